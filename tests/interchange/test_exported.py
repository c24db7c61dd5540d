import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.small_networks import NETWORKS, arguments, batch, condition, small

from lit_diffusion.interchange import load_network
from lit_diffusion.interchange.exported import RECORD, WEIGHTS, read_state_dict, write_network
from lit_diffusion.networks.conditions import WordIds


def write(folder, name="unet", **changes):
    network = small(name).eval()
    path = f"lit_diffusion.networks.{name}.{NETWORKS[name].__name__}"
    spec = {"class_path": path, "init_args": arguments(name) | changes}
    write_network(folder, network.state_dict(), {"network": spec, "step": 3})
    return network


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_comes_back_bit_exactly(name, tmp_path):
    write(tmp_path, name)
    network = write(tmp_path, name)  # in the place of the one that is there
    assert {path.name for path in tmp_path.iterdir()} == {RECORD, WEIGHTS}
    loaded = load_network(tmp_path)
    assert not loaded.training
    inputs = *batch(), condition("labels")
    assert torch.equal(loaded(*inputs), network(*inputs))


def test_a_condition_comes_back(tmp_path):
    network = small("unet", "words").eval()
    words = {"class_path": f"{WordIds.__module__}.WordIds", "init_args": {"num_words": 7}}
    for spec in (
        {"condition": words},
        {"context_dim": None, "vector_dim": None, "num_words": 7},  # of an earlier version
    ):
        path = "lit_diffusion.networks.unet.UNet"
        spec = {"class_path": path, "init_args": arguments("unet", "none") | spec}
        write_network(tmp_path, network.state_dict(), {"network": spec})
        inputs = *batch(), condition("words")
        assert torch.equal(load_network(tmp_path)(*inputs), network(*inputs))


WITHOUT_LIGHTNING = """
import sys
for name in ("lightning", "pytorch_lightning", "torchmetrics", "jsonargparse"):
    sys.modules[name] = None  # an ImportError for who imports it
import torch
from lit_diffusion.interchange import load_network
x, t, labels = torch.load(sys.argv[2], weights_only=True)
torch.save(load_network(sys.argv[1])(x, t, labels).detach(), sys.argv[2])
"""


@pytest.mark.slow
def test_it_is_read_where_lightning_cannot_be_imported(tmp_path):
    network = write(tmp_path / "exported")
    torch.save((*batch(), condition("labels")), tmp_path / "x.pt")
    code = [sys.executable, "-c", WITHOUT_LIGHTNING, tmp_path / "exported", tmp_path / "x.pt"]
    done = subprocess.run(code, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    output = torch.load(tmp_path / "x.pt", weights_only=True)
    assert torch.equal(output, network(*batch(), condition("labels")))


def test_weights_of_another_export_are_refused(tmp_path):
    write(tmp_path)
    state = load_file(tmp_path / WEIGHTS)
    save_file({name: value + 1 for name, value in state.items()}, tmp_path / WEIGHTS)
    with pytest.raises(ValueError, match=r"has SHA-256 .* export again"):
        load_network(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"channel_mult": [1, 3]}, "size mismatch for input_blocks.3.0.in_layers.2.weight"),
        ({"num_classes": None}, "Unexpected key.*label_emb.weight"),
        ({"model_channels": 99968}, "model_channels"),  # many times the memory there is
        ({"wings": 2}, r"UNet cannot be built: .*'wings'"),
        ({"condition": {"class_path": "this.prints", "init_args": {}}}, "cannot be built"),
    ],
)
def test_a_record_that_does_not_fit_its_weights_is_refused(changes, message, tmp_path):
    write(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        load_network(tmp_path)


ODD = r"network\.json is damaged .*other types"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"network": {"class_path": "this.prints", "init_args": {}}}, "of class this.prints, but"),
        ({"network": [1]}, ODD),
        ({"weights": [1]}, ODD),
    ],
)
def test_nothing_is_imported_that_a_record_names_and_odd_values_are_damage(
    changes, message, tmp_path
):
    write(tmp_path)
    record = json.loads((tmp_path / RECORD).read_text())
    (tmp_path / RECORD).write_text(json.dumps(record | changes))
    with pytest.raises(ValueError, match=message):
        load_network(tmp_path)


def test_shared_weights_are_written_under_each_of_their_names(tmp_path):
    weight = torch.ones(2, 2)
    write_network(tmp_path, {"a": weight, "b": weight, "c": torch.zeros(1)}, {"network": {}})
    assert {name: value.sum() for name, value in load_file(tmp_path / WEIGHTS).items()} == {
        "a": 4,
        "b": 4,
        "c": 0,
    }


def test_a_file_in_the_place_of_the_folder_is_kept(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match="is a file; name a folder"):
        write(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_of_several_sets_of_weights_in_a_file_the_averages_are_read(tmp_path):
    sets = {"model": {"module.a": torch.zeros(1)}, "ema": {"module.a": torch.ones(1).half()}}
    torch.save(sets, tmp_path / "x.pt")
    read = read_state_dict(tmp_path / "x.pt")
    assert list(read) == ["a"]
    assert read["a"].dtype == torch.float32
    assert read["a"] == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"opt": WordIds(7)}, "contains pickled code, which is never run"),
        ([1], "holds no state_dict"),
        (b"", "is damaged or has another format"),  # an EOFError without a message
        ({"a": torch.zeros(()).half().expand(10**6, 10**6)}, "would unpack to 2,000,000,000,000 b"),
    ],
)
def test_only_tensors_are_read(content, message, tmp_path):
    file = tmp_path / "x.pt"
    file.write_bytes(content) if isinstance(content, bytes) else torch.save(content, file)
    with pytest.raises(ValueError, match=message):
        read_state_dict(file)
