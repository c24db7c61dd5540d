"""Save the latest checkpoint of a fit, with a backup until the next finite loss."""

import math
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lit_diffusion.callbacks import trainer_state
from lit_diffusion.callbacks.finite_updates import FiniteUpdates
from lit_diffusion.cli.run_folder import FIRST_SAVE
from lit_diffusion.files import is_checkpoint, path_after_replace, remove, replace


class LastCheckpoint(trainer_state.AccumulationTracker, Checkpoint):
    """Saves `folder`/last.ckpt regularly, and at the end of the fit.

    The first save happens after `first` optimizer steps, so that an unwritable disk is noticed
    early. Further saves follow every `every_n_seconds` seconds, or less often if saving is slow, so
    that saving takes at most 2% of the time.

    A checkpoint is saved only at points from which Lightning resumes exactly: after a batch that
    ends an optimizer step, or after the validation that follows this batch. No checkpoint is saved
    after the last batch of an epoch, because a resume would skip the hooks at the end of the epoch.

    The checkpoint of the last step of the fit is saved under a temporary name, and replaces
    last.ckpt in `on_train_end`. A run that is killed before `on_train_end` resumes from the
    previous last.ckpt and repeats the steps since then.

    The weights in a new last.ckpt may already have diverged. Therefore, the previous last.ckpt is
    preserved as before-last.ckpt until the new weights have proven good. They count as good if a
    batch after the save has a finite loss, or if `FiniteUpdates` skips no update until the next
    save. On a GPU, the loss is read only at logging steps. If a non-finite loss or gradient ends
    the run while before-last.ckpt exists, before-last.ckpt replaces last.ckpt.

    Args:
        folder: folder of last.ckpt.
        first: optimizer steps until the first save.
        every_n_seconds: minimum time between saves, in seconds.
    """

    def __init__(
        self, folder: str | Path, first: int = FIRST_SAVE, every_n_seconds: float = 30.0
    ) -> None:
        self.path = Path(folder) / "last.ckpt"
        self.first = first
        self.every_n_seconds = every_n_seconds
        # Save of the last step. In on_train_end, it would be too late, because a resume would skip
        # the rest of an unfinished epoch.
        self._end_path = self.path.with_name(".last.ckpt.end")
        self._previous_path = self.path.with_name("before-last.ckpt")
        self._is_proven = False  # whether a loss was finite since the last save
        self._skipped_updates: list[int] = []  # counts of FiniteUpdates at the last save
        self._next_save_step = 0  # step of the next save
        self._last_save = (0.0, -1)  # time in seconds, step
        self._num_saved_batches = -1  # batches processed at the last save
        self._saved_epoch = -1  # epochs processed at the start of this fit, until its first save
        self._validated_step = -1

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self._delete_end(trainer)
        self._last_save = (time.monotonic(), trainer.global_step)
        self._num_saved_batches = _num_batches(trainer)
        self._saved_epoch = trainer.current_epoch
        self._skipped_updates = _count_skipped_updates(trainer)
        self._next_save_step = trainer.global_step + self.first

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save if a save is due. If a validation follows, `on_validation_end` saves instead."""
        is_unproven = not self._is_proven and trainer.is_global_zero
        if is_unproven and trainer_state.may_read(trainer) and _has_finite_loss(outputs):
            remove(self._previous_path)
            self._is_proven = True
        if self._is_due(trainer) and not trainer_state.validation_follows(trainer):
            self._save(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save if a save is due."""
        in_fit = trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking
        self._validated_step = trainer.global_step if in_fit else -1
        if in_fit and self._is_due(trainer):
            self._save(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the last step if it is not saved yet, and rename its checkpoint to last.ckpt."""
        loss = trainer.callback_metrics.get("val/loss")
        is_validated = self._validated_step == trainer.global_step
        if is_validated and loss is not None and not loss.isfinite():
            raise FloatingPointError(
                f"val/loss is {loss:g} after the last update, of step {trainer.global_step}. Lower "
                "the lr, or clip gradients (trainer.gradient_clip_val=1)."
            )
        # A resumed fit may process no batch, and only end the epoch, if a validation stops it.
        ended_epoch = 0 <= self._saved_epoch < trainer.current_epoch
        if _num_batches(trainer) > self._num_saved_batches or ended_epoch:
            self._save(trainer)
        if trainer.is_global_zero:
            remove(self._previous_path)
            if self._end_path.exists():
                replace(self._end_path, self.path)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Restore the previous checkpoint if the latest may have bad weights."""
        self._delete_end(trainer)
        diverged = isinstance(exception, FloatingPointError) and trainer.is_global_zero
        if diverged and self._previous_path.exists():
            replace(self._previous_path, self.path)
            rank_zero_warn(
                f"{self.path} is again the checkpoint of the save before, because no loss since "
                "the last save was known to be finite."
            )

    def _delete_end(self, trainer: Trainer) -> None:
        """Delete the save of the last step of a fit that did not end, and partial files."""
        if not trainer.is_global_zero:
            return
        if (latest := path_after_replace(self.path)) != self.path:
            os.rename(latest, self.path)
        if not is_checkpoint(self._previous_path):  # a kill may have left half a folder
            remove(self._previous_path)
        for leftover in self.path.parent.glob(".*last.ckpt.*"):
            remove(leftover)

    def _link_previous(self) -> None:
        """Hard-link last.ckpt to before-last.ckpt, unless that exists, to preserve its content."""
        if self._previous_path.exists() or not self.path.exists():
            return
        try:
            if self.path.is_dir():
                links = self._previous_path.with_name(f".{self._previous_path.name}.links")
                remove(links)
                shutil.copytree(self.path, links, copy_function=os.link)
                os.rename(links, self._previous_path)
            else:
                os.link(self.path, self._previous_path)
        except OSError as error:  # a file system without hard links
            rank_zero_warn(
                f"{self.path} is replaced at each save without a backup until the next finite "
                f"loss: {error}."
            )

    def _is_due(self, trainer: Trainer) -> bool:
        in_epoch = not trainer_state.ends_epoch(trainer)
        is_time = in_epoch and trainer.global_step >= self._next_save_step
        return (is_time or trainer_state.is_ending(trainer)) and not self.is_accumulating(trainer)

    def _save(self, trainer: Trainer) -> None:
        start = time.monotonic()
        seconds, steps = start - self._last_save[0], trainer.global_step - self._last_save[1]
        at_end = trainer_state.is_ending(trainer)
        trainer_state.confirm_updates(trainer)
        skipped_updates = _count_skipped_updates(trainer)
        if steps > 0 and skipped_updates and skipped_updates == self._skipped_updates:
            self._is_proven = True
            if trainer.is_global_zero:
                remove(self._previous_path)
        if trainer.is_global_zero and not at_end:
            self._link_previous()
        try:
            trainer.save_checkpoint(self._end_path if at_end else self.path, weights_only=False)
        except (OSError, FloatingPointError) as error:  # the previous save is still in place
            if trainer.is_global_zero and (self._is_proven or isinstance(error, OSError)):
                remove(self._previous_path)
            if not at_end or isinstance(error, FloatingPointError):
                raise
            text = str(error).replace(str(self._end_path), str(self.path)).rstrip(".")
            intact = "; the checkpoint saved there before is intact" if self.path.exists() else ""
            raise OSError(f"{text}{intact}.") from error
        self._is_proven, self._skipped_updates = False, skipped_updates
        pause = max(self.every_n_seconds, 50 * (time.monotonic() - start))
        wait = max(math.ceil(pause * steps / max(seconds, 1e-9)), 1)
        # All ranks must save at the same step, but their clocks differ.
        self._next_save_step = trainer.global_step + int(trainer.strategy.broadcast(wait))
        self._last_save = (time.monotonic(), trainer.global_step)
        self._num_saved_batches, self._saved_epoch = _num_batches(trainer), -1


def _num_batches(trainer: Trainer) -> int:
    """Number of batches that the fit has processed, including accumulated batches."""
    total: Any = trainer.fit_loop.epoch_loop.batch_progress.total
    return int(total.processed)


def _count_skipped_updates(trainer: Trainer) -> list[int]:
    """How many updates each FiniteUpdates of the Trainer has skipped."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    return [each.skipped_updates for each in callbacks if isinstance(each, FiniteUpdates)]


def _has_finite_loss(outputs: Any) -> bool:
    """Whether the loss returned by training_step is finite; True if it returned none."""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    return not isinstance(loss, Tensor) or bool(loss.isfinite().all())
