"""Snapshots of power-function averages, and averages of other widths made of them."""

from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from lit_diffusion.ema_profiles import coefficients, exponent
from lit_diffusion.files import atomic_write

Averages = Mapping[float, Mapping[str, Tensor]]
"""By width and name."""

FOLDER = "ema-snapshots"

FARTHEST = 0.1
"""Of a wanted profile, relatively, that snapshots still give: as far as a width an eighth off."""


def write_snapshot(folder: Path, step: int, averages: Averages) -> str:
    """Write averages after so many of their updates, whole or not at all; the file's SHA-256."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"{width:g}/{name}": value.detach().cpu().contiguous()
        for width, named in averages.items()
        for name, value in named.items()
    }
    content = save(tensors)
    with atomic_write(folder / f"step-{step:09d}.safetensors") as file:
        file.write(content)
    return sha256(content).hexdigest()


def snapshots_in(folder: Path) -> dict[int, Path]:
    """Files by the number of updates, the first first."""
    return {int(f.stem[5:]): f for f in sorted(folder.glob("step-" + 9 * "[0-9]" + ".safetensors"))}


def drop_after(folder: Path, step: int) -> int:
    """Remove snapshots of more updates; how many there were."""
    later = [file for taken, file in snapshots_in(folder).items() if taken > step]
    for file in later:
        file.unlink()
    return len(later)


def reconstructed(
    folder: Path, width: float, step: int, last: Averages, known: Mapping[int, str]
) -> dict[str, Tensor]:
    """The average of a relative width after so many updates, by name.

    It is made of those of other widths that were `last`, at that step, and of earlier snapshots,
    whose SHA-256 by their numbers of updates are `known`.

    Raises:
        ValueError: for a width that no profile has or that these cannot tell, a snapshot that is
            damaged or of another run, or snapshots of different weights.
    """
    files = _before(folder, step, known)
    parts = [(taken, tracked) for taken, file in files.items() for tracked in _widths(file)]
    parts += [(step, tracked) for tracked in last]
    taken, widths = zip(*parts, strict=True)
    factors, distance = coefficients(taken, list(map(exponent, widths)), step, exponent(width))
    if distance > FARTHEST:
        raise ValueError(
            f"the width {width:g} at step {step} cannot be told from {len(files)} snapshots in "
            f"{folder}: the nearest profile is {distance:.0%} off, above {FARTHEST:.0%}. Take one "
            f"nearer to those tracked ({', '.join(map('{:g}'.format, last))}), or train with "
            "PowerEMA(snapshot_every_n_steps=...) of more snapshots."
        )
    total = _nothing(last)
    for (taken_at, tracked), factor in zip(parts, factors.tolist(), strict=True):
        read = last[tracked] if taken_at == step else _read(files[taken_at], tracked)
        if _shapes(read) != _shapes(total):
            raise ValueError(
                f"{files.get(taken_at, 'the checkpoint')} holds averages of width {tracked:g} of "
                f"other weights than the checkpoint of width {next(iter(last)):g}; delete the "
                "snapshots of before the change."
            )
        for name, value in read.items():
            total[name] += factor * value.to(total[name])
    return {name: value.to(next(iter(last.values()))[name].dtype) for name, value in total.items()}


def _before(folder: Path, step: int, known: Mapping[int, str]) -> dict[int, Path]:
    """The snapshots of less updates, of which each must be `known`."""
    files = {taken: file for taken, file in snapshots_in(folder).items() if taken < step}
    for taken, file in files.items():
        if known.get(taken) != sha256(file.read_bytes()).hexdigest():
            raise ValueError(
                f"{file} is not the snapshot that the run of the checkpoint took at step {taken}: "
                "it is damaged, or another run's. Delete it, or bring the right one back."
            )
    return files


def _nothing(averages: Averages) -> dict[str, Tensor]:
    """In float64: factors may be large, and of both signs."""
    first = next(iter(averages.values()))
    wide = {name: torch.promote_types(value.dtype, torch.float64) for name, value in first.items()}
    return {name: torch.zeros(value.shape, dtype=wide[name]) for name, value in first.items()}


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in tensors.items()}


def _widths(path: Path) -> list[float]:
    with safe_open(path, "pt") as file:
        return sorted({float(key.partition("/")[0]) for key in file.keys()})  # noqa: SIM118


def _read(path: Path, width: float) -> dict[str, Tensor]:
    with safe_open(path, "pt") as file:
        keys = [key for key in file.keys() if float(key.partition("/")[0]) == width]  # noqa: SIM118
        return {key.partition("/")[2]: file.get_tensor(key) for key in keys}
