"""Hidden features of one network put in the order of another's, which changes no output.

Two runs may find the same features in another order; a line between them then leads through
mixtures of both. Aligned are the hidden layers of residual blocks and MLPs, and all layers of a
DCGAN. The features between blocks keep their order: skip connections tie them all together.

Source: Ainsworth et al. 2023, "Git Re-Basin" (arXiv 2209.04836), section 3.2: matching weights.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from lit_diffusion.lab.analysis.weights import State
from lit_diffusion.lab.gan.dcgan import DCGANDiscriminator, DCGANGenerator
from lit_diffusion.networks.layers import MLP, TimestepMLP
from lit_diffusion.networks.unet import ResBlock

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Units:
    """Hidden features that can change places.

    Args:
        places: (name of a weight, its dimension, how many copies of the features are along it).
        groups: of a group norm between: features change places with those of their group, and
            groups with groups.
    """

    places: tuple[tuple[str, int, int], ...]
    groups: int = 1


def hidden_units(network: nn.Module) -> list[Units]:
    """The hidden features of a network that can be put in another order."""
    return [units for name, part in network.named_modules() for units in _units(f"{name}.", part)]


def _units(prefix: str, part: nn.Module) -> Iterator[Units]:
    prefix = prefix.lstrip(".")
    if isinstance(part, ResBlock):
        ends = ("in_layers.2", "emb_layers.1", "out_layers.0"), "out_layers.3"
        told, made = (part.get_parameter(f"{name}.weight") for name in ends[0][1::-1])
        norm = cast(nn.GroupNorm, part.get_submodule("out_layers.0"))
        copies = {"emb_layers.1": len(told) // len(made)}
        yield _between(prefix, *ends, copies, norm.num_groups)
    elif isinstance(part, MLP):
        yield _between(prefix, ("fc1",), "fc2")
    elif isinstance(part, TimestepMLP):
        yield _between(prefix, ("0",), "2")
    elif isinstance(part, DCGANGenerator | DCGANDiscriminator):
        yield from _chain(f"{prefix}layers.", part.layers)


def _between(
    prefix: str,
    before: Sequence[str],
    after: str,
    copies: dict[str, int] | None = None,
    groups: int = 1,
) -> Units:
    copies = copies or {}
    made = [
        (f"{prefix}{name}.{kind}", 0, copies.get(name, 1))
        for name in before
        for kind in ("weight", "bias")
    ]
    return Units((*made, (f"{prefix}{after}.weight", 1, 1)), groups)


def _chain(prefix: str, layers: nn.Module) -> Iterator[Units]:
    """Of convolutions in a row, with batch norms between them."""
    convolutions = [
        (int(name), part)
        for name, part in layers.named_children()
        if isinstance(part, nn.Conv2d | nn.ConvTranspose2d)
    ]
    for (i, conv), (j, after) in pairwise(convolutions):
        made = [(f"{prefix}{i}.weight", int(isinstance(conv, nn.ConvTranspose2d)), 1)]
        if isinstance(layers.get_submodule(str(i + 1)), nn.BatchNorm2d):
            kinds = ("weight", "bias", "running_mean", "running_var")
            made += [(f"{prefix}{i + 1}.{kind}", 0, 1) for kind in kinds]
        made.append((f"{prefix}{j}.weight", int(isinstance(after, nn.Conv2d)), 1))
        yield Units(tuple(made))


def aligned(state: State, to: State, units: Sequence[Units], rounds: int = 20) -> State:
    """The same network, its hidden features in the order in which they are most like another's.

    Args:
        state: weights whose features are put in order.
        to: weights of the other.
        units: of their architecture.
        rounds: passes over all units at most, as one order may depend on others.
    """
    found = dict(state)
    for _ in range(rounds):
        changed = False
        for each in units:
            order = _best_order(found, to, each)
            changed |= bool((order != torch.arange(len(order))).any())
            found |= {place[0]: _reordered(found[place[0]], place, order) for place in each.places}
        if not changed:
            break
    return found


def _features(weight: Tensor, place: tuple[str, int, int]) -> Tensor:
    """(n, ...) float64 rows, one a feature."""
    _, dim, copies = place
    rows = weight.detach().cpu().double().movedim(dim, 0)
    return torch.unflatten(rows, 0, (copies, -1)).movedim(0, 1).flatten(1)


def _reordered(weight: Tensor, place: tuple[str, int, int], order: Tensor) -> Tensor:
    _, dim, copies = place
    rows = torch.unflatten(weight.movedim(dim, 0), 0, (copies, -1))[:, order.to(weight.device)]
    return rows.flatten(0, 1).movedim(0, dim).contiguous()


def _best_order(state: State, to: State, units: Units) -> Tensor:
    """(n,) which feature of `state` comes in the place of each."""
    alike = sum(
        _features(to[place[0]], place) @ _features(state[place[0]], place).T
        for place in units.places
    )
    assert isinstance(alike, Tensor)
    g, k = units.groups, len(alike) // units.groups
    blocks = alike.numpy().reshape(g, k, g, k).swapaxes(1, 2)
    inside = np.array([[_assigned(blocks[i, j]) for j in range(g)] for i in range(g)])
    gains = np.take_along_axis(blocks, inside[..., None], axis=3).sum(axis=(2, 3))
    outside = _assigned(gains)
    return torch.from_numpy(
        np.concatenate([j * k + inside[i, j] for i, j in enumerate(outside)]).astype(np.int64)
    )


def _assigned(gains: Array) -> Array:
    columns: Array = linear_sum_assignment(gains, maximize=True)[1]
    return columns
