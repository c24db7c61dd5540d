"""Exponential moving averages of weights, with the raw and the averaged weights kept apart.

The state that EMA saves in a checkpoint is {} or {"decays": [float], "steps": {name: int},
"shadows": [{name: Tensor}, ...], one for each decay}; names are those of parameters without
torch.compile.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
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
    is_state_init_step,
    isinstance_lightning,
    local_part,
    refuse_split_weights,
    refuse_strategy,
    refuse_unhooked,
    reshard,
    should_log,
)

try:
    import lightning.pytorch as pl
except ImportError:
    import pytorch_lightning as pl  # type: ignore[no-redef]

RAW = "raw"


# The average


def warmup_decay(decay: float, n: int) -> float:
    """Decay of step n under warm-up: min(decay, (1 + n) / (10 + n)).

    Young averages forget fast, so that short runs do not end near their initial weights.

    Source: TensorFlow's ExponentialMovingAverage with num_updates.

    Example:
        >>> warmup_decay(0.9999, 0), warmup_decay(0.9999, 90), warmup_decay(0.9999, 10**6)
        (0.1, 0.91, 0.9999)
    """
    return min(decay, (1 + n) / (10 + n))


def span_decay(decay: float, first: int, last: int, warmup: bool = False) -> float:
    """Decay of one update for optimizer steps first, ..., last - 1: the product of theirs."""
    return math.prod(warmup_decay(decay, n) if warmup else decay for n in range(first, last))


@torch.no_grad()
def ema_update_(shadow: Sequence[Tensor], params: Sequence[Tensor], decay: float) -> None:
    """shadow = decay * shadow + (1 - decay) * params, in place.

    In lerp form an average that equals the weights stays exactly there; the form above drifts. Of
    split tensors each rank updates its part. Parameters are copied to the device and dtype of
    their averages first, if those differ.

    Example:
        >>> shadow = [torch.zeros(2)]
        >>> ema_update_(shadow, [torch.ones(2)], decay=0.75)
        >>> shadow
        [tensor([0.2500, 0.2500])]
    """
    averages = [local_part(average) for average in shadow]
    wide = [local_part(p).to(average) for average, p in zip(averages, params, strict=True)]
    torch._foreach_lerp_(averages, wide, 1 - decay)


@torch.no_grad()
def overwrite_(targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy each value into its target, in the target's dtype; of split tensors, part by part."""
    torch._foreach_copy_([local_part(t) for t in targets], [local_part(v) for v in values])


@dataclass
class StoredAverage:
    """Averages of one parameter after `steps` optimizer steps, one for each decay.

    None stands for a decay without an average, which starts from the parameter's value.
    """

    steps: int
    shadows: list[Tensor | None]


@dataclass
class AveragedGroup:
    """The averaged parameters of one optimizer: shadows[d][i] is params[i] averaged by decays[d].

    `span(decay, first, last)` is the decay of one update for steps first, ..., last - 1. With
    `on_cpu` the averages are kept in the CPU's memory.
    """

    decays: tuple[float, ...]
    steps: int = 0
    on_cpu: bool = False
    span: Callable[[float, int, int], float] = span_decay
    names: list[str] = field(default_factory=list)
    params: list[Tensor] = field(default_factory=list)
    shadows: list[list[Tensor]] = field(init=False)

    def __post_init__(self) -> None:
        self.shadows = [[] for _ in self.decays]

    def add(self, name: str, param: Tensor, stored: StoredAverage | None) -> None:
        """Average `param` from now on, in float32 or wider, from what is stored or its value."""
        dtype = torch.promote_types(param.dtype, torch.float32)
        starts = stored.shadows if stored else [None for _ in self.decays]
        for column, start in zip(self.shadows, starts, strict=True):
            part = param if start is None else distribute_like(start, param)
            device = torch.device("cpu") if self.on_cpu else param.device
            column.append(part.detach().to(device, dtype, copy=True))
        self.names.append(name)
        self.params.append(param)

    def restart(self) -> None:
        """Set every average to the current weights."""
        for column in self.shadows if self.params else ():
            overwrite_(column, self.params)

    def advance(self, every_n_steps: int, start: int = 0) -> None:
        """Count an optimizer step, and update the averages if one is due."""
        self.steps += bool(self.params)
        if not self.params or self.steps % every_n_steps:
            return
        last = self.steps - start
        if last <= 0:
            self.restart()
            return
        for decay, column in zip(self.decays, self.shadows, strict=True):
            span = self.span(decay, max(last - every_n_steps, 0), last)
            ema_update_(column, self.params, span)

    def averages(self) -> dict[str, StoredAverage]:
        """The averages by name of the parameter."""
        return {
            name: StoredAverage(self.steps, [column[i] for column in self.shadows])
            for i, name in enumerate(self.names)
        }

    def refuse_nonfinite(self) -> None:
        """Raise FloatingPointError that names the first parameter whose average is not finite."""
        for decay, column in zip(self.decays, self.shadows, strict=True):
            bad = first_nonfinite(column)
            if bad is not None:
                raise FloatingPointError(
                    f"EMA: the average of {self.names[bad]!r} (decay {decay:g}) is not finite "
                    f"after {self.steps} optimizer steps, because the weight was not. Resume from "
                    "an earlier checkpoint with a lower learning rate or gradient clipping."
                )


class RawWeights:
    """Copies of parameters that are about to be overwritten.

    While there are copies, `module.state_dict()` returns them instead of the parameters: every
    checkpoint, full or weights-only, whoever saves it, holds the raw weights.
    """

    def __init__(self) -> None:
        self._copies: dict[Tensor, Tensor] = {}
        self._module: nn.Module | None = None
        self._hook: RemovableHandle | None = None

    @torch.no_grad()
    def save(self, module: nn.Module, params: Iterable[Tensor]) -> None:
        """Copy the parameters, in their own dtype, before they are overwritten."""
        self._module = module
        reshard(module)
        self._copies |= {p: p.detach().clone() for p in params}
        register: Any = module.register_state_dict_post_hook
        self._hook = register(partial(self._put_raw))  # torch sets an attribute on it

    def restore(self) -> None:
        """Write the copies back and drop them; may be called again after an interruption."""
        if self._copies:
            assert self._module is not None
            reshard(self._module)
            overwrite_(list(self._copies), list(self._copies.values()))
        self._copies.clear()
        if self._hook is not None:
            self._hook.remove()

    def _put_raw(
        self, module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any
    ) -> None:
        buffers = module.named_buffers(remove_duplicate=False)
        for name, param in chain(module.named_parameters(remove_duplicate=False), buffers):
            if param in self._copies and prefix + name in state:
                state[prefix + name] = self._copies[param]


# The state in a checkpoint


def pack(averages: Mapping[str, StoredAverage], decays: Sequence[float]) -> dict[str, Any]:
    """The state of an EMA callback, of averages by name."""
    return {
        "decays": list(decays),
        "steps": {name: average.steps for name, average in averages.items()},
        "shadows": [
            {name: average.shadows[d] for name, average in averages.items()}
            for d in range(len(decays))
        ],
    }


def unpack(
    state: Mapping[str, Any], decays: Sequence[float], params: Mapping[str, Tensor]
) -> dict[str, StoredAverage]:
    """Averages by name from the result of `pack`, rearranged for `decays` by `match_decays`.

    Raises:
        ValueError: an average without a parameter, or one of another shape or kind of dtype.
    """
    matches = match_decays(state["decays"], decays)
    for name, shadow in state["shadows"][0].items():
        param = params.get(name)
        if param is None or shadow.shape != param.shape or _kind(shadow) != _kind(param):
            raise ValueError(
                f"The checkpoint's average of {name!r}, {shadow.dtype} {tuple(shadow.shape)}, fits "
                "no parameter of the module. Resume with the module that wrote it."
            )
    return {
        name: StoredAverage(
            steps, [None if i is None else state["shadows"][i][name] for i in matches]
        )
        for name, steps in state["steps"].items()
    }


def _kind(tensor: Tensor) -> tuple[bool, bool]:
    return tensor.is_floating_point(), tensor.is_complex()


def match_decays(stored: Sequence[float], wanted: Sequence[float]) -> list[int | None]:
    """For each wanted decay, the position of the stored average that it continues.

    That is the one of equal decay, else the next one that no wanted decay equals, else None.

    Example:
        >>> match_decays([0.999, 0.9999], [0.9999, 0.99, 0.9])
        [1, 0, None]
    """
    unclaimed = [i for i, decay in enumerate(stored) if decay not in wanted]
    return [
        stored.index(decay) if decay in stored else (unclaimed.pop(0) if unclaimed else None)
        for decay in wanted
    ]


def check_averages(state: Any) -> None:  # noqa: C901 - a list of conditions
    """Raise ValueError for a state that no EMA callback saves; its text follows "as" or ":"."""
    if isinstance(state, dict) and not state:
        return
    if not (isinstance(state, dict) and {"decays", "steps", "shadows"} <= state.keys()):
        raise ValueError("it must hold decays, steps and shadows")
    decays, steps, shadows = state["decays"], state["steps"], state["shadows"]
    numbers = decays if isinstance(decays, list | tuple) else ()
    if not numbers or any(type(d) not in (int, float) or not 0 <= d < 1 for d in numbers):
        raise ValueError(f"its decays must be numbers in [0, 1), and are {decays!r:.50}")
    if not (isinstance(steps, dict) and all(map(_is_count, steps.values()))):
        raise ValueError(f"its steps must be counts by name, and are {steps!r:.50}")
    if not (isinstance(shadows, list | tuple) and len(shadows) == len(decays)):
        raise ValueError("it must hold averages for each decay")
    if not all(isinstance(shadow, dict) and shadow.keys() == steps.keys() for shadow in shadows):
        raise ValueError("it must hold an average of each parameter, by each decay")
    for name, value in chain.from_iterable(shadow.items() for shadow in shadows):
        if not _is_dense_of_real_numbers(value):
            raise ValueError(f"its average of {name} is not of real numbers")
        if (value.shape, value.dtype) != (shadows[0][name].shape, shadows[0][name].dtype):
            raise ValueError(f"its averages of {name} differ in shape or type")
    hashes = state.get("snapshots", {})  # of PowerEMA: SHA-256 by number of updates
    is_table = isinstance(hashes, dict) and all(map(_is_count, hashes))
    if not (is_table and all(isinstance(text, str) for text in hashes.values())):
        raise ValueError(f"its snapshots must be hashes by step, and are {hashes!r:.50}")


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_dense_of_real_numbers(value: Any) -> bool:
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return False
    is_odd = value.is_nested or value.is_quantized or value.is_meta
    return not is_odd and (value.is_floating_point() or value.is_complex())


# The callback


class EMA(pl.Callback):
    """Averages the trainable weights, and validates, tests and predicts with the averages.

    After each step of the optimizer that holds it: shadow = decay * shadow + (1 - decay) * weight.

    - Every parameter under `prefix` that requires a gradient and that an optimizer holds is
      averaged, in float32 or wider: shared ones once, those unfrozen or added later from then on.
      Each optimizer counts its own steps, so the networks of a GAN are averaged at their own pace.
      Accumulated batches and steps that a GradScaler skips do not count.
    - Weights that ModelParallelStrategy splits are averaged part by part. Saves gather the averages
      on rank 0; for this and for `weights()` all ranks are needed.
    - Validation, test and predict use the first decay, swapped in place and back; inside
      `weights(name)`, what that has put in place. Before the first update they use the weights.
    - `LightningModule.state_dict()` is raw, also while averages are in place, and with it every
      checkpoint; read averages from parameters or submodules. Checkpoints hold them under
      `checkpoint["callbacks"][ema.state_key]`, in the form that this file's docstring describes.
    - On resume these arguments win over the checkpoint's; a change of decays is printed.
    - The averages belong to the module object. Where its weights are replaced by hand, use another
      EMA, or give the Trainer a `ckpt_path`.
    - An average that is not finite is refused, by name, where it would be used, saved or logged.

    Args:
        decays: one or more, per optimizer step, in [0, 1). 0.9999 halves the past in 6,931 steps.
        warmup: limit the decay of step n to (1 + n) / (10 + n).
        every_n_steps: optimizer steps from one update to the next, which has their decays' product.
        prefix: submodule that is averaged, such as "network"; "" for all. Two EMA callbacks need
            prefixes of which neither contains the other.
        start: optimizer steps in which the averages are still the weights; `warmup` counts from
            there.
        buffers: whether buffers of floating point numbers under `prefix` are averaged too, such as
            the running statistics of BatchNorm, with each step of the first optimizer that has
            something to average. The vectors of spectral norm stay those of the weights.
        on_cpu: whether averages are kept in the CPU's memory, to which weights are copied at each
            update: slower, and uses no GPU memory.

    Raises:
        ValueError: bad arguments; at the start of a run, a prefix without parameters, overlapping
            EMAs, a strategy that is not supported, or a checkpoint whose averages do not fit.

    Source: Polyak & Juditsky 1992, "Acceleration of stochastic approximation by averaging".

    Example:
        >>> EMA(decays=(0.999, 0.9999)).names()
        ['raw', 'ema', 'ema_0.999', 'ema_0.9999']
    """

    _kind = "ema"

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
        self.decays = (decays,) if isinstance(decays, float) else tuple(decays)
        self.warmup = warmup
        self.every_n_steps = every_n_steps
        self.prefix = prefix.rstrip(".")
        self.start = start
        self.buffers = buffers
        self.on_cpu = on_cpu
        self._names = [RAW, "ema", *(f"{self._kind}_{decay:g}" for decay in self.decays)]
        if not self.decays or not all(0 <= decay < 1 for decay in self.decays):
            raise ValueError(f"decays must be one or more numbers in [0, 1), got {self.decays}.")
        if len(set(self._names)) < len(self._names):
            raise ValueError(f"decays must differ in their first 6 digits, got {self.decays}.")
        if self.every_n_steps < 1:
            raise ValueError(f"every_n_steps must be at least 1, got {self.every_n_steps}.")
        if self.start < 0:
            raise ValueError(f"start must be at least 0, got {self.start}.")
        self._module: pl.LightningModule | None = None
        self._groups: list[AveragedGroup] = []  # one for each optimizer
        self._pending: dict[str, StoredAverage] = {}  # of parameters that are not trained yet
        self._loaded: dict[str, Any] = {}  # state of a checkpoint, until a run starts
        self._handled: dict[int, Tensor] = {}  # parameters that no group has to adopt, by id
        self._hooks: list[RemovableHandle] = []
        self._active = self._outside = RAW  # weights in place: now, and outside of the evaluation
        self._raw = RawWeights()

    @property
    def steps(self) -> int:
        """Optimizer steps since the averages began; of several optimizers, the most."""
        steps = [group.steps for group in self._groups]
        return max([*steps, *(average.steps for average in self._pending.values())], default=0)

    def _span(self, decay: float, first: int, last: int) -> float:
        return span_decay(decay, first, last, self.warmup)

    # Weights by name

    def names(self) -> list[str]:
        """Names of weights: raw, ema (the first decay) and ema_<decay> for each."""
        return list(self._names)

    @contextmanager
    def weights(self, name: str) -> Iterator[None]:
        """Context in which the module's parameters hold the named weights. Contexts may be nested.

        Args:
            name: one of `names()`. Before the first update each of them gives the raw weights.
        """
        if name not in self._names:
            raise ValueError(f"EMA knows the weights {self._names}, got {name!r}.")
        if name != RAW and not self._groups:
            raise RuntimeError(
                f"EMA holds no averages, so there is no {name!r}: fit first, or give the Trainer a "
                "checkpoint that was written with EMA."
            )
        previous = self._active
        try:
            self._activate(name)
            yield
        finally:
            self._activate(previous)

    def _activate(self, name: str) -> None:
        """Put the named weights in place; `_activate(RAW)` also repairs an interrupted call."""
        if name == self._active:
            return
        if name == RAW:
            self._raw.restore()
            self._active = RAW
            return
        self._refresh_buffers()
        updated = [group for group in self._groups if group.steps >= self.every_n_steps]
        for group in updated:
            group.refuse_nonfinite()
        previous, self._active = self._active, name
        if previous == RAW:
            assert self._module is not None
            self._raw.save(self._module, [p for group in updated for p in group.params])
        which = max(self._names.index(name) - 2, 0)
        for group in updated:
            overwrite_(group.params, group.shadows[which])

    def _refuse_averages_in_place(self) -> None:
        if self._active != RAW:
            raise RuntimeError(
                f"The weights {self._active!r} are in place, and what is loaded or trained now "
                "would be lost; leave EMA.weights() first."
            )

    # Following the optimizers

    def _follow(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Average what the optimizers hold, starting from stored averages where there are any."""
        self._forget_if_replaced(trainer)
        from_checkpoint = bool(self._loaded)
        self._pending = self._take_stored(module)
        stored_names = set(self._pending)
        self._unfollow()
        self._groups = [self._new_group() for _ in trainer.optimizers]
        self._handled = {}
        for optimizer, group in zip(trainer.optimizers, self._groups, strict=True):
            refuse_unhooked(optimizer)
            self._adopt(optimizer, group)
            pairs = zip(group.names, group.params, strict=True)
            missing = [n for n, p in pairs if n not in stored_names and isinstance(p, Parameter)]
            if from_checkpoint and missing:
                raise ValueError(
                    f"The checkpoint's EMA holds no average of the parameter {missing[0]!r}, which "
                    "is trained now. Resume with the module that wrote it, or freeze the parameter "
                    "until training has started."
                )
            self._hooks += [
                optimizer.register_step_pre_hook(partial(self._before_step, group)),
                optimizer.register_step_post_hook(partial(self._after_step, group)),
            ]
        if not any(group.params for group in self._groups):
            pl.utilities.rank_zero_warn(
                f"No optimizer holds a trainable parameter under EMA(prefix={self.prefix!r}) yet: "
                "there is nothing to average until one does."
            )

    def _unfollow(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _new_group(self, steps: int = 0) -> AveragedGroup:
        return AveragedGroup(self.decays, steps, self.on_cpu, self._span)

    def _take_stored(self, module: pl.LightningModule) -> dict[str, StoredAverage]:
        """Averages of the checkpoint, else of an earlier run on the same module, by name."""
        self._refuse_averages_in_place()
        state = self._loaded or (self._packed() if module is self._module else {})
        self._module = module
        params = self._averaged_tensors()
        self._loaded = {}
        if not state:
            return {}
        self._print_changes(state["decays"])
        stored = unpack(state, self.decays, self._named_buffers() | params)
        if dropped := stored.keys() - params.keys():
            text = f"EMA averages no such buffers: {len(dropped)} averages are dropped."
            pl.utilities.rank_zero_info(text)
        buffers = [name for name, p in params.items() if not isinstance(p, Parameter)]
        if new := [name for name in buffers if name not in stored]:
            text = f"EMA(buffers=True): averages of {len(new)} buffers start from these."
            pl.utilities.rank_zero_info(text)
        return {name: average for name, average in stored.items() if name in params}

    def _print_changes(self, stored: Sequence[float]) -> None:
        matches, changes = match_decays(stored, self.decays), []
        for decay, i in zip(self.decays, matches, strict=True):
            if i is None:
                changes.append(f"EMA decay {decay:g} is new: its average starts from the weights.")
            elif stored[i] != decay:
                changes.append(f"EMA decay: the checkpoint had {stored[i]:g}, using {decay:g}.")
        dropped = [stored[i] for i in range(len(stored)) if i not in matches]
        for change in changes + [f"EMA decay {d:g} of the checkpoint is dropped." for d in dropped]:
            pl.utilities.rank_zero_info(change)

    def _adopt(self, optimizer: Optimizer, group: AveragedGroup) -> None:
        """Start to average parameters that the optimizer trains and no group has."""
        new = {
            id(param): param
            for entry in optimizer.param_groups
            for param in entry["params"]
            if id(param) not in self._handled and param.requires_grad
        }
        if not new:
            return
        self._handled |= new
        for name, param in self._averaged_tensors().items():
            if id(param) in new:
                stored = self._pending.pop(name, None)
                if stored:
                    group.steps = max(group.steps, stored.steps)
                group.add(name, param, stored)
        averaged = {name for each in self._groups for name in each.names}
        for name, buffer in self._averaged_buffers().items() if group.params else ():
            if name not in averaged:
                group.add(name, buffer, self._pending.pop(name, None))

    def _averaged_tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers under the prefix, by the name without torch.compile."""
        assert self._module is not None
        reshard(self._module)
        params: dict[str, Tensor] = {
            _uncompiled(name): param for name, param in self._module.named_parameters()
        }
        averaged = {name: param for name, param in params.items() if _is_under(name, self.prefix)}
        if not averaged:
            children = sorted({name.split(".")[0] for name in params})
            raise ValueError(
                f"EMA(prefix={self.prefix!r}) fits no parameter; the module's are under {children}."
            )
        return averaged | self._averaged_buffers()

    def _averaged_buffers(self) -> dict[str, Tensor]:
        """Buffers of floating point numbers that checkpoints hold; no masks of -inf.

        The singular vectors of spectral norm are not averaged: sums of unit vectors are shorter.
        """
        assert self._module is not None
        if not self.buffers:
            return {}
        saved = {_uncompiled(name) for name in self._module.state_dict()}
        return {
            name: buffer
            for name, buffer in self._named_buffers().items()
            if name in saved and _is_under(name, self.prefix)
            if buffer.is_floating_point() and buffer.isfinite().all()
            if not _is_singular_vector(name, saved)
        }

    def _named_buffers(self) -> dict[str, Tensor]:
        assert self._module is not None
        return {_uncompiled(name): buffer for name, buffer in self._module.named_buffers()}

    def _refresh_buffers(self) -> None:
        """Find buffers again that the module has replaced, as `.to(device)` does, by name."""
        if self.buffers:
            now = self._named_buffers()
            for group in self._groups:
                pairs = zip(group.names, group.params, strict=True)
                group.params = [now.get(name, param) for name, param in pairs]

    def _before_step(
        self, group: AveragedGroup, optimizer: Optimizer, _args: Any, kwargs: Any
    ) -> None:
        if is_state_init_step(optimizer, kwargs):
            return
        self._refuse_averages_in_place()
        self._adopt(optimizer, group)
        if group.steps == 0:
            group.restart()  # weights may have been loaded after fit start

    def _after_step(
        self, group: AveragedGroup, optimizer: Optimizer, _args: Any, kwargs: Any
    ) -> None:
        # A GradScaler has fused optimizers skip a step inside, and does not call step() of others.
        params = (param for entry in optimizer.param_groups for param in entry["params"])
        skipped = getattr(optimizer, "found_inf", None) or all(p.grad is None for p in params)
        if not skipped and not is_state_init_step(optimizer, kwargs):
            self._refresh_buffers()
            group.advance(self.every_n_steps, self.start)

    # State

    @property
    def state_key(self) -> str:
        """Key in `checkpoint["callbacks"]`; without the decays, which may change on resume."""
        return f"{type(self).__qualname__}{ {'prefix': self.prefix} }"

    def state_dict(self) -> dict[str, Any]:
        """The averages as `pack` arranges them; empty where there are none.

        Of split weights, whole averages on rank 0 and {} on the others; then collective.
        """
        return gather_state(self._packed())

    def _packed(self) -> dict[str, Any]:
        if self._loaded or not self._groups:
            return self._loaded  # unchanged, if a save comes before the run begins
        averages = dict(self._pending)
        for group in self._groups:
            group.refuse_nonfinite()
            averages |= group.averages()
        return pack(averages, self.decays)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the averages for the run that starts; during a run, go back to them."""
        try:
            check_averages(state_dict)
        except ValueError as error:
            raise ValueError(f"The checkpoint's state of EMA is damaged: {error}.") from None
        self._loaded = state_dict
        if self._hooks:  # restored during a fit, as by a search for an lr when it is done
            assert self._module is not None
            self._follow(self._module.trainer, self._module)

    # Lightning hooks

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse what cannot work before anything is loaded."""
        self._loaded = {}
        refuse_strategy(trainer, "EMA")
        for other in trainer.callbacks:  # type: ignore[attr-defined]
            if not isinstance(other, EMA) or other is self:
                continue
            if _is_under(self.prefix, other.prefix) or _is_under(other.prefix, self.prefix):
                raise ValueError(
                    f"EMA(prefix={self.prefix!r}) and EMA(prefix={other.prefix!r}) average the "
                    "same parameters; give one EMA several decays instead."
                )

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Create the averages on the module's device, or take those of the checkpoint."""
        for callback in trainer.checkpoint_callbacks:
            kind = pl.callbacks.ModelCheckpoint
            if isinstance_lightning(callback, kind) and callback.save_weights_only:
                pl.utilities.rank_zero_warn(
                    "ModelCheckpoint(save_weights_only=True) writes the raw weights only; the "
                    "averages of EMA will not be in its files."
                )
        refuse_split_weights(trainer, pl_module, "EMA")
        self._unfollow()
        if not trainer.strategy.restore_checkpoint_after_setup:
            self._follow(trainer, pl_module)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin under a strategy that has read the checkpoint only now."""
        if trainer.strategy.restore_checkpoint_after_setup and not self._hooks:
            self._follow(trainer, pl_module)

    on_sanity_check_start = on_train_start

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        """Log the decay, and check the averages, as often as Lightning logs."""
        if self.steps and should_log(trainer):
            for group in self._groups:
                group.refuse_nonfinite()
            n = self.steps - self.start
            decay = self._span(self.decays[0], n - 1, n) if n > 0 else 0.0
            pl_module.log(f"ema/decay_{self.prefix}" if self.prefix else "ema/decay", decay)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Warn if no step was seen."""
        if trainer.global_step and not any(group.steps for group in self._groups):
            pl.utilities.rank_zero_warn(
                f"EMA saw none of {trainer.global_step} optimizer steps, so there are no averages. "
                "An optimizer that steps another one inside it, or clears gradients as it steps, "
                "hides its steps."
            )

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Validate, test and predict with the averages."""
        if trainer.state.fn != pl.trainer.states.TrainerFn.FITTING:
            self._forget_if_replaced(trainer)
            if self._loaded or pl_module is not self._module:
                self._take_stored_to_evaluate(pl_module)
        self._outside = self._active
        if not self._groups:
            pl.utilities.rank_zero_warn(
                "EMA holds no averages (none in the checkpoint, or neither a checkpoint nor a fit "
                "before): the weights are used as they are."
            )
        elif self._active == RAW:
            self._activate("ema")

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Put the weights back."""
        self._activate(self._outside)

    on_test_start = on_predict_start = on_validation_start
    on_test_end = on_predict_end = on_validation_end

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """Put the raw weights back and release the optimizers."""
        self._activate(RAW)
        self._unfollow()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Release the optimizers."""
        self._unfollow()

    def _forget_if_replaced(self, trainer: pl.Trainer) -> None:
        """Drop averages in memory if the weights come from a checkpoint without averages."""
        if trainer.ckpt_path is not None and not self._loaded:
            self._module, self._groups, self._pending = None, [], {}

    def _take_stored_to_evaluate(self, module: pl.LightningModule) -> None:
        stored = self._take_stored(module)
        params = self._averaged_tensors()
        groups: dict[int, AveragedGroup] = {}  # by steps, as there are no optimizers
        for name, average in stored.items():
            group = groups.setdefault(average.steps, self._new_group(average.steps))
            group.add(name, params[name], average)
        self._groups = list(groups.values())
        self._pending = {}


def _uncompiled(name: str) -> str:
    return name.replace("_orig_mod.", "")


def _is_under(name: str, prefix: str) -> bool:
    return prefix in ("", name) or name.startswith(prefix + ".")


def _is_singular_vector(name: str, saved: Collection[str]) -> bool:
    """Whether a buffer belongs to torch's spectral norm, as a parametrization or as a hook."""
    if name[-2:] not in ("_u", "_v"):
        return False
    return ".parametrizations." in f".{name}" or f"{name[:-2]}_orig" in saved
