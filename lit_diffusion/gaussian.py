"""Gaussian identities for losses and solvers, in float64 until they are applied to images.

Notation: `x_t = alpha_t * x0 + sigma_t * noise`, and s is a less noisy time than t.
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
    """Give scales the dtype, device and number of dimensions of images, for broadcasting.

    Args:
        value: (B,) or ().
        images: (B, C, H, W).

    Returns:
        (B, 1, 1, 1) or (), in the dtype and on the device of `images`.

    Example:
        >>> expand_as(torch.ones(2).double(), torch.zeros(2, 3, 8, 8)).shape
        torch.Size([2, 1, 1, 1])
    """
    from_cpu = value.device.type == "cpu"  # the only direction that is safe without waiting
    value = value.to(device=images.device, dtype=images.dtype, non_blocking=from_cpu)
    return value.reshape(-1, *[1] * (images.ndim - 1))


class Posterior(NamedTuple):
    """Posteriors `q(x_s | x_t, x0) = N(x0_coef * x0 + xt_coef * x_t, variance)` of steps t to s.

    All entries are float64, with one element per pair (t, s).

    Attributes:
        x0_coef: weight of x0 in the mean.
        xt_coef: weight of x_t in the mean.
        variance: posterior variance; 0 if s is the clean time.
        log_variance: logarithm of the variance. In the step to the clean time, the logarithm would
            be log 0. This step therefore has the value of the previous step, as in
            improved-diffusion's `posterior_log_variance_clipped`.
        log_beta: log of the variance of `q(x_t | x_s)`, the upper bound on the reverse variance.
        last: whether s is the clean time.

    Example:
        >>> from lit_diffusion.processes import LinearFlow
        >>> steps = posterior(LinearFlow(), torch.tensor([0.5, 0.25, 0.0], dtype=torch.float64))
        >>> steps.last.tolist()
        [False, True]
    """

    x0_coef: Tensor
    xt_coef: Tensor
    variance: Tensor
    log_variance: Tensor
    log_beta: Tensor
    last: Tensor

    def at(self, index: int | Tensor) -> "Posterior":
        """The entries at `index`."""
        return Posterior(*(entry[index] for entry in self))


def posterior(process: Process, times: Tensor) -> Posterior:
    """Compute the posterior of every step down a grid of times.

    Args:
        process: the forward process.
        times: (N + 1,) float64, in decreasing order. The last is the clean time.

    Returns:
        N posteriors. Element i is for the step from times[i] to times[i + 1].

    Source: Ho et al. 2020 (DDPM), Eq. 6-7, written for any two times as in Kingma et al. 2021
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
    """Look up the posteriors of the steps from integer times t to t - 1 of a discrete process.

    For each process and device, a float64 table is computed once. Each call reads it with one
    gather.

    Args:
        process: a process in discrete steps.
        t: (B,) integer times, of any dtype.
        dtype: dtype of the result.

    Example:
        >>> from lit_diffusion.processes import DiscreteVP, LinearBetas
        >>> step_posterior(DiscreteVP(LinearBetas(100)), torch.tensor([0, 99])).last.tolist()
        [True, False]
    """
    steps = Posterior(*step_table(process, t.device)[:, t.long()].to(dtype))
    return steps._replace(last=steps.last != 0)


def step_table(process: Process, device: torch.device) -> Tensor:
    """Table of the posteriors of a discrete process: (6, T) float64.

    Row i is the i-th entry of `Posterior`. Column t is the step from t to t - 1.
    """
    if id(process) not in _tables_of:
        _tables_of[id(process)] = {}
        weakref.finalize(process, _tables_of.pop, id(process))
    tables = _tables_of[id(process)]
    if (table := tables.get(device)) is None:
        assert process.num_steps is not None
        times = torch.arange(process.num_steps - 1, -2, -1, device=device, dtype=torch.float64)
        table = torch.stack([entry.double() for entry in posterior(process, times)]).flip(1)
        if type(table) is Tensor:  # not a fake tensor, as torch.compile uses them
            tables[device] = table
    return table


@dataclass(frozen=True)
class FixedSmall:
    """Posterior variance for reverse steps, which is optimal if all data are one point.

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
        """log_posterior."""
        return log_posterior


@dataclass(frozen=True)
class FixedLarge:
    """Variance beta for reverse steps, which is optimal for standard normal data.

    The step to the clean image uses the posterior variance of the previous step.

    Source: Ho et al. 2020 (DDPM), section 3.2. The last step follows improved-diffusion.

    Example:
        >>> log_beta, log_posterior = torch.tensor(-4.0), torch.tensor(-5.0)
        >>> FixedLarge().log_variance(log_beta, log_posterior, torch.tensor(False), None)
        tensor(-4.)
    """

    learned: ClassVar[bool] = False

    def log_variance(
        self, log_beta: Tensor, log_posterior: Tensor, last: Tensor, frac: Tensor | None, /
    ) -> Tensor:
        """log_beta, or log_posterior where `last` is True."""
        return torch.where(last, log_posterior, log_beta)


@dataclass(frozen=True)
class LearnedRange:
    """Learned variance of reverse steps, between the posterior variance and beta.

    The network outputs a fraction, which interpolates between the logarithms of the two variances.
    Fractions outside [0, 1] extrapolate.

    Source: Nichol & Dhariwal 2021 (improved-diffusion), Eq. 15.

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
        """Interpolation from log_posterior at frac = 0 to log_beta at frac = 1."""
        if frac is None:
            raise ValueError(
                "LearnedRange needs a network that outputs a variance, and this network outputs "
                "none; train with HybridLoss, or sample with FixedSmall or FixedLarge."
            )
        return frac * log_beta + (1 - frac) * log_posterior


def normal_kl(mean1: Tensor, logvar1: Tensor, mean2: Tensor, logvar2: Tensor) -> Tensor:
    """Compute `KL(N(mean1, exp(logvar1)) || N(mean2, exp(logvar2)))` in nats, elementwise.

    Example:
        >>> zero, one = torch.zeros(()), torch.ones(())
        >>> normal_kl(one, zero, zero, zero)
        tensor(0.5000)
    """
    return 0.5 * (
        logvar2 - logvar1 - 1 + (logvar1 - logvar2).exp() + (mean1 - mean2) ** 2 * (-logvar2).exp()
    )


def approx_normal_cdf(x: Tensor) -> Tensor:
    """Approximate the standard normal CDF with tanh, as in the code of DDPM and improved-diffusion.

    Example:
        >>> approx_normal_cdf(torch.tensor([0.0, 1.0]))
        tensor([0.5000, 0.8412])
    """
    return 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def discretized_log_likelihood(x: Tensor, mean: Tensor, logvar: Tensor) -> Tensor:
    """Compute the log-probability of 8-bit values under a Gaussian, in nats.

    The Gaussian is integrated over the bin of each value. The outermost bins are unbounded.
    Probabilities below 1e-12 are set to 1e-12.

    Args:
        x: values in [-1, 1] on the grid of 256 levels.
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

    The term is `KL(q(x_s | x_t, x0) || p(x_s | x_t))`. In the step to the clean time, it is
    `-log p(x0 | x_t)`.

    Args:
        step: posteriors, with the shape (B,) for each entry.
        x0: (B, C, H, W) clean images.
        x_t: (B, C, H, W) noised images.
        x0_hat: (B, C, H, W) the model's estimate of x0, not clipped.
        log_variance: the model's log-variance, (B, C, H, W) or broadcastable.

    Returns:
        (B,) bits per dimension.

    Source: Nichol & Dhariwal 2021 (improved-diffusion), Eq. 4-7.
    """
    c0, ct = expand_as(step.x0_coef, x0), expand_as(step.xt_coef, x0)
    true_logvar = expand_as(step.log_variance, x0)
    from_x_t = ct * x_t
    mean = c0 * x0_hat + from_x_t
    kl = normal_kl(c0 * x0 + from_x_t, true_logvar, mean, log_variance)
    decoder = -discretized_log_likelihood(x0, mean, log_variance)
    last = step.last.to(x0.device).reshape(-1, *[1] * (x0.ndim - 1))
    return torch.where(last, decoder, kl).flatten(1).mean(1) * NATS_TO_BITS
