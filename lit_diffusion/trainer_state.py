"""Where a fit stands, and every private name of Lightning's that anything here uses.

A test asserts that each of them is there with the signature used, and setup.cfg caps lightning
below the next minor version.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard, TypeVar

from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.core.mixins.hparams_mixin import _given_hyperparameters
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSamplerWrapper
from lightning.pytorch.trainer.connectors.data_connector import _parse_num_batches
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from torch import Tensor
from torch.optim import Optimizer

_UNSAVED = (
    "_last_global_step_saved",
    "_last_checkpoint_saved",
    "_defer_save_until_validation",
    "current_score",
)
"""Of a ModelCheckpoint."""

T = TypeVar("T")


def is_a(value: object, kind: type[T]) -> TypeGuard[T]:
    """`isinstance` for a class of Lightning's, each of which `pytorch_lightning` has once more."""
    same = {f"{kind.__module__}.{kind.__qualname__}"}
    same |= {name.replace("lightning.pytorch", "pytorch_lightning", 1) for name in same}
    return any(f"{c.__module__}.{c.__qualname__}" in same for c in type(value).__mro__)


class WholeSteps:
    """Tells batches whose gradients wait for the next, which are in no checkpoint, from others.

    A module with manual optimization may accumulate by itself and tells nobody: there, a batch that
    made no optimizer step is taken for one that accumulates.
    """

    _step_before: int | None = None

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        """Note the step, to know whether the batch makes one."""
        self._step_before = trainer.global_step

    def accumulates(self, trainer: Trainer) -> bool:
        """Whether the last batch was such a one."""
        if trainer.lightning_module.automatic_optimization:
            return accumulates(trainer)
        return trainer.global_step == self._step_before


def accumulates(trainer: Trainer) -> bool:
    """Whether the Trainer itself accumulates after the batch."""
    return trainer.fit_loop.epoch_loop._should_accumulate()


def validation_follows(trainer: Trainer) -> bool:
    """Whether a validation belongs to the batch, as Lightning itself answers."""
    loop = trainer.fit_loop
    assert loop._data_fetcher is not None
    return loop.epoch_loop._should_check_val_fx(loop._data_fetcher)


def is_ending(trainer: Trainer) -> bool:
    """Whether the batch was the last of the run."""
    by_steps = 0 <= trainer.max_steps <= trainer.global_step
    epochs = trainer.max_epochs
    in_last_epoch = epochs is not None and 0 <= epochs <= trainer.current_epoch + 1
    stops = trainer.should_stop and trainer.fit_loop._can_stop_early
    return stops or by_steps or (in_last_epoch and trainer.is_last_batch)


def ends_epoch(trainer: Trainer) -> bool:
    """Whether work for the end of an epoch of several steps follows, and not after a resume."""
    return trainer.is_last_batch and trainer.num_training_batches > trainer.accumulate_grad_batches


def batch_is_ending(trainer: Trainer) -> bool:
    """Whether this is `on_train_batch_end`; the name of the hook is another while saving."""
    batches: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    return bool(batches.completed < batches.processed)


def epoch_is_ending(trainer: Trainer) -> bool:
    """Whether this is `on_train_epoch_end`."""
    epochs: Any = trainer.fit_loop.epoch_progress.current
    return bool(epochs.completed < epochs.processed)


def is_between_epochs(trainer: Trainer) -> bool:
    """Whether no epoch is running, as in `on_train_end`."""
    epochs: Any = trainer.fit_loop.epoch_progress.current
    return bool(epochs.completed == epochs.ready)


def row_is_to_come(trainer: Trainer) -> bool:
    """Whether the batch made an optimizer step whose metrics are yet to be logged."""
    return batch_is_ending(trainer) and not accumulates(trainer)


def steps_of_fit(module: LightningModule) -> int | None:
    """Optimizer steps behind the weights; None outside of a fit, where a Trainer counts from 0."""
    trainer = module._trainer
    fitting = trainer is not None and trainer.state.fn == TrainerFn.FITTING
    return module.global_step if fitting else None


def steps_of_run(trainer: Trainer) -> int | None:
    """Optimizer steps of a whole fit, if it has an end; the Trainer begins to read data for it."""
    steps, epochs = trainer.estimated_stepping_batches, trainer.max_epochs
    callbacks, batches = trainer.callbacks, trainer.num_training_batches  # type: ignore[attr-defined]
    scheduling = [c for c in callbacks if is_a(c, GradientAccumulationScheduler)]
    if scheduling and epochs is not None and epochs >= 0 and batches < math.inf:
        # The Trainer's estimate does not look that far.
        sizes = map(scheduling[-1].get_accumulate_grad_batches, range(epochs))
        steps = sum(math.ceil(batches / size) for size in sizes)
        steps = steps if trainer.max_steps == -1 else min(steps, trainer.max_steps)
    return int(steps) if 0 <= steps < math.inf else None


def loss_scale(trainer: Trainer, optimizer: Optimizer) -> float:
    """Factor on the gradients before a step: fused optimizers undo that of a GradScaler inside."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    unscales = scaler is not None and getattr(optimizer, "_step_supports_amp_scaling", False)
    return float(scaler.get_scale()) if unscales and scaler is not None else 1.0


def logs_are_due(trainer: Trainer) -> bool:
    """Whether loggers get what the running batch logs, as Lightning's own monitors ask."""
    return trainer._logger_connector.should_update_logs


def logged_step(trainer: Trainer) -> int:
    """The step of the row that Lightning logs now, in a batch, its validation, or before the first.

    It counts batches that stepped, from 0, where `global_step` counts the steps of each optimizer.
    All that goes to loggers has this step, and what is drawn or scored then `stepped_batches`.
    """
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def stepped_batches(trainer: Trainer) -> int:
    """Batches that stepped any optimizer, the running one included, and its validation.

    Equal to `global_step` where each steps a single optimizer once.
    """
    running = batch_is_ending(trainer) or trainer.validating
    return logged_step(trainer) + (running and not accumulates(trainer))


def count_validated_step(trainer: Trainer) -> None:
    """Count the step of a checkpoint that was saved at a validation, where none is due now.

    Lightning counts it as it leaves that validation out, and here there is none to leave out.
    """
    loop, automatic = trainer.fit_loop.epoch_loop, trainer.lightning_module.automatic_optimization
    if loop.restarted_on_last and not validation_follows(trainer):
        done = trainer.global_step if automatic else loop.batch_progress.total.processed
        loop._batches_that_stepped += loop._batches_that_stepped < done


def metrics_to_log(trainer: Trainer) -> dict[str, Any]:
    """What Lightning is about to hand to the loggers."""
    return dict(trainer._logger_connector.metrics["log"])


def put_metrics(trainer: Trainer, metrics: dict[str, Tensor]) -> None:
    """Add to `trainer.callback_metrics`, which schedules read."""
    trainer._logger_connector._callback_metrics.update(metrics)


def end_epoch_as_any_other(trainer: Trainer) -> None:
    """Have Lightning forget that the epoch was resumed, and do all that belongs to its end."""
    trainer.fit_loop._restarting = False


def loaded_checkpoint(trainer: Trainer) -> dict[str, Any]:
    """The checkpoint that is being restored, to be changed; {} where none is."""
    return trainer._checkpoint_connector._loaded_checkpoint


def epochs_in(checkpoint: Mapping[str, Any]) -> int:
    """Epochs of which a checkpoint has all batches; 0 where it does not tell."""
    try:
        loop = checkpoint["loops"]["fit_loop"]
        ended = loop["epoch_loop.batch_progress"]["is_last_batch"]
        return int(loop["epoch_progress"]["current"]["ready" if ended else "processed"])
    except (KeyError, TypeError, ValueError):
        return 0


def limited_batches(trainer: Trainer, length: int) -> int:
    """Training batches of an epoch of `length`, by trainer.limit_train_batches."""
    return int(_parse_num_batches(RunningStage.TRAINING, length, trainer.limit_train_batches))


def leave_signals(trainer: Trainer) -> None:
    """Keep Lightning from setting its handlers, until `give_signals_back`."""
    vars(trainer._signal_connector)["register_signal_handlers"] = lambda: None


def give_signals_back(trainer: Trainer) -> None:
    """Undo `leave_signals`."""
    vars(trainer._signal_connector).pop("register_signal_handlers", None)


def cluster_environment(trainer: Trainer) -> Any:
    """What the Trainer knows of its job, which on one device no strategy tells."""
    return trainer._accelerator_connector.cluster_environment


def attach_data(
    trainer: Trainer, module: LightningModule, data: LightningDataModule | None
) -> None:
    """Give the Trainer its data, as the start of a fit does."""
    trainer._data_connector.attach_data(module, datamodule=data)


def intervals_of(callback: ModelCheckpoint) -> tuple[int, int, bool]:
    """(every n steps, every n epochs, whether by time) of a callback that saves; 0 is never."""
    by_time = callback._train_time_interval is not None
    return callback._every_n_train_steps, callback._every_n_epochs, by_time


def unsaved_state(callback: ModelCheckpoint) -> dict[str, Any]:
    """What its `state_dict` leaves out, or its `load_state_dict`."""
    return {name: getattr(callback, name) for name in _UNSAVED}


def put_unsaved_state(callback: ModelCheckpoint, state: dict[str, Any]) -> None:
    """Go on from an `unsaved_state`."""
    vars(callback).update({name: state[name] for name in _UNSAVED if name in state})


def files_of(callback: ModelCheckpoint) -> set[str]:
    """Checkpoints that it has saved and knows of."""
    latest = {callback.best_model_path, callback.last_model_path, callback._last_checkpoint_saved}
    return {str(file) for file in {*latest, *callback.best_k_models} if file}


def own_sampler(loader: Any) -> Any:
    """The sampler that a loader was made with, where Lightning divides that among ranks."""
    sampler: Any = loader.sampler
    wrappers = (DistributedSamplerWrapper, UnrepeatedDistributedSamplerWrapper)
    divided: Any = sampler.dataset if isinstance(sampler, wrappers) else None
    return sampler if divided is None else divided._sampler


def is_built_from_config() -> bool:
    """Whether the module under construction is made of plain builtins, by a command line."""
    return _given_hyperparameters.get() is not None


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
