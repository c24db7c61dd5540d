"""Snapshots of power-function averages, and averages of other widths made of them."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from lit_diffusion.ema_profiles import coefficients, exponent
from lit_diffusion.system.files import whole_file

FOLDER = "ema-snapshots"


def write_snapshot(folder: Path, step: int, averages: Mapping[float, Mapping[str, Tensor]]) -> None:
    """Averages {width: {name: tensor}} after so many optimizer steps, as float32, whole or not."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"{width:g}/{name}": value.detach().cpu().float().contiguous()
        for width, named in averages.items()
        for name, value in named.items()
    }
    with whole_file(folder / f"step-{step:09d}.safetensors") as file:
        file.write(save(tensors))


def reconstructed(folder: Path, width: float, step: int) -> dict[str, Tensor]:
    """The average of a relative width after so many steps, by name, from the snapshots up to then.

    Raises:
        FileNotFoundError: where there are no snapshots up to then, or none from then on.
        ValueError: for a width that no profile has, or a damaged file.
    """
    gamma = exponent(width)
    files = {int(f.stem.partition("-")[2]): f for f in folder.glob("step-*.safetensors")}
    if not files or max(files) < step:
        raise FileNotFoundError(
            f"{folder} holds no snapshot from step {step} on, which an average of width {width:g} "
            "needs; train with PowerEMA(snapshot_every_n_steps=...)."
        )
    last = min(s for s in files if s >= step)
    parts = [(s, w) for s in sorted(files) if s <= last for w in _widths(files[s])]
    factors = coefficients(
        [s for s, _ in parts], [exponent(w) for _, w in parts], step, gamma
    ).tolist()
    total: dict[str, Tensor] = {}
    for (s, w), factor in zip(parts, factors, strict=True):
        for name, value in _read(files[s], w).items():
            total[name] = total.get(name, torch.zeros_like(value)) + factor * value
    return {name: value.float() for name, value in total.items()}


def _widths(path: Path) -> list[float]:
    try:
        with safe_open(path, "pt") as file:
            return sorted({float(key.partition("/")[0]) for key in file.keys()})  # noqa: SIM118
    except (SafetensorError, ValueError) as error:
        raise ValueError(f"{path} is no snapshot of averages ({error}); delete it.") from error


def _read(path: Path, width: float) -> dict[str, Tensor]:
    """In float64: factors are large and of both signs."""
    with safe_open(path, "pt") as file:
        keys = [key for key in file.keys() if float(key.partition("/")[0]) == width]  # noqa: SIM118
        return {key.partition("/")[2]: file.get_tensor(key).double() for key in keys}
