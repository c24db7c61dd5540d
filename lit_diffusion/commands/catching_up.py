"""What Lightning leaves out when a run goes on from within an epoch."""

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor

from lit_diffusion.batch_end import batch_is_ending


class CatchUp(Callback):
    """Does at a resume what Lightning leaves out, so that accumulation and schedules go on.

    It calls no `on_train_epoch_start` within an epoch, where GradientAccumulationScheduler sets its
    factor. It updates ReduceLROnPlateau after the hooks that save, by metrics that it does not
    save, and not at all at the end of an epoch that was interrupted.

    List it after other callbacks: GradientAccumulationScheduler wants to start from a factor of 1.
    """

    _METRICS = "metrics_of_schedules"

    def __init__(self) -> None:
        self._metrics: dict[str, Tensor] = {}

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keep the metrics by which updates are yet to be made."""
        # Elsewhere, as after an error, metrics may not be computed on all ranks.
        if batch_is_ending(trainer) or trainer.validating:
            names = {config.monitor for config in trainer.lr_scheduler_configs}
            known = trainer.callback_metrics if names - {None} else {}
            checkpoint[self._METRICS] = {k: v.cpu() for k, v in known.items() if k in names}

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Remember the metrics.

        Raises:
            ValueError: where they are not numbers by name.
        """
        metrics = checkpoint.get(self._METRICS, {})
        if not _are_metrics(metrics):
            raise ValueError(f"{self._METRICS} must be numbers by name, got {metrics!r:.100}.")
        self._metrics = dict(metrics)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Catch up, before the first batch."""
        metrics, self._metrics = self._metrics, {}
        known = trainer._logger_connector._callback_metrics
        known.update({k: v.to(pl_module.device) for k, v in metrics.items()})
        if trainer.fit_loop.restarted_mid_epoch:
            _set_accumulation(trainer, pl_module)
        if trainer.fit_loop.epoch_loop.restarted_on_train_batch_end:
            _update_plateaus(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Have the epoch end as any other: the metrics are there."""
        trainer.fit_loop._restarting = False


def _set_accumulation(trainer: Trainer, module: LightningModule) -> None:
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, GradientAccumulationScheduler):
            callback.on_train_epoch_start(trainer, module)


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


def _are_metrics(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(name, str)
        and isinstance(number, Tensor)
        and number.numel() == 1
        and torch.is_floating_point(number)
        for name, number in value.items()
    )
