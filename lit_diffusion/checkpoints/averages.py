"""Read averages of weights (EMA) from checkpoints and snapshots, and write snapshots.

The file callbacks/ema.py describes the state of `EMA` in a checkpoint. During training, `PowerEMA`
also writes snapshots, which are files with its averages. The state of `PowerEMA` in a checkpoint
has an additional entry "snapshots": {number of updates: SHA-256 of the snapshot}. From snapshots,
this module reconstructs averages with widths that `PowerEMA` did not compute.
"""

from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from lit_diffusion.callbacks.ema import check_averages
from lit_diffusion.ema_profiles import coefficients, exponent
from lit_diffusion.files import atomic_write, check_regular

_NAME_PREFIXES = {"EMA": "ema", "PowerEMA": "power"}
"""Name of a callback -> prefix of the names of its averages."""

Averages = Mapping[float, Mapping[str, Tensor]]
"""Relative width -> parameter name -> average."""

SNAPSHOT_FOLDER = "ema-snapshots"

MAX_PROFILE_ERROR = 0.1
"""Maximum relative distance between the reconstructed and the requested averaging profile. Two
profiles whose widths differ by an eighth have this distance."""


# Averages in checkpoints


def average_names(checkpoint: Mapping[str, Any], path: str | Path) -> list[str]:
    """List the names of the averages in a checkpoint, such as "ema_0.999".

    If the state of an EMA callback is damaged, a ValueError names the path.
    """
    return [name for names, _ in _named_states(checkpoint, path) for name in names]


def select_weights(
    checkpoint: Mapping[str, Any], weights: str, path: Path
) -> tuple[str, dict[str, Tensor]]:
    """Select weights of a checkpoint by name, or reconstruct them from the run's snapshots.

    Args:
        checkpoint: content of the checkpoint.
        weights: "raw" for the trained weights, "ema" for the first average, or the name of an
            average. If the run used `PowerEMA`, the name can also be "power_<width>" with any width
            that can be reconstructed from snapshots.
        path: path of the checkpoint. Snapshots are read from its run folder.

    Returns:
        The full name of the weights, and a dictionary from parameter name to average. For "raw",
        the dictionary is empty.

    Raises:
        ValueError: if the checkpoint does not have the requested weights. The message lists the
            available weights.
    """
    if weights == "raw":
        return "raw", {}
    averages: dict[str, Tensor] = {}
    selected, available = [], ["raw"]
    if weights.startswith("power_"):
        step, last, hashes = read_power_averages(checkpoint, path)
        if last:
            try:
                width = float(weights.removeprefix("power_"))
            except ValueError:
                raise ValueError(f"weights must be power_<width>, got {weights!r}.") from None
            weights = f"power_{width:g}"
            if weights not in average_names(checkpoint, path):
                folder = path.absolute().parent.parent / SNAPSHOT_FOLDER
                return weights, reconstruct_average(folder, width, step, last, hashes)
    for names, state in _named_states(checkpoint, path):
        available += names
        name = names[0] if weights == "ema" else weights
        if name in names:
            averages.update(state["shadows"][names.index(name)])
            selected.append(name)
    if not selected:
        raise ValueError(f"{path} has no weights {weights!r}; it has {', '.join(available)}.")
    return "+".join(dict.fromkeys(selected)), averages


def read_power_averages(
    checkpoint: Mapping[str, Any], path: str | Path
) -> tuple[int, dict[float, dict[str, Tensor]], dict[int, str]]:
    """Read the averages of PowerEMA in a checkpoint.

    Returns:
        The number of updates, the averages (width -> parameter name -> average), and the SHA-256 of
        each snapshot (number of updates -> SHA-256). Without `PowerEMA`, the result is (0, {}, {}).
    """
    step, averages, hashes = 0, dict[float, dict[str, Tensor]](), dict[int, str]()
    for names, state in _named_states(checkpoint, path):
        if names[0].startswith("power"):
            step = max([step, *state["steps"].values()])
            for width, shadow in zip(state["decays"], state["shadows"], strict=True):
                averages.setdefault(width, {}).update(shadow)
            hashes |= state.get("snapshots", {})
    return step, averages, hashes


def _named_states(
    checkpoint: Mapping[str, Any], path: str | Path
) -> list[tuple[list[str], dict[str, Any]]]:
    """Return the names of the averages and the state of each EMA callback that has averages."""
    states = []
    for key, state in checkpoint.get("callbacks", {}).items():
        if prefix := _NAME_PREFIXES.get(key.partition("{")[0]):
            try:
                check_averages(state)
            except ValueError as error:
                raise ValueError(
                    f"{path} is damaged: the state of {key} in it holds no averages: {error}."
                ) from None
            if state:
                states.append(([f"{prefix}_{decay:g}" for decay in state["decays"]], state))
    return states


# Averages in snapshots


def write_snapshot(folder: Path, step: int, averages: Averages) -> str:
    """Write the averages after `step` updates to a file atomically. Return the file's SHA-256."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"{width:g}/{name}": value.detach().cpu().contiguous()
        for width, parameters in averages.items()
        for name, value in parameters.items()
    }
    content = save(tensors)
    with atomic_write(folder / f"step-{step:09d}.safetensors") as file:
        file.write(content)
    return sha256(content).hexdigest()


def list_snapshots(folder: Path) -> dict[int, Path]:
    """Map the number of updates of each snapshot to its file, in ascending order."""
    return {int(f.stem[5:]): f for f in sorted(folder.glob("step-" + 9 * "[0-9]" + ".safetensors"))}


def delete_snapshots_after(folder: Path, step: int) -> int:
    """Delete snapshots written after more than `step` updates. Return how many were deleted."""
    later = [file for number, file in list_snapshots(folder).items() if number > step]
    for file in later:
        file.unlink()
    return len(later)


def reconstruct_average(
    folder: Path, width: float, step: int, last: Averages, hashes: Mapping[int, str]
) -> dict[str, Tensor]:
    """Reconstruct the average with a given relative width after `step` updates.

    The average is a linear combination of averages with other widths: the averages after `step`
    updates, and the averages in earlier snapshots. The result has one tensor per parameter name.

    Args:
        folder: folder of the snapshots.
        width: relative width of the average to reconstruct.
        step: number of updates after which to reconstruct the average.
        last: averages with other widths after `step` updates.
        hashes: SHA-256 of the run's snapshots, by number of updates.

    Raises:
        ValueError: if the width is invalid or cannot be reconstructed, or if a snapshot is damaged
            or belongs to a different run or to different weights.

    Source: Karras et al. 2024 (EDM2, arXiv 2312.02696), section 3.2.
    """
    files = {number: file for number, file in list_snapshots(folder).items() if number < step}
    for number, file in files.items():
        if hashes.get(number) != sha256(check_regular(file).read_bytes()).hexdigest():
            raise ValueError(
                f"{file} is not the snapshot that the checkpoint's run wrote at step {number}: it "
                "is damaged, or belongs to another run. Delete it, or restore the right file."
            )
    sources = [(number, w) for number, file in files.items() for w in _read_widths(file)]
    sources += [(step, w) for w in last]
    steps, widths = zip(*sources, strict=True)
    factors, distance = coefficients(steps, list(map(exponent, widths)), step, exponent(width))
    if distance > MAX_PROFILE_ERROR:
        raise ValueError(
            f"the width {width:g} at step {step} cannot be reconstructed from {len(files)} "
            f"snapshots in {folder}: the error of the nearest profile is {distance:.0%}, above "
            f"{MAX_PROFILE_ERROR:.0%}. Choose a width nearer to a width of the run "
            f"({', '.join(map('{:g}'.format, last))}), or train with more snapshots: "
            "PowerEMA(snapshot_every_n_steps=...)."
        )
    reference = next(iter(last.values()))
    # Sum in float64, because factors may be large and have both signs.
    total = {
        name: torch.zeros(value.shape, dtype=torch.promote_types(value.dtype, torch.float64))
        for name, value in reference.items()
    }
    for (number, w), factor in zip(sources, factors.tolist(), strict=True):
        average = last[w] if number == step else _read_average(files[number], w)
        if _shapes(average) != _shapes(total):
            raise ValueError(
                f"{files.get(number, 'the checkpoint')} holds averages of width {w:g} for "
                "weights whose names or shapes differ from the average of width "
                f"{next(iter(last)):g} in the checkpoint; delete the snapshots from before this "
                "change."
            )
        for name, value in average.items():
            total[name] += factor * value.to(total[name])
    return {name: value.to(reference[name].dtype) for name, value in total.items()}


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in tensors.items()}


def _read_widths(path: Path) -> list[float]:
    with safe_open(check_regular(path), "pt") as file:
        return sorted({float(key.partition("/")[0]) for key in file.keys()})  # noqa: SIM118


def _read_average(path: Path, width: float) -> dict[str, Tensor]:
    with safe_open(check_regular(path), "pt") as file:
        keys = [key for key in file.keys() if float(key.partition("/")[0]) == width]  # noqa: SIM118
        return {key.partition("/")[2]: file.get_tensor(key) for key in keys}
