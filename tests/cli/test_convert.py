from pathlib import Path

import pytest
import torch
from support.commands import call
from support.golden_weights import fill_
from support.small_digits import hyper_parameters, small_digits, write_small_digits

from lit_diffusion import __version__
from lit_diffusion.checkpoints import load
from lit_diffusion.cli.convert import export
from lit_diffusion.interchange import load_network
from lit_diffusion.interchange.exported import read_exported
from lit_diffusion.networks.dit import DiT

pytestmark = pytest.mark.usefixtures("folder")

IMPORT = "convert import dit.pt --kind dit --out out"


@pytest.fixture
def run(folder):
    return write_small_digits(Path("run/checkpoints/last.ckpt"))


@pytest.fixture
def dit(folder):
    network = fill_(DiT(8, 1, 2, 2, 32, 2, 4, num_classes=10)).eval()
    torch.save(network.state_dict(), "dit.pt")
    return network


def test_a_run_goes_out_as_weights_and_as_a_folder_of_diffusers(run, capsys):
    assert call("convert export --checkpoint run --out out") == 0
    assert "ema_0.9 weights of run/checkpoints/last.ckpt are in out." in capsys.readouterr().out
    x, t, labels = torch.randn(2, 1, 8, 8), torch.tensor([0.0, 700]), torch.tensor([3, -1])
    with torch.no_grad():
        assert torch.equal(load_network("out")(x, t, labels), run.network(x, t, labels))
    assert call("convert export --checkpoint run --out pipe --format diffusers") == 0
    assert "The network takes labels" in capsys.readouterr().out
    assert call("convert import pipe --kind diffusers-unet --out back") == 0
    with torch.no_grad():
        output = load_network("back")(x, t, labels)
        torch.testing.assert_close(output, run.network(x, t, labels), rtol=1e-5, atol=1e-5)


def test_a_published_file_comes_in(dit, capsys):
    assert call(f"{IMPORT} --network.num_heads=4") == 0
    assert "DiT(image_size=8, in_channels=1, out_channels=2" in capsys.readouterr().out
    x, t, labels = torch.randn(2, 1, 8, 8), torch.tensor([0.0, 700]), torch.tensor([3, -1])
    with torch.no_grad():
        assert torch.equal(load_network("out")(x, t, labels), dit(x, t, labels))


@pytest.mark.parametrize(
    ("weights", "named"), [("ema", "ema_0.9"), ("ema_0.9", "ema_0.9"), ("raw", "raw")]
)
def test_the_weights_asked_for_are_those_exported(run, weights, named):
    export("run", "out", weights)
    state = load_network("out").state_dict()
    expected = load("run", weights).network.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in state)
    assert read_exported("out")[0]["weights"] == named


def test_the_record_says_what_the_network_is_and_belongs_to(run):
    export("run", "out")
    record, _ = read_exported("out")
    model = small_digits(1)["model"]["init_args"]
    for name in ("network", "process", "parameterization", "image_shape"):
        assert record[name] == model[name]
    assert (record["step"], record["library"]) == (9, f"lit-diffusion {__version__}")


def test_a_checkpoint_of_another_sort_is_refused(run):
    hyper = hyper_parameters(small_digits(1), "model") | {"network": None}
    content = torch.load("run/checkpoints/last.ckpt", weights_only=True)
    torch.save(content | {"hyper_parameters": hyper}, "x.ckpt")
    with pytest.raises(ValueError, match=r"x\.ckpt"):
        export("x.ckpt", "out")
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("convert", "say export or import first, got nothing."),
        ("convert exprot --out x", "say export or import first, got exprot --out x."),
        ("convert export --out x", "checkpoint must be given"),
        ("convert export --checkpoint nowhere --out x", "There is no checkpoint at nowhere"),
        (IMPORT, "shapes cannot tell num_heads: give --network.num_heads=VALUE"),
        (f"{IMPORT} --network.num_heads=5", "num_heads"),
        (f"{IMPORT} --network.num_heads=[", "--network.num_heads=[ must be --network.NAME=VALUE"),
        (f"{IMPORT} --network.num_heads", "there is no option 'network.num_heads'"),
        (f"{IMPORT} --num_heads=4", "there is no option 'num_heads'"),
        (f"{IMPORT} --network.num_heads=4 --network.wings=2", "DiT cannot be built"),
        ("convert export --checkpoint run --out x --vae vae", "--vae vae belongs to --format diff"),
        ("convert import no.pt --kind dit --out out", "There is no file no.pt"),
        ("convert import dit.pt --kind uvit --out out", "not of --kind uvit: it lacks patch_embed"),
    ],
)
def test_a_mistake_ends_in_one_line_and_exit_code_2(dit, run, capsys, command, message):
    assert call(command) == 2
    err = capsys.readouterr().err.strip()
    assert message in err
    assert len(err.split("\n")) == 1
    assert not Path("out").exists()


@pytest.mark.parametrize("what", ["export", "import"])
def test_help_says_what_to_type(what, capsys):
    assert call(f"convert {what} --help") == 0
    assert f"usage: lit-diffusion convert {what}".strip() in capsys.readouterr().out
