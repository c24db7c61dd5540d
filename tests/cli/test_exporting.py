from pathlib import Path

import pytest
import torch
from support.small_digits import hyper_parameters, small_digits, write_small_digits

from lit_diffusion import __version__
from lit_diffusion.checkpoints import load
from lit_diffusion.cli.convert import export
from lit_diffusion.interchange import load_network
from lit_diffusion.interchange.exported import read_exported


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return write_small_digits(Path("run/checkpoints/last.ckpt"))


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
