"""Reads the averages of weights that EMA callbacks saved in a checkpoint.

Their state is {} or {"decays": [float], "steps": {name: int}, "shadows": one {name: Tensor} for
each decay} (callbacks/ema.py); of PowerEMA with "snapshots": {int: str}, the SHA-256 of each
snapshot file by number of updates.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from lit_diffusion.callbacks.ema import check_averages

_KINDS = {"EMA": "ema", "PowerEMA": "power"}
"""Callback -> what the names of its averages begin with."""


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
