"""The spectrum of a loss's Hessian by products with vectors, never the matrix itself.

Source: Ghorbani et al. 2019, "An Investigation into Neural Net Optimization via Hessian Eigenvalue
Density", section 2 (stochastic Lanczos quadrature); Golub & Welsch 1969 for the quadrature.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lit_diffusion.lab.analysis.consistency import Floats
from lit_diffusion.lab.analysis.saved import Saved

Product = Callable[[Tensor], Tensor]
"""(P,) -> (P,): a symmetric matrix times a vector."""


@dataclass(frozen=True)
class Spectrum(Saved):
    """What Lanczos runs from random vectors tell of a symmetric matrix of P rows.

    Attributes:
        num_parameters: P.
        nodes: (V, m) Ritz values of V random vectors, falling.
        weights: (V, m) of the quadrature; each row sums to 1. nan beyond where a run ended early.
    """

    num_parameters: int
    nodes: Floats
    weights: Floats

    @property
    def top(self) -> Floats:
        """Largest eigenvalues as each run has them, mean over runs; the first are converged."""
        found: Floats = np.nanmean(self.nodes[:, ~np.isnan(self.nodes).all(axis=0)], axis=0)
        return found

    @property
    def trace(self) -> float:
        """P times the mean eigenvalue."""
        return self.num_parameters * self.mean

    @property
    def mean(self) -> float:
        """Mean eigenvalue, by quadrature."""
        return float(np.nansum(self.nodes * self.expected_weights, axis=1).mean())

    @property
    def variance(self) -> float:
        """Variance of the eigenvalues, by quadrature."""
        second = np.nansum(self.nodes**2 * self.expected_weights, axis=1).mean()
        return float(second - self.mean**2)

    @property
    def expected_weights(self) -> Floats:
        """(V, m) weights, which are 1 / P at the outer eigenvalues that all runs have.

        A run's own weight there is the square of one normal number, and of large eigenvalues the
        noisiest part of any sum. More than 4 / P by the mean of runs is an eigenvalue many times.
        """
        lengths = np.abs(self.nodes).max(axis=0)
        alike = np.ptp(self.nodes, axis=0) <= 1e-3 * lengths  # False for nan
        alike &= self.weights.mean(axis=0) * self.num_parameters < 4
        ends = [np.logical_and.accumulate(each) for each in (alike, alike[::-1])]
        outer = ends[0] | ends[1][::-1]
        if len(self.nodes) < 2 or outer.all():
            return self.weights
        rest = self.weights[:, ~outer]
        found = np.full_like(self.weights, 1 / self.num_parameters)
        share = 1 - outer.sum() / self.num_parameters
        found[:, ~outer] = rest * share / np.nansum(rest, axis=1, keepdims=True)
        return found

    @property
    def ritz_variance(self) -> float:
        """Variance of the Ritz values, all alike: what the paper's figure seems to be.

        It says more of Lanczos, which finds extreme eigenvalues first, than of the matrix.
        """
        return float(np.nanvar(self.nodes))

    def density(self, at: Floats, width: float) -> Floats:
        """Spectral density at values (K,), smoothed by a Gaussian of this width."""
        z = (at[:, None, None] - self.nodes) / width
        bumps = np.exp(-0.5 * z**2) / (width * np.sqrt(2 * np.pi))
        found: Floats = np.nansum(bumps * self.expected_weights, axis=2).mean(axis=1)
        return found


def hessian_product(
    loss: Callable[[], Tensor], parameters: Iterable[Tensor]
) -> tuple[Product, Tensor]:
    """The Hessian of a loss at the weights in place, and its gradient (P,).

    The graph of the gradient is kept: memory of about three passes.

    Args:
        loss: scalar, a function of the weights alone: fixed batch, times and noise.
        parameters: that it is differentiated by.

    Raises:
        RuntimeError: where a part of the network has no second derivative.
    """
    chosen = [p for p in parameters if p.requires_grad]
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):  # others have no second derivative
        first = torch.autograd.grad(loss(), chosen, create_graph=True, materialize_grads=True)
        flat = torch.cat([g.flatten() for g in first])

    def product(vector: Tensor) -> Tensor:
        found = torch.autograd.grad(
            flat, chosen, vector.to(flat), retain_graph=True, materialize_grads=True
        )
        return torch.cat([g.flatten() for g in found])

    return product, flat.detach()


def difference_error(
    loss: Callable[[], Tensor], parameters: Iterable[Tensor], share: float = 1e-4
) -> float:
    """How far the Hessian times the gradient is from the difference of gradients, relatively.

    Small where the loss is smooth. Where a part of the network has no second derivative, autograd
    may take it for 0 and say nothing; where gradients jump, as with ReLU, its Hessian leaves that
    out. Both show here. The weights are put back.

    Args:
        loss: as of `hessian_product`.
        parameters: as of `hessian_product`.
        share: length of the difference, by that of the weights.
    """
    chosen = [p for p in parameters if p.requires_grad]
    product, gradient = hessian_product(loss, chosen)
    if not gradient.any():
        return 0.0
    before = [p.detach().clone() for p in chosen]
    length = torch.cat([p.flatten() for p in before]).norm()
    step = share * length * gradient / gradient.norm()
    told = product(step)
    sizes = [p.numel() for p in chosen]
    parts = [s.view_as(p) for s, p in zip(step.split(sizes), chosen, strict=True)]
    ends = []
    try:
        for sign in (1, -1):
            with torch.no_grad():
                for p, start, part in zip(chosen, before, parts, strict=True):
                    p.copy_(start + sign * part)
            ends.append(hessian_product(loss, chosen)[1])
    finally:
        with torch.no_grad():
            for p, start in zip(chosen, before, strict=True):
                p.copy_(start)
    found = (ends[0] - ends[1]) / 2
    return float((found - told).norm() / torch.maximum(found.norm(), told.norm()))


def lanczos(product: Product, start: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Ritz values (m,), rising, and weights (m,) of the quadrature that starts at a vector (P,).

    In float64, each vector orthogonalised twice against all before, which takes memory for `steps`
    vectors; m is at most `steps`, less where the vectors reach no farther.
    """
    steps = min(steps, len(start))
    basis = start.new_empty(steps, len(start), dtype=torch.float64)
    basis[0] = start.double() / start.double().norm()
    diagonal: list[Tensor] = []
    beside: list[Tensor] = []
    for k in range(steps):
        w = product(basis[k].to(start.dtype)).double()
        diagonal.append(basis[k] @ w)
        for _ in range(2):
            w = w - basis[: k + 1].T @ (basis[: k + 1] @ w)
        beside.append(w.norm())
        if k + 1 == steps or beside[-1] <= 1e-10 * torch.stack(diagonal).abs().max():
            break
        basis[k + 1] = w / beside[-1]
    matrix = torch.diag(torch.stack(diagonal))
    if len(diagonal) > 1:
        off = torch.diag(torch.stack(beside[: len(diagonal) - 1]), 1)
        matrix = matrix + off + off.T
    values, vectors = torch.linalg.eigh(matrix)
    return values, vectors[0].square()


def spectrum(
    product: Product,
    like: Tensor,
    steps: int = 80,
    seeds: Sequence[int] = range(4),
) -> Spectrum:
    """Stochastic Lanczos quadrature: a run of Lanczos from a random vector for each seed.

    Args:
        product: the matrix.
        like: (P,) whose dtype and device the vectors have.
        steps: of each run: products, and Ritz values.
        seeds: of the random vectors.
    """
    nodes, weights = (np.full((len(seeds), steps), np.nan) for _ in range(2))
    for row, seed in enumerate(seeds):
        generator = torch.Generator().manual_seed(seed)
        start = torch.randn(len(like), generator=generator, dtype=torch.float64).to(like)
        values, shares = lanczos(product, start, steps)
        nodes[row, : len(values)] = values.flip(0).cpu().numpy()
        weights[row, : len(values)] = shares.flip(0).cpu().numpy()
    return Spectrum(len(like), nodes, weights)
