from pathlib import Path

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint, TQDMProgressBar

from lit_diffusion.callbacks import EMA, FiniteUpdates, RankWatch, SaveOnSignal
from lit_diffusion.callbacks.progress import PlainProgress
from lit_diffusion.cli.defaults import EndPredictions, with_defaults, with_last_checkpoint
from lit_diffusion.cli.last_checkpoint import LastCheckpoint

FOLDER = Path("runs/tiny/checkpoints")


def kinds(callbacks):
    return [type(callback) for callback in callbacks]


def test_a_fit_watches_its_ranks_first_and_its_numbers_last():
    found = with_defaults([EMA()], fits=True, shows_progress=True)
    assert kinds(found) == [RankWatch, EMA, PlainProgress, FiniteUpdates]


def test_other_commands_update_nothing():
    found = with_defaults(None, fits=False, shows_progress=False)
    assert kinds(found) == [RankWatch, EndPredictions]


def test_what_a_config_names_is_not_added():
    given = [FiniteUpdates(3), TQDMProgressBar(), RankWatch(60)]
    assert with_defaults(given, fits=True, shows_progress=True) == given
    alone = RankWatch(60)
    assert with_defaults(alone, fits=True, shows_progress=False)[0] is alone


def test_a_fit_keeps_its_last_checkpoint_also_on_a_signal():
    found = with_last_checkpoint([], FOLDER)
    assert kinds(found) == [LastCheckpoint, SaveOnSignal]
    assert {saver.path for saver in found} == {FOLDER / "last.ckpt"}
    assert with_last_checkpoint(found, FOLDER) == found


def test_last_ckpt_is_saved_after_all_that_other_callbacks_do_at_a_step():
    """Their state would be that of the save before, and what they did would not be done again."""
    given = [SaveOnSignal(FOLDER), LastCheckpoint(FOLDER), ModelCheckpoint("kept"), EMA()]
    expected = [ModelCheckpoint, EMA, SaveOnSignal, LastCheckpoint]
    assert kinds(with_last_checkpoint(given, FOLDER)) == expected


@pytest.mark.parametrize("dirpath", [None, FOLDER])
def test_two_that_write_last_ckpt_are_refused(dirpath):
    """Lightning's takes the file of the other for a stranger's, and writes last-v1.ckpt."""
    with pytest.raises(ValueError, match="leave save_last out"):
        with_last_checkpoint([ModelCheckpoint(dirpath, save_last=True)], FOLDER)
    elsewhere = ModelCheckpoint("kept", save_last=True)
    assert kinds(with_last_checkpoint([elsewhere], FOLDER))[1:] == [LastCheckpoint, SaveOnSignal]


def test_saves_on_signals_go_where_a_resume_looks():
    with pytest.raises(ValueError, match="has the folder saved; leave that out"):
        with_last_checkpoint([SaveOnSignal("saved")], FOLDER)
    for folder in (None, FOLDER):
        found = with_last_checkpoint([SaveOnSignal(folder)], FOLDER)
        assert kinds(found) == [SaveOnSignal, LastCheckpoint]
