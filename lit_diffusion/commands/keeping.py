"""What a fit keeps: its config, its latest checkpoint, and curves that agree with it."""

import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.apply_func import convert_tensors_to_scalars
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lit_diffusion.batch_end import (
    WholeSteps,
    batch_is_ending,
    ends_epoch,
    epoch_is_ending,
    is_between_epochs,
    is_ending,
    row_is_to_come,
    validation_follows,
)
from lit_diffusion.commands.checkpoint_before import CheckpointBefore
from lit_diffusion.commands.run_folder import next_config
from lit_diffusion.loggers import AppendingCSVLogger, rewind_evaluations
from lit_diffusion.metrics.record import ImageCount, batches_done, images_of_a_batch


class RunConfig(SaveConfigCallback):
    """Writes config.yaml, and at a resume config.resume-N.yaml, into the run folder of a fit.

    It is written when all of a checkpoint is restored: a config with which that failed must not be
    taken for the run's.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Choose the name, which depends on what the folder holds before anything is written."""
        if stage == "fit":
            self._path = next_config(Path(trainer.default_root_dir))

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the config."""
        self._write(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the config, where nothing is validated before."""
        self._write(trainer)

    def _write(self, trainer: Trainer) -> None:
        if self.already_saved:
            return
        self.already_saved = True
        if trainer.is_global_zero:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            part = self._path.with_name(f".{self._path.name}.part")  # whole or not at all
            self.parser.save(self.config, part, skip_unset=False, overwrite=True, multifile=False)
            os.replace(part, self._path)


class CurvesInStep(Callback):
    """Keeps metrics.csv and evaluations.jsonl in step with the checkpoint that a run goes on from.

    A checkpoint is written when all rows of its step are on the disk, and a resume takes out what
    was logged after it.

    Args:
        root: the run folder.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Log the row that Lightning logs only after `on_train_batch_end`, where saves are made."""
        if not row_is_to_come(trainer):
            return
        connector = trainer._logger_connector
        metrics = convert_tensors_to_scalars(connector.metrics["log"])
        if metrics and connector.should_update_logs:
            step = metrics.pop("step", trainer.fit_loop.epoch_loop._batches_that_stepped)
            metrics.setdefault("epoch", trainer.current_epoch)
            for logger in _csv_loggers(trainer):
                logger.log_ahead(metrics, int(step))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Rewind to the step that was restored."""
        if not trainer.is_global_zero:
            return
        rewind_evaluations(self._root / "evaluations.jsonl", trainer.global_step)
        for logger in _csv_loggers(trainer):
            # By what Lightning logs: each optimizer's steps count in global_step.
            logger.rewind(trainer.fit_loop.epoch_loop._batches_that_stepped)


class ImagesSeen(Callback):
    """Counts training images, also of a run whose resumes change the batch size.

    Attributes:
        image_count: of the fit, which `images_seen` asks for.
    """

    _KEY = "images_seen"

    def __init__(self) -> None:
        self.image_count: ImageCount | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count on from what a checkpoint brought."""
        each = images_of_a_batch(trainer)
        count = self.image_count or ImageCount(0, 0, each)
        self.image_count = count.resumed(batches_done(trainer), each)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Save the count, where commands that do not count need not know of it."""
        if self.image_count is not None:
            checkpoint[self._KEY] = list(self.image_count)

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Go on from a saved count.

        Raises:
            ValueError: where it is none.
        """
        images = checkpoint.get(self._KEY)
        if images is None:
            return
        is_list = isinstance(images, list) and len(images) == 3
        if not is_list or not all(type(n) is int or n is None for n in images):
            raise ValueError(f"{self._KEY} must be three counts, got {images!r:.100}.")
        self.image_count = ImageCount(*images)


class ExactResume(Callback):
    """Says of a checkpoint that a run would not go on from it as it was.

    Between accumulated batches gradients would be lost, so the step would be made of the others
    alone: refused. Before a validation that is due, that one would be left out; at the end of an
    epoch, Lightning counts a step twice in what it logs. Such files, as ModelCheckpoint writes
    them, are as good as others to sample from. `LastCheckpoint` saves elsewhere.
    """

    _MARK = "resumes_inexactly"

    def __init__(self) -> None:
        self._steps = WholeSteps()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin with no batch before."""
        self._steps = WholeSteps()

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Note the step."""
        self._steps.batch_starts(trainer)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Mark the file."""
        why = _inexact(trainer, self._steps.accumulates(trainer))
        if why is not None:
            checkpoint[self._MARK] = why

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Refuse or warn of one that is marked."""
        why = checkpoint.get(self._MARK)
        if why == _BETWEEN:
            raise ValueError(
                f"{trainer.ckpt_path} was saved {why}, whose gradients no file holds; resume from "
                "checkpoints/last.ckpt, and have others saved at whole steps "
                "(trainer.val_check_interval a multiple of accumulate_grad_batches)."
            )
        if why is not None:
            rank_zero_warn(
                f"{trainer.ckpt_path} was saved {why}; from others, such as checkpoints/last.ckpt "
                "of an interrupted run, a run goes on as if it had not been interrupted."
            )


_BETWEEN = "between accumulated batches"


def _inexact(trainer: Trainer, accumulates: bool) -> str | None:
    if accumulates and is_between_epochs(trainer):
        return "after batches whose optimizer step was still to come, and does not come"
    if accumulates:
        return _BETWEEN
    if batch_is_ending(trainer) and validation_follows(trainer):
        return "before the validation of its step, which is left out"
    if epoch_is_ending(trainer):
        return "at the end of an epoch, after which Lightning counts a step twice"
    return None


class LastCheckpoint(Checkpoint):
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

    Example:
        >>> trainer = Trainer(callbacks=[LastCheckpoint("run")], logger=False, accelerator="cpu")
    """

    def __init__(self, folder: str | Path, first: int = 20, every_n_seconds: float = 30.0) -> None:
        self.path = Path(folder) / "last.ckpt"
        self.first = first
        self.every_n_seconds = every_n_seconds
        self._before = CheckpointBefore(self.path)
        self._is_proven = False
        self._due = 0
        self._saved = (0.0, -1)
        self._steps = WholeSteps()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self._saved = (time.monotonic(), trainer.global_step)
        self._due = trainer.global_step + self.first
        self._steps = WholeSteps()

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Note the step, to know whether the batch makes one."""
        self._steps.batch_starts(trainer)

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
        if in_fit and self._is_wanted(trainer):
            self._save(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save where the run ended in a way that could not be foreseen."""
        if trainer.global_step > self._saved[1]:
            self._save(trainer)
        if trainer.is_global_zero:
            self._before.let_go()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Bring back the checkpoint before, where that may be the last good one."""
        stopped = isinstance(exception, FloatingPointError) and trainer.is_global_zero
        if stopped and self._before.bring_back():
            rank_zero_warn(
                f"{self.path} is again that of the save before, as no loss has been finite since "
                "the last save."
            )

    def _is_wanted(self, trainer: Trainer) -> bool:
        due = trainer.global_step >= self._due and not ends_epoch(trainer)
        return (due or is_ending(trainer)) and not self._steps.accumulates(trainer)

    def _save(self, trainer: Trainer) -> None:
        began = time.monotonic()
        seconds, steps = began - self._saved[0], trainer.global_step - self._saved[1]
        self._save_beside_the_one_before(trainer)
        pause = max(self.every_n_seconds, 50 * (time.monotonic() - began))
        wait = max(math.ceil(pause * steps / max(seconds, 1e-9)), 1)
        # Clocks differ; all ranks save together, so they count to the same step.
        self._due = trainer.global_step + int(trainer.strategy.broadcast(wait))
        self._saved = (time.monotonic(), trainer.global_step)

    def _save_beside_the_one_before(self, trainer: Trainer) -> None:
        if trainer.is_global_zero:
            self._before.keep()
        try:
            trainer.save_checkpoint(self.path, weights_only=False)
        except OSError:  # a full disk: the one before is still the last
            if trainer.is_global_zero:
                self._before.let_go()
            raise
        self._is_proven = False


def _is_finite(outputs: Any) -> bool:
    """Whether the loss of a batch is, as far as training_step's output tells."""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    return not isinstance(loss, Tensor) or bool(loss.isfinite().all())


def _csv_loggers(trainer: Trainer) -> list[AppendingCSVLogger]:
    return [logger for logger in trainer.loggers if isinstance(logger, AppendingCSVLogger)]
