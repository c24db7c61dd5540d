import math
import os
import shutil
from functools import partial
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from support.commands import equal
from support.saving import Saves, fit, saved
from support.tiny_run import TinyModule, TinyNet

from lit_diffusion.callbacks import FiniteUpdates, finite_updates, trainer_state
from lit_diffusion.cli import last_checkpoint
from lit_diffusion.cli.run_folder import read_command_line
from lit_diffusion.files import atomic_write_text, remove, replace


class Death(Exception):
    """What a run dies of."""


@pytest.mark.parametrize("hook", ["on_train_epoch_end", "on_train_end"])
def test_what_a_run_that_died_at_its_end_had_yet_to_do_is_done_at_the_resume(tmp_path, hook):
    """From the checkpoint of the last step nothing would be: the run would pass for complete."""
    calls = []

    def end(trainer, *args):
        calls.append(trainer.global_step)
        if len(calls) == 1:
            raise Death

    dies = pl.Callback()
    setattr(dies, hook, end)
    options = {"callbacks": [dies], "max_epochs": 1, "max_steps": -1}
    with pytest.raises(Death):
        fit(Saves(tmp_path, first=2, every_n_seconds=1000.0), tmp_path, **options)
    assert os.listdir(tmp_path) == ["last.ckpt"]
    assert saved(tmp_path)["global_step"] == 2
    fit(Saves(tmp_path), tmp_path, tmp_path / "last.ckpt", **options)
    assert calls == [4, 4]
    assert os.listdir(tmp_path) == ["last.ckpt"]
    assert saved(tmp_path)["global_step"] == 4


def test_a_resume_that_only_ends_the_epoch_of_its_checkpoint_saves_that(tmp_path):
    """Early stopping may end it at once, where a signal had it save after the last validation."""
    calls, stops, signal = [], pl.Callback(), pl.Callback()

    def stop(trainer, *args):
        calls.append(trainer.global_step)
        trainer.should_stop = trainer.global_step == 2
        if calls == [1, 2, 1, 2]:
            raise Death

    stops.on_train_epoch_end = stop
    signal.on_validation_end = lambda trainer, *args: trainer.save_checkpoint(file)
    file, options = tmp_path / "last.ckpt", {"limit_train_batches": 1, "max_steps": 9}
    fit(Saves(tmp_path / "whole", first=100), tmp_path, callbacks=[stops], **options)
    with pytest.raises(Death):
        fit(Saves(tmp_path, first=100), tmp_path, callbacks=[stops, signal], **options)
    fit(Saves(tmp_path, first=100), tmp_path, file, callbacks=[stops], **options)
    assert calls == [1, 2, 1, 2, 2]
    for key in ("epoch", "global_step", "loops"):
        assert saved(tmp_path)[key] == saved(tmp_path / "whole")[key]


def test_what_a_kill_at_the_end_has_left_is_gone_before_the_first_batch(tmp_path):
    """It must never take the place of a later checkpoint."""
    names, lists = [], pl.Callback()
    lists.on_train_batch_start = lambda *args: names.extend(os.listdir(tmp_path))
    for name in (".last.ckpt.end", "..last.ckpt.end.part", ".last.ckpt.part"):
        (tmp_path / name).write_text("old")
    fit(Saves(tmp_path), tmp_path, callbacks=[lists], max_steps=1)
    assert names == []


@pytest.mark.parametrize(
    "options",
    [
        {"max_steps": 4},
        {"max_epochs": 2, "max_steps": -1, "limit_val_batches": 0},
        {"max_epochs": 2, "max_steps": -1, "accumulate_grad_batches": 3},
        {"max_steps": 5, "val_check_interval": 2},
    ],
)
def test_the_file_at_the_end_is_that_of_the_last_step(tmp_path, options):
    callback = Saves(tmp_path, first=100)
    trainer = fit(callback, tmp_path, **options)
    assert callback.steps == [trainer.global_step]
    assert equal(saved(tmp_path)["state_dict"], trainer.model.state_dict())


@pytest.mark.quick
@pytest.mark.parametrize("options", [{}, {"val_check_interval": 2}, {"accumulate_grad_batches": 2}])
@pytest.mark.parametrize("steps", [1, 3, 4, 6])
def test_a_resume_from_any_end_is_exact(tmp_path, steps, options):
    whole = fit(Saves(tmp_path / "whole"), tmp_path, max_steps=8, **options)
    fit(Saves(tmp_path), tmp_path, max_steps=steps, **options)
    file = tmp_path / "last.ckpt"
    resumed = fit(Saves(tmp_path), tmp_path, file, max_steps=8, **options)
    assert equal(whole.model.state_dict(), resumed.model.state_dict())
    assert whole.current_epoch == resumed.current_epoch


@pytest.mark.parametrize(
    ("seconds", "steps"), [(0, [2, 7, 13, 18, 23, 29, 30]), (0.2, [2, 13, 23, 30]), (1, [2, 30])]
)
def test_the_first_save_comes_early_and_then_time_decides(tmp_path, monkeypatch, seconds, steps):
    """A batch takes a second, a save should come each 5 s, but take a fiftieth of the time."""
    clock, batches = SimpleNamespace(now=0.0), pl.Callback()
    batches.on_train_batch_start = lambda *args: setattr(clock, "now", clock.now + 1)

    def save(*args, **options):
        clock.now += seconds
        save_checkpoint(*args, **options)

    save_checkpoint = pl.Trainer.save_checkpoint
    monkeypatch.setattr(last_checkpoint, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(pl.Trainer, "save_checkpoint", save)
    saver = Saves(tmp_path, first=2, every_n_seconds=5.0)
    fit(saver, tmp_path, callbacks=[batches], max_steps=30, limit_val_batches=0)
    assert saver.steps == steps


def test_no_save_comes_between_the_last_batch_of_an_epoch_and_its_end(tmp_path):
    """A resume would not do again what callbacks do at the end of an epoch."""
    callback = Saves(tmp_path, first=4)
    fit(callback, tmp_path, max_steps=7)
    assert callback.steps == [5, 7]


class Ruin(pl.Callback):
    """Makes the weights useless in one update, of which loss and gradients are finite."""

    def __init__(self, step: int, lr: float = 1e30) -> None:
        self.step, self.lr = step, lr

    def on_train_batch_start(self, trainer, *args):
        lr = self.lr if trainer.global_step + 1 == self.step else 1e-3
        for group in trainer.optimizers[0].param_groups:
            group["lr"] = lr


def test_a_run_that_stops_for_a_loss_keeps_the_checkpoint_from_before_the_weights_were_ruined(
    tmp_path,
):
    fit(Saves(tmp_path), tmp_path, max_steps=2)
    good = (tmp_path / "last.ckpt").read_bytes()
    saver, stop = Saves(tmp_path, first=1), [FiniteUpdates(), Ruin(3)]
    with pytest.raises(FloatingPointError), pytest.warns(UserWarning, match="save before"):
        fit(saver, tmp_path, tmp_path / "last.ckpt", stop, limit_val_batches=0)
    assert saver.steps == [3]
    assert (tmp_path / "last.ckpt").read_bytes() == good
    assert not (tmp_path / "before-last.ckpt").exists()


class Spoilt(TinyModule):
    """Its loss is not finite from a step on."""

    def __init__(self, since):
        super().__init__(TinyNet(3), partial(torch.optim.Adam, fused=True))
        self.since = since

    def training_step(self, *args):
        loss = super().training_step(*args)
        return loss * math.nan if self.global_step >= self.since else loss


@pytest.mark.parametrize(("num_allowed", "bad", "saved_step"), [(0, 9, 7), (3, 5, 3)])
def test_on_a_gpu_a_save_proves_the_one_before_if_no_update_was_skipped_since(
    tmp_path, monkeypatch, num_allowed, bad, saved_step
):
    """Without a step that logs; saves are due at odd steps."""

    class SavesOften(Saves):
        def _is_due(self, trainer):
            return trainer.global_step % 2 == 1

    monkeypatch.setattr(finite_updates, "_DEFERRING_DEVICES", ("cpu",))
    monkeypatch.setattr(trainer_state, "may_read", lambda trainer: False)
    options = {"callbacks": [FiniteUpdates(num_allowed)], "limit_val_batches": 0}
    with pytest.raises(FloatingPointError), pytest.warns(UserWarning, match="save before"):
        fit(SavesOften(tmp_path), tmp_path, module=Spoilt(bad), max_steps=24, **options)
    assert saved(tmp_path)["global_step"] == saved_step
    assert {path.name for path in tmp_path.glob("*last*")} == {"last.ckpt"}


@pytest.mark.parametrize("first", [1, 100])
@pytest.mark.parametrize("validates", [0, 1.0])
def test_a_run_whose_last_update_ruins_the_weights_does_not_end_well(tmp_path, first, validates):
    """No loss comes after it that would tell."""
    saver, ruin = Saves(tmp_path, first=first, every_n_seconds=0.0), Ruin(3, lr=math.nan)
    options = {"limit_val_batches": validates, "max_steps": 3}
    with pytest.raises(FloatingPointError, match=r"weights of step 3 are not finite .*not saved"):
        fit(saver, tmp_path, callbacks=[FiniteUpdates(), ruin], **options)
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["last.ckpt"] * (first == 1)
    assert first == 100 or saved(tmp_path)["global_step"] in (1, 2)


def test_a_last_update_after_which_the_validation_is_not_finite_does_not_end_well(tmp_path):
    """Its weights are finite."""
    fit(Saves(tmp_path), tmp_path, max_steps=2)
    good = (tmp_path / "last.ckpt").read_bytes()
    callbacks, again = [FiniteUpdates(), Ruin(4)], tmp_path / "last.ckpt"
    with pytest.raises(FloatingPointError, match=r"val/loss is (inf|nan) after the last update"):
        fit(Saves(tmp_path), tmp_path, again, callbacks, max_steps=4)
    assert (tmp_path / "last.ckpt").read_bytes() == good
    assert [path.name for path in tmp_path.glob(".*ckpt*")] == []


def write_parts(path, content):
    (part := path.with_name("part")).mkdir()
    for name in ("meta.pt", ".metadata"):
        (part / name).write_text(content)
    replace(part, path)


@pytest.mark.parametrize(("write", "name"), [(atomic_write_text, ""), (write_parts, "meta.pt")])
def test_the_save_before_an_unproven_one_outlives_the_process(tmp_path, write, name):
    """A run that dies before a loss was finite leaves both; the next one puts the older back."""
    saver = Saves(tmp_path, first=1)
    write(saver.path, "proven")
    saver._link_previous()
    assert os.path.samefile(tmp_path / "before-last.ckpt" / name, saver.path / name)  # no copy
    for content in ("ruined", "ruined too"):
        write(saver.path, content)
        saver._link_previous()
    trainer = SimpleNamespace(is_global_zero=True)
    with pytest.warns(UserWarning, match="save before"):
        Saves(tmp_path).on_exception(trainer, None, FloatingPointError())
    assert (saver.path / name).read_text() == "proven"
    assert os.listdir(tmp_path) == ["last.ckpt"]


def test_half_a_folder_never_takes_the_place_of_a_whole_one(tmp_path, monkeypatch):
    """A kill may come while the files of before-last.ckpt are deleted."""
    saver = Saves(tmp_path, first=1)
    write_parts(saver.path, "whole")
    saver._link_previous()

    def kill(folder):
        (folder / "meta.pt").unlink()
        raise Death

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", kill)
        with pytest.raises(Death):
            remove(tmp_path / "before-last.ckpt")
    assert (tmp_path / "before-last.ckpt").is_dir()
    saver.on_exception(SimpleNamespace(is_global_zero=True), None, FloatingPointError())
    assert os.listdir(tmp_path) == ["last.ckpt"]
    assert (saver.path / "meta.pt").read_text() == "whole"


def test_a_folder_that_a_kill_has_left_aside_is_the_last_one_again(tmp_path):
    path = tmp_path / "checkpoints" / "last.ckpt"
    path.parent.mkdir()
    write_parts(path, "proven")
    path.rename(path.with_name(".last.ckpt.old"))
    again = ["fit", "--ckpt_path=last", f"--trainer.default_root_dir={tmp_path}"]
    assert read_command_line(again).checkpoint == path.with_name(".last.ckpt.old")
    assert read_command_line(again).holds_checkpoint
    saver = Saves(path.parent)
    saver._delete_end(SimpleNamespace(is_global_zero=True))
    assert read_command_line(again).checkpoint == path
    assert os.listdir(path.parent) == ["last.ckpt"]
