"""Formula inputs and weights of the golden files (tests/golden/README.md), and their arrays."""

from functools import cache
from math import prod, sqrt
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

FOLDER = Path(__file__).parent.parent / "golden"


@cache
def load(case: str) -> dict[str, np.ndarray]:
    with np.load(FOLDER / f"{case}.npz") as arrays:
        return dict(arrays)


def tensor(case: str, key: str) -> Tensor:
    return torch.from_numpy(load(case)[key])


def _hash(shape, k: int) -> Tensor:
    j = torch.arange(prod(shape)) + 131 * k
    return ((1237 * j * j + 4001 * j + 977) % 10007).reshape(shape)


def U(shape, k: int, scale: float = 1.0) -> Tensor:
    """Uniform-like in (-scale, scale)."""
    return scale * ((2 * _hash(shape, k) + 1).double() / 10007 - 1)


def Z(shape, k: int, scale: float = 1.0) -> Tensor:
    """Unit variance times scale; plays the role of Gaussian noise."""
    return scale * sqrt(3) * U(shape, k)


def PIX(shape, k: int) -> Tensor:
    """8-bit images in [-1, 1]."""
    return (_hash(shape, k) % 256).double() / 127.5 - 1


def close(actual: Tensor, expected: Tensor, rtol: float = 1e-7, atol: float = 1e-9) -> None:
    """Equal to the tolerance that tests/golden/README.md gives for float64 arrays."""
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol, check_dtype=False)


def golden_weight(name: str, shape: tuple[int, ...], k: int) -> Tensor:
    """The value of the parameter `name`, k-th of the sorted names of its network."""
    if name == "pos_embed" or name.endswith("positional_embedding"):
        return U(shape, k, 0.5)
    if name.endswith("label_emb.weight"):
        return U(shape, k, 1.0)
    if len(shape) == 1:
        return U(shape, k, 0.1) + (1.0 if name.endswith(("weight", "gamma")) else 0.0)
    return U(shape, k, sqrt(3 * shape[0] / prod(shape)))


@torch.no_grad()
def fill_(network: nn.Module) -> nn.Module:
    """Set every parameter by the rule, in place; every block then influences the output."""
    state = network.state_dict()
    for k, name in enumerate(sorted(state)):
        state[name].copy_(golden_weight(name, tuple(state[name].shape), k))
    return network
