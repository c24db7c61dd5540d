import json
from pathlib import Path

import pytest
import torch
from support.commands import call, checkpoint, weights
from support.small_digits import small_digits, write_small_digits
from support.tiny_run import write_config

from lit_diffusion.checkpoints import load
from lit_diffusion.cli.convert import export
from lit_diffusion.cli.init_weights import match_weights, read_init


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_small_digits(Path("old/checkpoints/last.ckpt"))
    config(lr=0.0)


def config(lr=0.002, steps=1, **network):
    config = small_digits(steps)
    model = config["model"]["init_args"]
    model["optimizer"]["init_args"]["lr"] = lr
    model["network"]["init_args"] |= network
    write_config(config, Path("new.yaml"))


def fit(options):
    return call(f"fit --config new.yaml {options} --trainer.limit_val_batches=0")


def network_of(state):
    return {name: value for name, value in state.items() if name.startswith("network.")}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("source", "which"),
    [("old", "ema"), ("old:ema_0.9", "ema"), ("old:raw", "raw")],
)
def test_a_run_begins_with_the_weights_and_so_does_its_average(source, which):
    """With an lr of 0, where it ends is where it began."""
    assert fit(f"--init_weights {source}") == 0
    expected = network_of(load("old", which).state_dict())
    assert same(network_of(weights("runs/new")), expected)
    state = next(s for key, s in checkpoint("runs/new")["callbacks"].items() if "EMA" in key)
    for name, average in network_of(state["shadows"][0]).items():
        assert torch.allclose(average, expected[name], rtol=1e-6, atol=1e-7)


def test_an_exported_network_does_as_well(capsys, caplog):
    export("old", "exported")
    assert fit("--init_weights exported") == 0
    assert same(network_of(weights("runs/new")), network_of(load("old").state_dict()))
    assert "Starting from the ema_0.9 weights of exported: 129 kept." in caplog.messages
    assert fit("--init_weights exported:raw --trainer.default_root_dir b") == 2
    assert "exported holds ema_0.9 weights alone" in capsys.readouterr().err


def test_what_does_not_fit_is_told_and_left(caplog):
    config(lr=0.0, channel_mult=[1, 2, 2])
    assert fit("--init_weights old:raw") == 0
    (line,) = [message for message in caplog.messages if message.startswith("Starting from")]
    assert "raw weights of old/checkpoints/last.ckpt" in line
    assert "left as they were (network.output_blocks.1.0.in_layers.0.weight (24,) for (32,)" in line
    assert "new, as the file has none such (network.input_blocks." in line
    new, old = weights("runs/new"), weights("old")
    assert torch.equal(new["network.time_embed.0.weight"], old["network.time_embed.0.weight"])


@pytest.mark.quick
@pytest.mark.parametrize("source", ["old", "exported"])
def test_settings_under_which_the_same_weights_mean_something_else_are_told(source, caplog):
    """All shapes fit, and the heads of attention would be read in another order.

    What lacks in a file is the default, as in those of an import.
    """
    export("old", "exported")
    record = json.loads(Path("exported/network.json").read_text())
    assert "split_heads_first" not in record["network"]["init_args"]
    config(lr=0.0, split_heads_first=False)
    assert fit(f"--init_weights {source}") == 0
    (line,) = [message for message in caplog.messages if message.startswith("Starting from")]
    message = (
        "They were trained with other settings (model.network.split_heads_first True for False)."
    )
    assert line.endswith(f": 129 kept. {message}")


@pytest.mark.slow
def test_a_resume_goes_on_and_does_not_begin_again(caplog):
    config()
    assert fit("--init_weights old") == 0
    caplog.clear()
    assert fit("--ckpt_path=last --trainer.max_steps=2") == 0
    assert call("fit --ckpt_path=runs/new/checkpoints/last.ckpt --trainer.max_steps=3") == 0
    assert not any("Starting from" in message for message in caplog.messages)
    assert not same(network_of(weights("runs/new")), network_of(load("old").state_dict()))


@pytest.mark.quick
@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nowhere", "There is no checkpoint at nowhere"),
        ("old:ema_0.5", "has no weights 'ema_0.5'; it has raw, ema_0.9"),
        ("old:power_0.1", "has no weights 'power_0.1'; it has raw, ema_0.9"),
        ("foreign.ckpt", "none of its weights (wings.weight, ...) fits the model"),
    ],
)
def test_a_mistake_is_told_before_anything_is_trained(source, message, capsys):
    torch.save({"state_dict": {"wings.weight": torch.ones(3)}}, "foreign.ckpt")
    assert fit(f"--init_weights {source}") == 2
    assert message in capsys.readouterr().err
    assert not Path("runs/new/checkpoints").exists()


def test_raw_weights_are_taken_where_there_are_no_averages():
    content = torch.load("old/checkpoints/last.ckpt", weights_only=True)
    torch.save(content | {"callbacks": {}}, "raw.ckpt")
    text, state, _ = read_init("raw.ckpt")
    assert text == "raw weights of raw.ckpt"
    assert same(state, content["state_dict"])


def test_weights_are_sorted_by_name_shape_and_kind():
    target = {
        "kept": torch.zeros(2),
        "convolution": torch.zeros(3, 2, 1),
        "wider": torch.zeros(4),
        "turned": torch.zeros(2, 3),
        "count": torch.zeros(2, dtype=torch.int64),
        "new": torch.zeros(1),
    }
    state = {
        "kept": torch.ones(2),
        "convolution": torch.ones(3, 2),
        "wider": torch.ones(5),
        "turned": torch.ones(3, 2),
        "count": torch.ones(2),
        "dropped": torch.ones(1),
    }
    fitting, outcome = match_weights(target, state)
    assert {name: value.shape for name, value in fitting.items()} == {
        name: target[name].shape for name in ("kept", "convolution")
    }
    assert list(outcome.values()) == [
        ["kept"],
        ["convolution"],
        ["wider (5,) for (4,)", "turned (3, 2) for (2, 3)"],
        ["count", "dropped"],
        ["count", "new"],
    ]
