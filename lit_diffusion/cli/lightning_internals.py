"""Private names of Lightning that only the command line uses.

A test asserts that each exists with the expected signature, as for `callbacks.trainer_state`.
"""

from collections.abc import Callable, Mapping
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningCLI
from torch import Tensor

from lit_diffusion.callbacks.trainer_state import (
    is_accumulating,
    is_batch_ending,
    validation_follows,
)

_UNSAVED = (
    "_last_global_step_saved",
    "_last_checkpoint_saved",
    "_defer_save_until_validation",
    "current_score",
)
"""Attributes of a ModelCheckpoint."""


def is_epoch_ending(trainer: Trainer) -> bool:
    """Whether this is `on_train_epoch_end`."""
    epochs: Any = trainer.fit_loop.epoch_progress.current
    return bool(epochs.completed < epochs.processed)


def is_between_epochs(trainer: Trainer) -> bool:
    """Whether no epoch is running, as in `on_train_end`."""
    epochs: Any = trainer.fit_loop.epoch_progress.current
    return bool(epochs.completed == epochs.ready)


def is_row_pending(trainer: Trainer) -> bool:
    """Whether the batch made an optimizer step whose metrics are yet to be logged."""
    return is_batch_ending(trainer) and not is_accumulating(trainer)


def count_validated_step(trainer: Trainer) -> None:
    """Count the step of a checkpoint that was saved at a validation, where none is due now.

    Lightning counts it as it leaves that validation out, and here there is none to leave out.
    """
    loop, automatic = trainer.fit_loop.epoch_loop, trainer.lightning_module.automatic_optimization
    if loop.restarted_on_last and not validation_follows(trainer):
        batches: Any = loop.batch_progress.total
        done = trainer.global_step if automatic else batches.processed
        loop._batches_that_stepped += loop._batches_that_stepped < done


def metrics_to_log(trainer: Trainer) -> dict[str, Any]:
    """The metrics that Lightning is about to pass to the loggers."""
    return dict(trainer._logger_connector.metrics["log"])


def update_callback_metrics(trainer: Trainer, metrics: dict[str, Tensor]) -> None:
    """Add to `trainer.callback_metrics`, which schedulers read."""
    trainer._logger_connector._callback_metrics.update(metrics)


def forget_restart(trainer: Trainer) -> None:
    """Have Lightning finish a resumed epoch as it finishes any other."""
    trainer.fit_loop._restarting = False


def completed_epochs(checkpoint: Mapping[str, Any]) -> int:
    """Epochs of which a checkpoint has all batches; 0 if it does not say."""
    try:
        loop = checkpoint["loops"]["fit_loop"]
        ended = loop["epoch_loop.batch_progress"]["is_last_batch"]
        return int(loop["epoch_progress"]["current"]["ready" if ended else "processed"])
    except (KeyError, TypeError, ValueError):
        return 0


def cluster_environment(trainer: Trainer) -> Any:
    """The Trainer's cluster environment, which strategies of one device do not expose."""
    return trainer._accelerator_connector.cluster_environment


def save_intervals(callback: ModelCheckpoint) -> tuple[int, int, bool]:
    """(every n steps, every n epochs, whether by time) of a ModelCheckpoint; 0 is never."""
    by_time = callback._train_time_interval is not None
    return callback._every_n_train_steps, callback._every_n_epochs, by_time


def unsaved_state(callback: ModelCheckpoint) -> dict[str, Any]:
    """State that its `state_dict` or its `load_state_dict` leaves out."""
    return {name: getattr(callback, name) for name in _UNSAVED}


def restore_unsaved_state(callback: ModelCheckpoint, state: dict[str, Any]) -> None:
    """Restore an `unsaved_state`."""
    vars(callback).update({name: state[name] for name in _UNSAVED if name in state})


def saved_files(callback: ModelCheckpoint) -> set[str]:
    """Paths of the checkpoints that it has saved and keeps track of."""
    latest = {callback.best_model_path, callback.last_model_path, callback._last_checkpoint_saved}
    return {str(file) for file in {*latest, *callback.best_k_models} if file}


class SubcommandCLI(LightningCLI):
    """LightningCLI whose private joints have names that a subclass may count on."""

    def compare_with_checkpoint(self) -> None:
        """Called when the config is parsed, in place of Lightning's reading the checkpoint."""

    def run_trainer(self, run: Callable[[], None]) -> None:
        """Call `run`, which calls the Trainer."""
        run()

    def value_of(self, config: Any, key: str) -> Any:
        """A value of the subcommand in a config, or in one that was instantiated."""
        return self._get(config, key)

    def dumped(self) -> dict[str, Any]:
        """The config of the subcommand as plain builtins, as it is now."""
        if hasattr(self, "config_dump"):
            del self.config_dump
        self._dump_config()
        dumped: dict[str, Any] = self.config_dump
        return dumped

    def options(self, subcommand: str) -> list[str]:
        """Names of what a subcommand takes."""
        return [action.dest for action in self._subcommand_parsers[subcommand]._actions]

    def _parse_ckpt_path(self) -> None:
        self.subcommand = self.config["subcommand"]
        self.compare_with_checkpoint()

    def _run_subcommand(self, subcommand: str) -> None:
        run = super()._run_subcommand
        self.run_trainer(lambda: run(subcommand))

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        """What the Trainer is called with: no config may have code in a checkpoint run."""
        return {**super()._prepare_subcommand_kwargs(subcommand), "weights_only": True}
