"""Functions that tell callbacks more about a running fit than Lightning's public API does.

The functions read the progress of a fit, check strategies and optimizers, gather tensors that are
split over ranks, find tensors with NaN or infinite entries, and check values in checkpoints.

The callbacks in ema.py, momentum_decay.py, curriculum.py, loss_resampler.py and finite_updates.py
depend only on this file, torch and Lightning. To use one of these callbacks in your own package,
copy its file and trainer_state.py; loss_resampler.py also needs curriculum.py. The file
step_seed.py can be copied alone.

Callbacks access private names of Lightning only through the functions in this file. A test of
lit-diffusion checks that each of these names exists with the expected signature, and setup.cfg
excludes minor versions of Lightning that were not tested.

In this file, "split tensor" means a torch DTensor, which FSDP2 and tensor parallelism create. The
shape of a split tensor is the shape of the whole tensor, but each rank stores only a part, which
may be empty. If the docstring of a function says "Collective", all ranks must call the function.
"""

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any, TypeGuard, TypeVar

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
        from torch.distributed._composable.fsdp import FSDPModule  # type: ignore[attr-defined]
        from torch.distributed._tensor import (  # type: ignore[attr-defined]
            DTensor,
            distribute_tensor,
        )

T = TypeVar("T")


def isinstance_lightning(value: object, kind: type[T]) -> TypeGuard[T]:
    """`isinstance` for classes that exist in both `lightning` and `pytorch_lightning`.

    If both packages are installed, each has its own copy of every class. Both copies are accepted.
    """

    def qualified_name(c: type) -> str:
        return f"{c.__module__}.{c.__qualname__}".replace("lightning.pytorch", "pytorch_lightning")

    return qualified_name(kind) in map(qualified_name, type(value).__mro__)


# Progress of a fit


class AccumulationTracker:
    """Mixin for callbacks that need to know whether gradients are being accumulated.

    Checkpoints do not contain gradients, so callbacks should not save while gradients are being
    accumulated. Under manual optimization, the Trainer does not know whether the module accumulates
    gradients. The mixin then assumes that the gradients of a batch without an optimizer step are
    being accumulated.
    """

    _step_before: int | None = None

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Store the step count, to detect whether the optimizer steps in the batch."""
        self._step_before = trainer.global_step

    def is_accumulating(self, trainer: pl.Trainer) -> bool:
        """Whether the last batch left gradients that no optimizer step has used yet."""
        if trainer.lightning_module.automatic_optimization:
            return is_accumulating(trainer)
        return trainer.global_step == self._step_before


def is_accumulating(trainer: pl.Trainer) -> bool:
    """Whether the Trainer continues to accumulate gradients after the current batch."""
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
    """Whether the current batch is the last of an epoch that has several optimizer steps.

    Callbacks should not save a checkpoint after this batch, because a run that resumes from this
    checkpoint would skip the hooks at the end of the epoch.
    """
    return trainer.is_last_batch and trainer.num_training_batches > trainer.accumulate_grad_batches


def is_batch_ending(trainer: pl.Trainer) -> bool:
    """Whether the Trainer is running the hooks `on_train_batch_end`.

    If a callback saves a checkpoint in `on_train_batch_end`, Lightning calls `on_save_checkpoint`
    before `on_train_batch_end` returns. This function then returns True in both hooks.
    """
    batches: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    return bool(batches.completed < batches.processed)


def attached_trainer(module: pl.LightningModule) -> pl.Trainer | None:
    """Return the Trainer of a module; None if `module.trainer` would raise an error."""
    return module._trainer


def completed_steps(module: pl.LightningModule) -> int | None:
    """Return the optimizer steps completed in the current fit, or None outside a fit.

    Outside a fit, the Trainer's step count can be wrong for the module: a new Trainer starts
    counting at 0, even if the module is already trained.
    """
    trainer = attached_trainer(module)
    fitting = trainer is not None and trainer.state.fn == pl.trainer.states.TrainerFn.FITTING
    return module.global_step if fitting else None


def output_folder(trainer: pl.Trainer) -> str:
    """Return the folder for files of callbacks. All ranks get the same folder. Collective.

    The command `lit-diffusion fit` stores this folder in `trainer.run_folder`. If the Trainer does
    not have this attribute, the function returns the folder in which Lightning creates
    `checkpoints/`: the first logger's version directory, or `default_root_dir` without a logger.
    """
    folder = getattr(trainer, "run_folder", trainer.default_root_dir)
    if not hasattr(trainer, "run_folder") and trainer.loggers:
        logger = trainer.loggers[0]
        version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
        folder = os.path.join(logger.save_dir or folder, str(logger.name), version)
    return str(trainer.strategy.broadcast(str(folder)))


def total_steps(trainer: pl.Trainer) -> int | None:
    """Return the number of optimizer steps in the whole fit; None if the fit has no end.

    As a side effect, this sets up the training data.
    """
    steps, epochs = trainer.estimated_stepping_batches, trainer.max_epochs
    kind = pl.callbacks.GradientAccumulationScheduler
    callbacks, batches = trainer.callbacks, trainer.num_training_batches  # type: ignore[attr-defined]
    schedulers = [c for c in callbacks if isinstance_lightning(c, kind)]
    if schedulers and epochs is not None and epochs >= 0 and batches < math.inf:
        # The Trainer's estimate assumes that all epochs accumulate as many batches as the first.
        sizes = map(schedulers[-1].get_accumulate_grad_batches, range(epochs))
        steps = sum(math.ceil(batches / size) for size in sizes)
        steps = steps if trainer.max_steps == -1 else min(steps, trainer.max_steps)
    return int(steps) if 0 <= steps < math.inf else None


def should_log(trainer: pl.Trainer) -> bool:
    """Whether metrics are sent to loggers after the current batch (see `log_every_n_steps`)."""
    return trainer._logger_connector.should_update_logs


def may_read(trainer: pl.Trainer) -> bool:
    """Whether the host can read a value from the device without an additional wait.

    The function returns True on a CPU, which needs no wait. On other devices, it returns True only
    in a step that logs metrics, because such a step waits for the device anyway.
    """
    return trainer.strategy.root_device.type == "cpu" or should_log(trainer)


def confirm_updates(trainer: pl.Trainer) -> None:
    """Raise an error if the GPU has skipped an update and the host has not noticed it. Collective.

    The callback FiniteUpdates lets the GPU skip non-finite updates, and the host may notice a skip
    only a few steps later. Therefore, call this function in `on_train_batch_end` before you
    evaluate or save weights. The function calls the method `confirm_updates` of each callback that
    has this method.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if (confirm := getattr(callback, "confirm_updates", None)) is not None:
            confirm(trainer, trainer.lightning_module)


def logger_step(trainer: pl.Trainer) -> int:
    """Return the step that Lightning passes to loggers during a batch or the validation after it.

    The step is the number of earlier batches in which an optimizer stepped. In contrast,
    `global_step` is the sum of the steps of all optimizers.
    """
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def stepped_batches(trainer: pl.Trainer) -> int:
    """Return the number of batches so far in which an optimizer stepped.

    The current batch is included as soon as `on_train_batch_end` runs.
    """
    is_current_done = is_batch_ending(trainer) or trainer.validating
    return logger_step(trainer) + (is_current_done and not is_accumulating(trainer))


def loss_scale(trainer: pl.Trainer, optimizer: Optimizer) -> float:
    """Return the factor by which gradients are still scaled when an optimizer steps.

    A fused optimizer unscales the gradients inside its own step. If the Trainer has a GradScaler
    and the optimizer is fused, the result is the GradScaler's scale. Otherwise, it is 1.
    """
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    unscales = scaler is not None and getattr(optimizer, "_step_supports_amp_scaling", False)
    return float(scaler.get_scale()) if unscales and scaler is not None else 1.0


def loaded_checkpoint(trainer: pl.Trainer) -> dict[str, Any]:
    """Return the checkpoint that the Trainer is restoring; {} if there is none.

    You may modify the checkpoint in place.
    """
    return trainer._checkpoint_connector._loaded_checkpoint


def limited_batches(trainer: pl.Trainer, length: int) -> int:
    """Return how many of `length` batches an epoch uses under `trainer.limit_train_batches`."""
    connector: Any = pl.trainer.connectors.data_connector  # type: ignore[attr-defined]
    stage = pl.trainer.states.RunningStage.TRAINING
    return int(connector._parse_num_batches(stage, length, trainer.limit_train_batches))


def disable_signal_handlers(trainer: pl.Trainer) -> None:
    """Prevent Lightning from installing its signal handlers, until `enable_signal_handlers`."""
    vars(trainer._signal_connector)["register_signal_handlers"] = lambda: None


def enable_signal_handlers(trainer: pl.Trainer) -> None:
    """Allow Lightning to install its signal handlers again."""
    vars(trainer._signal_connector).pop("register_signal_handlers", None)


def undivided_sampler(loader: Any) -> Any:
    """Return the sampler of a loader, without Lightning's wrapper that divides it among ranks."""
    divided: Any = getattr(loader.sampler, "dataset", None)
    is_wrapped = type(divided).__name__ == "_DatasetSamplerWrapper"
    return divided._sampler if is_wrapped else loader.sampler


def is_built_from_config() -> bool:
    """Whether LightningCLI is now constructing a module from a config.

    In this case, the module's hyperparameters are plain builtins, such as numbers and lists.
    """
    return pl.core.mixins.hparams_mixin._given_hyperparameters.get() is not None


@contextmanager
def eval_mode(module: nn.Module) -> Iterator[None]:
    """Context that sets a module to eval mode, and restores each submodule's mode at the end."""
    training = [submodule for submodule in module.modules() if submodule.training]
    module.eval()
    try:
        yield
    finally:
        for submodule in training:
            submodule.training = True


def register_state_dict_hook(module: nn.Module, hook: Callable[..., None]) -> RemovableHandle:
    """Make `module.state_dict()` call `hook(module, state_dict, prefix, metadata)` at its end."""
    # The public method exists since torch 2.5, and does not take a bound method.
    return module._register_state_dict_hook(hook)  # type: ignore[no-untyped-call]


# Strategies


def refuse_strategy(trainer: pl.Trainer, name: str) -> None:
    """Raise ValueError if the callback called `name` does not support the Trainer's strategy."""
    strategy = trainer.strategy
    if isinstance_lightning(strategy, pl.strategies.ModelParallelStrategy):
        if "src_data_rank" not in signature(distribute_tensor).parameters:
            raise ValueError(f"{name} needs torch 2.7 or later for weights that are split.")
        return
    is_xla = any("XLA" in kind.__name__ for kind in type(strategy).__mro__)
    # True for FSDPStrategy, DeepSpeedStrategy and all other strategies that split weights.
    if is_xla or strategy.restore_checkpoint_after_setup:
        raise ValueError(
            f"{name} does not support {type(strategy).__name__}, which updates or saves weights in "
            "its own way; use strategy='ddp', or ModelParallelStrategy with fully_shard in "
            "configure_model for weights that are split over ranks."
        )


def refuse_split_weights(trainer: pl.Trainer, module: pl.LightningModule, name: str) -> None:
    """Raise ValueError if weights are split and the strategy would save only one rank's parts."""
    strategy, split = trainer.strategy, find_dtensor(dict(module.named_parameters()))
    if split and not isinstance_lightning(strategy, pl.strategies.ModelParallelStrategy):
        raise ValueError(
            f"{name} needs ModelParallelStrategy, with fully_shard in configure_model: "
            f"{type(strategy).__name__} would save one rank's part of {split!r}."
        )


# Optimizers


def refuse_unhooked(optimizer: object) -> None:
    """Raise ValueError if the optimizer's `step()` would not call hooks."""
    # Optimizer.__init__ sets this attribute. Some wrappers of an optimizer do not call __init__.
    hooked = getattr(getattr(type(optimizer), "step", None), "hooked", False)
    if not (hooked and isinstance(optimizer, Optimizer)):
        raise ValueError(
            "Optimizers must be a torch.optim.Optimizer whose step() runs hooks; "
            f"{type(optimizer).__name__} is something else, or has not called "
            "Optimizer.__init__. Return torch's own optimizer, or the optimizer inside this "
            "wrapper, and use a strategy that does not wrap it, such as 'ddp'."
        )


def is_state_init_step(optimizer: Optimizer, kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of `step(**kwargs)` only initializes the optimizer's state, with lr 0.

    The functions of `torch.distributed.checkpoint.state_dict` call `step()` with lr 0 before they
    save or load the state of an optimizer that has no state yet.
    """
    return dict(kwargs) == {"closure": None} and all(
        group.get("lr") == 0 for group in optimizer.param_groups
    )


# Ranks, and tensors that are split over them


def all_gather_objects(value: T, world_size: int) -> list[T]:
    """Gather one value from each rank, in the order of ranks. Collective."""
    values = [value] * world_size
    if world_size > 1:
        torch.distributed.all_gather_object(values, value)
    return values


def is_dtensor(value: object) -> "TypeGuard[DTensor]":
    """Whether a value is a tensor that is split over ranks."""
    return _HAS_DISTRIBUTED and isinstance(value, DTensor)


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a split tensor, without a copy. Return other tensors unchanged."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def saves_split_tensors(module: pl.LightningModule | None) -> bool:
    """Whether the strategy saves split tensors, so that callbacks need not gather them.

    The function returns True if the strategy has an attribute `saves_split_tensors` that is True.
    Each rank then saves its own parts. Lightning's own strategies do not have this attribute.
    """
    trainer = getattr(module, "_trainer", None)
    return trainer is not None and getattr(trainer.strategy, "saves_split_tensors", False)


def distribute_like(whole: Tensor, model: Tensor) -> Tensor:
    """Split `whole`, which has equal values on all ranks, over ranks in the same way as `model`.

    If `whole` is already split, or if `model` is not split, `whole` is returned unchanged.
    """
    if is_dtensor(whole) or not is_dtensor(model):
        return whole
    return distribute_tensor(whole, model.device_mesh, model.placements, src_data_rank=None)


def find_dtensor(state: Any, name: str = "") -> str | None:
    """Return the path of the first split tensor in nested dicts and lists, or None.

    A path has the form "shadows.0.weight".
    """
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
    """Gather the split tensors of a nested state as whole CPU tensors on rank 0.

    If no tensor is split, the function returns the state unchanged. Otherwise, all ranks must call
    the function together. It returns the state with whole tensors on rank 0, and {} on other ranks.
    The other ranks never hold more than one whole tensor at a time.
    """
    if find_dtensor(state) is None:
        return dict(state)
    is_first = torch.distributed.get_rank() == 0
    whole: dict[str, Any] = _gather(state, is_first)
    return whole if is_first else {}


def _gather(value: Any, is_first: bool) -> Any:
    if is_dtensor(value):
        # A part that was offloaded to the CPU must move to the device on which ranks communicate.
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

    While FSDP2 keeps the gathered weights, `parameters()` returns them instead of the sharded
    weights. The next forward pass uses them even if the sharded weights have changed. A rank may
    call this function alone.
    """
    if _HAS_DISTRIBUTED:
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()


# Non-finite tensors


def is_nonfinite(tensors: Sequence[Tensor]) -> Tensor:
    """Return flags (N,) bool, True for tensors with a NaN or infinite entry.

    The function does not wait for a GPU. In a split tensor, it checks only the part of this rank.
    In a sparse tensor, it checks the stored values. An empty tensor counts as finite.

    Example:
        >>> is_nonfinite([torch.ones(2), torch.tensor([0.0, float("nan")])])
        tensor([False,  True])
    """
    values = [t.coalesce().values() if t.is_sparse else t for t in tensors]
    if not {*map(type, values)} <= {Tensor, nn.Parameter}:
        values = [local_part(value) for value in values]
    values = [value if value.numel() else value.new_zeros(1) for value in values]
    # On a CPU, the 2-norm is ten times as fast as the max norm, but squares may overflow. If the
    # 2-norm finds non-finite tensors, the max norm is therefore computed as well.
    if {*map(Tensor.get_device, values)} == {-1}:
        flags = _has_infinite_norm(values, 2.0)
        if not flags.any():
            return flags
    return _has_infinite_norm(values, math.inf)


def _has_infinite_norm(values: Sequence[Tensor], order: float) -> Tensor:
    norms = list(torch._foreach_norm(list(values), order))
    if len({*map(Tensor.get_device, norms)}) > 1:
        norms = [norm.to(norms[0].device) for norm in norms]
    # x * 0 is NaN if x is infinite or NaN. It takes a third of the operations of isfinite().
    return torch.stack(norms) * 0 != 0


def first_nonfinite(tensors: Sequence[Tensor]) -> int | None:
    """Return the index of the first tensor with a NaN or infinite entry; None if all are finite.

    The host waits for the device once. If tensors are split, all ranks of the tensors' device mesh
    must call the function together, and they all return the same index.
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


# Values in checkpoints


def is_count(value: Any) -> bool:
    """Whether a value is an int (not a bool) in `[0, 2**63)`."""
    return type(value) is int and 0 <= value < 2**63


def is_dense_tensor(value: Any) -> TypeGuard[Tensor]:
    """Whether a value is a tensor that can be copied into a parameter."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return False
    return not (value.is_nested or value.is_quantized or value.is_meta)


def strip_compile_prefix(state: Mapping[str, T]) -> dict[str, T]:
    """Remove the prefix `_orig_mod.` that torch.compile adds to names of parameters and buffers."""
    return {name.replace("_orig_mod.", ""): value for name, value in state.items()}
