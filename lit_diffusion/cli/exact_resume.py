"""What a resume needs beyond Lightning to end as a run that was never interrupted."""

import os
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from lit_diffusion.callbacks.trainer_state import (
    AccumulationTracker,
    is_batch_ending,
    validation_follows,
)
from lit_diffusion.checkpoints.reading import read_step
from lit_diffusion.cli.lightning_internals import (
    forget_restart,
    is_between_epochs,
    is_epoch_ending,
    restore_unsaved_state,
    saved_files,
    unsaved_state,
    update_callback_metrics,
)

BETWEEN_BATCHES = "between accumulated batches"


class ExactResume(AccumulationTracker, Callback):
    """Restores what Lightning does not, and marks checkpoints that cannot be resumed exactly.

    Lightning does not call `on_train_epoch_start` in a resumed epoch, where
    GradientAccumulationScheduler sets its factor. It updates ReduceLROnPlateau after the hooks in
    which checkpoints are saved, by metrics that it does not save, and not at all at the end of an
    interrupted epoch. ModelCheckpoint and EarlyStopping use the last of these metrics too, and part
    of a ModelCheckpoint's state is not saved.

    Checkpoints that other callbacks save than `LastCheckpoint` may be marked. One saved between
    accumulated batches lacks their gradients: resuming from it is refused. One saved before the
    validation of its step leaves that out, and one saved at the end of an epoch makes Lightning
    count a step twice in its logs: resuming from these warns. All of them are good to sample from.

    List it after other callbacks: GradientAccumulationScheduler must start from a factor of 1.
    """

    def __init__(self) -> None:
        self._metrics: dict[str, Tensor] = {}
        self._savers: dict[str, Any] = {}

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Save metrics and the rest of each ModelCheckpoint's state; mark an inexact file."""
        checkpoint["model_checkpoints"] = {
            saver.state_key: unsaved_state(saver) for saver in _model_checkpoints(trainer)
        }
        if reason := self._why_inexact(trainer):
            checkpoint["resumes_inexactly"] = reason
        # Elsewhere, as after an error, metrics may not be computed on all ranks.
        if is_batch_ending(trainer) or trainer.validating:
            metrics = trainer.callback_metrics
            checkpoint["callback_metrics"] = {name: metrics[name].cpu() for name in sorted(metrics)}

    def _why_inexact(self, trainer: Trainer) -> str | None:
        """When the checkpoint is saved, if no exact resume is possible from there."""
        if self.is_accumulating(trainer):
            if is_between_epochs(trainer):
                return "after batches whose optimizer step was still to come, and does not come"
            return BETWEEN_BATCHES
        if is_batch_ending(trainer) and validation_follows(trainer):
            return "before the validation of its step, which is left out"
        if is_epoch_ending(trainer):
            return "at the end of an epoch, after which Lightning counts a step twice"
        return None

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Refuse a marked file, or warn of it; load the metrics."""
        reason = checkpoint.get("resumes_inexactly")
        if reason == BETWEEN_BATCHES:
            raise ValueError(
                f"{trainer.ckpt_path} was saved {reason}, whose gradients no file holds; resume "
                "from checkpoints/last.ckpt, and have others saved at whole steps "
                "(trainer.val_check_interval a multiple of accumulate_grad_batches)."
            )
        if reason is not None:
            rank_zero_warn(
                f"{trainer.ckpt_path} was saved {reason}; from others, such as "
                "checkpoints/last.ckpt of an interrupted run, a run resumes bit-exactly."
            )
        self._metrics = dict(checkpoint.get("callback_metrics", {}))
        self._savers = checkpoint.get("model_checkpoints", {})

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore metrics and savers, and do what Lightning left out before the first batch."""
        with isolate_rng():  # ModelCheckpoint asks for the size of the validation set
            trainer.fit_loop.epoch_loop.val_loop.setup_data()
        if trainer.ckpt_path is not None:
            _restore_savers(trainer, self._savers)
        metrics, self._metrics = self._metrics, {}
        update_callback_metrics(trainer, {k: v.to(pl_module.device) for k, v in metrics.items()})
        if trainer.fit_loop.restarted_mid_epoch:
            for callback in trainer.callbacks:  # type: ignore[attr-defined]
                if isinstance(callback, GradientAccumulationScheduler):
                    callback.on_train_epoch_start(trainer, pl_module)
        if trainer.fit_loop.epoch_loop.restarted_on_train_batch_end:
            _update_plateau_schedulers(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Have Lightning end a resumed epoch as any other: the metrics are there."""
        forget_restart(trainer)


def _update_plateau_schedulers(trainer: Trainer) -> None:
    """Make the updates that Lightning makes after `on_train_batch_end`, where it was saved."""
    loop, epochs = trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_progress.current
    loop.update_lr_schedulers("step", update_plateau_schedulers=True)
    if loop.batch_progress.is_last_batch:  # Lightning has begun to count the next epoch
        epochs.completed -= 1
        loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
        epochs.completed += 1


def _model_checkpoints(trainer: Trainer) -> list[ModelCheckpoint]:
    return [each for each in trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint)]


def _restore_savers(trainer: Trainer, states: dict[str, dict[str, Any]]) -> None:
    """Restore each ModelCheckpoint, and let it overwrite the files saved after the checkpoint.

    Files that the interrupted run saved after the checkpoint from which it resumes are unknown to
    ModelCheckpoint, which would save the same step again beside them, as -v1.
    """
    savers = _model_checkpoints(trainer)
    for saver in savers:
        restore_unsaved_state(saver, states.get(saver.state_key, {}))
    tracked = {os.path.abspath(file) for saver in savers for file in saved_files(saver)}
    folders = {os.path.abspath(saver.dirpath) for saver in savers if saver.dirpath}
    files = {str(file) for folder in folders for file in Path(folder).glob("*.ckpt")} - tracked
    obsolete = {file for file in files if read_step(file) >= trainer.global_step}
    for saver in savers:
        vars(saver)["file_exists"] = partial(_file_exists, obsolete, saver.file_exists)


def _file_exists(obsolete: set[str], file_exists: Any, path: str, trainer: Trainer) -> bool:
    """ModelCheckpoint's `file_exists`, except for obsolete files, which it may overwrite once."""
    path = os.path.abspath(path)
    is_obsolete = trainer.strategy.broadcast(path in obsolete)
    obsolete.discard(path)
    return bool(file_exists(path, trainer)) and not is_obsolete
