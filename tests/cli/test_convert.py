import errno
import os
import re
from pathlib import Path

import pytest
import torch
from support.commands import call
from support.golden import fill_
from support.small_digits import small_digits, write_small_digits

from lit_diffusion import __version__
from lit_diffusion.checkpoints import load
from lit_diffusion.cli.convert import export
from lit_diffusion.interchange import load_network
from lit_diffusion.interchange.exported import read_exported
from lit_diffusion.networks.dit import DiT

pytestmark = pytest.mark.usefixtures("folder")

CONFIGS = Path(__file__).parents[2] / "configs"
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
    output = capsys.readouterr().out
    assert "The network takes labels" in output
    assert "DDPMPipeline samples by DDPMScheduler, this run by" in output
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


def test_a_published_file_is_trained_on_with_the_config_beside_it(dit, caplog):
    assert call(f"{IMPORT} --network.num_heads=4") == 0
    configs = f"--config {CONFIGS}/digits.yaml --config out/model.yaml --init_weights out"
    loss = '{"class_path": "HybridLoss", "init_args": {"weighting": "Simple"}}'
    quick = "--trainer.fast_dev_run=1 --trainer.callbacks=[]"
    assert call(f"fit {configs} --model.loss='{loss}' {quick}") == 0
    assert f"out: {len(dit.state_dict())} copied." in caplog.text


def test_the_command_to_train_further_can_be_pasted_into_a_shell(dit, capsys):
    assert call(f"{IMPORT[:-3]} 'my dit' --network.num_heads=4") == 0
    command = "fit --config CONFIG --config 'my dit/model.yaml' --init_weights 'my dit'"
    assert capsys.readouterr().out.endswith(f"lit-diffusion {command}\n")
    assert f"lit-diffusion {command}\n" in Path("my dit/model.yaml").read_text()


@pytest.mark.parametrize(("weights", "named"), [("ema", "ema_0.9"), ("raw", "raw")])
def test_the_weights_asked_for_are_those_exported(run, weights, named):
    export("run", "out", weights)
    record, _ = read_exported("out")
    state = load_network("out").state_dict()
    expected = load("run", weights).network.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in state)
    model = small_digits(1)["model"]["init_args"]
    for name in ("network", "process", "parameterization", "image_shape"):
        assert record[name] == model[name]
    library = f"lit-diffusion {__version__}"
    assert (record["weights"], record["step"], record["library"]) == (named, 9, library)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("convert export --out x", "checkpoint must be given"),
        ("convert export --checkpoint nowhere --out x", "run folder or checkpoint nowhere"),
        (f"{IMPORT} --network.num_heads=5", "num_heads"),
        (f"{IMPORT} --network.num_heads=4 --network.depth=1e30", "dit.pt"),
        (f"{IMPORT} --network.num_heads={'9' * 5000}", "must be --network.NAME=VALUE in YAML"),
        ("convert export --checkpoint run --out x --vae vae", "--vae vae belongs to --format diff"),
        ("convert import no.pt --kind dit --out out", "There is no file no.pt "),
    ],
)
def test_a_mistake_ends_in_one_line_and_exit_code_2(dit, run, capsys, command, message):
    assert call(command) == 2
    err = capsys.readouterr().err.strip()
    assert message in err
    assert len(err.split("\n")) == 1
    assert not Path("out").exists()


def change(convert):
    state = torch.load("dit.pt")
    torch.save({name: convert(value) for name, value in state.items()}, "dit.pt")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda: change(lambda x: x.where(x < x.max(), torch.nan)), "pos_embed are not"),
        (lambda: change(torch.Tensor.int), "pos_embed is torch.int32"),
        (lambda: change(lambda x: x[..., 0]), "not of --kind dit"),
    ],
)
def test_a_file_that_is_no_published_one_is_refused_with_the_fault(dit, capsys, spoil, message):
    spoil()
    assert call(f"{IMPORT} --network.num_heads=4") == 2
    assert message in capsys.readouterr().err
    assert not Path("out").exists()


def test_the_file_itself_is_not_replaced_by_what_is_made_of_it(dit, capsys):
    Path("dit.pt").rename("network.safetensors")
    before = Path("network.safetensors").read_bytes()
    Path("link").symlink_to(".")
    for out in (".", "link"):
        command = f"convert import network.safetensors --kind dit --out {out}"
        assert call(f"{command} --network.num_heads=4") == 2
        assert "choose another folder" in capsys.readouterr().err
    assert Path("network.safetensors").read_bytes() == before


@pytest.mark.parametrize("form", ["safetensors", "diffusers"])
def test_a_full_disk_is_a_line_that_names_the_file_and_leaves_no_part_of_it(
    run, capsys, monkeypatch, form
):
    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    assert call(f"convert export --checkpoint run --out out --format {form}") == 2
    err = capsys.readouterr().err.strip()
    assert re.fullmatch(r"lit-diffusion convert: out/.*: No space left on device; free .*", err)
    assert [path for path in Path("out").rglob("*") if path.is_file()] == []
