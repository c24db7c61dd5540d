"""Compute bits per dimension of images, from the variational bound or the probability flow.

`bits_per_dim` is for 8-bit images. `flow_bits_per_dim` computes a density over real numbers in
[-1, 1]. To use it for 8-bit images, first spread each value over its bin of width 2 / 255 by adding
uniform noise. Then add `log2(255 / 2) = 6.994` to the result. In expectation over the noise, the
sum is an upper bound on the bits per dimension of the 8-bit image.
"""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from lit_diffusion.gaussian import NATS_TO_BITS, expand_as, normal_kl, posterior, variational_term
from lit_diffusion.grids import check_finite
from lit_diffusion.protocols import Denoise, Process, RandnLike, TimeGrid, Variance


class BitsPerDim(NamedTuple):
    """Result of `bits_per_dim`: a bound and its terms in bits per dimension, and prediction errors.

    Attributes:
        total: (B,) the bound, which is `prior` plus the sum of `terms`.
        prior: (B,) the term `KL(q(x_T | x0) || p(x_T))`.
        terms: (B, N) terms of the N reverse steps, in the order of sampling.
        x0_mse: (B, N) mean squared error of the predicted x0 in each step.
        noise_mse: (B, N) mean squared error of the predicted noise in each step.

    Example:
        >>> from lit_diffusion.gaussian import FixedSmall
        >>> from lit_diffusion.grids import Sections
        >>> from lit_diffusion.processes import DiscreteVP, LinearBetas
        >>> from lit_diffusion.protocols import Denoised
        >>> x0, process = torch.zeros(2, 1, 8, 8), DiscreteVP(LinearBetas(20))
        >>> def oracle(x_t, t):  # knows that the image is 0
        ...     return Denoised(x0, x_t / process.alpha_sigma(t)[1][0].float())
        >>> bits = bits_per_dim(oracle, process, x0, FixedSmall(), Sections(), steps=20)
        >>> bits.terms.shape
        torch.Size([2, 20])
    """

    total: Tensor
    prior: Tensor
    terms: Tensor
    x0_mse: Tensor
    noise_mse: Tensor


@torch.no_grad()
def bits_per_dim(
    denoise: Denoise,
    process: Process,
    x0: Tensor,
    variance: Variance,
    times: TimeGrid,
    steps: int,
    randn_like: RandnLike = torch.randn_like,
    clip: bool = True,
) -> BitsPerDim:
    """Estimate the variational bound on `-log2 p(x0)` per dimension, with one noise draw per step.

    Args:
        denoise: the model.
        process: forward process. At its noisiest time, x_t should be close to the prior.
        x0: (B, C, H, W) 8-bit images in [-1, 1].
        variance: variance of the reverse steps.
        times: grid of the reverse steps. If the grid has fewer steps than the process, the result
            is a different, looser bound.
        steps: number of reverse steps.
        randn_like: source of noise.
        clip: whether the estimate of x0 is clamped to [-1, 1] before the model's mean is computed.

    Raises:
        ValueError: if a time of the grid is not finite.

    Source: Nichol & Dhariwal 2021 (improved-diffusion, arXiv 2102.09672), Eq. 4-7.

    Example:
        See `BitsPerDim`.
    """
    grid = times.grid(process, steps)
    check_finite(grid, times, process)
    posteriors = posterior(process, grid)
    rows = []
    for i, t in enumerate(grid[:-1]):
        noise, batch_t = randn_like(x0), t.to(x0.device).expand(len(x0))
        alpha, sigma = (expand_as(v, x0) for v in process.alpha_sigma(batch_t))
        x_t = alpha * x0 + sigma * noise
        denoised = denoise(x_t, batch_t)
        x0_hat = denoised.x0.clamp(-1, 1) if clip else denoised.x0
        step = posteriors.at(torch.full((len(x0),), i))
        log_beta, log_posterior = expand_as(step.log_beta, x0), expand_as(step.log_variance, x0)
        last = step.last.to(x0.device).reshape(-1, *[1] * (x0.ndim - 1))
        log_variance = variance.log_variance(log_beta, log_posterior, last, denoised.logvar_frac)
        term = variational_term(step, x0, x_t, x0_hat, log_variance)
        noise_error = (x_t - alpha * x0_hat) / sigma - noise
        rows.append((term, _mean_square(x0_hat - x0), _mean_square(noise_error)))
    terms, x0_mse, noise_mse = (torch.stack(row, dim=1) for row in zip(*rows, strict=True))
    prior = _prior_bits(process, x0, grid[0])
    return BitsPerDim(terms.sum(1) + prior, prior, terms, x0_mse, noise_mse)


def _prior_bits(process: Process, x0: Tensor, t: Tensor) -> Tensor:
    alpha, sigma = (v.to(x0) for v in process.alpha_sigma(t))
    zero = torch.zeros_like(x0)
    std = process.prior(torch.ones_like(x0), t)
    kl = normal_kl(alpha * x0, zero + 2 * sigma.log(), zero, 2 * std.log())
    return kl.flatten(1).mean(1) * NATS_TO_BITS


def _mean_square(error: Tensor) -> Tensor:
    return error.square().flatten(1).mean(1)


def score(denoise: Denoise, process: Process) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the score function of a model: the gradient of `log p(x_t)` with respect to x_t.

    Returns:
        A function of noised images x_t and times t. The function returns `-noise / sigma`, where
        `noise` is the noise that the model predicts. The result has the shape of x_t.

    Source: Song et al. 2021 (score SDEs), section 3.3.

    Example:
        >>> from lit_diffusion.processes import LinearFlow
        >>> from lit_diffusion.protocols import Denoised
        >>> gradient = score(lambda x_t, t: Denoised(x_t, x_t), LinearFlow())
        >>> gradient(torch.ones(1, 1, 1, 1), torch.tensor([0.5]).double()).item()
        -2.0
    """

    def gradient(x_t: Tensor, t: Tensor) -> Tensor:
        return -denoise(x_t, t).noise / expand_as(process.alpha_sigma(t)[1], x_t)

    return gradient


@torch.inference_mode(mode=False)  # a Trainer validates in inference mode, without gradients
@torch.no_grad()
def flow_bits_per_dim(
    denoise: Denoise,
    process: Process,
    x0: Tensor,
    times: TimeGrid,
    steps: int,
    probes: int | None = 1,
    randn_like: RandnLike = torch.randn_like,
) -> Tensor:
    """Compute `-log2 p(x0)` per dimension with the probability flow ODE from the data to the prior.

    With `y = x_t / alpha` and `s = log(sigma / alpha)`, the flow is
    `dy / ds = (sigma / alpha) * noise`, where `noise` is the noise that the model predicts. Along
    the flow, the derivative of `log p(y)` is minus the divergence of the flow. The classical
    fourth-order Runge-Kutta method integrates y and `log p(y)`.

    Args:
        denoise: the model, which must be differentiable.
        process: forward process.
        x0: (B, C, H, W) real numbers in [-1, 1].
        times: grid without times of pure noise. The flow starts at the least noisy time, with
            `x_t = x0`. It ends at the noisiest time, where x_t is assumed to have the distribution
            of the prior.
        steps: number of times in the grid. The clean time is not counted. The cost is
            `4 * (steps - 1)` function evaluations.
        probes: number of random vectors v with entries +-1. The divergence of the flow is estimated
            as the mean of `v^T J v`, where J is the Jacobian of the flow. None computes the exact
            trace of J, with one backward pass per dimension.
        randn_like: source of normal random numbers. The entries of v are the signs of these
            numbers.

    Returns:
        (B,) bits per dimension.

    Raises:
        ValueError: if a time of the grid is pure noise, if `steps < 2`, or if `probes < 1`.

    Source: Song et al. 2021 (score SDEs), section 4.3 and appendix D.2; Hutchinson's estimator of
    the trace.

    Example:
        >>> from lit_diffusion.grids import LogSNR
        >>> from lit_diffusion.processes import ContinuousVP
        >>> from lit_diffusion.protocols import Denoised
        >>> process = ContinuousVP()
        >>> def gaussian(x_t, t):  # the exact model of standard normal data
        ...     alpha, sigma = (scale.float().view(-1, 1, 1, 1) for scale in process.alpha_sigma(t))
        ...     return Denoised(alpha * x_t, sigma * x_t)
        >>> x0 = torch.zeros(1, 1, 4, 4)
        >>> bits = flow_bits_per_dim(gaussian, process, x0, LogSNR(), steps=20, probes=None)
        >>> round(bits.item(), 2)  # log2(2 pi) / 2
        1.33
    """
    noisiest, alpha, s = _flow_times(process, times, steps)
    y, log_det = x0 / alpha[0], x0.new_zeros(len(x0))
    if probes is not None and probes < 1:
        raise ValueError(f"probes must be at least 1, or None for the whole trace, got {probes}.")
    signs = None if probes is None else [randn_like(x0).sign() for _ in range(probes)]

    def slope(log_level: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return `dy / ds` and the trace of its Jacobian (exact or estimated) at a `log_level`."""
        t = process.at_log_snr(-2 * log_level)
        with torch.enable_grad():
            y = y.detach().requires_grad_()
            x_t = process.alpha_sigma(t)[0].to(y) * y
            dy = log_level.exp() * denoise(x_t, t.to(y.device).expand(len(y))).noise
            traces = [
                (torch.autograd.grad(dy, y, v, retain_graph=True)[0] * v).flatten(1).sum(1)
                for v in (_basis_images(y) if signs is None else signs)
            ]
        total = torch.stack(traces).sum(0)
        return dy.detach(), total if signs is None else total / len(signs)

    for a, b in pairwise(s):
        h = b - a
        dy_1, div_1 = slope(a, y)
        dy_2, div_2 = slope((a + b) / 2, y + h / 2 * dy_1)
        dy_3, div_3 = slope((a + b) / 2, y + h / 2 * dy_2)
        dy_4, div_4 = slope(b, y + h * dy_3)
        y = y + h / 6 * (dy_1 + 2 * dy_2 + 2 * dy_3 + dy_4)
        log_det = log_det + h / 6 * (div_1 + 2 * div_2 + 2 * div_3 + div_4)
    std = process.prior(torch.ones_like(y), noisiest) / alpha[-1]
    log_normal = -0.5 * ((y / std).square() + math.log(2 * math.pi)) - std.log()
    log_prior = log_normal.flatten(1).sum(1)
    dims = y[0].numel()
    nats = -(log_prior + log_det - dims * alpha[0].log())
    return nats / dims * NATS_TO_BITS


def _flow_times(process: Process, times: TimeGrid, steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the noisiest time (), and alpha and `log(sigma / alpha)` at all times of the grid.

    Alpha and `log(sigma / alpha)` have the shape (steps,) and begin with the least noisy time.
    """
    grid = times.grid(process, steps)[:-1].flip(0)
    alpha, sigma = process.alpha_sigma(grid)
    if steps < 2 or not (alpha > 0).all():
        raise ValueError(
            f"the flow needs two times or more, none of them pure noise (alpha = 0), got {steps} "
            f"times of {times} on {process}; use LogSNR(noisiest=-12)."
        )
    return grid[-1], alpha, (sigma / alpha).log()


def _basis_images(like: Tensor) -> list[Tensor]:
    """Return the standard basis of images. Each basis image is repeated for every row of `like`."""
    basis = torch.eye(like[0].numel(), dtype=like.dtype, device=like.device)
    return [row.view_as(like[0]).expand_as(like) for row in basis]
