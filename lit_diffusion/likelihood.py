"""How many bits per dimension a model needs: the variational bound, term by term."""

from typing import NamedTuple

import torch
from torch import Tensor

from lit_diffusion.gaussian import NATS_TO_BITS, expand_as, normal_kl, posterior, variational_term
from lit_diffusion.protocols import Denoise, Process, RandnLike, TimeGrid, Variance


class BitsPerDim(NamedTuple):
    """The bound and what it is made of.

    Attributes:
        total: (B,) sum of all terms.
        prior: (B,) KL(q(x_T | x0) || p(x_T)).
        terms: (B, N) of the reverse steps, noisiest first.
        x0_mse: (B, N) mean squared error of x0, noisiest first.
        noise_mse: (B, N) mean squared error of the noise, noisiest first.
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
    """Variational bound on -log2 p(x0) per dimension, with one draw of noise per term.

    Args:
        denoise: the model.
        process: whose noisiest time is close to its prior.
        x0: (B, C, H, W) 8-bit images in [-1, 1].
        variance: of the reverse steps.
        times: grid; fewer steps than the process has give another, looser bound.
        steps: number of terms.
        randn_like: source of noise.
        clip: whether x0 is clamped to [-1, 1] in the model's mean.

    Source: Nichol & Dhariwal 2021 (improved-diffusion), Eq. 4-7.
    """
    grid = times.grid(process, steps)
    every_step = posterior(process, grid)
    rows = []
    for i, t in enumerate(grid[:-1]):
        noise, batch_t = randn_like(x0), t.to(x0.device).expand(len(x0))
        alpha, sigma = (expand_as(v, x0) for v in process.alpha_sigma(batch_t))
        x_t = alpha * x0 + sigma * noise
        seen = denoise(x_t, batch_t)
        x0_hat = seen.x0.clamp(-1, 1) if clip else seen.x0
        step = every_step.at(torch.full((len(x0),), i))
        log_beta, log_posterior = expand_as(step.log_beta, x0), expand_as(step.log_variance, x0)
        last = step.last.to(x0.device).reshape(-1, *[1] * (x0.ndim - 1))
        log_variance = variance.log_variance(log_beta, log_posterior, last, seen.logvar_frac)
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
