"""State of a running fit that callbacks need beyond Lightning's public API.

Progress of the fit, checks of strategies and optimizers, tensors that are split over ranks or not
finite, and a base class of callbacks that set noise levels. ema.py, momentum_decay.py,
curriculum.py, loss_resampler.py, step_seed.py and finite_updates.py depend only on this file, torch
and Lightning; copy any of them together with this file into your own package.

Callbacks use private names of Lightning only through this file. A test asserts that each exists
with the expected signature, and setup.cfg caps lightning below the next minor version.

A split tensor is a torch DTensor, as created by FSDP2 or tensor parallelism: it has the shape of
the whole tensor, and each rank stores a part, which may be empty. Functions marked collective must
be called on every rank.
"""

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any, NamedTuple, TypeGuard, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

try:
    import lightning.pytorch as pl
except ImportError:
    import pytorch_lightning as pl  # type: ignore[no-redef]

_HAS_DISTRIBUTED = torch.distributed.is_available()

if _HAS_DISTRIBUTED:
    try:
        from torch.distributed.fsdp import FSDPModule
        from torch.distributed.tensor import DTensor, distribute_tensor
    except ImportError:  # before torch 2.6
        from torch.distributed._composable.fsdp import FSDPModule
        from torch.distributed._tensor import DTensor, distribute_tensor

T = TypeVar("T")


def isinstance_lightning(value: object, kind: type[T]) -> TypeGuard[T]:
    """`isinstance` for a class of Lightning, from `lightning` or from `pytorch_lightning`.

    Both packages may be installed, and each defines its own copy of every class.
    """

    def qualified_name(c: type) -> str:
        return f"{c.__module__}.{c.__qualname__}".replace("lightning.pytorch", "pytorch_lightning")

    return qualified_name(kind) in map(qualified_name, type(value).__mro__)


# Where a fit stands


class AccumulationTracker:
    """Mixin for callbacks that need to know whether gradients are being accumulated.

    Checkpoints do not contain gradients. Under manual optimization, where the module accumulates
    by itself, a batch without an optimizer step counts as accumulating.
    """

    _step_before: int | None = None

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Store the step count, to detect whether the batch makes a step."""
        self._step_before = trainer.global_step

    def is_accumulating(self, trainer: pl.Trainer) -> bool:
        """Whether gradients of the last batch are still to be used by an optimizer step."""
        if trainer.lightning_module.automatic_optimization:
            return is_accumulating(trainer)
        return trainer.global_step == self._step_before


def is_accumulating(trainer: pl.Trainer) -> bool:
    """Whether the Trainer itself accumulates gradients after the current batch."""
    return trainer.fit_loop.epoch_loop._should_accumulate()


def validation_follows(trainer: pl.Trainer) -> bool:
    """Whether the Trainer validates after the current batch."""
    loop = trainer.fit_loop
    assert loop._data_fetcher is not None
    return loop.epoch_loop._should_check_val_fx(loop._data_fetcher)


def is_ending(trainer: pl.Trainer) -> bool:
    """Whether the current batch is the last of the fit."""
    by_steps = 0 <= trainer.max_steps <= trainer.global_step
    epochs = trainer.max_epochs
    in_last_epoch = epochs is not None and 0 <= epochs <= trainer.current_epoch + 1
    stops = trainer.should_stop and trainer.fit_loop._can_stop_early
    return stops or by_steps or (in_last_epoch and trainer.is_last_batch)


def ends_epoch(trainer: pl.Trainer) -> bool:
    """Whether an epoch of several steps ends here; a resume would skip the hooks of its end."""
    return trainer.is_last_batch and trainer.num_training_batches > trainer.accumulate_grad_batches


def is_batch_ending(trainer: pl.Trainer) -> bool:
    """Whether `on_train_batch_end` runs; Lightning's own name of the hook changes in a save."""
    batches: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    return bool(batches.completed < batches.processed)


def attached_trainer(module: pl.LightningModule) -> pl.Trainer | None:
    """The Trainer of a module; None without one, where `module.trainer` raises an error."""
    return module._trainer


def completed_steps(module: pl.LightningModule) -> int | None:
    """Optimizer steps completed in the fit; None outside a fit, as a new Trainer counts from 0."""
    trainer = attached_trainer(module)
    fitting = trainer is not None and trainer.state.fn == pl.trainer.states.TrainerFn.FITTING
    return module.global_step if fitting else None


def output_folder(trainer: pl.Trainer) -> str:
    """Folder for the files that callbacks write about this run; the same on all ranks. Collective.

    It is `trainer.run_folder`, which the command line sets. In other projects it is where Lightning
    makes `checkpoints/`: the folder of the first logger's version, or `default_root_dir` if there
    is no logger.
    """
    folder = getattr(trainer, "run_folder", trainer.default_root_dir)
    if not hasattr(trainer, "run_folder") and trainer.loggers:
        logger = trainer.loggers[0]
        version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
        folder = os.path.join(logger.save_dir or folder, str(logger.name), version)
    return str(trainer.strategy.broadcast(str(folder)))


def total_steps(trainer: pl.Trainer) -> int | None:
    """Optimizer steps of the whole fit; None if it has no end. The Trainer loads its data."""
    steps, epochs = trainer.estimated_stepping_batches, trainer.max_epochs
    kind = pl.callbacks.GradientAccumulationScheduler
    callbacks, batches = trainer.callbacks, trainer.num_training_batches  # type: ignore[attr-defined]
    schedulers = [c for c in callbacks if isinstance_lightning(c, kind)]
    if schedulers and epochs is not None and epochs >= 0 and batches < math.inf:
        # The Trainer's estimate uses the factor of the first epoch for all epochs.
        sizes = map(schedulers[-1].get_accumulate_grad_batches, range(epochs))
        steps = sum(math.ceil(batches / size) for size in sizes)
        steps = steps if trainer.max_steps == -1 else min(steps, trainer.max_steps)
    return int(steps) if 0 <= steps < math.inf else None


def should_log(trainer: pl.Trainer) -> bool:
    """Whether metrics of the current batch are sent to loggers (`log_every_n_steps`)."""
    return trainer._logger_connector.should_update_logs


def may_read(trainer: pl.Trainer) -> bool:
    """Whether the host may read a value of the device: on a CPU, and in steps that log anyway."""
    return trainer.strategy.root_device.type == "cpu" or should_log(trainer)


def confirm_updates(trainer: pl.Trainer) -> None:
    """Stop the run if an update was skipped on the device without the host knowing. Collective.

    To be called in `on_train_batch_end` before the weights are evaluated or written. Calls the
    method of this name of each callback that has one, as FiniteUpdates does.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if (confirm := getattr(callback, "confirm_updates", None)) is not None:
            confirm(trainer, trainer.lightning_module)


def logger_step(trainer: pl.Trainer) -> int:
    """The step that Lightning passes to loggers during a batch or its validation.

    Counts batches that made a step, from 0; `global_step` instead sums the steps of all optimizers.
    Lightning logs metrics at this step; for images and scores see `stepped_batches`.
    """
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def stepped_batches(trainer: pl.Trainer) -> int:
    """Number of batches that made an optimizer step, including the current one once it is done.

    Equal to `global_step` if each batch steps a single optimizer once.
    """
    is_current_done = is_batch_ending(trainer) or trainer.validating
    return logger_step(trainer) + (is_current_done and not is_accumulating(trainer))


def loss_scale(trainer: pl.Trainer, optimizer: Optimizer) -> float:
    """Factor on the gradients before a step; not 1 where a fused optimizer unscales them itself."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    unscales = scaler is not None and getattr(optimizer, "_step_supports_amp_scaling", False)
    return float(scaler.get_scale()) if unscales and scaler is not None else 1.0


def loaded_checkpoint(trainer: pl.Trainer) -> dict[str, Any]:
    """The checkpoint being restored, which may be modified in place; {} without one."""
    return trainer._checkpoint_connector._loaded_checkpoint


def limited_batches(trainer: pl.Trainer, length: int) -> int:
    """Number of training batches, of `length` in an epoch, under `trainer.limit_train_batches`."""
    connector: Any = pl.trainer.connectors.data_connector  # type: ignore[attr-defined]
    stage = pl.trainer.states.RunningStage.TRAINING
    return int(connector._parse_num_batches(stage, length, trainer.limit_train_batches))


def disable_signal_handlers(trainer: pl.Trainer) -> None:
    """Prevent Lightning from installing its signal handlers until `enable_signal_handlers`."""
    vars(trainer._signal_connector)["register_signal_handlers"] = lambda: None


def enable_signal_handlers(trainer: pl.Trainer) -> None:
    """Undo `disable_signal_handlers`."""
    vars(trainer._signal_connector).pop("register_signal_handlers", None)


def undivided_sampler(loader: Any) -> Any:
    """The sampler of a loader, without Lightning's wrapper that divides it among ranks."""
    divided: Any = getattr(loader.sampler, "dataset", None)
    is_wrapped = type(divided).__name__ == "_DatasetSamplerWrapper"
    return divided._sampler if is_wrapped else loader.sampler


def is_built_from_config() -> bool:
    """Whether LightningCLI is constructing the current module; its arguments are plain builtins."""
    return pl.core.mixins.hparams_mixin._given_hyperparameters.get() is not None


@contextmanager
def eval_mode(module: nn.Module) -> Iterator[None]:
    """Context in which a module is in eval mode; restores the mode of each submodule."""
    training = [submodule for submodule in module.modules() if submodule.training]
    module.eval()
    try:
        yield
    finally:
        for submodule in training:
            submodule.training = True


def register_state_dict_hook(module: nn.Module, hook: Callable[..., None]) -> RemovableHandle:
    """Have `module.state_dict()` call `hook(module, state_dict, prefix, metadata)` at its end."""
    # The public name is missing before torch 2.5.
    public = getattr(module, "register_state_dict_post_hook", None)
    register: Any = public or module._register_state_dict_hook
    handle: RemovableHandle = register(hook)
    return handle


# Strategies


def refuse_strategy(trainer: pl.Trainer, name: str) -> None:
    """Raise ValueError if callback `name` cannot follow updates under the Trainer's strategy."""
    strategy = trainer.strategy
    if isinstance_lightning(strategy, pl.strategies.ModelParallelStrategy):
        if "src_data_rank" not in signature(distribute_tensor).parameters:
            raise ValueError(f"{name} needs torch 2.7 or later for weights that are split.")
        return
    is_xla = any("XLA" in kind.__name__ for kind in type(strategy).__mro__)
    # True for FSDPStrategy, DeepSpeedStrategy and all others of Lightning that split weights.
    if is_xla or strategy.restore_checkpoint_after_setup:
        raise ValueError(
            f"{name} does not support {type(strategy).__name__}, which updates or saves weights in "
            "its own way; use strategy='ddp', or ModelParallelStrategy with fully_shard in "
            "configure_model for weights that are split over ranks."
        )


def refuse_split_weights(trainer: pl.Trainer, module: pl.LightningModule, name: str) -> None:
    """Raise ValueError if weights are split and the strategy would save only one rank's part."""
    strategy, split = trainer.strategy, find_dtensor(dict(module.named_parameters()))
    if split and not isinstance_lightning(strategy, pl.strategies.ModelParallelStrategy):
        raise ValueError(
            f"{name} needs ModelParallelStrategy, with fully_shard in configure_model: "
            f"{type(strategy).__name__} would save one rank's part of {split!r}."
        )


# Optimizers


def refuse_unhooked(optimizer: object) -> None:
    """Raise ValueError if hooks on the optimizer's `step()` would not run."""
    # Optimizer.__init__ sets this mark; some wrappers of another optimizer do not call it.
    hooked = getattr(getattr(type(optimizer), "step", None), "hooked", False)
    if not (hooked and isinstance(optimizer, Optimizer)):
        raise ValueError(
            "Only a torch.optim.Optimizer whose step() runs hooks can be followed; "
            f"{type(optimizer).__name__} is something else, or has not called "
            "Optimizer.__init__. Return torch's own optimizer, or the one inside, and use a "
            "strategy such as 'ddp' that leaves it as it is."
        )


def is_state_init_step(optimizer: Optimizer, kwargs: Mapping[str, Any]) -> bool:
    """Whether `step(**kwargs)` is torch's step with lr 0 that only initializes optimizer state.

    `torch.distributed.checkpoint.state_dict` makes it before it saves or loads an empty state.
    """
    return dict(kwargs) == {"closure": None} and all(
        group.get("lr") == 0 for group in optimizer.param_groups
    )


# Ranks, and tensors that are split over them


def all_gather_objects(value: T, world_size: int) -> list[T]:
    """The values of all ranks, by rank. Collective."""
    values = [value] * world_size
    if world_size > 1:
        torch.distributed.all_gather_object(values, value)
    return values


def is_dtensor(value: object) -> "TypeGuard[DTensor]":
    """Whether a value is a tensor that is split over ranks."""
    return _HAS_DISTRIBUTED and isinstance(value, DTensor)


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a split tensor, sharing its memory; other tensors are returned as is."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def saves_split_tensors(module: pl.LightningModule | None) -> bool:
    """Whether the module's strategy saves split tensors of callbacks part by part.

    Lightning's own strategies do not. Others set the attribute `saves_split_tensors`.
    """
    trainer = getattr(module, "_trainer", None)
    return trainer is not None and getattr(trainer.strategy, "saves_split_tensors", False)


def distribute_like(whole: Tensor, model: Tensor) -> Tensor:
    """Split `whole`, equal on all ranks, like `model`; no-op if it is split or `model` is not."""
    if is_dtensor(whole) or not is_dtensor(model):
        return whole
    return distribute_tensor(whole, model.device_mesh, model.placements, src_data_rank=None)


def find_dtensor(state: Any, name: str = "") -> str | None:
    """The dotted path of the first split tensor in nested dicts and lists; None without one."""
    if is_dtensor(state):
        return name
    if isinstance(state, list | tuple):
        state = dict(enumerate(state))
    if isinstance(state, Mapping):
        for key, entry in state.items():
            if (path := find_dtensor(entry, f"{name}.{key}" if name else str(key))) is not None:
                return path
    return None


def gather_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Gather the split tensors of a nested state as whole CPU tensors on rank 0, for a file.

    Collective if tensors are split: other ranks then return {} and hold one whole tensor at a time.
    """
    if find_dtensor(state) is None:
        return dict(state)
    is_first = torch.distributed.get_rank() == 0
    whole: dict[str, Any] = _gather(state, is_first)
    return whole if is_first else {}


def _gather(value: Any, is_first: bool) -> Any:
    if is_dtensor(value):
        # Parts offloaded to the CPU move back to the device on which the ranks communicate.
        parts: Any = value.detach().to(value.device_mesh.device_type)
        whole = parts.full_tensor()
        return whole.cpu() if is_first else None
    if isinstance(value, Mapping):
        return {key: _gather(entry, is_first) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_gather(entry, is_first) for entry in value)
    return value


def reshard(module: nn.Module) -> None:
    """Free the gathered weights that FSDP2 keeps after a forward pass without a backward pass.

    Until then `parameters()` returns the gathered copies, and the next forward pass uses them even
    if the sharded weights have changed. Not collective.
    """
    if _HAS_DISTRIBUTED:
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()


# Non-finite tensors


def is_nonfinite(tensors: Sequence[Tensor]) -> Tensor:
    """(N,) bool: whether each tensor has a NaN or infinite entry. Does not synchronize with a GPU.

    Checks this rank's part of split tensors and the values of sparse ones; empty ones are finite.
    """
    values = [t.coalesce().values() if t.is_sparse else t for t in tensors]
    if not {*map(type, values)} <= {Tensor, nn.Parameter}:
        values = [local_part(value) for value in values]
    values = [value if value.numel() else value.new_zeros(1) for value in values]
    # On a CPU the 2-norm is ten times as fast, but squares may overflow: what it flags is checked.
    if {*map(Tensor.get_device, values)} == {-1}:
        flags = _has_infinite_norm(values, 2.0)
        if not flags.any():
            return flags
    return _has_infinite_norm(values, math.inf)


def _has_infinite_norm(values: Sequence[Tensor], order: float) -> Tensor:
    norms = list(torch._foreach_norm(list(values), order))
    if len({*map(Tensor.get_device, norms)}) > 1:
        norms = [norm.to(norms[0].device) for norm in norms]
    # x * 0 is NaN if x is infinite or NaN: a third of the operations of isfinite().
    return torch.stack(norms) * 0 != 0


def first_nonfinite(tensors: Sequence[Tensor]) -> int | None:
    """Index of the first tensor with a NaN or infinite entry; costs one host synchronization.

    Collective if tensors are split: all ranks of their mesh return the same index.
    """
    if not tensors:
        return None
    flags = is_nonfinite(tensors)
    for mesh in dict.fromkeys(tensor.device_mesh for tensor in tensors if is_dtensor(tensor)):
        reduced = flags.to(mesh.device_type, torch.int32)
        for group in mesh.get_all_groups():
            torch.distributed.all_reduce(reduced, torch.distributed.ReduceOp.MAX, group)
        flags = reduced.to(flags.device, torch.bool)
    flags = flags.cpu()
    return int(flags.nonzero()[0]) if flags.any() else None


# Noise levels, set on the module for the length of a batch


class Timesteps(NamedTuple):
    """Values for the attributes of `protocols.HasTimesteps`: (num_bins,) over u in [0, 1]."""

    timestep_density: Tensor | None = None
    timestep_weight: Tensor | None = None


def importance_weight(density: Tensor) -> Tensor:
    """Loss weight 1 / (num_bins * p) that undoes a density (num_bins,), which p normalizes.

    Example:
        >>> importance_weight(torch.tensor([1.0, 3.0]))
        tensor([2.0000, 0.6667])
    """
    return density.sum() / (len(density) * density)


def total_variation(density: Tensor) -> Tensor:
    """Distance sum |p - 1 / num_bins| / 2 of a density (num_bins,), normalized to p, from uniform.

    Example:
        >>> total_variation(torch.tensor([1.0, 3.0]))
        tensor(0.2500)
    """
    return (density / density.sum() - 1 / len(density)).abs().sum() / 2


class TimestepWriter(pl.Callback, ABC):
    """Sets the attributes `writes` of the module to `timesteps_at(step)` during training batches.

    Between batches they are None. Each attribute has one writer. If two callbacks set the density
    and the weight, both take effect.
    """

    writes: tuple[str, ...] = ()
    _written = Timesteps()

    @abstractmethod
    def timesteps_at(self, step: int, device: torch.device) -> Timesteps:
        """Values after `step` optimizer steps, the same on all ranks."""

    @abstractmethod
    def numbers_at(self, step: int, device: torch.device) -> dict[str, float | Tensor]:
        """Metrics to log after `step` optimizer steps."""

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuse modules without the attributes, and attributes with two writers."""
        name = type(self).__name__
        if missing := [a for a in self.writes if not hasattr(pl_module, a)]:
            raise ValueError(
                f"{name} needs a module with {' and '.join(self.writes)} (protocols.HasTimesteps), "
                f"and {type(pl_module).__name__} lacks {' and '.join(missing)}; set it to None in "
                "its __init__ and use it in its training_step."
            )
        for other in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(other, TimestepWriter) and other is not self:
                shared = " and ".join(sorted({*self.writes} & {*other.writes}))
                if shared:
                    raise ValueError(
                        f"{name} and {type(other).__name__} both set {shared}; remove one of them."
                    )

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        """Set the attributes, unless something else has set them."""
        step = trainer.global_step
        timesteps = self.timesteps_at(step, pl_module.device)
        for attribute in self.writes:
            value, name = getattr(pl_module, attribute), type(self).__name__
            if value is not None and value is not getattr(self._written, attribute):
                raise ValueError(
                    f"{name} sets {attribute}, and something else has set it to a tensor of shape "
                    f"{tuple(value.shape)}; leave it None, or remove {name}."
                )
            setattr(pl_module, attribute, getattr(timesteps, attribute))
        self._written = timesteps
        if should_log(trainer):
            pl_module.log_dict(self.numbers_at(step, pl_module.device))

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """Reset the attributes to None; at the end of a run as well, if a batch was skipped."""
        for attribute, value in self._written._asdict().items():
            if value is not None and getattr(pl_module, attribute) is value:
                setattr(pl_module, attribute, None)
        self._written = Timesteps()

    on_train_batch_end = on_exception = on_train_end  # type: ignore[assignment]
