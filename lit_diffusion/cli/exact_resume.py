"""What it takes to go on from a checkpoint as if the run had not been interrupted."""

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

_BETWEEN = "between accumulated batches"


class ExactResume(AccumulationTracker, Callback):
    """Does at a resume what Lightning leaves out, and says where a run would not go on as it was.

    Lightning calls no `on_train_epoch_start` within an epoch, where GradientAccumulationScheduler
    sets its factor. It updates ReduceLROnPlateau after the hooks that save, by metrics that it does
    not save, and not at all at the end of an epoch that was interrupted. ModelCheckpoint and
    EarlyStopping go by the last of such metrics too, and part of a ModelCheckpoint's state is in no
    checkpoint.

    Checkpoints that others save elsewhere than `LastCheckpoint` are marked. Between accumulated
    batches gradients would be lost, so the step would be made of the others alone: refused. Before
    a validation that is due, that one would be left out; at the end of an epoch, Lightning counts a
    step twice in what it logs: warned of. Such files are as good as others to sample from.

    List it after other callbacks: GradientAccumulationScheduler wants to start from a factor of 1.
    """

    _MARK = "resumes_inexactly"
    _METRICS = "callback_metrics"
    _SAVERS = "model_checkpoints"

    def __init__(self) -> None:
        self._metrics: dict[str, Tensor] = {}
        self._savers: dict[str, Any] = {}

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Mark the file, and keep the metrics that schedules and callbacks go by."""
        savers = _model_checkpoints(trainer)
        checkpoint[self._SAVERS] = {each.state_key: unsaved_state(each) for each in savers}
        if why := _inexact(trainer, self.is_accumulating(trainer)):
            checkpoint[self._MARK] = why
        # Elsewhere, as after an error, metrics may not be computed on all ranks.
        if is_batch_ending(trainer) or trainer.validating:
            known = trainer.callback_metrics
            checkpoint[self._METRICS] = {k: known[k].cpu() for k in sorted(known)}

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Refuse or warn of a file that is marked; remember the metrics."""
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
        self._metrics = dict(checkpoint.get(self._METRICS, {}))
        self._savers = checkpoint.get(self._SAVERS, {})

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Catch up, before the first batch."""
        with isolate_rng():  # ModelCheckpoint asks for its size, which only validations found out
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
            _update_plateaus(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Have the epoch end as any other: the metrics are there."""
        forget_restart(trainer)


def _inexact(trainer: Trainer, accumulates: bool) -> str | None:
    if accumulates and is_between_epochs(trainer):
        return "after batches whose optimizer step was still to come, and does not come"
    if accumulates:
        return _BETWEEN
    if is_batch_ending(trainer) and validation_follows(trainer):
        return "before the validation of its step, which is left out"
    if is_epoch_ending(trainer):
        return "at the end of an epoch, after which Lightning counts a step twice"
    return None


def _update_plateaus(trainer: Trainer) -> None:
    """Make the updates that Lightning makes after `on_train_batch_end`, where the file was saved.

    After that of the last batch of an epoch, Lightning has begun to count the next one.
    """
    loop, epochs = trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_progress.current
    loop.update_lr_schedulers("step", update_plateau_schedulers=True)
    if loop.batch_progress.is_last_batch:
        epochs.completed -= 1
        loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
        epochs.completed += 1


def _model_checkpoints(trainer: Trainer) -> list[ModelCheckpoint]:
    return [each for each in trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint)]


def _restore_savers(trainer: Trainer, states: dict[str, dict[str, Any]]) -> None:
    """Put in place what each `ModelCheckpoint` saves of itself in no file, and find its old files.

    Those that the run saved before it was interrupted, after the checkpoint from which it goes on,
    pass for others' files there: the same step would be saved beside its old file, as -v1. Here
    that one is replaced.
    """
    found = _model_checkpoints(trainer)
    for each in found:
        restore_unsaved_state(each, states.get(each.state_key, {}))
    known = {os.path.abspath(file) for each in found for file in saved_files(each)}
    folders = {os.path.abspath(each.dirpath) for each in found if each.dirpath}
    files = {str(file) for folder in folders for file in Path(folder).glob("*.ckpt")} - known
    undone = {file for file in files if read_step(file) >= trainer.global_step}
    for each in found:
        vars(each)["file_exists"] = partial(_exists, undone, each.file_exists)


def _exists(undone: set[str], exists: Any, filepath: str, trainer: Trainer) -> bool:
    """`exists`, but for files that are about to be replaced."""
    path = os.path.abspath(filepath)
    is_undone = trainer.strategy.broadcast(path in undone)
    undone.discard(path)
    return bool(exists(filepath, trainer)) and not is_undone
