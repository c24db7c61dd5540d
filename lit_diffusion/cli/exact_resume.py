"""Save and restore the state that Lightning's checkpoints lack, so that runs resume exactly.

This file uses private names of Lightning. A test asserts that each of these names exists and has
the expected signature.
"""

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.apply_func import convert_tensors_to_scalars
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from lit_diffusion.callbacks import trainer_state
from lit_diffusion.checkpoints.reading import read_step
from lit_diffusion.cli.loggers import AppendingCSVLogger, rewind_evaluations
from lit_diffusion.metrics.evaluation_record import ImageCount, parse_image_count, start_image_count

BETWEEN_BATCHES = "between accumulated batches"

_OMITTED_ATTRIBUTES = (
    "_last_global_step_saved",
    "_last_checkpoint_saved",
    "_defer_save_until_validation",
    "current_score",
)
"""Attributes of a ModelCheckpoint that its `state_dict` or `load_state_dict` omits."""


class ExactResume(trainer_state.AccumulationTracker, Callback):
    """Saves and restores the state that Lightning omits, and marks inexact checkpoints.

    The callback makes up for five gaps in Lightning:

    - In a resumed epoch, Lightning does not call `on_train_epoch_start`. Therefore,
      GradientAccumulationScheduler does not set the number of accumulated batches.
    - Lightning saves checkpoints before it updates ReduceLROnPlateau, so a resume loses this
      update. Lightning also skips the update at the end of a resumed epoch.
    - Lightning does not save `callback_metrics`. After a resume, ReduceLROnPlateau,
      ModelCheckpoint and EarlyStopping therefore lack the metrics that they monitor.
    - Lightning saves only a part of the state of ModelCheckpoint.
    - Lightning does not save whether EarlyStopping has stopped the fit. A resumed run would
      therefore continue to train.

    The files metrics.csv and evaluations.jsonl stay consistent with a checkpoint. All rows of the
    checkpoint's step are on disk before the checkpoint is written, and a resume deletes the rows of
    later steps. Training images are counted correctly even if a resume changes the batch size.

    If a callback other than `LastCheckpoint` saves a checkpoint, a resume from it may be inexact,
    for example because the resume skips a validation. The reason is written into the checkpoint,
    and a resume warns of it. If the checkpoint lacks accumulated gradients, a resume raises an
    error. You can still sample from such a checkpoint.

    List this callback after GradientAccumulationScheduler. Otherwise, the scheduler raises an error
    at the start of training, because this callback has changed the number of accumulated batches.

    Attributes:
        image_count: how many training images the fit has used, for `count_training_images`.
    """

    def __init__(self) -> None:
        self.image_count: ImageCount | None = None
        self._metrics: dict[str, Tensor] = {}
        self._stopped_early: object = None  # message of EarlyStopping, if it has stopped the fit
        self._model_checkpoint_states: dict[str, Any] = {}

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Log the metrics of the step, and save what Lightning omits."""
        in_batch_end = trainer_state.is_batch_ending(trainer)
        is_step = not trainer_state.is_accumulating(trainer)
        if in_batch_end and is_step and trainer_state.should_log(trainer):
            _log_pending_row(trainer)
        if self.image_count is not None:
            checkpoint["images_seen"] = list(self.image_count)
        checkpoint["model_checkpoints"] = {
            saver.state_key: {name: getattr(saver, name) for name in _OMITTED_ATTRIBUTES}
            for saver in _model_checkpoints(trainer)
        }
        if reason := self._why_inexact(trainer):
            checkpoint["resumes_inexactly"] = reason
        if trainer.should_stop:
            for stopper in trainer.early_stopping_callbacks:
                if stopper.stopping_reason_message:
                    checkpoint["stopped_early"] = stopper.stopping_reason_message
        # Otherwise, for example after an error, metrics may not be computed on all ranks.
        if in_batch_end or trainer.validating:
            metrics = trainer.callback_metrics
            checkpoint["callback_metrics"] = {name: metrics[name].cpu() for name in sorted(metrics)}

    def _why_inexact(self, trainer: Trainer) -> str | None:
        """Return a phrase that says when the checkpoint is saved; None if it resumes exactly."""
        epochs: Any = trainer.fit_loop.epoch_progress.current
        if self.is_accumulating(trainer):
            if epochs.completed == epochs.ready:  # in on_train_end
                return "after accumulated batches whose optimizer step is never made"
            return BETWEEN_BATCHES
        if trainer_state.is_batch_ending(trainer) and trainer_state.validation_follows(trainer):
            return "before the validation of its step, which the resume skips"
        if epochs.completed < epochs.processed:  # in on_train_epoch_end
            return "at the end of an epoch, after which Lightning counts a step twice"
        return None

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Raise an error or warn if the checkpoint is marked, and load the saved state."""
        reason = checkpoint.get("resumes_inexactly")
        if reason == BETWEEN_BATCHES:
            raise ValueError(
                f"{trainer.ckpt_path} was saved {reason}, whose gradients are in no file; resume "
                "from checkpoints/last.ckpt. To save other checkpoints at whole steps, set "
                "trainer.val_check_interval to a multiple of accumulate_grad_batches."
            )
        if reason is not None:
            rank_zero_warn(
                f"{trainer.ckpt_path} was saved {reason}, so the resume is not bit-exact. Other "
                "checkpoints, such as last.ckpt of an interrupted run, resume bit-exactly."
            )
        self.image_count = parse_image_count(checkpoint.get("images_seen"))
        self._metrics = dict(checkpoint.get("callback_metrics", {}))
        self._stopped_early = checkpoint.get("stopped_early")
        self._model_checkpoint_states = checkpoint.get("model_checkpoints", {})

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the loaded state, and make up for the steps that Lightning skipped."""
        loop = trainer.fit_loop.epoch_loop
        # For a checkpoint saved at a validation, Lightning counts the step when it skips that
        # validation. If no validation is due now, the step is counted here.
        if loop.restarted_on_last and not trainer_state.validation_follows(trainer):
            batches: Any = loop.batch_progress.total
            done = trainer.global_step if pl_module.automatic_optimization else batches.processed
            loop._batches_that_stepped += loop._batches_that_stepped < done
        if trainer.is_global_zero:
            _rewind_logs(trainer)
        self.image_count = start_image_count(trainer, self.image_count)
        with isolate_rng():  # ModelCheckpoint reads the size of the validation set
            loop.val_loop.setup_data()
        if trainer.ckpt_path is not None:
            _restore_model_checkpoints(trainer, self._model_checkpoint_states)
        metrics, self._metrics = self._metrics, {}
        trainer._logger_connector._callback_metrics.update(
            {name: value.to(pl_module.device) for name, value in metrics.items()}
        )
        epochs: Any = trainer.fit_loop.epoch_progress.current
        if trainer.fit_loop.restarted_mid_epoch and epochs.completed == epochs.ready:
            # Saved at the end of an epoch; the next one begins as in a run that was not stopped.
            trainer.fit_loop.reset_restart_stage()
            loop.restarting = False
            loop._batches_that_stepped += 1
        if trainer.fit_loop.restarted_mid_epoch:
            for callback in trainer.callbacks:  # type: ignore[attr-defined]
                if isinstance(callback, GradientAccumulationScheduler):
                    callback.on_train_epoch_start(trainer, pl_module)
        if loop.restarted_on_train_batch_end:
            _update_plateau_schedulers(trainer)
        if isinstance(self._stopped_early, str) and trainer.early_stopping_callbacks:
            trainer.should_stop = True
            fix = "Leave out EarlyStopping to train on."
            rank_zero_info(f"This run was stopped early: {self._stopped_early} {fix}")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Clear Lightning's restart flag, so that ReduceLROnPlateau is updated in this epoch."""
        trainer.fit_loop._restarting = False


def _log_pending_row(trainer: Trainer) -> None:
    """Log the metrics that Lightning would log only after `on_train_batch_end`."""
    if metrics := convert_tensors_to_scalars(dict(trainer._logger_connector.metrics["log"])):
        step = metrics.pop("step", trainer_state.logger_step(trainer))
        metrics.setdefault("epoch", trainer.current_epoch)
        for logger in trainer.loggers:
            if isinstance(logger, AppendingCSVLogger):
                logger.log_ahead(metrics, int(step))


def _rewind_logs(trainer: Trainer) -> None:
    """Delete the rows of steps after the restored one."""
    step = trainer.global_step
    evaluations = Path(trainer.default_root_dir) / "evaluations.jsonl"
    num_deleted = {evaluations: rewind_evaluations(evaluations, step)}
    for logger in trainer.loggers:
        if isinstance(logger, AppendingCSVLogger):
            num_deleted[logger.path] = logger.rewind(trainer_state.logger_step(trainer))
    for file, num in num_deleted.items():
        if num:
            rank_zero_info(f"Deleted {num} rows of steps after {step} from {file}.")


def _update_plateau_schedulers(trainer: Trainer) -> None:
    """Make the updates that Lightning would have made after the save in `on_train_batch_end`."""
    loop, epochs = trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_progress.current
    loop.update_lr_schedulers("step", update_plateau_schedulers=True)
    if loop.batch_progress.is_last_batch:  # Lightning already counts the next epoch
        epochs.completed -= 1
        loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
        epochs.completed += 1


def _model_checkpoints(trainer: Trainer) -> list[ModelCheckpoint]:
    return [each for each in trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint)]


def _restore_model_checkpoints(trainer: Trainer, states: dict[str, dict[str, Any]]) -> None:
    """Restore each ModelCheckpoint, and let it overwrite files saved after the checkpoint.

    ModelCheckpoint does not know the files that the interrupted run saved after this checkpoint. It
    would save the same steps again under other names, with the suffix -v1.
    """
    savers = _model_checkpoints(trainer)
    tracked, files = set[str](), set[str]()
    for saver in savers:
        state = states.get(saver.state_key, {})
        vars(saver).update({name: state[name] for name in _OMITTED_ATTRIBUTES if name in state})
        latest = [saver.best_model_path, saver.last_model_path, saver._last_checkpoint_saved]
        saved_files = list(filter(None, [*latest, saver.kth_best_model_path, *saver.best_k_models]))
        for file in saved_files:  # ModelCheckpoint may delete it
            is_text = isinstance(file, str)
            is_elsewhere = "://" in str(file) and not str(file).startswith(f"{saver.dirpath}/")
            if not is_text or is_elsewhere or ".." in Path(file).parts:
                raise ValueError(
                    f"{trainer.ckpt_path} lists {file} as a file of ModelCheckpoint, which would "
                    f"delete it, but its folder is {saver.dirpath}; resume from another checkpoint."
                )
        tracked |= set(map(os.path.abspath, saved_files))
        if saver.dirpath:
            files |= {os.path.abspath(file) for file in Path(saver.dirpath).glob("*.ckpt")}
    obsolete = {file for file in files - tracked if read_step(file) >= trainer.global_step}
    for saver in savers:
        vars(saver)["file_exists"] = partial(_file_exists, obsolete, saver.file_exists)


def _file_exists(obsolete: set[str], file_exists: Any, path: str, trainer: Trainer) -> bool:
    """ModelCheckpoint's `file_exists`, but False once for each obsolete file."""
    path = os.path.abspath(path)
    is_obsolete = trainer.strategy.broadcast(path in obsolete)
    obsolete.discard(path)
    return bool(file_exists(path, trainer)) and not is_obsolete


def completed_epochs(checkpoint: Mapping[str, Any]) -> int:
    """Number of epochs that a checkpoint has completed; 0 if it does not record them."""
    try:
        loop = checkpoint["loops"]["fit_loop"]
        ended = loop["epoch_loop.batch_progress"]["is_last_batch"]
        return int(loop["epoch_progress"]["current"]["ready" if ended else "processed"])
    except (KeyError, TypeError, ValueError):
        return 0


def save_interval(callback: ModelCheckpoint) -> int:
    """Number of steps between saves of a ModelCheckpoint; 0 if it does not save every N steps."""
    return callback._every_n_train_steps
