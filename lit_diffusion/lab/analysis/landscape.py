"""Compute losses on planes in weight space: in random directions, or through a run's trajectory.

Source: Li et al. 2018, "Visualizing the Loss Landscape of Neural Nets", sections 4 and 7.
"""

import math
import re
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor, nn

from lit_diffusion.data.base import require_at_least
from lit_diffusion.lab.analysis import common
from lit_diffusion.lab.analysis.common import Arrays
from lit_diffusion.lab.analysis.fixed_losses import (
    WeightState,
    check_same_losses,
    copy_weights,
    describe_losses,
    evaluate_losses,
    network_of_loss,
)

Direction = dict[str, Tensor]
"""A step in weight space: one tensor per trainable parameter, by name."""


def random_directions(module: nn.Module, seed: int) -> list[Direction]:
    """Draw two standard normal directions, with the seeds `seed` and `seed` + 1."""
    directions = []
    for each_seed in (seed, seed + 1):
        generator = torch.Generator().manual_seed(each_seed)
        trained = ((name, p) for name, p in module.named_parameters() if p.requires_grad)
        directions.append({n: torch.randn(p.shape, generator=generator).to(p) for n, p in trained})
    return directions


def normalize_filters(direction: Direction, module: nn.Module) -> Direction:
    """Scale each filter of a direction to the norm of the corresponding filter of the weights.

    A filter is the part of a weight that belongs to one output channel. The output channels are
    dimension 0 of the weight, but dimension 1 for transposed convolutions. For biases and the
    weights of normalization layers, the result is 0.
    """
    transposed = nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d
    weights = dict(module.named_parameters())
    normalized = {}
    for name, d in direction.items():
        w = weights[name].detach()
        if d.ndim < 2:
            normalized[name] = torch.zeros_like(d)
            continue
        layer = module.get_submodule(re.sub(r"(\.parametrizations\..*|(^|\.)\w+)$", "", name))
        filter_dims = tuple(i for i in range(d.ndim) if i != int(isinstance(layer, transposed)))
        w_norms, d_norms = (x.square().sum(filter_dims, keepdim=True).sqrt() for x in (w, d))
        normalized[name] = d * (w_norms / d_norms.clamp(min=1e-12))
    return normalized


def project(
    states: Sequence[WeightState], center: WeightState, plane: Sequence[Direction]
) -> NDArray[np.float64]:
    """Compute least-squares coordinates of states in a plane through `center`.

    Returns:
        (len(states), 2).

    Example:
        >>> x, y = {"w": torch.tensor([1.0, 0.0])}, {"w": torch.tensor([0.0, 1.0])}
        >>> project([{"w": torch.tensor([2.0, 3.0])}], {"w": torch.zeros(2)}, [x, y])
        array([[2., 3.]])
    """
    names = list(plane[0])
    basis = torch.stack([_flatten(d, names) for d in plane], dim=1)  # (P, 2)
    offsets = torch.stack([_flatten(s, names) - _flatten(center, names) for s in states], dim=1)
    return torch.linalg.lstsq(basis, offsets).solution.T.numpy()


def principal_plane(
    states: Sequence[WeightState], center: WeightState, names: Sequence[str]
) -> tuple[list[Direction], float]:
    """Compute the first two principal directions of `states` around `center`.

    Returns:
        The two directions, and the fraction of the variance of `states` around `center` that these
        directions explain.

    Raises:
        ValueError: if there are fewer than two states, or if all states lie on one line through
            `center`.

    Source: Li et al. 2018, section 7.2.

    Example:
        >>> states = [{"w": torch.tensor([2.0, 0, 0])}, {"w": torch.tensor([0, 1.0, 0])}]
        >>> plane, explained = principal_plane(states, {"w": torch.zeros(3)}, names=["w"])
        >>> round(explained, 6)
        1.0
    """
    offsets = torch.stack([_flatten(s, names) - _flatten(center, names) for s in states])
    _, sizes, vectors = torch.linalg.svd(offsets, full_matrices=False)
    if len(sizes) < 2 or not sizes[1] > 1e-9 * sizes[0]:
        raise ValueError(
            "--path needs two or more checkpoints of the run of C, whose weights differ from those "
            "of C and from each other."
        )
    share = (sizes[:2].square().sum() / sizes.square().sum()).item()
    lengths = [center[name].numel() for name in names]
    plane = []
    for size, vector in zip(sizes[:2], vectors[:2], strict=True):
        parts = zip(names, torch.split(vector * size, lengths), strict=True)
        plane.append({n: p.view_as(center[n]).to(center[n]) for n, p in parts})
    return plane, share


def _flatten(state: WeightState, names: Sequence[str]) -> Tensor:
    """Concatenate tensors to a vector (P,) float64 on the CPU."""
    return torch.cat([state[name].double().flatten().cpu() for name in names])


def draw_landscape(
    names: Sequence[str],
    axis: NDArray[np.float64],
    values: NDArray[np.float64],
    path: Path,
    trajectory: NDArray[np.float64] | None = None,
    note: str = "",
) -> None:
    """Draw each loss (K, K) as a surface, and as contours with an optional trajectory (n, 2)."""
    count = len(names)
    figure = Figure(figsize=(4.5 * count, 7), layout="tight")  # "constrained" cuts labels beside 3D
    for i, name in enumerate(names):
        is_positive = values[i].min() > 0
        heights = np.log10(values[i]) if is_positive else values[i]
        contour_axes = figure.add_subplot(2, count, i + 1)
        contours = contour_axes.contourf(axis, axis, heights, levels=24)
        label = "log10 loss" if is_positive else "loss"
        figure.colorbar(contours, ax=contour_axes, label=label, shrink=0.6)
        if trajectory is not None:
            contour_axes.plot(*trajectory.T, "w.-", linewidth=1)
        contour_axes.set(
            title=name, aspect="equal", xlabel="first direction", ylabel="second direction"
        )
        surface_axes: Any = figure.add_subplot(2, count, count + i + 1, projection="3d")
        surface_axes.plot_surface(*np.meshgrid(axis, axis), heights, cmap="viridis")
    common.save_figure(figure, path, note)


def plot_landscape(options: Namespace) -> str:
    """Run `lit-diffusion analyze landscape`; returns the text to print."""
    points, extent = options.points, options.span
    require_at_least(2, points=points)
    if not 0 < extent < math.inf:
        raise ValueError(f"--span must be above 0 and finite, got {extent}.")
    loaded = common.load_analyzed_module(options.checkpoint, options)
    module, losses = loaded.module, common.load_losses(loaded, options)
    center = copy_weights(module)
    on_trajectory = [common.load_analyzed_module(file, options) for file in options.path or ()]
    trajectory = None
    if on_trajectory:
        check_same_losses(loaded, *on_trajectory)
        states = [copy_weights(each.module) for each in on_trajectory]
        trained = [name for name, p in module.named_parameters() if p.requires_grad]
        plane, share = principal_plane(states, center, trained)
        trajectory = project(states, center, plane)
        extent = 1.2 * float(np.abs(trajectory).max())
        planes = dict.fromkeys(losses, plane)
    else:
        plane = [normalize_filters(d, module) for d in random_directions(module, options.seed)]
        planes = {name: [of_network(each, module, name) for each in plane] for name in losses}
    axis = np.linspace(-extent, extent, points)
    common.print_cost_of_losses(losses, points**2)
    out = common.plan_analysis("landscape", options, loaded, *on_trajectory)

    def compute_row(number: str) -> Arrays:
        y = axis[int(number)]
        rows = []
        for name, loss in losses.items():
            first, second = planes[name]
            states = ({n: center[n] + x * first[n] + y * second[n] for n in first} for x in axis)
            rows.append(evaluate_losses(module, states, {name: loss}))
        return {"values": np.stack(rows)}  # (number of losses, 1, K)

    arrays = common.compute_pieces(out, [str(i) for i in range(points)], compute_row, "row")
    values = np.concatenate([each["values"] for each in arrays], axis=1)
    names, note = list(losses), describe_losses(module, options.images, "unchanged")
    result = {"names": names, "x": axis, "y": axis, "values": values}
    common.save_result(out / "landscape", result, note)
    draw_landscape(names, axis, values, out / "landscape.png", trajectory, note)
    lines = [
        f"{name}: {np.nanmin(each):.4g} to {np.nanmax(each):.4g}"
        + (f"; {bad} points are not finite" if (bad := (~np.isfinite(each)).sum()) else "")
        for name, each in zip(names, values, strict=True)
    ]
    if trajectory is not None:
        steps = [each.step for each in on_trajectory]
        common.save_result(out / "way", {"steps": steps, "points": trajectory, "share": share})
        lines.append(f"The plane explains {share:.1%} of the squared distances of --path from C.")
    return "\n".join([*lines, note])


def of_network(direction: Direction, module: nn.Module, loss: str) -> Direction:
    """Restrict a direction to the weights of the network that minimizes a loss.

    The two networks of a GAN have opposing losses. Along a direction that changes both networks,
    neither loss would have its minimum at the center. The direction for a loss therefore changes
    only the network that this loss trains. If a loss trains the whole module, the direction is
    returned unchanged.
    """
    if network_of_loss(module, loss) is None:
        return direction
    return {name: d for name, d in direction.items() if name.startswith(f"{loss}.")}
