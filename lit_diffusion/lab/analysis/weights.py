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


class ExactSpectralNorm(nn.Module):
    """A weight over its largest singular value, which is differentiated too.

    torch's holds the singular vectors of its last power iteration fixed: as weights move they are
    no longer those of the weights, and their share of the curvature is lost.

    Args:
        dim: of the weight that the rows of the matrix are along.
    """

    def __init__(self, dim: int = 0) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, weight: Tensor) -> Tensor:
        """Of the same shape."""
        rows = weight.movedim(self.dim, 0).flatten(1)
        out: Tensor = weight / torch.linalg.matrix_norm(rows, 2)
        return out


def exact_spectral_norms_(module: nn.Module) -> None:
    """Put `ExactSpectralNorm` in place of torch's `parametrizations.spectral_norm`.

    Raises:
        ValueError: for the older `torch.nn.utils.spectral_norm`, which works by hooks.
    """
    for name, part in module.named_modules():
        own = {key for key, _ in part.named_parameters(recurse=False)}
        vectors = {key for key, _ in part.named_buffers(recurse=False) if key.endswith("_u")}
        if any(f"{key[:-2]}_orig" in own for key in vectors):
            raise ValueError(
                f"{name} has torch.nn.utils.spectral_norm, which does not follow moved weights; "
                "build it with torch.nn.utils.parametrizations.spectral_norm."
            )
        if isinstance(part, ParametrizationList):
            for i, each in enumerate(part):
                if {"_u", "_v"} <= dict(each.named_buffers()).keys():
                    part[i] = ExactSpectralNorm(getattr(each, "dim", 0))


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
