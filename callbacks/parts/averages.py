"""How an average of weights moves, and how it takes their place; ema.py says when."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lit_diffusion.callbacks.trainer_state import (
    distribute_like,
    first_nonfinite,
    local_part,
    reshard,
)
from lit_diffusion.checkpoints.averages import Averaged


def warmup_decay(decay: float, n: int) -> float:
    """Decay of step n under warm-up: min(decay, (1 + n) / (10 + n)).

    Young averages forget fast, so that short runs do not end near their initial weights.

    Source: TensorFlow's ExponentialMovingAverage with num_updates.

    Example:
        >>> warmup_decay(0.9999, 0), warmup_decay(0.9999, 90), warmup_decay(0.9999, 10**6)
        (0.1, 0.91, 0.9999)
    """
    return min(decay, (1 + n) / (10 + n))


def span_decay(decay: float, first: int, last: int, warmup: bool) -> float:
    """Decay of one update for optimizer steps first, ..., last - 1: the product of theirs."""
    return math.prod(warmup_decay(decay, n) if warmup else decay for n in range(first, last))


def plain_decay(decay: float, first: int, last: int) -> float:
    """Of one update for optimizer steps first, ..., last - 1, without warm-up."""
    return span_decay(decay, first, last, warmup=False)


@torch.no_grad()
def ema_update_(shadow: Sequence[Tensor], params: Sequence[Tensor], decay: float) -> None:
    """shadow = decay * shadow + (1 - decay) * params, in place.

    In lerp form an average that equals the weights stays exactly there; the form above drifts. Of
    split tensors each rank updates its part; parameters come to the device and precision of their
    averages first.

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
    """Copy each value into its target, in the target's dtype; of split ones, part by part."""
    torch._foreach_copy_([local_part(t) for t in targets], [local_part(v) for v in values])


@dataclass
class Group:
    """The averaged parameters of one optimizer: shadows[d][i] averages params[i] under decay d.

    `span` gives the decay of an update for steps first, ..., last - 1, of decay d. With `on_cpu`
    the averages are kept there.
    """

    decays: tuple[float, ...]
    steps: int = 0
    on_cpu: bool = False
    span: Callable[[float, int, int], float] = plain_decay
    names: list[str] = field(default_factory=list)
    params: list[Tensor] = field(default_factory=list)
    shadows: list[list[Tensor]] = field(init=False)

    def __post_init__(self) -> None:
        self.shadows = [[] for _ in self.decays]

    def add(self, name: str, param: Tensor, known: Averaged | None) -> None:
        """Average `param` from now on, starting from its known averages or else from its value."""
        dtype = torch.promote_types(param.dtype, torch.float32)
        starts = known.shadows if known else [None for _ in self.decays]
        for column, start in zip(self.shadows, starts, strict=True):
            part = param if start is None else distribute_like(start, param)
            device = torch.device("cpu") if self.on_cpu else param.device
            column.append(part.detach().to(device, dtype, copy=True))
        self.names.append(name)
        self.params.append(param)

    def restart(self) -> None:
        """Set every average to the weights as they are."""
        for column in self.shadows if self.params else ():
            overwrite_(column, self.params)

    def advance(self, every_n_steps: int, start: int = 0) -> None:
        """Count a step of the optimizer, and update where one is due; of none while it is empty."""
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

    def averages(self) -> dict[str, Averaged]:
        """By name of the parameter."""
        return {
            name: Averaged(self.steps, [column[i] for column in self.shadows])
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
    """Copies of parameters that are about to be overwritten, and the way back.

    While anything is kept, `module.state_dict()` shows the copies: every checkpoint, full or
    weights-only, whoever saves it, gets the raw weights.
    """

    def __init__(self) -> None:
        self._copies: dict[Tensor, Tensor] = {}
        self._module: nn.Module | None = None
        self._hook: RemovableHandle | None = None

    @torch.no_grad()
    def keep(self, module: nn.Module, params: Iterable[Tensor]) -> None:
        """Copy the parameters, in their own dtype, before they are overwritten."""
        self._module = module
        reshard(module)
        self._copies |= {p: p.detach().clone() for p in params}
        register: Any = module.register_state_dict_post_hook
        self._hook = register(partial(self._show))  # which torch puts a mark on

    def put_back(self) -> None:
        """Write the copies back and drop them; after an interruption at any instant, once more."""
        if self._copies:
            assert self._module is not None
            reshard(self._module)
            overwrite_(list(self._copies), list(self._copies.values()))
        self._copies.clear()
        if self._hook is not None:
            self._hook.remove()

    def _show(self, module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
        buffers = module.named_buffers(remove_duplicate=False)
        for name, param in chain(module.named_parameters(remove_duplicate=False), buffers):
            if param in self._copies and prefix + name in state:
                state[prefix + name] = self._copies[param]
