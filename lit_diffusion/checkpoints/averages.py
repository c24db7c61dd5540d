"""Averages of weights as checkpoints hold them: no other file knows how.

The state of an EMA callback is {} or {"decays": [float], "steps": {name: int}, "shadows": one
{name: Tensor} for each decay}; of PowerEMA with "snapshots": {int: str} of those that were written,
SHA-256 by number of updates.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from lit_diffusion.checkpoints.reading import is_count, is_dense_tensor, number_kind

_KINDS = {"EMA": "ema", "PowerEMA": "power"}
"""Callback -> what the names of its averages begin with."""


@dataclass
class Averaged:
    """Averages of one parameter, which have seen `steps` optimizer steps, one for each decay.

    None stands for its value as it is.
    """

    steps: int
    shadows: list[Tensor | None]


def pack(averages: Mapping[str, Averaged], decays: Sequence[float]) -> dict[str, Any]:
    """The state of an EMA callback."""
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
) -> dict[str, Averaged]:
    """Averages from `pack`, arranged for other decays by `match_decays`.

    Raises:
        ValueError: an average has no parameter, or one of another shape or kind of numbers.
    """
    matches = match_decays(state["decays"], decays)
    for name, shadow in state["shadows"][0].items():
        param = params.get(name)
        if (
            param is None
            or shadow.shape != param.shape
            or number_kind(shadow) != number_kind(param)
        ):
            raise ValueError(
                f"The checkpoint's average of {name!r}, {shadow.dtype} {tuple(shadow.shape)}, fits "
                "no parameter of the module. Resume with the module that wrote it."
            )
    return {
        name: Averaged(steps, [None if i is None else state["shadows"][i][name] for i in matches])
        for name, steps in state["steps"].items()
    }


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


def changed_decays(state: Mapping[str, Any], wanted: Sequence[float]) -> list[str]:
    """What `match_decays` changes of a callback's state, a sentence each.

    Example:
        >>> changed_decays({"decays": [0.999]}, [0.99])
        ['EMA decay: the checkpoint had 0.999, using 0.99.']
    """
    stored = state["decays"]
    matches, changes = match_decays(stored, wanted), []
    for decay, i in zip(wanted, matches, strict=True):
        if i is None:
            changes.append(f"EMA decay {decay:g} is new: its average starts from the weights.")
        elif stored[i] != decay:
            changes.append(f"EMA decay: the checkpoint had {stored[i]:g}, using {decay:g}.")
    dropped = sorted(set(range(len(stored))) - set(matches))
    return changes + [f"EMA decay {stored[i]:g} of the checkpoint is dropped." for i in dropped]


def check_averages(state: Any) -> None:
    """Refuse what no EMA callback saves: says what is wrong, without the file's name."""
    if isinstance(state, dict) and not state:
        return
    if not (isinstance(state, dict) and {"decays", "steps", "shadows"} <= state.keys()):
        raise ValueError("it must hold decays, steps and shadows")
    decays, steps, shadows = state["decays"], state["steps"], state["shadows"]
    if not (isinstance(decays, list | tuple) and decays and all(map(_is_decay, decays))):
        raise ValueError(f"its decays must be numbers in [0, 1), and are {decays!r:.50}")
    if not (isinstance(steps, dict) and all(map(is_count, steps.values()))):
        raise ValueError(f"its steps must be counts by name, and are {steps!r:.50}")
    if not (isinstance(shadows, list | tuple) and len(shadows) == len(decays)):
        raise ValueError("it must hold averages for each decay")
    for shadow in shadows:
        _check_shadow(shadow, steps, shadows[0])
    taken = state.get("snapshots", {})
    if not (isinstance(taken, dict) and all(map(is_count, taken)) and _are_texts(taken.values())):
        raise ValueError(f"its snapshots must be hashes by step, and are {taken!r:.50}")


def find_averages(checkpoint: Mapping[str, Any], path: str | Path) -> list[dict[str, Any]]:
    """The states of EMA callbacks that hold averages in the checkpoint of the file `path`."""
    return [state for _, state in _averages_in(checkpoint, path)]


def _averages_in(
    checkpoint: Mapping[str, Any], path: str | Path
) -> list[tuple[str, dict[str, Any]]]:
    """What the names of averages begin with, and the averages."""
    found = []
    for key, state in checkpoint.get("callbacks", {}).items():
        kind = _KINDS.get(key.partition("{")[0])
        if kind is not None:
            try:
                check_averages(state)
            except ValueError as error:
                raise ValueError(
                    f"{path} is damaged: the state of {key} in it holds no averages, as {error}."
                ) from None
            found.append((kind, state))
    return [(kind, state) for kind, state in found if state]


def average_names(checkpoint: Mapping[str, Any], path: str | Path) -> list[str]:
    """Names of the averages in a checkpoint."""
    found = _averages_in(checkpoint, path)
    return [f"{kind}_{decay:g}" for kind, state in found for decay in state["decays"]]


def read_power_averages(
    checkpoint: Mapping[str, Any], path: str | Path
) -> tuple[int, dict[float, dict[str, Tensor]], dict[int, str]]:
    """How often the averages of PowerEMA were updated, these by width, and the known snapshots.

    0, {} and {} without.
    """
    states = [state for kind, state in _averages_in(checkpoint, path) if kind == "power"]
    averages: dict[float, dict[str, Tensor]] = {}
    for state in states:
        for width, shadow in zip(state["decays"], state["shadows"], strict=True):
            averages.setdefault(width, {}).update(shadow)
    steps = max((n for state in states for n in state["steps"].values()), default=0)
    taken = {step: sha for state in states for step, sha in state.get("snapshots", {}).items()}
    return steps, averages, taken


def select_averages(
    checkpoint: Mapping[str, Any], weights: str, path: str | Path
) -> tuple[str, dict[str, Tensor]]:
    """The unambiguous name of the weights "raw", "ema" or "ema_<decay>", and the averages in them.

    `path` is of the file, for messages.
    """
    if weights == "raw":
        return "raw", {}
    averages, chosen, known = {}, [], ["raw"]
    for kind, state in _averages_in(checkpoint, path):
        names = [f"{kind}_{decay:g}" for decay in state["decays"]]
        known += names
        name = names[0] if weights == "ema" else weights
        if name in names:
            averages.update(state["shadows"][names.index(name)])
            chosen.append(name)
    if not chosen:
        raise ValueError(f"{path} has no weights {weights!r}; it has {', '.join(known)}.")
    return "+".join(dict.fromkeys(chosen)), averages


def _check_shadow(shadow: Any, steps: Mapping[str, int], first: Mapping[str, Tensor]) -> None:
    if not (isinstance(shadow, dict) and shadow.keys() == steps.keys()):
        raise ValueError("it must hold an average of each parameter, by each decay")
    for name, value in shadow.items():
        if not (is_dense_tensor(value) and (value.is_floating_point() or value.is_complex())):
            raise ValueError(f"its average of {name} is not of real numbers")
        if (value.shape, value.dtype) != (first[name].shape, first[name].dtype):
            raise ValueError(f"its averages of {name} differ in shape or type")


def _are_texts(values: Iterable[Any]) -> bool:
    return all(isinstance(value, str) for value in values)


def _is_decay(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < 1
