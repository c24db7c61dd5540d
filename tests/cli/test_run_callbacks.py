from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint, TQDMProgressBar
from support.commands import call
from support.tiny_run import spec, tiny_config, write_config

from lit_diffusion.callbacks import EMA, FiniteUpdates, RankWatch, SaveOnSignal
from lit_diffusion.callbacks.progress import PlainProgress
from lit_diffusion.cli.last_checkpoint import LastCheckpoint
from lit_diffusion.cli.run_callbacks import (
    EndPredictions,
    apply_callback_options,
    skip_empty_hooks,
    split_callback_options,
    with_defaults,
    with_last_checkpoint,
)

FOLDER = Path("runs/tiny/checkpoints")


def kinds(callbacks):
    return [type(callback) for callback in callbacks]


@pytest.mark.parametrize(
    ("fits", "expected"),
    [
        (True, [RankWatch, EMA, PlainProgress, FiniteUpdates]),
        (False, [RankWatch, EMA, PlainProgress, EndPredictions]),
    ],
)
def test_ranks_are_watched_first_and_other_commands_update_nothing(fits, expected):
    assert kinds(with_defaults([EMA()], fits=fits, shows_progress=True)) == expected


def test_hooks_of_a_step_are_kept_where_a_callback_has_them():
    hooks, saver = LambdaCallback(on_after_backward=print), SaveOnSignal(FOLDER)
    skip_empty_hooks([hooks, saver])
    assert (hooks.on_after_backward, hooks.on_train_batch_end) == (print, None)
    assert (callable(saver.on_train_batch_start), saver.on_after_backward) == (True, None)
    assert callable(hooks.on_train_start)


def test_hooks_of_a_callback_that_refuses_changes_are_skipped_too():
    @dataclass(frozen=True)
    class Frozen(Callback):
        text: str

    skip_empty_hooks([callback := Frozen("x")])
    assert callback.on_after_backward is None


def test_what_a_config_names_is_not_added():
    callbacks = [FiniteUpdates(3), TQDMProgressBar(), RankWatch(60)]
    assert with_defaults(callbacks, fits=True, shows_progress=True) == callbacks
    alone = RankWatch(60)
    assert with_defaults(alone, fits=True, shows_progress=False)[0] is alone


def test_a_fit_keeps_its_last_checkpoint_also_on_a_signal():
    savers = with_last_checkpoint([], FOLDER)
    assert kinds(savers) == [LastCheckpoint, SaveOnSignal]
    assert {saver.path for saver in savers} == {FOLDER / "last.ckpt"}
    assert with_last_checkpoint(savers, FOLDER) == savers


def test_last_ckpt_is_saved_after_all_that_other_callbacks_do_at_a_step():
    """Their state would be that of the save before, and what they did would not be done again."""
    callbacks = [SaveOnSignal(FOLDER), LastCheckpoint(FOLDER), ModelCheckpoint("kept"), EMA()]
    expected = [ModelCheckpoint, EMA, SaveOnSignal, LastCheckpoint]
    assert kinds(with_last_checkpoint(callbacks, FOLDER)) == expected


@pytest.mark.parametrize("dirpath", [None, FOLDER])
def test_two_that_write_last_ckpt_are_refused(dirpath):
    """Lightning's takes the file of the other for a stranger's, and writes last-v1.ckpt."""
    with pytest.raises(ValueError, match="leave save_last out"):
        with_last_checkpoint([ModelCheckpoint(dirpath, save_last=True)], FOLDER)
    elsewhere = ModelCheckpoint("kept", save_last=True)
    assert kinds(with_last_checkpoint([elsewhere], FOLDER))[1:] == [LastCheckpoint, SaveOnSignal]


def test_saves_on_signals_go_where_a_resume_looks():
    with pytest.raises(ValueError, match="got saved; leave folder out"):
        with_last_checkpoint([SaveOnSignal("saved")], FOLDER)
    for folder in (None, FOLDER):
        savers = with_last_checkpoint([SaveOnSignal(folder)], FOLDER)
        assert kinds(savers) == [SaveOnSignal, LastCheckpoint]


# Callbacks by the names of their classes


def callbacks():
    return [
        spec("lit_diffusion.callbacks.EMA", decays=[0.9], warmup=True),
        spec("lit_diffusion.callbacks.FIDEvaluation", extractor="x"),
        spec("lightning.pytorch.callbacks.LearningRateMonitor"),
    ]


def apply(callbacks, *options):
    by_name = split_callback_options(f"--trainer.callbacks.{option}" for option in options)[1]
    return apply_callback_options(callbacks, by_name)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("EAM.decays=[0.5]", "LearningRateMonitor; did you mean EMA[?]$"),
        ("EMA=3", r"EMA: set an argument by .*EMA.ARGUMENT=VALUE, or remove .* by .*EMA=null"),
        ("FIDEvaluation.extractor.a=2", "extractor must have arguments, got 'x'"),
        ("EMA.decays=[0.9", "the value must be YAML, got "),
        (f"EMA.decays={'9' * 5000}", "^--trainer.callbacks.EMA.decays: .* be YAML, got 9+"),
    ],
)
def test_mistakes_name_the_option_and_the_fix(option, message):
    with pytest.raises(ValueError, match=message):
        apply(callbacks(), option)
    with pytest.raises(ValueError, match=r"EMA, .*EMA, .*; change them in a file"):  # which?
        apply([*callbacks(), *callbacks()], "EMA.warmup=false")


def test_a_config_says_which_callbacks_of_earlier_configs_it_drops(folder, capsys, caplog):
    write_config(tiny_config(callbacks=[spec("EMA")]))
    write_config({"trainer": {"callbacks+": ["MomentumDecay"]}}, Path("mdlrc.yaml"))
    write_config({"trainer": {"callbacks": [spec("EMA", decays=[0.0])]}}, Path("no-ema.yaml"))
    for arms, is_dropped in [(["mdlrc", "no-ema"], True), (["no-ema", "mdlrc"], False)]:
        configs = " ".join(f"--config {name}.yaml" for name in ["tiny", *arms])
        caplog.clear()
        assert call(f"fit {configs} --trust support --print_config") == 0
        assert ("MomentumDecay" in capsys.readouterr().out) is not is_dropped
        notes = [message for message in caplog.messages if "drops MomentumDecay; to" in message]
        assert len(notes) == is_dropped


def test_a_callback_with_a_state_is_refused_if_two_configs_add_it(folder, capsys):
    write_config(tiny_config())
    write_config({"trainer": {"callbacks+": ["MomentumDecay"]}}, Path("mdlrc.yaml"))
    configs = "--config tiny.yaml --config mdlrc.yaml --config mdlrc.yaml"
    assert call(f"fit {configs} --trust support") == 2
    assert "trainer.callbacks has MomentumDecay twice" in capsys.readouterr().err


def test_callbacks_are_set_dropped_and_added_in_one_command(folder, capsys):
    """One that is added is set at once, as it may need its arguments to be parsed."""
    fid = spec("FIDEvaluation", num_samples=9, extractor="digits-cnn")
    write_config(tiny_config(callbacks=[spec("SampleGrid", num=4), spec("EMA"), fid]))
    options = [
        "--trainer.callbacks+=EarlyStopping --trainer.callbacks.EarlyStopping.monitor=val/loss",
        "--trainer.callbacks.FIDEvaluation=null --trainer.callbacks.SampleGrid.num 10",
        "--trust support --print_config",
    ]
    assert call(" ".join(["fit --config tiny.yaml", *options])) == 0
    grid, ema, stopping = yaml.safe_load(capsys.readouterr().out)["trainer"]["callbacks"]
    assert grid["init_args"]["num"] == 10
    assert ema["class_path"] == "lit_diffusion.callbacks.EMA"
    assert stopping["init_args"]["monitor"] == "val/loss"
