from pathlib import Path

import pytest
import yaml
from support.commands import call

from lit_diffusion.cli.named_callbacks import Change, changed, split_off

DIGITS = Path(__file__).parents[2] / "configs" / "digits.yaml"


def callbacks():
    return [
        {
            "class_path": "lit_diffusion.callbacks.EMA",
            "init_args": {"decays": [0.9], "warmup": True},
        },
        {"class_path": "lit_diffusion.callbacks.FIDEvaluation", "init_args": {"extractor": "x"}},
        {"class_path": "lightning.pytorch.callbacks.LearningRateMonitor"},
    ]


def options(*changes):
    return split_off([f"--trainer.callbacks.{change}" for change in changes])[1]


def test_other_options_stay_in_their_order():
    given = ["--config", "a.yaml", "--trainer.callbacks.EMA.warmup", "false", "--data.x=1"]
    given += ["--trainer.callbacks+=EMA", "--trainer.callbacks.decays=[0.5]"]
    others, changes = split_off(given)
    assert others == [*given[:2], *given[4:]]
    assert changes == [Change("EMA", "warmup", "false")]


def test_a_callback_is_changed_wherever_it_stands():
    first, second, third = changed(
        callbacks(),
        options("EMA.decays=[0.5, 1e-3]", "LearningRateMonitor.init_args.logging_interval=step"),
    )
    assert first["init_args"] == {"decays": [0.5, 0.001], "warmup": True}
    assert third["init_args"] == {"logging_interval": "step"}
    assert second == callbacks()[1]


def test_arguments_of_arguments_are_reached():
    nested = [{"class_path": "a.B", "init_args": {"c": {"class_path": "d.E", "init_args": {}}}}]
    for option in ("B.c.f=2", "B.init_args.c.init_args.f=2"):
        assert changed(nested, options(option))[0]["init_args"]["c"]["init_args"] == {"f": 2}


def test_null_leaves_one_out():
    assert changed(callbacks(), options("EMA=null")) == callbacks()[1:]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (
            "Timer.duration=3",
            "has EMA, FIDEvaluation, LearningRateMonitor; .*callbacks.=Timer adds one[.]",
        ),
        ("EAM.decays=[0.5]", "LearningRateMonitor; did you mean EMA[?]$"),
        ("EMA=3", "EMA=3: =null leaves EMA out"),
        ("FIDEvaluation.extractor.a=2", "extractor is 'x', which has no a"),
        ("EMA.decays", "needs a value"),
        ("EMA.decays=", "name an argument and its value"),
        ("EMA.decays=[0.9", "the value is no YAML"),
        ("EMA.init_args={decays: [0.5]}", "name an argument and its value"),
    ],
)
def test_mistakes_are_told(option, message):
    with pytest.raises(ValueError, match=message):
        changed(callbacks(), options(option))


def test_of_two_of_a_class_none_is_meant():
    with pytest.raises(ValueError, match="has several EMA; change them in a file"):
        changed([*callbacks(), *callbacks()], options("EMA.warmup=false"))


def test_callbacks_are_set_dropped_and_added_in_one_command(capsys):
    given = [
        f"fit --config {DIGITS} --trainer.callbacks+=LearningRateMonitor",
        "--trainer.callbacks.FIDEvaluation=null --trainer.callbacks.SampleGrid.num 10",
        "--trainer.callbacks.LearningRateMonitor.logging_interval=step --print_config",
    ]
    assert call(" ".join(given)) == 0
    grid, ema, monitor = yaml.safe_load(capsys.readouterr().out)["trainer"]["callbacks"]
    assert grid["init_args"]["num"] == 10
    assert ema["class_path"] == "lit_diffusion.callbacks.EMA"
    assert monitor["init_args"]["logging_interval"] == "step"


def test_a_wrong_argument_is_told_as_any_other(capsys):
    assert call(f"fit --config {DIGITS} --trainer.callbacks.EMA.decay=0.5") == 2
    assert "EMA has no argument 'decay'. Did you mean 'decays'?" in capsys.readouterr().err


def test_one_that_is_added_is_set_at_once_as_it_may_need_it(capsys):
    added = "--trainer.callbacks+=EarlyStopping --trainer.callbacks.EarlyStopping.monitor=val/loss"
    assert call(f"fit --config {DIGITS} {added} --print_config") == 0
    *_, last = yaml.safe_load(capsys.readouterr().out)["trainer"]["callbacks"]
    assert last["init_args"]["monitor"] == "val/loss"
