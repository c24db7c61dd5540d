"""Losses on planes through weights, in directions whose filters are as long as the weights' own.

Source: Li et al. 2018, "Visualizing the Loss Landscape of Neural Nets", sections 4 and 7.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from lit_diffusion.lab.analysis.consistency import Floats
from lit_diffusion.lab.analysis.interpolation import Losses
from lit_diffusion.lab.analysis.saved import Saved
from lit_diffusion.lab.analysis.weights import State, put_, restored

Direction = dict[str, Tensor]
TRANSPOSED = nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d


@dataclass(frozen=True)
class Landscape(Saved):
    """Losses at center + x first + y second.

    Attributes:
        names: of the losses.
        x: (K,) coordinates along the first direction.
        y: (L,) along the second.
        values: (len(names), L, K).
    """

    names: list[str]
    x: Floats
    y: Floats
    values: Floats


def directions(module: nn.Module, seed: int, num: int = 2) -> list[Direction]:
    """Random directions, a standard normal number per weight, of `num` seeds from `seed` on."""
    made = []
    for k in range(num):
        generator = torch.Generator().manual_seed(seed + k)
        made.append(
            {
                name: torch.randn(p.shape, generator=generator).to(p)
                for name, p in module.named_parameters()
                if p.requires_grad
            }
        )
    return made


def filter_normalised(direction: Direction, module: nn.Module) -> Direction:
    """Each filter as long as that of the module's weight; none along biases and norms.

    A filter is what makes one output: a row of the weight, a column of a deconvolution's.
    """
    weights = dict(module.named_parameters())
    found = {}
    for name, d in direction.items():
        w = weights[name].detach()
        if d.ndim < 2:
            found[name] = torch.zeros_like(d)
            continue
        owner = module.get_submodule(re.sub(r"(\.parametrizations\..*|(^|\.)\w+)$", "", name))
        others = tuple(i for i in range(d.ndim) if i != int(isinstance(owner, TRANSPOSED)))
        lengths = [each.square().sum(others, keepdim=True).sqrt() for each in (w, d)]
        found[name] = d * (lengths[0] / lengths[1].clamp(min=1e-12))
    return found


@torch.no_grad()
def landscape(
    module: nn.Module,
    plane: Sequence[Direction],
    losses: Losses,
    x: Sequence[float] | Floats,
    y: Sequence[float] | Floats,
) -> Landscape:
    """Losses of a module on a plane through its weights, which are put back.

    Args:
        module: at the center.
        plane: two directions by name, as of `filter_normalised` or `principal_plane`.
        losses: what to compute at each point.
        x: coordinates along the first.
        y: coordinates along the second.
    """
    values = np.full((len(losses), len(y), len(x)), np.nan)
    with restored(module) as center:
        for row, v in enumerate(y):
            for column, u in enumerate(x):
                put_(module, {n: center[n] + u * d + v * plane[1][n] for n, d in plane[0].items()})
                values[:, row, column] = [loss().item() for loss in losses.values()]
    return Landscape(list(losses), np.array(x), np.array(y), values)


@dataclass(frozen=True)
class Way(Saved):
    """A run's weights in a plane.

    Attributes:
        steps: of the checkpoints.
        points: (len(steps), 2) coordinates.
        share: of the squared distance from the center that the plane holds, over all checkpoints.
    """

    steps: list[int]
    points: Floats
    share: float


def projected(states: Sequence[State], center: State, plane: Sequence[Direction]) -> Floats:
    """(len(states), 2) coordinates of weights in a plane, by least squares."""
    names = list(plane[0])
    basis = torch.stack([_flat(d, names) for d in plane], dim=1)
    rows = torch.stack([_flat(s, names) - _flat(center, names) for s in states], dim=1)
    found: Floats = torch.linalg.lstsq(basis, rows).solution.T.numpy()
    return found


def principal_plane(
    states: Sequence[State], center: State, names: Sequence[str]
) -> tuple[list[Direction], float]:
    """The two directions that hold most of a run's squared distance from the center, and its share.

    Raises:
        ValueError: for fewer than two places that differ from the center.

    Source: Li et al. 2018, section 7.2.
    """
    rows = torch.stack([_flat(s, names) - _flat(center, names) for s in states])
    _, sizes, vectors = torch.linalg.svd(rows, full_matrices=False)
    if len(sizes) < 2 or not sizes[1] > 1e-9 * sizes[0]:
        raise ValueError("a way needs two places or more that differ from its end, and each other.")
    share = (sizes[:2].square().sum() / sizes.square().sum()).item()
    return [_shaped(v * sizes[i], center, names) for i, v in enumerate(vectors[:2])], share


def _flat(state: State, names: Sequence[str]) -> Tensor:
    return torch.cat([state[name].double().flatten().cpu() for name in names])


def _shaped(flat: Tensor, like: State, names: Sequence[str]) -> Direction:
    parts = torch.split(flat, [like[name].numel() for name in names])
    return {n: p.view_as(like[n]).to(like[n]) for n, p in zip(names, parts, strict=True)}
