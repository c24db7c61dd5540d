"""Posteriors, variances and likelihoods of the Gaussians in losses and solvers.

Coefficients are computed in float64 and cast to the dtype of the images when they are used.

Notation: `x_t = alpha_t * x0 + sigma_t * noise`. The time s is less noisy than the time t.
"""

import math
import weakref
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from lit_diffusion.protocols import Process

NATS_TO_BITS = 1 / math.log(2)


def expand_as(value: Tensor, images: Tensor) -> Tensor:
    """Convert a scale per image to a tensor that broadcasts against the images (B, C, H, W).

    A value (B,) becomes (B, 1, 1, 1), and () becomes (1, 1, 1, 1), in the dtype and on the device
    of `images`.
    """
    from_cpu = value.device.type == "cpu"  # a copy to the CPU must wait for the values
    value = value.to(device=images.device, dtype=images.dtype, non_blocking=from_cpu)
    return value.reshape(-1, *[1] * (images.ndim - 1))


class Posterior(NamedTuple):
    """Posteriors `q(x_s | x_t, x0) = N(x0_coef * x0 + xt_coef * x_t, variance)` for pairs (t, s).

    Each attribute has one element per pair (t, s). `last` is bool. The other attributes are
    float64, unless `step_posterior` converts them to a different dtype.

    Attributes:
        x0_coef: factor on x0 in the mean.
        xt_coef: factor on x_t in the mean.
        variance: variance of the posterior, which is 0 for the step to the clean image.
        log_variance: logarithm of the variance. For the step to the clean image, the logarithm
            would be infinite. Therefore, the value of the previous, noisier step is used, as in
            improved-diffusion's `posterior_log_variance_clipped`.
        log_beta: logarithm of the variance of `q(x_t | x_s)`, which is an upper bound on the
            variance of a reverse step.
        last: whether the step ends at the clean image.
    """

    x0_coef: Tensor
    xt_coef: Tensor
    variance: Tensor
    log_variance: Tensor
    log_beta: Tensor
    last: Tensor

    def at(self, index: int | Tensor) -> "Posterior":
        """Return the posteriors at `index`."""
        return Posterior(*(entry[index] for entry in self))


def posterior(process: Process, times: Tensor) -> Posterior:
    """Compute the posteriors of the steps between consecutive times of a grid.

    Args:
        process: the forward process.
        times: (N + 1,) float64, in decreasing order. The last time is the clean time.

    Returns:
        N posteriors. Element i is for the step from times[i] to times[i + 1].

    Source: Ho et al. 2020 (DDPM), Eq. 6-7, generalized to any two times as in Kingma et al. 2021
    (VDM), appendix A.

    Example:
        >>> from lit_diffusion.processes import LinearFlow
        >>> steps = posterior(LinearFlow(), torch.tensor([0.5, 0.25, 0.0], dtype=torch.float64))
        >>> steps.variance.round(decimals=4).tolist()
        [0.0556, 0.0]
    """
    alpha, sigma = process.alpha_sigma(times)
    ratio = alpha[:-1] / alpha[1:]
    beta = sigma[:-1] ** 2 - ratio**2 * sigma[1:] ** 2
    variance = beta * sigma[1:] ** 2 / sigma[:-1] ** 2
    log_beta = beta.log()
    log_variance = variance.log()
    log_variance[-1] = log_variance[-2] if len(variance) > 1 else log_beta[-1]
    return Posterior(
        x0_coef=alpha[1:] * beta / sigma[:-1] ** 2,
        xt_coef=ratio * sigma[1:] ** 2 / sigma[:-1] ** 2,
        variance=variance,
        log_variance=log_variance,
        log_beta=log_beta,
        last=sigma[1:] == 0,
    )


_tables_of: dict[int, dict[torch.device, Tensor]] = {}  # by id of the process, while it exists


def step_posterior(process: Process, t: Tensor, dtype: torch.dtype = torch.float64) -> Posterior:
    """Look up the posteriors of a process in T discrete steps, for the steps from t to t - 1.

    The times t (B,) are integers from 0 to T - 1, in any dtype.
    """
    steps = Posterior(*step_table(process, t.device)[:, t.long()].to(dtype))
    return steps._replace(last=steps.last != 0)


def step_table(process: Process, device: torch.device) -> Tensor:
    """Return the posteriors of all T steps of a discrete process, as a float64 table.

    The table has the shape (6, T). Row i has the i-th attribute of `Posterior`. Column t is for the
    step from t to t - 1.
    """
    if id(process) not in _tables_of:
        _tables_of[id(process)] = {}
        weakref.finalize(process, _tables_of.pop, id(process))
    tables = _tables_of[id(process)]
    if (table := tables.get(device)) is None:
        assert process.num_steps is not None
        times = torch.arange(process.num_steps - 1, -2, -1, device=device, dtype=torch.float64)
        table = torch.stack([entry.double() for entry in posterior(process, times)]).flip(1)
        if type(table) is Tensor:  # fake tensors of torch.compile must not be stored
            tables[device] = table
    return table


@dataclass(frozen=True)
class FixedSmall:
    """Reverse steps with the posterior variance, which is optimal if the data are a single point.

    Source: Ho et al. 2020 (DDPM), section 3.2.

    Example:
        >>> log_beta, log_posterior = torch.tensor(-4.0), torch.tensor(-5.0)
        >>> FixedSmall().log_variance(log_beta, log_posterior, torch.tensor(False), None)
        tensor(-5.)
    """

    learned: ClassVar[bool] = False

    def log_variance(
        self, log_beta: Tensor, log_posterior: Tensor, last: Tensor, frac: Tensor | None, /
    ) -> Tensor:
        """Return `log_posterior`."""
        return log_posterior


@dataclass(frozen=True)
class FixedLarge:
    """Reverse steps with the variance of `q(x_t | x_s)`, which is optimal for standard normal data.

    The step to the clean image has the log-variance `Posterior.log_variance` instead, as in
    improved-diffusion.

    Source: Ho et al. 2020 (DDPM), section 3.2; Nichol & Dhariwal 2021 (improved-diffusion).

    Example:
        >>> log_beta, log_posterior = torch.tensor(-4.0), torch.tensor(-5.0)
        >>> FixedLarge().log_variance(log_beta, log_posterior, torch.tensor(False), None)
        tensor(-4.)
    """

    learned: ClassVar[bool] = False

    def log_variance(
        self, log_beta: Tensor, log_posterior: Tensor, last: Tensor, frac: Tensor | None, /
    ) -> Tensor:
        """Return `log_beta`, or `log_posterior` where `last` is True."""
        return torch.where(last, log_posterior, log_beta)


@dataclass(frozen=True)
class LearnedRange:
    """Reverse steps with a learned variance between the posterior variance and beta.

    The log-variance is `frac * log_beta + (1 - frac) * log_posterior`, where the network outputs
    `frac` for each value of the image. The network may output fractions outside [0, 1].

    Source: Nichol & Dhariwal 2021 (improved-diffusion, arXiv 2102.09672), Eq. 15.

    Example:
        >>> log_beta, log_posterior = torch.tensor(-4.0), torch.tensor(-5.0)
        >>> last, fraction = torch.tensor(False), torch.tensor(0.5)
        >>> LearnedRange().log_variance(log_beta, log_posterior, last, fraction)
        tensor(-4.5000)
    """

    learned: ClassVar[bool] = True

    def log_variance(
        self, log_beta: Tensor, log_posterior: Tensor, last: Tensor, frac: Tensor | None, /
    ) -> Tensor:
        """Interpolate linearly from `log_posterior` at frac = 0 to `log_beta` at frac = 1."""
        if frac is None:
            raise ValueError(
                "LearnedRange needs a network that outputs a variance, and this network outputs "
                "none; train with HybridLoss, or sample with FixedSmall or FixedLarge."
            )
        return frac * log_beta + (1 - frac) * log_posterior


def normal_kl(mean1: Tensor, logvar1: Tensor, mean2: Tensor, logvar2: Tensor) -> Tensor:
    """Compute `KL(N(mean1, exp(logvar1)) || N(mean2, exp(logvar2)))` in nats, elementwise."""
    return 0.5 * (
        logvar2 - logvar1 - 1 + (logvar1 - logvar2).exp() + (mean1 - mean2) ** 2 * (-logvar2).exp()
    )


def approx_normal_cdf(x: Tensor) -> Tensor:
    """Approximate the standard normal CDF with tanh, as the code of DDPM does."""
    return 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def discretized_log_likelihood(x: Tensor, mean: Tensor, logvar: Tensor) -> Tensor:
    """Compute the log-probability of 8-bit values under a Gaussian, in nats.

    The probability of a value is the integral of the Gaussian over the value's bin of width
    2 / 255. The bins of -1 and 1 extend to infinity. Probabilities below 1e-12 are set to 1e-12.

    Args:
        x: 8-bit values that were scaled from [0, 255] to [-1, 1].
        mean: mean of the Gaussian, with the shape of `x`.
        logvar: log-variance of the Gaussian, with the shape of `x`.

    Returns:
        Log-probabilities, with the shape of `x`.

    Source: Ho et al. 2020 (DDPM), Eq. 13.

    Example:
        >>> levels = torch.arange(256) / 127.5 - 1
        >>> nats = discretized_log_likelihood(levels, torch.zeros(256), torch.zeros(256))
        >>> round(nats.exp().sum().item(), 4)
        1.0
    """
    scale = (-0.5 * logvar).exp()
    upper = approx_normal_cdf(scale * (x - mean + 1 / 255))
    lower = approx_normal_cdf(scale * (x - mean - 1 / 255))
    probability = torch.where(x < -0.999, upper, torch.where(x > 0.999, 1 - lower, upper - lower))
    return probability.clamp(min=1e-12).log()


def variational_term(
    step: Posterior, x0: Tensor, x_t: Tensor, x0_hat: Tensor, log_variance: Tensor
) -> Tensor:
    """Compute the term of the variational bound for one step from t to s.

    The term is `KL(q(x_s | x_t, x0) || p(x_s | x_t))`, where p is the model. If s is the clean
    time, the term is `-log p(x0 | x_t)`.

    Args:
        step: posteriors, one per image. Each attribute has the shape (B,).
        x0: (B, C, H, W) clean images.
        x_t: (B, C, H, W) noised images.
        x0_hat: (B, C, H, W) the model's estimate of x0. This function does not clip it.
        log_variance: log-variance of the model, with a shape that broadcasts to (B, C, H, W).

    Returns:
        (B,) bits per dimension.

    Source: Nichol & Dhariwal 2021 (improved-diffusion, arXiv 2102.09672), Eq. 4-7.
    """
    c0, ct = expand_as(step.x0_coef, x0), expand_as(step.xt_coef, x0)
    true_logvar = expand_as(step.log_variance, x0)
    from_x_t = ct * x_t
    mean = c0 * x0_hat + from_x_t
    kl = normal_kl(c0 * x0 + from_x_t, true_logvar, mean, log_variance)
    decoder = -discretized_log_likelihood(x0, mean, log_variance)
    last = step.last.to(x0.device).reshape(-1, *[1] * (x0.ndim - 1))
    return torch.where(last, decoder, kl).flatten(1).mean(1) * NATS_TO_BITS
