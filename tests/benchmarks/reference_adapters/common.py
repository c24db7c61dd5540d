"""What the comparisons have in common."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from support.golden import PIX, Z
from support.tiny_diffusion import tiny_diffusion
from support.toy import CountedNoise
from torch import Tensor, nn

from lit_diffusion.losses import DenoisingLoss, HybridLoss, Simple
from lit_diffusion.modules.diffusion import DiffusionModule
from lit_diffusion.solvers import Euler

Comparison = Callable[[Random], float]
"""Draws a configuration and gives the worst deviation of ours from theirs."""

SHAPE = (2, 3, 8, 8)


@contextmanager
def in_float64() -> Iterator[None]:
    """References cast to float32 wherever they can: here that is float64, of ours as well."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    with (
        patch.object(torch, "float32", torch.float64),
        patch.object(torch.Tensor, "float", torch.Tensor.double),
        patch.object(np, "float32", np.float64),
    ):
        yield
    torch.set_default_dtype(before)


def worst(*pairs: tuple[Any, Any], each: bool = False) -> float:
    """Largest |ours - theirs|, over the largest |theirs|; `each`: over that of every entry."""
    largest = 0.0
    for ours, theirs in pairs:
        ours, theirs = (torch.as_tensor(v, dtype=torch.float64).detach() for v in (ours, theirs))
        assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
        assert theirs.abs().max() > 0, "nothing is compared"
        size = theirs.abs() if each else theirs.abs().max()
        off = ((ours - theirs).abs() / size.clamp(min=1e-300)).max().item()
        largest = max(largest, math.inf if math.isnan(off) else off)
    return largest


@contextmanager
def counted_noise(first: int = 0, source: Any = None) -> Iterator[None]:
    """`torch.randn_like` of references hands out what `CountedNoise(first)` does."""
    with patch.object(torch, "randn_like", source or CountedNoise(first)):
        yield


@torch.no_grad()
def fill_(network: nn.Module) -> nn.Module:
    """Random weights of a sensible size, also where a new network has zeros."""
    for name, parameter in network.named_parameters():
        if name == "pos_embed":
            continue  # a table, of which DiT has a formula
        if parameter.ndim > 1:
            parameter.normal_(std=parameter[0].numel() ** -0.5)
        else:
            parameter.normal_(std=0.1).add_(float(name.endswith("weight")))
    return network.eval()


class Net(nn.Module):
    """A small network that both call: nearly x, so that trajectories stay in bounds.

    Args:
        channels: of the output, which after the third are a variance.
        size: what x is multiplied by; noise is nearly x, images much less.
    """

    def __init__(self, channels: int = 3, size: float = 0.9) -> None:
        super().__init__()
        self.conv, self.size = nn.Conv2d(3, channels, 3, padding=1), size
        self.labels = nn.Embedding(10, 3)

    def forward(self, x: Tensor, noise_label: Tensor, y: Tensor | None = None) -> Tensor:
        noise_label = torch.sin(noise_label.double() / 100)[:, None, None, None]
        inner = x if y is None else x + self.labels(y.clamp(min=0))[:, :, None, None]
        h = 0.3 * torch.tanh(self.conv(inner) + noise_label)
        h[:, :3] += (self.size + 0.05 * noise_label) * x
        return h


def module(
    net: nn.Module, process: Any, parameterization: Any, learned: bool = False, **changes: Any
) -> DiffusionModule:
    """Ours around a network, of six channels where it has a learned variance."""
    loss = HybridLoss(Simple()) if learned else DenoisingLoss(Simple())
    changes = {"num_classes": None, "label_dropout": 0.0, "image_shape": (3, 8, 8)} | changes
    parts = {"process": process, "parameterization": parameterization, "solver": Euler()}
    return tiny_diffusion(network=net, loss=loss, **parts, **changes).eval()


def images(draw: Random) -> Tensor:
    """8-bit, in [-1, 1]."""
    return PIX(SHAPE, draw.randrange(1000))


def noise(draw: Random) -> Tensor:
    """As `CountedNoise` has it."""
    return Z(SHAPE, draw.randrange(1000, 2000))


def outputs(ours: nn.Module, theirs: nn.Module, /, *inputs: Tensor, **labels: Any) -> float:
    """Of two networks; labels, where they are not the same, by the names ours and theirs."""
    with torch.no_grad():
        mine = ours(*inputs, *labels.get("ours", ()))
        other = theirs(*inputs, *labels.get("theirs", ()))
    assert other.std() > 1e-3
    return worst((mine, other))
