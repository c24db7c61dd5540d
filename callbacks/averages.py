"""How an average of weights moves and how it is stored, without Lightning; ema.py says when."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lit_diffusion.callbacks.finite import first_nonfinite
from lit_diffusion.sharding import is_split, local, split_like


def warmup_decay(decay: float, n: int) -> float:
    """Decay of step n under warm-up: min(decay, (1 + n) / (10 + n)).

    Young averages forget fast, so that short runs do not end near their initial weights.

    Args:
        decay: per optimizer step, in [0, 1); 0.999 is reached at n = 8,990, 0.9999 at 89,990.
        n: optimizer steps completed before this one.

    Source: TensorFlow's ExponentialMovingAverage with num_updates.

    Example:
        >>> warmup_decay(0.9999, 0), warmup_decay(0.9999, 90), warmup_decay(0.9999, 10**6)
        (0.1, 0.91, 0.9999)
    """
    return min(decay, (1 + n) / (10 + n))


def span_decay(decay: float, first: int, last: int, warmup: bool) -> float:
    """Decay of one update for optimizer steps first, ..., last - 1: the product of theirs.

    On weights that stand still, one update for k steps therefore equals k updates.

    Example:
        >>> span_decay(0.5, 100, 103, warmup=True)
        0.125
    """
    return math.prod(warmup_decay(decay, n) if warmup else decay for n in range(first, last))


@torch.no_grad()
def ema_update_(shadow: Sequence[Tensor], params: Sequence[Tensor], decay: float) -> None:
    """shadow = decay * shadow + (1 - decay) * params, in place.

    In lerp form an average that equals the weights stays exactly there; the form above drifts.

    Args:
        shadow: tensors of any shapes, float32 or wider; of split ones, each rank updates its part.
        params: tensors of the same shapes, split alike; lower precisions are widened first.
        decay: in [0, 1].

    Example:
        >>> shadow = [torch.zeros(2)]
        >>> ema_update_(shadow, [torch.ones(2)], decay=0.75)
        >>> shadow
        [tensor([0.2500, 0.2500])]
    """
    averages = [local(average) for average in shadow]
    wide = [local(p).to(average.dtype) for average, p in zip(averages, params, strict=True)]
    torch._foreach_lerp_(averages, wide, 1 - decay)


@torch.no_grad()
def overwrite_(targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy each value into its target, in the target's dtype; of split ones, part by part."""
    torch._foreach_copy_([local(t) for t in targets], [local(v) for v in values])


def match_decays(stored: Sequence[float], wanted: Sequence[float]) -> list[int | None]:
    """For each wanted decay, which stored average it continues.

    The one of equal decay, else the next that nobody claims, else None.

    Example:
        >>> match_decays([0.999, 0.9999], [0.9999, 0.99, 0.9])
        [1, 0, None]
    """
    unclaimed = [i for i, decay in enumerate(stored) if decay not in wanted]
    return [
        stored.index(decay) if decay in stored else (unclaimed.pop(0) if unclaimed else None)
        for decay in wanted
    ]


def changed_decays(stored: Sequence[float], wanted: Sequence[float]) -> list[str]:
    """What `match_decays` changes, a sentence each.

    Example:
        >>> changed_decays([0.999], [0.99])
        ['EMA decay: the checkpoint had 0.999, using 0.99.']
    """
    matches, told = match_decays(stored, wanted), []
    for decay, i in zip(wanted, matches, strict=True):
        if i is None:
            told.append(f"EMA decay {decay:g} is new: its average starts from the weights.")
        elif stored[i] != decay:
            told.append(f"EMA decay: the checkpoint had {stored[i]:g}, using {decay:g}.")
    dropped = sorted(set(range(len(stored))) - set(matches))
    return told + [f"EMA decay {stored[i]:g} of the checkpoint is dropped." for i in dropped]


@dataclass
class Average:
    """Averages of one parameter, one for each decay; None stands for its value as it is.

    `steps` counts the optimizer steps that they have seen.
    """

    steps: int
    shadows: list[Tensor | None]


@dataclass
class Group:
    """The averaged parameters of one optimizer: shadows[d][i] averages params[i] under decay d."""

    decays: tuple[float, ...]
    steps: int = 0
    names: list[str] = field(default_factory=list)
    params: list[Tensor] = field(default_factory=list)
    shadows: list[list[Tensor]] = field(init=False)

    def __post_init__(self) -> None:
        self.shadows = [[] for _ in self.decays]

    def add(self, name: str, param: Tensor, known: Average | None) -> None:
        """Average `param` from now on, starting from its known averages or else from its value."""
        starts = known.shadows if known else [None for _ in self.decays]
        for column, start in zip(self.shadows, starts, strict=True):
            column.append(_shadow(param, param if start is None else start))
        self.names.append(name)
        self.params.append(param)

    def restart(self) -> None:
        """Set every average to the weights as they are."""
        for column in self.shadows:
            overwrite_(column, self.params)

    def advance(self, every_n_steps: int, warmup: bool) -> None:
        """Count a step of the optimizer, and update where one is due."""
        self.steps += 1
        if self.steps % every_n_steps:
            return
        for decay, column in zip(self.decays, self.shadows, strict=True):
            span = span_decay(decay, self.steps - every_n_steps, self.steps, warmup)
            ema_update_(column, self.params, span)

    def averages(self) -> dict[str, Average]:
        """By name of the parameter."""
        return {
            name: Average(self.steps, [column[i] for column in self.shadows])
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


def pack(averages: Mapping[str, Average], decays: Sequence[float]) -> dict[str, Any]:
    """Averages as tensors and builtins, for a checkpoint.

    Returns:
        {"decays": [float], "steps": {name: int}, "shadows": one {name: Tensor} for each decay}.
    """
    return {
        "decays": list(decays),
        "steps": {name: average.steps for name, average in averages.items()},
        "shadows": [
            {name: average.shadows[d] for name, average in averages.items()}
            for d in range(len(decays))
        ],
    }


def unpack(
    state: Mapping[str, Any], decays: Sequence[float], params: Mapping[str, nn.Parameter]
) -> dict[str, Average]:
    """Averages from `pack`, arranged for other decays by `match_decays`.

    Raises:
        ValueError: an average has no parameter, or one of another shape.
    """
    matches = match_decays(state["decays"], decays)
    for name, shadow in state["shadows"][0].items():
        _refuse_misfit(name, shadow, params.get(name))
    return {
        name: Average(steps, [None if i is None else state["shadows"][i][name] for i in matches])
        for name, steps in state["steps"].items()
    }


def _shadow(param: Tensor, value: Tensor) -> Tensor:
    """A copy of `value` on the device of `param` and split as it is, float32 or wider."""
    dtype = torch.promote_types(param.dtype, torch.float32)
    part = value if is_split(value) else split_like(value, param)
    return part.detach().to(param.device, dtype, copy=True)


def _refuse_misfit(name: str, shadow: Tensor, param: nn.Parameter | None) -> None:
    if param is None:
        raise ValueError(
            f"The checkpoint's EMA holds an average of {name!r}, which the module does not have. "
            "Resume with the module that wrote it."
        )
    if shadow.shape != param.shape:
        raise ValueError(
            f"The checkpoint's average of {name!r} has shape {tuple(shadow.shape)}, the parameter "
            f"{tuple(param.shape)}. Resume with the module that wrote it."
        )
