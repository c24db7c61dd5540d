from pathlib import Path

import pytest
import yaml
from support.commands import call
from support.tiny_run import spec

pytestmark = pytest.mark.usefixtures("folder")


def write_config(callbacks=None):
    dit = spec("DiT", image_size=8, in_channels=1, out_channels=1, depth=2, width=32, num_heads=2)
    config = {
        "trainer": {"callbacks": callbacks, "devices": 2},
        "model": {"init_args": {"network": dit, "image_shape": [1, 8, 8]}},
        "data": {"init_args": {"batch_size": 4}},
    }
    Path("dit.yaml").write_text(yaml.safe_dump(config))


@pytest.mark.parametrize(
    ("callbacks", "num"),
    [
        (None, 0),
        ("EMA", 1),
        (spec("EMA", decays=[0.9, 0.99]), 2),
        ([spec("lit_diffusion.callbacks.EMA"), spec("PowerEMA"), "StepSeed"], 3),
    ],
)
def test_averages_are_counted_under_long_and_short_names_of_their_classes(callbacks, num, capsys):
    write_config(callbacks)
    assert call("plan --config dit.yaml") == 0
    assert f"averages ({num})" in capsys.readouterr().out


def test_a_part_without_arguments_may_be_a_class_path(capsys):
    write_config()
    Path("data.yaml").write_text("data: lit_diffusion.data.DigitsDataModule")
    assert call("plan --config data.yaml --config dit.yaml") == 0
    assert "4 images on each rank" in capsys.readouterr().out
    assert call("plan --config data.yaml") == 2
    assert "data.yaml must state model.network." in capsys.readouterr().err


def test_callbacks_are_replaced_or_appended_as_in_fit(capsys):
    write_config("EMA")
    Path("more.yaml").write_text("trainer: {callbacks+: [EMA, StepSeed]}")
    Path("other.yaml").write_text("trainer: {callbacks: [PowerEMA], callbacks+: EMA}")
    for config, num in (("more", 2), ("other", 3)):
        assert call(f"plan --config dit.yaml --config {config}.yaml") == 0
        assert f"averages ({num})" in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--ranks 8,0", "--bandwidth 0", "--tflops -1"])
def test_ranks_and_speeds_must_be_positive(option, capsys):
    write_config()
    assert call(f"plan --config dit.yaml {option}") == 2
    assert "must be positive, got " in capsys.readouterr().err
