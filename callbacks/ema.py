"""Exponential moving averages (EMA) of weights, stored separately from the raw weights.

Checkpoints contain the state of the callback `EMA`. If there are no averages, the state is {}.
Otherwise it has three entries:

    {"decays": [float, ...], "steps": {name: int}, "shadows": [{name: Tensor}, ...]}

The list "shadows" contains one dictionary of averages for each decay. The dictionary "steps" has
the number of optimizer steps of each parameter. Each `name` is the name of a parameter (or averaged
buffer) in the module, without the prefix `_orig_mod.` that torch.compile adds.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from .trainer_state import (
    distribute_like,
    first_nonfinite,
    gather_state,
    is_count,
    is_dense_tensor,
    is_dtensor,
    is_state_init_step,
    isinstance_lightning,
    local_part,
    refuse_split_weights,
    refuse_strategy,
    refuse_unhooked,
    register_state_dict_hook,
    reshard,
    saves_split_tensors,
    should_log,
    strip_compile_prefix,
)

try:
    import lightning.pytorch as pl
except ImportError:
    import pytorch_lightning as pl  # type: ignore[no-redef]

RAW = "raw"


# The average


def warmup_decay(decay: float, n: int) -> float:
    """Return the decay at step n with warm-up, `min(decay, (1 + n) / (10 + n))`.

    Warm-up makes the decay small in early steps, so that the average soon forgets the initial
    weights.

    Source: ExponentialMovingAverage of TensorFlow, with the argument num_updates.

    Example:
        >>> warmup_decay(0.9999, 0), warmup_decay(0.9999, 90), warmup_decay(0.9999, 10**6)
        (0.1, 0.91, 0.9999)
    """
    return min(decay, (1 + n) / (10 + n))


def span_decay(decay: float, first: int, last: int, warmup: bool = False) -> float:
    """Return the product of the decays of steps `first` to `last - 1`.

    One update with this decay replaces the updates of these steps.

    Example:
        >>> span_decay(0.5, first=0, last=3)
        0.125
    """
    return math.prod(warmup_decay(decay, n) if warmup else decay for n in range(first, last))


@torch.no_grad()
def ema_update_(
    shadow: Sequence[Tensor],
    params: Sequence[Tensor],
    decay: float,
    found_inf: Tensor | None = None,
) -> None:
    """Update averages in place: `shadow = decay * shadow + (1 - decay) * params`.

    The update is computed with `torch.lerp`, which does not change an average that equals the
    weights. Weights are first converted to the device and dtype of their averages. If a tensor is
    split over ranks (a DTensor), each rank updates the part that it stores.

    Args:
        shadow: the averages.
        params: one tensor of weights for each average, with the shape of the average.
        decay: factor on the old averages, in [0, 1].
        found_inf: scalar float tensor on the device. If it is 1, the averages do not change.

    Example:
        >>> shadow = [torch.zeros(2)]
        >>> ema_update_(shadow, [torch.ones(2)], decay=0.75)
        >>> shadow
        [tensor([0.2500, 0.2500])]
    """
    averages = [local_part(average) for average in shadow]
    weights = [local_part(p).to(average) for average, p in zip(averages, params, strict=True)]
    can_fuse = found_inf is not None and _can_fuse(averages, weights)
    _lerp_(averages, weights, decay, found_inf, can_fuse)


def _can_fuse(averages: list[Tensor], weights: list[Tensor]) -> bool:
    """Whether one fused kernel can update the averages.

    The kernel ignores strides, so averages and weights must have equal strides. It also needs
    float32 averages and all tensors on one device.
    """
    return (
        {average.dtype for average in averages} == {torch.float32}
        and len({*map(Tensor.get_device, averages)}) == 1
        and [*map(Tensor.stride, averages)] == [*map(Tensor.stride, weights)]
    )


@torch.no_grad()
def _lerp_(
    averages: list[Tensor],
    weights: list[Tensor],
    decay: float,
    found_inf: Tensor | None,
    can_fuse: bool,
) -> None:
    """`ema_update_` for tensors that are not split and whose devices and dtypes agree."""
    if found_inf is None:
        torch._foreach_lerp_(averages, weights, 1 - decay)
    # The lerp is a step of SGD with lr = 1 - decay and the gradient `average - weight`, for which
    # torch has a fused kernel. Below decay 0.5, torch's lerp uses another formula, which copies the
    # weights exactly at decay 0.
    elif can_fuse and decay >= 0.5:
        torch._fused_sgd_(
            averages,
            weights,
            [],
            lr=1 - decay,
            weight_decay=1.0,
            maximize=True,
            momentum=0.0,
            dampening=0.0,
            nesterov=False,
            is_first_step=False,
            found_inf=found_inf.to(averages[0].device),
        )
    else:
        for average, param in zip(averages, weights, strict=True):
            is_skipped = found_inf.to(average.device) > 0
            average.lerp_(torch.where(is_skipped, average, param), 1 - decay)


@torch.no_grad()
def overwrite_(targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy each value into its target, cast to the target's dtype.

    If a tensor is split over ranks (a DTensor), each rank copies the part that it stores.
    """
    if targets:
        torch._foreach_copy_([local_part(t) for t in targets], [local_part(v) for v in values])


# The state in a checkpoint


def check_averages(state: Any) -> None:  # noqa: C901 - a list of conditions
    """Raise ValueError if `state` does not have the format of EMA's state.

    The error message is a part of a sentence. Callers insert it into their own error message.
    """
    if isinstance(state, dict) and not state:
        return
    if not (isinstance(state, dict) and {"decays", "steps", "shadows"} <= state.keys()):
        raise ValueError("it must hold decays, steps and shadows")
    decays, steps, shadows = state["decays"], state["steps"], state["shadows"]
    numbers = decays if isinstance(decays, list | tuple) else ()
    if not numbers or any(type(d) not in (int, float) or not 0 <= d < 1 for d in numbers):
        raise ValueError(f"its decays must be numbers in [0, 1), and are {decays!r:.50}")
    if not (isinstance(steps, dict) and all(map(is_count, steps.values()))):
        raise ValueError(f"its steps must be counts by name, and are {steps!r:.50}")
    if not (isinstance(shadows, list | tuple) and len(shadows) == len(decays)):
        raise ValueError("it must hold averages for each decay")
    if not all(isinstance(shadow, dict) and shadow.keys() == steps.keys() for shadow in shadows):
        raise ValueError("it must hold an average of each parameter for each decay")
    for name, value in chain.from_iterable(shadow.items() for shadow in shadows):
        if not (is_dense_tensor(value) and (value.is_floating_point() or value.is_complex())):
            raise ValueError(f"its average of {name} is not of real numbers")
        if (value.shape, value.dtype) != (shadows[0][name].shape, shadows[0][name].dtype):
            raise ValueError(f"its averages of {name} differ in shape or type")
    hashes = state.get("snapshots", {})  # PowerEMA: step -> SHA-256
    is_table = isinstance(hashes, dict) and all(map(is_count, hashes))
    if not (is_table and all(isinstance(text, str) for text in hashes.values())):
        raise ValueError(f"its snapshots must be hashes by step, and are {hashes!r:.50}")


# The callback


@dataclass
class _Group:
    """The averaged tensors of one optimizer, by name, and the optimizer's number of steps."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    steps: int = 0
    skipped: Tensor | float = 0.0  # how many of these steps the device has skipped by itself
    params: list[Tensor] = field(default_factory=list)  # the optimizer's, at the last step
    frozen: list[Tensor] = field(default_factory=list)  # those in `params` that need no gradient
    # (weights, averages of each decay), in the order of `tensors`; None if `tensors` has changed.
    lists: tuple[list[Tensor], list[list[Tensor]]] | None = None
    is_uniform: bool = False  # whether `lists` agree in devices and dtypes, and none is split
    strides: list[tuple[int, ...]] | None = None  # of the weights; None if no fused kernel fits


class EMA(pl.Callback):
    """Averages the trainable weights, and uses the averages in validation, test and predict.

    After each optimizer step, each average becomes `decay * average + (1 - decay) * weight`.

    - `EMA` averages each parameter under `prefix` that requires a gradient and belongs to an
      optimizer. Averages are stored in float32, or in a wider dtype if the parameter has one.
      Shared parameters are averaged once. If a parameter is unfrozen or added during training, its
      average starts then.
    - Steps are counted for each optimizer, so each network of a GAN is averaged at the steps of its
      own optimizer. A batch that only accumulates gradients is not counted, nor is an update that
      a GradScaler skips.
    - Validation, test and predict use the averages with the first decay, and swap the raw weights
      back in when they end. Inside the context `weights(name)`, they use the weights called `name`
      instead. Before step `every_n_steps`, which has the first update of the averages, the raw
      weights are used everywhere. Averages in a checkpoint of an earlier step are not used either.
    - `LightningModule.state_dict()` returns the raw weights, even while averages are swapped in.
      Every checkpoint therefore contains the raw weights. To read the averages while they are
      swapped in, read the module's parameters. Checkpoints also contain all averages, in
      `checkpoint["callbacks"][ema.state_key]`. The docstring of this file describes their format.
    - On resume, the arguments of this object apply, even if the checkpoint was written with other
      arguments. If the decays differ, a message is printed.
    - After a fit, this callback keeps the averages, and another fit of the same module object
      continues them. If you load other weights into the module by hand between the fits, create a
      new EMA, or pass `ckpt_path` to `trainer.fit`.
    - If an average is NaN or infinite, an error names the parameter. The averages are checked when
      they are swapped in, when they are saved, and whenever metrics are logged.
    - Under ModelParallelStrategy, each rank averages the parts of the weights that it stores. All
      ranks must save checkpoints together, because saving to a single file gathers the averages on
      rank 0. All ranks must also enter `weights()` together.

    Args:
        decays: decay of the average per optimizer step, in [0, 1). If you pass several values, one
            average is kept for each value. A decay of 0.9999 has a half-life of 6,931 steps.
        warmup: whether to limit the decay of step n = 0, 1, ... to `(1 + n) / (10 + n)`.
        every_n_steps: optimizer steps between updates of the averages. Each update uses the product
            of the decays of the steps since the last update.
        prefix: name of the submodule to average, such as "network"; "" averages all parameters. If
            there are several EMA callbacks, no parameter may be under the prefixes of two of them.
        start: number of optimizer steps after which averaging starts. Until then, the averages
            equal the weights. The steps of the warm-up are counted from the start of averaging.
        buffers: whether to average floating point buffers under `prefix` too, such as the running
            statistics of BatchNorm. If the module has several optimizers, buffers are averaged at
            the steps of the first optimizer that trains averaged parameters. The singular vectors
            that spectral norm stores as buffers are never averaged.
        on_cpu: whether to store the averages in CPU memory. This saves GPU memory but is slower,
            because each update copies the weights to the CPU.

    Raises:
        ValueError: if an argument is invalid, or if the strategy is not supported. At the start of
            a run, the error is also raised if no parameter is under the prefix, if the prefixes of
            two EMA callbacks overlap, or if the averages in the checkpoint do not fit the module.
        FloatingPointError: if an average is not finite.

    Source: Polyak & Juditsky 1992, "Acceleration of stochastic approximation by averaging".

    Example:
        >>> EMA(decays=(0.999, 0.9999)).names()
        ['raw', 'ema', 'ema_0.999', 'ema_0.9999']
    """

    _name_prefix = "ema"

    def __init__(
        self,
        decays: tuple[float, ...] | float = (0.9999,),
        warmup: bool = True,
        every_n_steps: int = 1,
        prefix: str = "",
        start: int = 0,
        buffers: bool = False,
        on_cpu: bool = False,
    ) -> None:
        self.decays = (decays,) if isinstance(decays, int | float) else tuple(decays)
        self.warmup = warmup
        self.every_n_steps = every_n_steps
        self.prefix = prefix.rstrip(".")
        self.start = start
        self.buffers = buffers
        self.on_cpu = on_cpu
        self._names = [RAW, "ema", *(f"{self._name_prefix}_{decay:g}" for decay in self.decays)]
        if not self.decays or not all(0 <= decay < 1 for decay in self.decays):
            raise ValueError(f"decays must be one or more numbers in [0, 1), got {self.decays}.")
        if len(set(self._names)) < len(self._names):
            raise ValueError(f"decays must differ in their first 6 digits, got {self.decays}.")
        if self.every_n_steps < 1:
            raise ValueError(f"every_n_steps must be at least 1, got {self.every_n_steps}.")
        if self.start < 0:
            raise ValueError(f"start must be at least 0, got {self.start}.")
        self._module: pl.LightningModule | None = None
        self._shadows: list[dict[str, Tensor]] = [{} for _ in self.decays]  # by name
        self._groups: list[_Group] = []  # one for each optimizer
        self._idle_steps: dict[str, int] = {}  # steps of averages without an optimizer so far
        self._loaded: dict[str, Any] = {}  # state of a checkpoint, until a run starts
        self._known_params: dict[int, Tensor] = {}  # parameters assigned to a group, by id
        self._hooks: list[RemovableHandle] = []
        self._active = self._active_before_eval = RAW  # names of the weights in the module
        self._raw: dict[Tensor, Tensor] = {}  # parameter -> copy of its raw value, while swapped
        self._raw_hook: RemovableHandle | None = None

    @property
    def steps(self) -> int:
        """Number of optimizer steps that this callback saw: the maximum over all optimizers."""
        return max([*self._idle_steps.values(), *(g.steps for g in self._groups)], default=0)

    def _steps_by_name(self) -> dict[str, int]:
        tracked = {name: group.steps for group in self._groups for name in group.tensors}
        return self._idle_steps | tracked

    def _update_decay(self, decay: float, first: int, last: int) -> float:
        return span_decay(decay, first, last, self.warmup)

    # Weights by name

    def names(self) -> list[str]:
        """Return the names that `weights` accepts: "raw", "ema" (first decay) and "ema_<decay>"."""
        return list(self._names)

    @contextmanager
    def weights(self, name: str) -> Iterator[None]:
        """Context in which the module's parameters have the weights called `name`.

        Contexts may be nested.

        Args:
            name: one of `names()`. Before the first update of a fit, each name means the raw
                weights.

        Raises:
            ValueError: if the name is unknown.
            RuntimeError: if `name` is not "raw" and there are no averages, because no fit has
                started and no checkpoint was loaded.
        """
        if name not in self._names:
            raise ValueError(f"EMA provides the weights {self._names}, got {name!r}.")
        if name != RAW and not (self._groups or self._idle_steps):
            raise RuntimeError(
                f"EMA holds no averages yet, so there is no {name!r}: fit first, or give the "
                "Trainer a checkpoint that was written with EMA."
            )
        previous = self._active
        try:
            self._activate(name)
            yield
        finally:
            self._activate(previous)

    @torch.no_grad()
    def _activate(self, name: str) -> None:
        """Swap in the weights called `name`. `_activate(RAW)` also undoes an interrupted swap."""
        if name == self._active:
            return
        assert self._module is not None
        tensors = self._named_tensors()
        if name == RAW:
            overwrite_(list(self._raw), list(self._raw.values()))
            self._raw, self._active = {}, RAW
            if self._raw_hook is not None:
                self._raw_hook.remove()
            return
        steps = self._steps_by_name()
        updated = [n for n in steps if n in tensors and steps[n] >= self.every_n_steps]
        self._refuse_nonfinite(updated)
        targets = [tensors[n] for n in updated]
        previous, self._active = self._active, name
        if previous == RAW:
            self._raw = {target: target.detach().clone() for target in targets}
            self._raw_hook = register_state_dict_hook(self._module, self._write_raw_weights)
        shadow = self._shadows[max(self._names.index(name) - 2, 0)]
        overwrite_(targets, [shadow[n] for n in updated])

    def _write_raw_weights(
        self, module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any
    ) -> None:
        """Hook of `module.state_dict()` that replaces swapped-in averages by the raw weights."""
        buffers = module.named_buffers(remove_duplicate=False)
        for name, tensor in chain(module.named_parameters(remove_duplicate=False), buffers):
            if tensor in self._raw and prefix + name in state:
                state[prefix + name] = self._raw[tensor]

    def _refuse_nonfinite(self, names: Sequence[str]) -> None:
        """Raise FloatingPointError if an average is not finite, naming the first such parameter."""
        for decay, shadow in zip(self.decays, self._shadows, strict=True):
            bad = first_nonfinite([shadow[name] for name in names])
            if bad is not None:
                raise FloatingPointError(
                    f"EMA: the average of {names[bad]!r} (decay {decay:g}) is not finite after "
                    f"{self.steps} optimizer steps, because the weight was not. Resume from an "
                    "earlier checkpoint with a lower learning rate or gradient clipping."
                )

    def _refuse_averages_in_place(self) -> None:
        if self._active != RAW:
            raise RuntimeError(
                f"The weights {self._active!r} are swapped in, so weights that are loaded or "
                "trained now would be lost; leave EMA.weights() first."
            )

    # Averaging at optimizer steps

    def _start_averaging(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Hook the optimizers, and start or continue the averages of their parameters."""
        from_checkpoint = bool(self._loaded)
        self._remove_hooks()
        self._load_averages(trainer, module)
        stored = set(self._idle_steps)
        self._groups = [_Group() for _ in trainer.optimizers]
        for optimizer, group in zip(trainer.optimizers, self._groups, strict=True):
            refuse_unhooked(optimizer)
            self._add_parameters(optimizer, group)
            params = [name for name, t in group.tensors.items() if isinstance(t, Parameter)]
            missing = [name for name in params if name not in stored]
            if from_checkpoint and missing:
                raise ValueError(
                    f"The checkpoint's EMA has no average of the parameter {missing[0]!r}, which "
                    "is trained now. Resume with the module that wrote the checkpoint, or freeze "
                    "the parameter until training has started."
                )
            self._hooks += [
                optimizer.register_step_pre_hook(partial(self._before_step, group)),
                optimizer.register_step_post_hook(partial(self._after_step, group)),
            ]
        if not any(group.tensors for group in self._groups):
            pl.utilities.rank_zero_warn(
                f"No optimizer has a trainable parameter under EMA(prefix={self.prefix!r}) yet, so "
                "nothing is averaged until one has."
            )

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _load_averages(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Load averages from the checkpoint or, without one, from an earlier run of the module."""
        state = self._loaded
        if not state and trainer.ckpt_path is None and module is self._module:
            state = self._averages_state()
        self._refuse_averages_in_place()
        self._shadows = [{} for _ in self.decays]
        self._groups, self._known_params, self._idle_steps = [], {}, {}
        self._loaded, self._module = {}, module
        tensors, averaged = self._named_tensors(), self._averaged_tensors()
        if not state:
            return
        for name, value in state["shadows"][0].items():
            tensor = tensors.get(name)
            kind = (value.shape, value.is_floating_point())  # else complex
            if tensor is None or kind != (tensor.shape, tensor.is_floating_point()):
                raise ValueError(
                    f"The checkpoint's average of {name!r}, {value.dtype} {tuple(value.shape)}, "
                    "fits no parameter of the module. Resume with the module that wrote the "
                    "checkpoint."
                )
        self._idle_steps = {name: n for name, n in state["steps"].items() if name in averaged}
        for shadow, i in zip(self._shadows, self._match_decays(state["decays"]), strict=True):
            for name in self._idle_steps:
                start = averaged[name] if i is None else state["shadows"][i][name]
                shadow[name] = self._copy_as_average(start, averaged[name])

    def _match_decays(self, stored: Sequence[float]) -> list[int | None]:
        """Return, for each decay, the index of the stored average to continue, or None.

        A decay continues the stored average that has the same decay. If there is none, the decay
        continues the next stored average whose own decay is not used any more, if one is left.
        Changes are printed.
        """
        matches: list[int | None] = []
        unclaimed = [i for i, decay in enumerate(stored) if decay not in self.decays]
        info = pl.utilities.rank_zero_info
        for decay in self.decays:
            if decay in stored:
                matches.append(stored.index(decay))
            elif unclaimed:
                matches.append(i := unclaimed.pop(0))
                info(f"EMA decay: the checkpoint had {stored[i]:g}, using {decay:g}.")
            else:
                matches.append(None)
                info(f"EMA decay {decay:g} is new: its average starts from the weights.")
        for i in unclaimed:
            info(f"EMA decay {stored[i]:g} of the checkpoint is dropped.")
        return matches

    def _copy_as_average(self, value: Tensor, tensor: Tensor) -> Tensor:
        """Copy `value` in float32 or wider, split over ranks and strided like `tensor`."""
        dtype = torch.promote_types(tensor.dtype, torch.float32)
        device = torch.device("cpu") if self.on_cpu else tensor.device
        average = torch.empty_like(tensor, dtype=dtype, device=device, requires_grad=False)
        return average.copy_(distribute_like(value, tensor).detach())

    def _add_parameters(self, optimizer: Optimizer, group: _Group) -> None:
        """Start averaging parameters of the optimizer that are in no group yet."""
        params = list(chain.from_iterable(entry["params"] for entry in optimizer.param_groups))
        is_same = len(params) == len(group.params) and all(map(is_, params, group.params))
        if is_same and not any(param.requires_grad for param in group.frozen):
            return
        group.params = params
        group.frozen = [param for param in params if not param.requires_grad]
        trained = {id(param): param for param in params if param.requires_grad}
        new = {key: param for key, param in trained.items() if key not in self._known_params}
        if not new:
            return
        self._known_params |= new
        averaged = self._averaged_tensors()
        added = {name: tensor for name, tensor in averaged.items() if id(tensor) in new}
        if group.tensors or added:
            tracked = {name for each in self._groups for name in each.tensors}
            buffers = self._averaged_buffers().items()
            added |= {name: buffer for name, buffer in buffers if name not in tracked}
        for each in self._groups:
            each.lists = None
        for name, tensor in added.items():
            for each in self._groups:
                each.tensors.pop(name, None)  # of a replaced parameter with the same name
            group.tensors[name] = tensor
            if (steps := self._idle_steps.pop(name, None)) is None:
                for shadow in self._shadows:
                    shadow[name] = self._copy_as_average(tensor, tensor)
            elif isinstance(tensor, Parameter):
                group.steps = max(group.steps, steps)

    def _named_tensors(self) -> dict[str, Tensor]:
        """All parameters and buffers, by name without the prefix of torch.compile."""
        assert self._module is not None
        reshard(self._module)
        params = dict[str, Tensor](self._module.named_parameters())
        return strip_compile_prefix(dict(self._module.named_buffers()) | params)

    def _averaged_tensors(self) -> dict[str, Tensor]:
        """Parameters under the prefix and, if `buffers` is set, buffers to average."""
        assert self._module is not None
        params = strip_compile_prefix(dict(self._module.named_parameters()))
        averaged = {name: param for name, param in params.items() if _is_under(name, self.prefix)}
        if not averaged:
            children = sorted({name.split(".")[0] for name in params})
            raise ValueError(
                f"EMA(prefix={self.prefix!r}) matches no parameter; the module's parameters are "
                f"under {children}."
            )
        return {**averaged, **self._averaged_buffers()}

    def _averaged_buffers(self) -> dict[str, Tensor]:
        """Floating point buffers in checkpoints, except masks of -inf and spectral norm vectors.

        The singular vectors of spectral norm have norm 1. Their average would have a smaller norm.
        """
        assert self._module is not None
        if not self.buffers:
            return {}
        saved = strip_compile_prefix(self._module.state_dict())
        buffers = strip_compile_prefix(dict(self._module.named_buffers()))
        return {
            name: buffer
            for name, buffer in buffers.items()
            if name in saved and _is_under(name, self.prefix)
            if buffer.is_floating_point() and buffer.isfinite().all()
            if not _is_singular_vector(name, saved)
        }

    def _before_step(self, group: _Group, optimizer: Optimizer, _args: Any, kwargs: Any) -> None:
        if is_state_init_step(optimizer, kwargs):
            return
        self._refuse_averages_in_place()
        self._add_parameters(optimizer, group)
        if group.steps == 0:
            self._reset_to_weights(group)  # weights may have been loaded after `on_fit_start`

    def _reset_to_weights(self, group: _Group) -> None:
        """Set the averages to the current weights."""
        for shadow in self._shadows:
            overwrite_([shadow[name] for name in group.tensors], list(group.tensors.values()))

    def _after_step(self, group: _Group, optimizer: Optimizer, _args: Any, kwargs: Any) -> None:
        found_inf = getattr(optimizer, "found_inf", None)
        # If a GradScaler skips a step, it calls step() of fused optimizers, which do nothing, and
        # does not call step() of other optimizers. Without a GradScaler, found_inf may have been
        # set by FiniteUpdates; it stays on the device.
        by_scaler = hasattr(optimizer, "grad_scale")
        params = (param for entry in optimizer.param_groups for param in entry["params"])
        skipped = (by_scaler and found_inf) or all(p.grad is None for p in params)
        if skipped or is_state_init_step(optimizer, kwargs) or not group.tensors:
            return
        group.steps += 1
        if by_scaler:
            found_inf = None
        elif found_inf is not None:
            group.skipped = group.skipped + found_inf
        last = group.steps - self.start
        if group.steps % self.every_n_steps and last != 0:
            return
        if self.buffers:  # modules may have replaced buffers, as `.to(device)` does
            tensors = self._named_tensors()
            group.tensors = {name: tensors[name] for name in group.tensors}
            group.lists = None
        if last <= 0:
            self._reset_to_weights(group)
            return
        if group.lists is None:
            self._prepare_lists(group)
        assert group.lists is not None
        weights, averages = group.lists
        can_fuse = found_inf is not None and group.strides == [*map(Tensor.stride, weights)]
        for decay, shadow in zip(self.decays, averages, strict=True):
            span = self._update_decay(decay, max(last - self.every_n_steps, 0), last)
            if group.is_uniform:
                _lerp_(shadow, weights, span, found_inf, can_fuse)
            else:
                ema_update_(shadow, weights, span, found_inf)

    def _prepare_lists(self, group: _Group) -> None:
        weights = list(group.tensors.values())
        averages = [[shadow[name] for name in group.tensors] for shadow in self._shadows]
        group.lists = weights, averages
        group.is_uniform = not any(map(is_dtensor, weights)) and all(
            (weight.device, weight.dtype) == (average.device, average.dtype)
            for weight, average in zip(weights, averages[0], strict=True)
        )
        can_fuse = group.is_uniform and _can_fuse(averages[0], weights)
        group.strides = [*map(Tensor.stride, weights)] if can_fuse else None

    # State

    @property
    def state_key(self) -> str:
        """Key of the state, without the decays, because they may change on resume."""
        return f"{type(self).__qualname__}{ {'prefix': self.prefix} }"

    def state_dict(self) -> dict[str, Any]:
        """Return the averages by decay and name, or {} if there are none.

        If weights are split over ranks, all ranks must call this method together. What they get
        depends on `saves_split_tensors`. If it is False, rank 0 gets the whole averages, and the
        other ranks get {}. If it is True, each rank gets the parts that it stores.
        """
        state = self._averages_state()
        return state if saves_split_tensors(self._module) else gather_state(state)

    def _averages_state(self) -> dict[str, Any]:
        if self._loaded or not (self._groups or self._idle_steps):
            return self._loaded  # for a checkpoint that is saved before the run begins
        steps = self._steps_by_name()
        self._refuse_nonfinite(list(steps))
        shadows = [dict(shadow) for shadow in self._shadows]
        return {"decays": list(self.decays), "steps": steps, "shadows": shadows}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Store the averages until the run starts; during a run, restore them at once."""
        try:
            check_averages(state_dict)
        except ValueError as error:
            raise ValueError(f"The checkpoint's state of EMA is damaged: {error}.") from None
        self._loaded = state_dict
        if self._hooks:  # restored during a fit, for example after the lr finder
            assert self._module is not None
            self._start_averaging(self._module.trainer, self._module)

    # Lightning hooks

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Raise an error for unsupported strategies and overlapping EMAs."""
        self._loaded = {}  # Lightning loads checkpoints after this hook
        refuse_strategy(trainer, "EMA")
        for other in trainer.callbacks:  # type: ignore[attr-defined]
            if not isinstance(other, EMA) or other is self:
                continue
            if _is_under(self.prefix, other.prefix) or _is_under(other.prefix, self.prefix):
                raise ValueError(
                    f"EMA(prefix={self.prefix!r}) and EMA(prefix={other.prefix!r}) average the "
                    "same parameters; use one EMA with several decays instead."
                )

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Create the averages on the module's device, or load them from the checkpoint."""
        for callback in trainer.checkpoint_callbacks:
            kind = pl.callbacks.ModelCheckpoint
            if isinstance_lightning(callback, kind) and callback.save_weights_only:
                pl.utilities.rank_zero_warn(
                    "ModelCheckpoint(save_weights_only=True) writes the raw weights only; the "
                    "averages of EMA will not be in its files."
                )
        refuse_split_weights(trainer, pl_module, "EMA")
        self._remove_hooks()
        if not trainer.strategy.restore_checkpoint_after_setup:
            self._start_averaging(trainer, pl_module)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start averaging under a strategy that loads checkpoints after `on_fit_start`."""
        if trainer.strategy.restore_checkpoint_after_setup and not self._hooks:
            self._start_averaging(trainer, pl_module)

    on_sanity_check_start = on_train_start

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        """Log the decay and check the averages for NaN, whenever Lightning logs metrics."""
        if should_log(trainer) and self.steps:
            self._refuse_nonfinite(list(self._steps_by_name()))
            n = self.steps - self.start
            decay = self._update_decay(self.decays[0], n - 1, n) if n > 0 else 0.0
            pl_module.log(f"ema/decay_{self.prefix}" if self.prefix else "ema/decay", decay)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Warn if no optimizer step has called this callback's hooks."""
        if trainer.global_step and not any(group.steps for group in self._groups):
            pl.utilities.rank_zero_warn(
                f"EMA saw none of {trainer.global_step} optimizer steps, so there are no averages. "
                "EMA cannot see the steps of an optimizer that calls another optimizer's step() or "
                "clears gradients inside its own step()."
            )

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Swap in the averages for validation, test or predict."""
        is_fitting = trainer.state.fn == pl.trainer.states.TrainerFn.FITTING
        is_current = pl_module is self._module and not self._loaded and trainer.ckpt_path is None
        if not (is_fitting or is_current):
            self._load_averages(trainer, pl_module)
        self._active_before_eval = self._active
        if not (self._groups or self._idle_steps):
            pl.utilities.rank_zero_warn(
                "EMA holds no averages, because the checkpoint has none, or because there was "
                "neither a checkpoint nor a fit before: the raw weights are used."
            )
        elif self._active == RAW:
            self._activate("ema")

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Swap back the weights that the module had before the evaluation."""
        self._activate(self._active_before_eval)

    on_test_start = on_predict_start = on_validation_start
    on_test_end = on_predict_end = on_validation_end

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Swap back the raw weights, and remove the hooks."""
        self._activate(RAW)
        self._remove_hooks()
        if isinstance(exception, FloatingPointError):  # the device has skipped the last updates
            for group in self._groups:
                group.steps, group.skipped = group.steps - int(group.skipped), 0.0

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Remove the optimizer hooks."""
        self._remove_hooks()


def _is_under(name: str, prefix: str) -> bool:
    return prefix in ("", name) or name.startswith(prefix + ".")


def _is_singular_vector(name: str, saved: Collection[str]) -> bool:
    """Whether a buffer is a vector of spectral norm, in torch's old or new implementation."""
    if name[-2:] not in ("_u", "_v"):
        return False
    return ".parametrizations." in f".{name}" or f"{name[:-2]}_orig" in saved
