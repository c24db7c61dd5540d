"""Pictures of what the analyses found."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from torch import Tensor

from lit_diffusion.files import atomic_write
from lit_diffusion.lab.analysis.consistency import Consistency, Floats
from lit_diffusion.lab.analysis.hessian import Spectrum
from lit_diffusion.lab.analysis.interpolation import Interpolation
from lit_diffusion.lab.analysis.landscape import Landscape


def draw_consistency(found: Consistency, images: Tensor, path: Path, seeds: int = 12) -> None:
    """The first seeds side by side: a row a model, a column a seed."""
    rows, columns = len(images), min(seeds, images.shape[1])
    figure = Figure(figsize=(0.75 * columns + 2, 0.8 * rows + 0.6), layout="constrained")
    figure.suptitle(
        f"{found.all_pairs:.1f} dB; shuffled seeds {found.shuffled:.1f} dB", fontsize="medium"
    )
    axes = figure.subplots(rows, columns, squeeze=False)
    for row, (name, of_model) in enumerate(zip(found.names, images, strict=True)):
        for column in range(columns):
            _show(axes[row, column], of_model[column])
        side = "" if row == 0 else f"\n{found.pairs[0, row]:.1f} dB"
        label = f"{name[-28:]}{side}"
        axes[row, 0].set_ylabel(label, rotation=0, ha="right", va="center", fontsize="small")
    _write(figure, path)


def _show(axes: Any, image: Tensor) -> None:
    pixels = image.movedim(0, -1).squeeze(-1).numpy()
    axes.imshow(pixels, cmap="gray", vmin=0, vmax=255, interpolation="nearest")
    axes.set(xticks=[], yticks=[])


def draw_interpolation(found: Mapping[str, Interpolation], path: Path) -> None:
    """A panel a loss, a line for each of `found`."""
    names = next(iter(found.values())).names
    figure = Figure(figsize=(3.2 * len(names), 3), layout="constrained")
    panels = figure.subplots(1, len(names), squeeze=False)[0]
    for i, (axes, name) in enumerate(zip(panels, names, strict=True)):
        for kind, each in found.items():
            axes.plot(each.alphas, each.values[i], label=kind)
        scale = "log" if min(each.values[i].min() for each in found.values()) > 0 else "linear"
        axes.set(title=name, xlabel="alpha (0: second, 1: first)", yscale=scale)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("loss")
    if len(found) > 1:
        panels[0].legend(fontsize="small")
    _write(figure, path)


def draw_landscape(found: Landscape, path: Path, run: Floats | None = None) -> None:
    """Contours of each loss, with a run's way through them, above its surface."""
    count = len(found.names)
    figure = Figure(figsize=(4 * count, 6), layout="constrained")
    for i, name in enumerate(found.names):
        is_positive = found.values[i].min() > 0
        values = np.log10(found.values[i]) if is_positive else found.values[i]
        flat = figure.add_subplot(2, count, i + 1)
        lines = flat.contourf(found.x, found.y, values, levels=24)
        label = "log10 loss" if is_positive else "loss"
        figure.colorbar(lines, ax=flat, label=label, shrink=0.6)
        if run is not None:
            flat.plot(*run.T, "w.-", linewidth=1)
        flat.set(title=name, aspect="equal", xlabel="first direction", ylabel="second")
        solid: Any = figure.add_subplot(2, count, count + i + 1, projection="3d")
        solid.plot_surface(*np.meshgrid(found.x, found.y), values, cmap="viridis")
    _write(figure, path)


def draw_spectra(found: Mapping[str, Spectrum], path: Path) -> None:
    """The density of eigenvalues of each loss, on a logarithmic axis."""
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.add_subplot(yscale="log")
    low = min(np.nanmin(each.nodes) for each in found.values())
    high = max(np.nanmax(each.nodes) for each in found.values())
    width = (high - low) / 100
    at = np.linspace(low - 4 * width, high + 4 * width, 1000)
    drawn = {name: each.density(at, width) for name, each in found.items()}
    most = max(density.max() for density in drawn.values())
    # a random vector has a hundredth of its mean share, or more, in nine of ten eigenvectors
    least = min(0.01 / (each.num_parameters * width) for each in found.values())
    for name, density in drawn.items():
        top = found[name].top[:5]
        (line,) = axes.plot(at, density, label=f"{name}: largest {top[0]:.3g}")
        axes.plot(top, [2 * least] * len(top), "|", color=line.get_color(), markersize=10)
    axes.set(xlabel="eigenvalue", ylabel="density", ylim=(least, 3 * most))
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    _write(figure, path)


def _write(figure: Figure, path: Path) -> None:
    with atomic_write(path, shared=True) as file:
        figure.savefig(file, format="png", dpi=120)
