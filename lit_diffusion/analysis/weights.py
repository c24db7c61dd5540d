"""Weights as points in a space: copies, points on a line, points put in place for a while."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

State = dict[str, Tensor]
"""Floating-point parameters and buffers of a module, by name."""


def state_of(module: nn.Module) -> State:
    """Copies of all that is of floating point, such as running statistics too."""
    return {
        name: value.detach().clone()
        for name, value in module.state_dict().items()
        if value.is_floating_point()
    }


@torch.no_grad()
def put_(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Overwrite what has these names."""
    own = module.state_dict()
    for name, value in state.items():
        own[name].copy_(value)


@torch.no_grad()
def move_(module: nn.Module, state: Mapping[str, Tensor], iterations: int = 50) -> None:
    """`put_`, and the vectors of spectral norm are found for the weights that are there now.

    Args:
        module: whose weights move.
        state: where to.
        iterations: of the power method.
    """
    put_(module, state)
    for part in module.modules():
        if isinstance(part, ParametrizationList):
            for each in part:
                if {"_u", "_v"} <= dict(each.named_buffers()).keys():
                    each.train()
                    for _ in range(iterations):
                        each(part.original)
                    each.eval()


@contextmanager
def restored(module: nn.Module) -> Iterator[State]:
    """A context that ends with the weights that it began with, which it gives."""
    before = state_of(module)
    try:
        yield before
    finally:
        put_(module, before)


def between(a: State, b: State, alpha: float) -> State:
    """alpha a + (1 - alpha) b.

    Raises:
        ValueError: where they have not the same names and shapes.
    """
    shapes = [{name: value.shape for name, value in state.items()} for state in (a, b)]
    if shapes[0] != shapes[1]:
        wrong = sorted({n for n in a.keys() | b.keys() if shapes[0].get(n) != shapes[1].get(n)})
        raise ValueError(
            f"only weights of one architecture lie on a line, and these differ in {wrong[0]} and "
            f"{len(wrong) - 1} more."
        )
    return {name: torch.lerp(b[name], value, alpha) for name, value in a.items()}
