from copy import deepcopy
from functools import cache
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule
from support.commands import call, checkpoint, equal, weights
from support.small_digits import hyper_parameters, small_digits, write_small_digits
from support.tiny_run import write_config
from torch import nn

from lit_diffusion.checkpoints import load
from lit_diffusion.checkpoints.loading import build_module
from lit_diffusion.cli.convert import export
from lit_diffusion.cli.init_weights import start_from


@pytest.fixture(autouse=True)
def files(folder):
    write_small_digits(Path("old/checkpoints/last.ckpt"))


@cache
def build(**network):
    config = small_digits(1)
    config["model"]["init_args"]["network"]["init_args"] |= network
    hyper = hyper_parameters(config, "model")
    return build_module({"hyper_parameters": hyper}, "this"), hyper


def start(source, **network):
    """A module of that network that starts from `source`, and the line about it."""
    module, hyper = deepcopy(build(**network))
    return module, start_from(module, source, hyper)


def network_of(state):
    return {name: value for name, value in state.items() if name.startswith("network.")}


@pytest.mark.slow
def test_a_run_begins_with_the_weights_and_so_does_its_average_and_a_resume_does_not(caplog):
    """With an lr of 0, where it ends is where it began."""
    config = small_digits(1, limit_val_batches=0)
    config["model"]["init_args"]["optimizer"]["init_args"]["lr"] = 0.0
    write_config(config, Path("new.yaml"))
    assert call("fit --config new.yaml --init_weights old") == 0
    expected = network_of(load("old", "ema").state_dict())
    assert equal(network_of(weights("runs/new")), expected)
    state = next(s for key, s in checkpoint("runs/new")["callbacks"].items() if "EMA" in key)
    for name, average in network_of(state["shadows"][0]).items():
        assert torch.allclose(average, expected[name], rtol=1e-6, atol=1e-7)
    caplog.clear()
    last = "runs/new/checkpoints/last.ckpt"
    assert call(f"fit --ckpt_path={last} --trainer.max_steps=2 --model.optimizer.lr=0.01") == 0
    assert not any("Starting from" in message for message in caplog.messages)
    assert not equal(network_of(weights("runs/new")), expected)


def test_weights_that_are_not_finite_are_refused_by_name():
    content = torch.load("old/checkpoints/last.ckpt", weights_only=True)
    content["state_dict"]["network.out.2.bias"].fill_(torch.inf)
    torch.save(content, "diverged.ckpt")
    with pytest.raises(ValueError, match=r"diverged.ckpt:raw: .*network\.out\.2\.bias is not"):
        start("diverged.ckpt:raw")


@pytest.mark.parametrize(
    ("source", "which", "text"),
    [
        ("old", "ema", "ema_0.9 weights of old/checkpoints/last.ckpt: 129 copied."),
        ("old:raw", "raw", "raw weights of old/checkpoints/last.ckpt: 129 copied."),
        ("exported", "ema", "ema_0.9 weights of exported: 129 copied."),
        ("raw.ckpt", "raw", "raw weights of raw.ckpt: 129 copied."),  # has no averages
    ],
)
def test_weights_are_those_of_the_source(source, which, text):
    if source == "exported":
        export("old", "exported")
    content = torch.load("old/checkpoints/last.ckpt", weights_only=True)
    torch.save(content | {"callbacks": {}}, "raw.ckpt")
    module, line = start(source)
    assert line == f"Starting from the {text}"
    assert equal(network_of(module.state_dict()), network_of(load("old", which).state_dict()))


def test_settings_under_which_the_same_weights_mean_something_else_are_listed():
    """All shapes fit, and the heads of attention would be read in another order."""
    _, line = start("old", split_heads_first=False)
    settings = "network.split_heads_first True for False"
    assert line.endswith(f"They were trained with other settings (model.{settings}).")


def test_what_does_not_fit_is_listed_and_left():
    module, line = start("old:raw", channel_mult=(1, 2, 2))
    assert "left as they were (network.output_blocks.1.0.in_layers.0.weight (24,) for (32,)" in line
    assert "new because the file does not have them (network.input_blocks." in line
    name = "network.time_embed.0.weight"
    assert torch.equal(module.state_dict()[name], weights("old")[name])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nowhere", "There is no checkpoint at nowhere"),
        ("old:ema_0.5", "has no weights 'ema_0.5'; it has raw, ema_0.9"),
        ("exported:raw", "exported has only ema_0.9 weights"),
        ("foreign.ckpt", r"none of its weights \(wings.weight, ...\) fits the model"),
    ],
)
def test_a_source_that_has_no_such_weights_is_refused(source, message):
    if "exported" in source:
        export("old", "exported")
    torch.save({"state_dict": {"wings.weight": torch.ones(3)}}, "foreign.ckpt")
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        start(source)


class Stateful(nn.Linear):
    def get_extra_state(self):
        return {"scale": 1}

    def set_extra_state(self, state):
        raise AssertionError("only weights are read")


class Tied(LightningModule):
    def __init__(self):
        super().__init__()
        self.a, self.b = Stateful(2, 2), nn.Linear(2, 2)
        self.b.weight = self.a.weight


def test_shared_weights_begin_as_their_average_and_an_extra_state_is_left():
    """A shared parameter has two names in the state_dict, and an average under one of them."""
    module = Tied()
    shadow = {name: torch.full_like(p, 7.0) for name, p in module.named_parameters()}
    ema = {"decays": [0.9], "steps": dict.fromkeys(shadow, 3), "shadows": [shadow]}
    content = {"state_dict": module.state_dict(), "callbacks": {"EMA{'prefix': ''}": ema}}
    torch.save(content, "tied.ckpt")
    line = start_from(module, "tied.ckpt", {})
    assert line == "Starting from the ema_0.9 weights of tied.ckpt: 4 copied."
    assert all((parameter == 7.0).all() for parameter in module.parameters())


def test_the_network_of_another_module_may_be_a_name():
    module = Tied()
    hyper = {"_class_path": "mine.Tied", "network": "small"}
    torch.save({"state_dict": module.state_dict(), "hyper_parameters": hyper}, "named.ckpt")
    line = start_from(module, "named.ckpt", {"network": "large"})
    assert line.endswith("trained with other settings (model.network small for large).")
