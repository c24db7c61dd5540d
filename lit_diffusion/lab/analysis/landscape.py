"""Losses on planes through weights: random directions with normalized filters, or a run's own way.

Source: Li et al. 2018, "Visualizing the Loss Landscape of Neural Nets", sections 4 and 7.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor, nn

from lit_diffusion.checkpoints.loading import LoadedModule
from lit_diffusion.data.base import require_at_least
from lit_diffusion.lab.analysis import common
from lit_diffusion.lab.analysis.command import LandscapeOptions
from lit_diffusion.lab.analysis.fixed_losses import (
    Losses,
    WeightState,
    check_same_losses,
    copy_weights,
    evaluate_losses,
    network_of_loss,
)
from lit_diffusion.lab.analysis.work_queue import Arrays, compute_pieces

Direction = dict[str, Tensor]
"""A step of each trained parameter, by name."""


@dataclass(frozen=True)
class Landscape:
    """Losses at center + x first + y second.

    Attributes:
        names: names of the losses.
        x: (K,) coordinates along the first direction.
        y: (L,) coordinates along the second direction.
        values: (len(names), L, K).
    """

    names: list[str]
    x: NDArray[np.float64]
    y: NDArray[np.float64]
    values: NDArray[np.float64]


def random_directions(module: nn.Module, seed: int, num: int = 2) -> list[Direction]:
    """Draw `num` directions with a standard normal number per weight, by seeds from `seed` on."""
    drawn = []
    for k in range(num):
        generator = torch.Generator().manual_seed(seed + k)
        drawn.append(
            {
                name: torch.randn(p.shape, generator=generator).to(p)
                for name, p in module.named_parameters()
                if p.requires_grad
            }
        )
    return drawn


def normalize_filters(direction: Direction, module: nn.Module) -> Direction:
    """Scale each filter of a direction to the length of the weight's filter.

    A filter makes one output: it is a row of a weight, a column of a transposed convolution's.
    Biases and weights of norms do not move.
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
        of_weight, of_direction = (x.square().sum(filter_dims, keepdim=True).sqrt() for x in (w, d))
        normalized[name] = d * (of_weight / of_direction.clamp(min=1e-12))
    return normalized


def loss_landscape(
    module: nn.Module,
    plane: Sequence[Direction],
    losses: Losses,
    x: Sequence[float] | NDArray[np.float64],
    y: Sequence[float] | NDArray[np.float64],
) -> Landscape:
    """Evaluate losses of a module on a plane through its weights, which are put back.

    Args:
        module: module at the center of the plane.
        plane: two directions with the same names.
        losses: losses by name.
        x: coordinates along the first direction.
        y: coordinates along the second direction.
    """
    center, (first, second) = copy_weights(module), plane
    points = (
        {name: center[name] + u * d + v * second[name] for name, d in first.items()}
        for v in y
        for u in x
    )
    values = evaluate_losses(module, points, losses).reshape(len(losses), len(y), len(x))
    return Landscape(list(losses), np.array(x), np.array(y), values)


@dataclass(frozen=True)
class WeightTrajectory:
    """A run's weights, projected on a plane.

    Attributes:
        steps: steps of the checkpoints.
        points: (len(steps), 2) coordinates.
        share: part of the squared distance from the center, summed over the checkpoints, that lies
            in the plane.
    """

    steps: list[int]
    points: NDArray[np.float64]
    share: float


def project(
    states: Sequence[WeightState], center: WeightState, plane: Sequence[Direction]
) -> NDArray[np.float64]:
    """(len(states), 2) coordinates of weights in a plane through `center`, by least squares."""
    names = list(plane[0])
    basis = torch.stack([_flatten(d, names) for d in plane], dim=1)  # (P, 2)
    offsets = torch.stack([_flatten(s, names) - _flatten(center, names) for s in states], dim=1)
    points: NDArray[np.float64] = torch.linalg.lstsq(basis, offsets).solution.T.numpy()
    return points


def principal_plane(
    states: Sequence[WeightState], center: WeightState, names: Sequence[str]
) -> tuple[list[Direction], float]:
    """The two directions that hold most of the squared distance of `states` from `center`.

    Returns:
        The directions, and the part of the squared distance that they hold.

    Raises:
        ValueError: unless two states differ from the center and each other.

    Source: Li et al. 2018, section 7.2.
    """
    offsets = torch.stack([_flatten(s, names) - _flatten(center, names) for s in states])
    _, sizes, vectors = torch.linalg.svd(offsets, full_matrices=False)
    if len(sizes) < 2 or not sizes[1] > 1e-9 * sizes[0]:
        raise ValueError("a way needs two places or more that differ from its end, and each other.")
    share = (sizes[:2].square().sum() / sizes.square().sum()).item()
    lengths = [center[name].numel() for name in names]
    plane = []
    for size, vector in zip(sizes[:2], vectors[:2], strict=True):
        parts = zip(names, torch.split(vector * size, lengths), strict=True)
        plane.append({n: p.view_as(center[n]).to(center[n]) for n, p in parts})
    return plane, share


def _flatten(state: WeightState, names: Sequence[str]) -> Tensor:
    """(P,) float64 on the CPU."""
    return torch.cat([state[name].double().flatten().cpu() for name in names])


def draw_landscape(
    result: Landscape, path: Path, trajectory: NDArray[np.float64] | None = None
) -> None:
    """Draw each loss as contours, with a trajectory (n, 2) on them, above its surface."""
    count = len(result.names)
    figure = Figure(figsize=(4 * count, 6), layout="constrained")
    for i, name in enumerate(result.names):
        is_positive = result.values[i].min() > 0
        values = np.log10(result.values[i]) if is_positive else result.values[i]
        flat = figure.add_subplot(2, count, i + 1)
        contours = flat.contourf(result.x, result.y, values, levels=24)
        label = "log10 loss" if is_positive else "loss"
        figure.colorbar(contours, ax=flat, label=label, shrink=0.6)
        if trajectory is not None:
            flat.plot(*trajectory.T, "w.-", linewidth=1)
        flat.set(title=name, aspect="equal", xlabel="first direction", ylabel="second")
        surface: Any = figure.add_subplot(2, count, count + i + 1, projection="3d")
        surface.plot_surface(*np.meshgrid(result.x, result.y), values, cmap="viridis")
    common.save_figure(figure, path)


def plot_landscape(options: LandscapeOptions) -> str:
    """Run `lit-diffusion analyze landscape`; returns the text to print."""
    require_at_least(2, points=options.points)
    if not 0 < options.span < math.inf:
        raise ValueError(f"--span must be above 0 and finite, got {options.span}.")
    loaded = common.load_with_exact_spectral_norm(options.checkpoint, options)
    losses = common.load_losses(loaded, options)
    on_path = [common.load_with_exact_spectral_norm(path, options) for path in options.path or ()]
    trajectory = None
    if on_path:
        plane, trajectory = _plane_of_path(loaded, on_path)
        reach = 1.2 * float(np.abs(trajectory.points).max())
        surfaces = [(plane, losses)]
    else:
        random = random_directions(loaded.module, options.seed)
        plane = [normalize_filters(each, loaded.module) for each in random]
        reach = options.span
        surfaces = _split_by_network(loaded.module, plane, losses)
    axis = np.linspace(-reach, reach, options.points)
    common.print_cost_of_losses(losses, options.points**2)
    out = common.plan_analysis("landscape", options, loaded, *on_path)

    def compute_row(number: str) -> Arrays:
        y = [axis[int(number)]]
        parts = [loss_landscape(loaded.module, p, each, axis, y).values for p, each in surfaces]
        return {"values": np.concatenate(parts)}

    arrays = compute_pieces(out, [str(i) for i in range(len(axis))], compute_row, "row")
    if arrays is None:
        return common.text_of_unfinished(out)
    values = np.concatenate([each["values"] for each in arrays], axis=1)
    result = Landscape(list(losses), axis, axis, values)
    common.save_result(result, out / "landscape")
    draw_landscape(result, out / "landscape.png", trajectory.points if trajectory else None)
    lines = [
        f"{name}: {np.nanmin(each):.4g} to {np.nanmax(each):.4g}"
        + (f"; {bad} points are not finite" if (bad := (~np.isfinite(each)).sum()) else "")
        for name, each in zip(losses, values, strict=True)
    ]
    if trajectory:
        common.save_result(trajectory, out / "way")
        share = f"{trajectory.share:.1%}"
        lines.append(f"The plane holds {share} of the run's squared distance from its end.")
    return "\n".join(lines)


def _plane_of_path(
    loaded: LoadedModule, on_path: Sequence[LoadedModule]
) -> tuple[list[Direction], WeightTrajectory]:
    """The principal plane of checkpoints around `loaded`, and their points in it."""
    check_same_losses(loaded, on_path)
    center = copy_weights(loaded.module)
    states = [copy_weights(each.module) for each in on_path]
    names = [name for name, p in loaded.module.named_parameters() if p.requires_grad]
    plane, share = principal_plane(states, center, names)
    steps = [each.step for each in on_path]
    return plane, WeightTrajectory(steps, project(states, center, plane), share)


def _split_by_network(
    module: nn.Module, plane: list[Direction], losses: Losses
) -> list[tuple[list[Direction], Losses]]:
    """Pair each loss of a GAN with the part of the plane along its own network's weights.

    Along the weights of both, what one loss gains the other pays, and no center is lowest.
    """
    surfaces: list[tuple[list[Direction], Losses]] = []
    for name, loss in losses.items():
        if network_of_loss(module, name) is None:
            return [(plane, losses)]
        part = [{n: d for n, d in each.items() if n.startswith(f"{name}.")} for each in plane]
        surfaces.append((part, {name: loss}))
    return surfaces
