"""Estimate spectra of Hessians from Hessian-vector products.

Source: Ghorbani et al. 2019, "An Investigation into Neural Net Optimization via Hessian Eigenvalue
Density", section 2 (stochastic Lanczos quadrature); Golub & Welsch 1969 for the quadrature.
"""

import math
import re
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from scipy.linalg import eigh_tridiagonal
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lit_diffusion.data.base import require_at_least
from lit_diffusion.lab.analysis import common
from lit_diffusion.lab.analysis.common import Arrays
from lit_diffusion.lab.analysis.fixed_losses import describe_losses, network_of_loss
from lit_diffusion.signals import print_error

MatrixProduct = Callable[[Tensor], Tensor]
"""Product of a symmetric matrix with a vector, (P,) -> (P,)."""


@dataclass(frozen=True)
class Spectrum:
    """Eigenvalues of a symmetric (P, P) matrix, estimated by V Lanczos runs.

    Attributes:
        num_parameters: number of parameters P.
        nodes: (V, m) Ritz values (estimated eigenvalues) of each Lanczos run, in descending order.
            If a run ended early, its row is padded with NaN.
        weights: (V, m) quadrature weights of the Ritz values. Each row sums to 1.

    Example:
        >>> matrix = torch.diag(torch.arange(1.0, 6.0))
        >>> spectrum = estimate_spectrum(lambda v: matrix.to(v) @ v, torch.zeros(5), steps=5)
        >>> spectrum.top.round(6)
        array([5., 4., 3., 2., 1.])
    """

    num_parameters: int
    nodes: NDArray[np.float64]
    weights: NDArray[np.float64]

    @property
    def top(self) -> NDArray[np.float64]:
        """(m,) largest eigenvalues, averaged over runs. Only the first few are accurate."""
        columns = ~np.isnan(self.nodes).all(axis=0)
        return np.nanmean(self.nodes[:, columns], axis=0)

    @property
    def mean(self) -> float:
        """Mean eigenvalue, by quadrature."""
        return float(np.nansum(self.nodes * self.expected_weights, axis=1).mean())

    @property
    def trace(self) -> float:
        """P times the mean eigenvalue."""
        return self.num_parameters * self.mean

    @property
    def variance(self) -> float:
        """Variance of the eigenvalues, by quadrature."""
        second = np.nansum(self.nodes**2 * self.expected_weights, axis=1).mean()
        return float(second - self.mean**2)

    @property
    def expected_weights(self) -> NDArray[np.float64]:
        """Quadrature weights (V, m), with `1 / P` for the eigenvalues at both ends of the spectrum.

        In a single Lanczos run, the weight of a large eigenvalue is proportional to the square of
        one normal variable, so weighted sums over large eigenvalues would be noisy. Therefore,
        weights are replaced by their expectation `1 / P`, where P is the number of parameters.

        The weights are replaced one by one, from each end of the spectrum inward. From each end,
        the replacement stops at the first Ritz value on which the runs disagree. It also stops at
        the first weight whose mean over runs is at least `4 / P`, because such a weight belongs to
        an eigenvalue of multiplicity above 1. The weights between the two stops are rescaled, so
        that each row still sums to 1.
        """
        magnitudes = np.abs(self.nodes).max(axis=0)
        agree = np.ptp(self.nodes, axis=0) <= 1e-3 * magnitudes  # False for nan
        agree &= self.weights.mean(axis=0) * self.num_parameters < 4
        from_left = np.logical_and.accumulate(agree)
        from_right = np.logical_and.accumulate(agree[::-1])[::-1]
        outer = from_left | from_right
        if len(self.nodes) < 2 or outer.all():
            return self.weights
        inner = self.weights[:, ~outer]
        weights = np.full_like(self.weights, 1 / self.num_parameters)
        share = 1 - outer.sum() / self.num_parameters
        weights[:, ~outer] = inner * share / np.nansum(inner, axis=1, keepdims=True)
        return weights

    @property
    def ritz_variance(self) -> float:
        """Variance of the Ritz values with equal weights.

        A figure of "Why diffusion models are stable and how to make them faster" (2023) seems to
        show this unweighted variance of Ritz values. It says more about the Lanczos method than
        about the matrix, because the method finds extreme eigenvalues first.
        """
        return float(np.nanvar(self.nodes))

    def density(self, at: NDArray[np.float64], width: float) -> NDArray[np.float64]:
        """(K,) spectral density at values (K,), smoothed by a Gaussian with std `width`."""
        z = (at[:, None, None] - self.nodes) / width  # (K, V, m)
        kernels = np.exp(-0.5 * z**2) / (width * np.sqrt(2 * np.pi))
        densities = np.nansum(kernels * self.expected_weights, axis=2)  # (K, V)
        return densities.mean(axis=1)


def hessian_product(
    loss: Callable[[], Tensor], parameters: Iterable[Tensor]
) -> tuple[MatrixProduct, Tensor]:
    """Build the Hessian-vector product of a loss at the current weights.

    The autograd graph of the gradient stays in memory as long as the returned function exists. It
    needs about as much memory as the graphs of three forward passes.

    Args:
        loss: scalar loss that depends only on the weights.
        parameters: tensors to differentiate by. Tensors without `requires_grad` are ignored.

    Returns:
        The Hessian-vector product, and the gradient (P,).

    Raises:
        RuntimeError: if a part of the network has no second derivative.

    Example:
        >>> weight = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> product, gradient = hessian_product(lambda: (weight**3).sum(), [weight])
        >>> product(torch.tensor([1.0, 0.0]))
        tensor([6., 0.])
    """
    weights = [p for p in parameters if p.requires_grad]
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):  # others lack second derivatives
        first = torch.autograd.grad(loss(), weights, create_graph=True, materialize_grads=True)
        gradient = torch.cat([g.flatten() for g in first])

    def product(vector: Tensor) -> Tensor:
        second = torch.autograd.grad(
            gradient, weights, vector.to(gradient), retain_graph=True, materialize_grads=True
        )
        return torch.cat([g.flatten() for g in second])

    return product, gradient.detach()


def finite_difference_error(loss: Callable[[], Tensor], parameters: Iterable[Tensor]) -> float:
    """Return the relative error of a Hessian-vector product, compared with a central difference.

    The product is the Hessian times the gradient of the loss. The error is small for smooth losses.
    It is large if a part of the network has no second derivative, which autograd may silently treat
    as 0. It is also large if gradients jump, as with ReLU, because the Hessian ignores the jumps.
    The weights are restored before the function returns. The arguments are the same as for
    `hessian_product`.
    """
    weights = [p for p in parameters if p.requires_grad]
    product, gradient = hessian_product(loss, weights)
    if not gradient.any():
        return 0.0
    original = [p.detach().clone() for p in weights]
    length = torch.cat([p.flatten() for p in original]).norm()
    step = 1e-4 * length * gradient / gradient.norm()
    hessian_change = product(step)
    steps = step.split([p.numel() for p in weights])
    ends = []
    with torch.no_grad():
        try:
            for sign in (1, -1):
                for p, start, part in zip(weights, original, steps, strict=True):
                    p.copy_(start + sign * part.view_as(p))
                ends.append(hessian_product(loss, weights)[1])
        finally:
            for p, start in zip(weights, original, strict=True):
                p.copy_(start)
    gradient_change = (ends[0] - ends[1]) / 2
    scale = torch.maximum(gradient_change.norm(), hessian_change.norm())
    return float((gradient_change - hessian_change).norm() / scale)


def lanczos(
    product: MatrixProduct, start: Tensor, steps: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Run Lanczos in float64, with full reorthogonalization (twice per step).

    It stores `steps` vectors of P numbers.

    Args:
        product: function that multiplies the matrix by a vector.
        start: (P,) vector to start from.
        steps: maximum number of products. The method stops earlier if the vectors span an invariant
            subspace.

    Returns:
        Ritz values (m,), ascending, and their quadrature weights (m,).

    Example:
        >>> matrix = torch.diag(torch.tensor([1.0, 3.0]))
        >>> nodes, weights = lanczos(lambda v: matrix.to(v) @ v, torch.ones(2), steps=2)
        >>> nodes.round(6), weights.round(6)
        (array([1., 3.]), array([0.5, 0.5]))
    """
    steps = min(steps, len(start))
    basis = start.new_empty(steps, len(start), dtype=torch.float64)
    basis[0] = start.double() / start.double().norm()
    diagonal: list[float] = []
    off_diagonal: list[float] = []
    for k in range(steps):
        w = product(basis[k].to(start.dtype)).double()
        diagonal.append((basis[k] @ w).item())
        for _ in range(2):
            w = w - basis[: k + 1].T @ (basis[: k + 1] @ w)
        norm = w.norm().item()
        if k + 1 == steps or norm <= 1e-10 * max(map(abs, diagonal)):
            break
        off_diagonal.append(norm)
        basis[k + 1] = w / norm
    values, vectors = eigh_tridiagonal(diagonal, off_diagonal)
    return values, vectors[0] ** 2


def estimate_spectrum(
    product: MatrixProduct, like: Tensor, steps: int = 80, seeds: Sequence[int] = range(4)
) -> Spectrum:
    """Estimate a spectrum by stochastic Lanczos quadrature: one Lanczos run per seed.

    Each run starts from a random vector.

    Args:
        product: function that multiplies the matrix by a vector.
        like: (P,) tensor with the dtype and device of the vectors.
        steps: number of products per run, which is also the number of Ritz values.
        seeds: seeds of the random vectors.
    """
    nodes, weights = (np.full((len(seeds), steps), np.nan) for _ in range(2))
    for row, seed in enumerate(seeds):
        generator = torch.Generator().manual_seed(seed)
        start = torch.randn(len(like), generator=generator, dtype=torch.float64).to(like)
        ritz_values, shares = lanczos(product, start, steps)
        nodes[row, : len(ritz_values)] = ritz_values[::-1]
        weights[row, : len(shares)] = shares[::-1]
    return Spectrum(len(like), nodes, weights)


def draw_spectra(spectra: Mapping[str, Spectrum], path: Path, note: str) -> None:
    """Draw the eigenvalue density of each loss on a logarithmic axis."""
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.add_subplot(yscale="log")
    low = min(np.nanmin(each.nodes) for each in spectra.values())
    high = max(np.nanmax(each.nodes) for each in spectra.values())
    width = max(high - low, 1e-3 * abs(high)) / 100 or 0.01  # also if all values are equal
    at = np.linspace(low - 4 * width, high + 4 * width, 1000)
    densities = {name: each.density(at, width) for name, each in spectra.items()}
    most = max(density.max() for density in densities.values())
    # Nine of ten squared components of a random vector are above 0.01 of their mean.
    least = min(0.01 / (each.num_parameters * width) for each in spectra.values())
    for name, density in densities.items():
        top = spectra[name].top[:5]
        (line,) = axes.plot(at, density, label=f"{name}: largest {top[0]:.3g}")
        axes.plot(top, [2 * least] * len(top), "|", color=line.get_color(), markersize=10)
    axes.set(xlabel="eigenvalue", ylabel="density", ylim=(least, 3 * most))
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    common.save_figure(figure, path, note)


def compute_spectra(options: Namespace) -> str:
    """Run `lit-diffusion analyze hessian`; returns the text to print."""
    steps, vectors = options.steps, options.vectors
    require_at_least(1, steps=steps, vectors=vectors)
    loaded = common.load_analyzed_module(options.checkpoint, options)
    losses = common.load_losses(loaded, options)
    parameters = {
        name: list((network_of_loss(loaded.module, name) or loaded.module).parameters())
        for name in losses
    }
    for name, loss in losses.items():
        check_second_derivative(name, loss, parameters[name], options.kinks)
    start = time.monotonic()
    for loss in losses.values():
        product, like = hessian_product(loss, loaded.module.parameters())
        product(torch.ones_like(like))
    seconds = (time.monotonic() - start) * steps * vectors
    size = 8e-9 * steps * sum(p.numel() for p in loaded.module.parameters())
    what = f"{steps * vectors} products with the Hessians of {len(losses)} losses"
    common.print_cost(f"{what}, keeping {steps} vectors of all weights, {size:.1f} GB", seconds)
    out = common.plan_analysis("hessian", options, loaded)

    def run_lanczos(piece: str) -> Arrays:
        number, seed = map(int, piece.split("-"))
        name = list(losses)[number]
        product, like = hessian_product(losses[name], parameters[name])
        spectrum = estimate_spectrum(product, like, steps, [seed])
        return {"nodes": spectrum.nodes, "weights": spectrum.weights, "num": np.array(len(like))}

    names = [f"{i}-{seed}" for i in range(len(losses)) for seed in range(vectors)]
    arrays = common.compute_pieces(out, names, run_lanczos, "vector")
    note = describe_losses(loaded.module, options.images, "unchanged")
    spectra: dict[str, Spectrum] = {}
    for i, name in enumerate(losses):
        runs = arrays[i * vectors : (i + 1) * vectors]
        nodes, weights = (np.concatenate([each[k] for each in runs]) for k in ("nodes", "weights"))
        spectra[name] = Spectrum(int(runs[0]["num"]), nodes, weights)
        common.save_result(out / f"hessian-{i}", vars(spectra[name]), note)
    draw_spectra(spectra, out / "hessian.png", note)
    texts = [
        f"{name}: largest {', '.join(f'{value:.4g}' for value in each.top[:5])}; "
        f"smallest {np.nanmin(each.nodes):.4g}; trace {each.trace:.4g}; "
        f"variance {each.variance:.4g} by quadrature, {each.ritz_variance:.4g} of Ritz values"
        for name, each in spectra.items()
    ]
    return "\n".join([*texts, note])


def check_second_derivative(
    name: str, loss: Callable[[], Tensor], parameters: Sequence[Tensor], allows_jumps: bool
) -> None:
    """Raise ValueError if autograd's Hessian disagrees with finite differences of gradients."""
    rule = (
        "a part of the network has no second derivative, such as a fused attention, or gradients "
        "jump, as with ReLU, or with a spectral norm whose largest singular value is repeated. "
        "Use plain operations, or pass --kinks to ignore the jumps"
    )
    try:
        error = finite_difference_error(loss, parameters)
    except RuntimeError as failure:
        if not re.search("derivative|differentiate", str(failure)):
            raise
        raise ValueError(f"{rule}: {failure}") from failure
    if error > 0.1 or math.isnan(error):
        difference = f"the Hessian of {name} is {error:.0%} off the difference of gradients"
        if not allows_jumps or math.isnan(error):
            raise ValueError(f"{difference}: {rule}.")
        print_error(f"{difference}, because gradients jump.")
