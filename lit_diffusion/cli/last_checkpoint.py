"""The latest checkpoint of a fit, and the one before it until the latest has shown to be sound."""

import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lit_diffusion.callbacks.trainer_state import (
    AccumulationTracker,
    ends_epoch,
    is_ending,
    validation_follows,
)
from lit_diffusion.files import sync_folder


class LastCheckpoint(AccumulationTracker, Checkpoint):
    """Keeps `folder`/last.ckpt as fresh as is cheap, and that of the last step at the end.

    The first save comes after `first` optimizer steps, so that a disk that cannot be written to is
    known early. Each further one comes `every_n_seconds` after the one before, or later where
    saving is slow, so that at most one part in fifty of the time goes into it.

    Saves are made where Lightning resumes exactly: after a batch that ends a step, or after the
    validation that belongs to it; not after the last of an epoch, as what callbacks do at its end
    is not done again. (A file saved in `on_train_end` of an unfinished epoch resumes in the next
    one.)

    The checkpoint before is kept as before-last.ckpt until the next batch has a finite loss. It
    takes the place of last.ckpt where the run ends because a loss or gradient is not finite: the
    update before that may have been the one that ruined the weights.

    Args:
        folder: where the file goes.
        first: optimizer steps until the first save.
        every_n_seconds: at least, between saves.
    """

    def __init__(self, folder: str | Path, first: int = 20, every_n_seconds: float = 30.0) -> None:
        self.path = Path(folder) / "last.ckpt"
        self.first = first
        self.every_n_seconds = every_n_seconds
        self._end = self.path.with_name(".last.ckpt.end")
        self._before = CheckpointBefore(self.path)
        self._is_proven = False
        self._due = 0
        self._saved, self._validated = (0.0, -1), -1

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self._drop_end(trainer)
        self._saved = (time.monotonic(), trainer.global_step)
        self._due = trainer.global_step + self.first

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save where it is due and no validation follows."""
        if not self._is_proven and trainer.is_global_zero and _is_finite(outputs):
            self._before.let_go()
            self._is_proven = True
        if self._is_wanted(trainer) and not validation_follows(trainer):
            self._save(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save where it is due."""
        in_fit = trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking
        self._validated = trainer.global_step if in_fit else -1
        if in_fit and self._is_wanted(trainer):
            self._save(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the last save in place, made now where the end could not be foreseen."""
        loss = trainer.callback_metrics.get("val/loss")
        if self._validated == trainer.global_step and loss is not None and not loss.isfinite():
            raise FloatingPointError(
                f"val/loss is {loss:g} after the last update, of step {trainer.global_step}. Lower "
                "the lr, or clip gradients (trainer.gradient_clip_val=1)."
            )
        if trainer.global_step > self._saved[1]:
            self._save(trainer)
        if trainer.is_global_zero:
            self._before.let_go()
            if self._end.exists():
                os.replace(self._end, self.path)
                sync_folder(self.path.parent)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Bring back the checkpoint before, where that may be the last good one."""
        self._drop_end(trainer)
        diverged = isinstance(exception, FloatingPointError) and trainer.is_global_zero
        if diverged and self._before.bring_back():
            rank_zero_warn(
                f"{self.path} is again that of the save before, as no loss has been finite since "
                "the last save."
            )

    def _drop_end(self, trainer: Trainer) -> None:
        for left in self.path.parent.glob(".*last.ckpt.*") if trainer.is_global_zero else ():
            if left.is_file():
                left.unlink()

    def _is_wanted(self, trainer: Trainer) -> bool:
        due = trainer.global_step >= self._due and not ends_epoch(trainer)
        return (due or is_ending(trainer)) and not self.is_accumulating(trainer)

    def _save(self, trainer: Trainer) -> None:
        began = time.monotonic()
        seconds, steps = began - self._saved[0], trainer.global_step - self._saved[1]
        ends = is_ending(trainer) and not self.path.is_dir()  # as sharded strategies save
        if trainer.is_global_zero and not ends:
            self._before.keep()
        try:
            trainer.save_checkpoint(self._end if ends else self.path, weights_only=False)
        except (OSError, FloatingPointError) as error:  # not saved: the one before is the last
            if trainer.is_global_zero:
                self._before.let_go()
            if not ends or isinstance(error, FloatingPointError):
                raise
            text = str(error).replace(str(self._end), str(self.path)).rstrip(".")
            kept = "; the checkpoint saved there before is intact" if self.path.exists() else ""
            raise OSError(f"{text}{kept}.") from error
        self._is_proven = False
        pause = max(self.every_n_seconds, 50 * (time.monotonic() - began))
        wait = max(math.ceil(pause * steps / max(seconds, 1e-9)), 1)
        # Clocks differ; all ranks save together, so they count to the same step.
        self._due = trainer.global_step + int(trainer.strategy.broadcast(wait))
        self._saved = (time.monotonic(), trainer.global_step)


class CheckpointBefore:
    """before-<name>, under which the old content of a file outlives the writing of a new one.

    No space is taken but that of the old file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._before = path.with_name(f"before-{path.name}")

    def keep(self) -> None:
        """Give the present content the second name, unless an older one has yet to be let go."""
        if self._before.exists() or not self._path.exists():
            return
        try:
            os.link(self._path, self._before)
        except OSError as error:  # a file system without hard links
            rank_zero_warn(
                f"{self._path} is replaced at each save without its old content being kept until "
                f"the next loss is finite: {error}."
            )

    def let_go(self) -> None:
        """Drop the old content."""
        self._before.unlink(missing_ok=True)

    def bring_back(self) -> bool:
        """Put the old content in place of the new one; whether there was one."""
        if not self._before.exists():
            return False
        os.replace(self._before, self._path)
        sync_folder(self._path.parent)
        return True


def _is_finite(outputs: Any) -> bool:
    """Whether the loss of a batch is, as far as training_step's output tells."""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    return not isinstance(loss, Tensor) or bool(loss.isfinite().all())
