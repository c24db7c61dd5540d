import os
import time
import warnings
from functools import partial
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from support.commands import equal
from support.tiny_run import TinyData, TinyModule, TinyNet

from lit_diffusion.callbacks import FiniteUpdates
from lit_diffusion.commands.keeping import ExactResume, ImagesSeen, LastCheckpoint, RunConfig


class Saves(LastCheckpoint):
    """Remembers the steps at which it saved."""

    def _save(self, trainer):
        super()._save(trainer)
        self.steps = [*getattr(self, "steps", []), trainer.global_step]


def fit(
    callback: pl.Callback, tmp_path: Path, ckpt_path=None, callbacks=(), module=None, **options
):
    torch.manual_seed(0)
    module = module or TinyModule(TinyNet(3), torch.optim.Adam)
    options = {"max_steps": 12} | options
    trainer = pl.Trainer(
        callbacks=[*callbacks, callback],
        accelerator="cpu",
        logger=False,
        default_root_dir=tmp_path,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **options,
    )
    trainer.fit(module, TinyData(), ckpt_path=ckpt_path)  # 4 batches an epoch
    return trainer


def saved(tmp_path: Path) -> dict:
    return torch.load(tmp_path / "last.ckpt", weights_only=True)


class SlowBatches(pl.Callback):
    def on_train_batch_start(self, *args):
        time.sleep(0.02)


def test_a_config_is_written_as_a_whole_or_not_at_all(tmp_path):
    """What is half a config would be taken for another run's, or for none."""

    class DyingParser:
        def save(self, config, path, **options):
            Path(path).write_text("trainer:")
            raise OSError("No space left on device")

    with pytest.raises(OSError, match="No space left"):
        fit(RunConfig(DyingParser(), None), tmp_path)
    assert not list(tmp_path.glob("*.yaml"))


@pytest.mark.parametrize(
    "options",
    [
        {"max_steps": 3},
        {"max_steps": 4},
        {"max_steps": 6, "check_val_every_n_epoch": 2},
        {"max_epochs": 2, "max_steps": -1},
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


@pytest.mark.parametrize("limit_val_batches", [0, 1.0])
def test_a_run_that_another_callback_stops_keeps_its_last_step(tmp_path, limit_val_batches):
    class Stop(pl.Callback):
        def on_train_batch_end(self, trainer, *args):
            trainer.should_stop = trainer.global_step == 6

    callback = Saves(tmp_path, first=100)
    fit(callback, tmp_path, callbacks=[Stop()], limit_val_batches=limit_val_batches)
    assert callback.steps == [6]


@pytest.mark.parametrize("options", [{}, {"val_check_interval": 2}, {"accumulate_grad_batches": 2}])
@pytest.mark.parametrize("steps", range(1, 7))
def test_a_resume_from_any_end_is_exact(tmp_path, steps, options):
    whole = fit(Saves(tmp_path / "whole"), tmp_path, max_steps=8, **options)
    fit(Saves(tmp_path), tmp_path, max_steps=steps, **options)
    file = tmp_path / "last.ckpt"
    resumed = fit(Saves(tmp_path), tmp_path, file, max_steps=8, **options)
    assert equal(whole.model.state_dict(), resumed.model.state_dict())
    assert whole.current_epoch == resumed.current_epoch


def test_the_first_save_comes_early_and_then_time_decides(tmp_path):
    callback = Saves(tmp_path, first=2, every_n_seconds=0.1)
    callback.steps = []
    fit(callback, tmp_path, callbacks=[SlowBatches()], max_steps=60, limit_val_batches=0)
    assert callback.steps[0] == 2
    pauses = [b - a for a, b in zip(callback.steps[:-1], callback.steps[1:-1], strict=False)]
    assert pauses
    assert min(pauses) >= 2


def test_saving_that_is_slow_is_done_less_often(tmp_path, monkeypatch):
    callback = Saves(tmp_path, first=1, every_n_seconds=0.001)
    save = pl.Trainer.save_checkpoint

    def slowly(*args, **options):
        time.sleep(0.05)
        save(*args, **options)

    monkeypatch.setattr(pl.Trainer, "save_checkpoint", slowly)
    fit(callback, tmp_path, max_steps=20, limit_val_batches=0)
    assert callback.steps == [1, 20]


def test_a_checkpoint_that_is_due_with_a_validation_holds_what_follows_it(tmp_path):
    """Validation of the step that is saved is over, so a resume need not repeat it."""
    seen = []

    class Order(pl.Callback):
        def on_validation_end(self, trainer, pl_module):
            seen.append(("validated", trainer.global_step))

    class Noting(Saves):
        def _save(self, trainer):
            super()._save(trainer)
            seen.append(("saved", trainer.global_step))

    options = {"max_steps": 3, "val_check_interval": 2}
    fit(Noting(tmp_path, first=2), tmp_path, callbacks=[Order()], **options)
    assert seen == [("validated", 2), ("saved", 2), ("saved", 3)]


def test_no_save_is_made_between_the_last_batch_of_an_epoch_and_its_end(tmp_path):
    """A resume would not do again what callbacks do at the end of an epoch."""
    callback = Saves(tmp_path, first=4)
    fit(callback, tmp_path, max_steps=7)
    assert callback.steps == [5, 7]


class Ruin(pl.Callback):
    """Makes the weights useless in one update, of which loss and gradients are finite."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer, *args):
        lr = 1e30 if trainer.global_step + 1 == self.step else 1e-3
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


def test_a_save_that_the_next_loss_has_proven_stays_where_a_later_one_stops_the_run(tmp_path):
    saver = Saves(tmp_path, first=2, every_n_seconds=1000.0)
    with pytest.raises(FloatingPointError):
        fit(saver, tmp_path, callbacks=[FiniteUpdates(), Ruin(3)], limit_val_batches=0)
    assert saver.steps == [2]
    assert saved(tmp_path)["global_step"] == 2


def test_nothing_but_the_file_is_left_in_the_folder(tmp_path):
    fit(LastCheckpoint(tmp_path / "checkpoints", first=1, every_n_seconds=0.001), tmp_path)
    assert os.listdir(tmp_path / "checkpoints") == ["last.ckpt"]


def test_no_save_is_made_between_accumulated_batches(tmp_path):
    """Steps end at batches 3, 4, 7 and 8 of two epochs of four; validation comes after 2 and 4.

    The second step ends an epoch.
    """

    class SavesAlways(Saves):
        def _save(self, trainer):
            super()._save(trainer)
            self._due = 0

    callback = SavesAlways(tmp_path, first=0)
    options = {"max_epochs": 2, "max_steps": -1, "val_check_interval": 2}
    fit(callback, tmp_path, callbacks=[ExactResume()], accumulate_grad_batches=3, **options)
    assert callback.steps == [1, 3, 4]
    assert "resumes_inexactly" not in saved(tmp_path)


@pytest.mark.parametrize(("batch", "refused"), [(2, True), (3, False), (4, False)])
def test_what_was_saved_between_accumulated_batches_is_no_place_to_go_on_from(
    tmp_path, batch, refused
):
    class SaveAt(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, given, batch_idx):
            if batch_idx + 1 == batch and trainer.current_epoch == 0:
                trainer.save_checkpoint(tmp_path / "some.ckpt")

    options = {"accumulate_grad_batches": 3, "max_epochs": 2, "max_steps": -1}
    fit(SaveAt(), tmp_path, callbacks=[ExactResume()], **options)
    again = partial(fit, ExactResume(), tmp_path, ckpt_path=tmp_path / "some.ckpt", **options)
    if refused:
        with pytest.raises(ValueError, match=r"some\.ckpt was saved between accumulated batches"):
            again()
    else:
        again()


@pytest.mark.parametrize(
    ("hook", "step", "said"),
    [
        ("on_train_batch_end", 2, "before the validation of its step, which is left out"),
        ("on_train_batch_end", 3, None),
        ("on_validation_end", 2, None),
        ("on_train_epoch_end", 4, "at the end of an epoch"),
        ("on_train_end", 8, None),
    ],
)
def test_a_file_from_which_a_run_would_not_go_on_as_it_was_says_so(tmp_path, hook, step, said):
    class SaveAt(pl.Callback):
        def save(self, trainer, *args):
            if trainer.global_step == step:
                trainer.save_checkpoint(tmp_path / "some.ckpt")

    saver = SaveAt()
    setattr(saver, hook, saver.save)
    fit(saver, tmp_path, callbacks=[ExactResume()], max_steps=8, val_check_interval=2)
    again = partial(fit, ExactResume(), tmp_path, ckpt_path=tmp_path / "some.ckpt", max_steps=9)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        again()
    told = [str(w.message) for w in caught if "some.ckpt was saved" in str(w.message)]
    assert len(told) == (said is not None)
    assert all(f"some.ckpt was saved {said}" in text for text in told)


class AccumulatesItself(TinyModule):
    """Steps after every third batch and the last."""

    def __init__(self):
        super().__init__(TinyNet(3), torch.optim.Adam)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.manual_backward(super().training_step(batch, batch_idx))
        if self.trainer.fit_loop.total_batch_idx in (2, 5):
            self.optimizers().step()
            self.optimizers().zero_grad()


@pytest.mark.parametrize(("batch", "refused"), [(2, True), (3, False), (4, True), (6, False)])
@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_validation_end"])
def test_batches_that_a_module_accumulates_by_itself_are_no_place_to_go_on_from(
    tmp_path, batch, refused, hook
):
    class SaveAt(pl.Callback):
        def save(self, trainer, *args):
            if trainer.fit_loop.total_batch_idx + 1 == batch:
                trainer.save_checkpoint(tmp_path / "some.ckpt")

    saver, kept = SaveAt(), Saves(tmp_path, first=1, every_n_seconds=0.0)
    setattr(saver, hook, saver.save)
    options = {"max_steps": 2, "val_check_interval": 1, "limit_val_batches": 1}
    module = AccumulatesItself()
    fit(kept, tmp_path, callbacks=[ExactResume(), saver], module=module, **options)
    marked = torch.load(tmp_path / "some.ckpt", weights_only=True).get("resumes_inexactly")
    assert (marked == "between accumulated batches") == refused
    assert kept.steps == [1, 2]
    assert "resumes_inexactly" not in saved(tmp_path)


def test_a_run_that_ends_without_the_step_of_its_last_batches_says_so(tmp_path):
    """It is kept nevertheless, and a resume is warned of what it lacks."""
    options = {"max_epochs": 1, "max_steps": -1, "limit_val_batches": 0}
    callback = Saves(tmp_path, first=100)
    fit(callback, tmp_path, callbacks=[ExactResume()], module=AccumulatesItself(), **options)
    assert callback.steps == [1]
    with pytest.warns(UserWarning, match="whose optimizer step was still to come"):
        fit(
            ExactResume(),
            tmp_path,
            tmp_path / "last.ckpt",
            module=AccumulatesItself(),
            **options | {"max_epochs": 2},
        )


@pytest.mark.parametrize("images", [[1], "abc", [1, 2, "many"], [1, 2, True]])
def test_counts_of_images_that_are_none_are_refused(images):
    with pytest.raises(ValueError, match="images_seen must be three counts"):
        ImagesSeen().on_load_checkpoint(None, None, {"images_seen": images})
