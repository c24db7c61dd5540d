"""Training times: random numbers u in [0, 1), mapped to times of the process.

A training step draws a number u for each image of the batch with `draw_uniforms`. A larger u means
a noisier image. The density of u is uniform, unless a callback, such as a curriculum, changes it.
`Stratified`, `Antithetic` and `Independent` are joint distributions of the numbers u of a batch.
The quantile function of a `TimestepDistribution`, such as `LogNormal`, maps u to a time of the
process.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_diffusion.protocols import Device, Process, TimestepDistribution, UniformDraws

LAST_UNIFORM = 1 - 2**-53  # the largest float64 below 1


def draw_uniforms(
    n: int,
    density: Tensor | None = None,
    uniforms: UniformDraws | None = None,
    *,
    generator: torch.Generator | None = None,
    device: Device = None,
) -> Tensor:
    """Draw n values u in [0, 1), each with the marginal density `density`.

    Args:
        n: number of values.
        density: (num_bins,) density in equal bins over [0, 1], not necessarily normalized. None
            means the uniform density.
        uniforms: joint distribution of the n uniform random numbers from which the values are
            computed. None means `Stratified()`.
        generator: source of randomness. None means torch's global generator.
        device: device of the result.

    Returns:
        (n,) float64.

    Example:
        >>> u = draw_uniforms(4)
        >>> sorted((u * 4).long().tolist())
        [0, 1, 2, 3]
    """
    u = (Stratified() if uniforms is None else uniforms).uniforms(n, generator, device)
    return u if density is None else _inverse_cdf(u, density)


def bin_of(u: Tensor, num_bins: int) -> Tensor:
    """Divide [0, 1] into `num_bins` equal bins, and return the int64 index of the bin of each u.

    Example:
        >>> bin_of(torch.tensor([0.0, 0.49, 0.5, 0.99]), num_bins=2)
        tensor([0, 0, 1, 1])
    """
    return (u * num_bins).long().clamp(0, num_bins - 1)


def _inverse_cdf(u: Tensor, density: Tensor) -> Tensor:
    """Quantile function of a piecewise constant density. It is linear within each bin."""
    weights = density.to(device=u.device, dtype=torch.float64)
    if weights.is_cuda and torch.are_deterministic_algorithms_enabled():
        cdf = weights.expand(len(weights), -1).tril().sum(1)  # because cumsum raises an error here
    else:
        cdf = weights.cumsum(0)
    cdf = cdf / cdf[-1]  # ends at exactly 1, so that no u is mapped to an empty bin at the end
    index = torch.searchsorted(cdf, u, right=True)
    mass = cdf.diff(prepend=cdf.new_zeros(1))[index]
    # The fraction must be below 1 even after rounding, because the next bin may be empty.
    fraction = ((u - (cdf[index] - mass)) / mass).clamp(0, 1 - 2**-32)
    return (index + fraction) / len(cdf)


@dataclass(frozen=True)
class Independent:
    """Independent uniform random numbers.

    Source: Ho et al. 2020 (DDPM), algorithm 1.

    Example:
        >>> Independent().uniforms(4, None, None).shape
        torch.Size([4])
    """

    def uniforms(self, n: int, generator: torch.Generator | None, device: Device, /) -> Tensor:
        """Draw n numbers, (n,) float64 in [0, 1)."""
        return torch.rand(n, dtype=torch.float64, generator=generator, device=device)


@dataclass(frozen=True)
class Stratified:
    """One uniform random number from each of n equal strata of [0, 1), in random order.

    The variance of the loss is lower than with `Independent`.

    Source: Kingma et al. 2021 (VDM), appendix I.1, but with an independent offset in each stratum.

    Example:
        >>> u = Stratified().uniforms(4, None, None)
        >>> (4 * u.sort().values).long().tolist()
        [0, 1, 2, 3]
    """

    def uniforms(self, n: int, generator: torch.Generator | None, device: Device, /) -> Tensor:
        """Draw n numbers, (n,) float64 in [0, 1)."""
        u = torch.rand(n, dtype=torch.float64, generator=generator, device=device)
        u = (torch.randperm(n, generator=generator, device=device) + u) / n
        return u.clamp(max=LAST_UNIFORM)


@dataclass(frozen=True)
class Antithetic:
    """Pairs of u and `1 - u`: the second half of the batch mirrors the first half.

    For odd n, the last value of the first half has no partner.

    Source: the code of Song et al. 2021 (DDIM). In VDM, "antithetic" means `Stratified`.

    Example:
        >>> u = Antithetic().uniforms(5, None, None)
        >>> bool(torch.allclose(u[:2] + u[3:], torch.ones(2).double()))
        True
    """

    def uniforms(self, n: int, generator: torch.Generator | None, device: Device, /) -> Tensor:
        """Draw n numbers, (n,) float64 in [0, 1)."""
        first = torch.rand((n + 1) // 2, dtype=torch.float64, generator=generator, device=device)
        return torch.cat([first, (1 - first).clamp(max=LAST_UNIFORM)])[:n]


@dataclass(frozen=True)
class Uniform:
    """Uniform times. On `EDMProcess`, `ln(sigma)` is uniform instead.

    Source: Ho et al. 2020 (DDPM), algorithm 1.

    Example:
        >>> from lit_diffusion.processes import DiscreteVP, LinearBetas
        >>> Uniform().quantile(torch.tensor([0.0, 0.5]), DiscreteVP(LinearBetas(1000))).tolist()
        [0.0, 500.0]
    """

    def quantile(self, u: Tensor, process: Process, /) -> Tensor:
        """Return `process.from_unit(u)`."""
        return process.from_unit(u)


@dataclass(frozen=True)
class LogNormal:
    """Times for which `ln(sigma / alpha)` is normally distributed.

    With this distribution, intermediate noise levels are trained most often. Levels outside the
    range of the process are clamped to the range. With the defaults on `EDMProcess()`, a fraction
    of 2e-5 of the levels is clamped. On a discrete process, times are rounded to the nearest step.

    Args:
        mean: mean of `ln(sigma / alpha)`. EDM uses -1.2. EDM2 uses -0.4 for latents and -0.8 for
            64x64 pixels.
        std: standard deviation of `ln(sigma / alpha)`. EDM uses 1.2. EDM2 uses 1.0 for latents and
            1.6 for 64x64 pixels.

    Raises:
        ValueError: unless mean and std are finite and std > 0.

    Source: Karras et al. 2022 (EDM), table 1 and section 5.

    Example:
        >>> from lit_diffusion.processes import EDMProcess
        >>> median = LogNormal().quantile(torch.tensor([0.5], dtype=torch.float64), EDMProcess())
        >>> round(median.log().item(), 6)
        -1.2
    """

    mean: float = -1.2
    std: float = 1.2

    def __post_init__(self) -> None:
        if not 0 < self.std < math.inf:
            raise ValueError(f"std must be > 0, got {self.std}.")
        if not math.isfinite(self.mean):
            raise ValueError(f"mean must be finite, got {self.mean}.")

    def quantile(self, u: Tensor, process: Process, /) -> Tensor:
        """Return the time at which `sigma / alpha` is `exp(mean + std * z)`.

        Here, z is the quantile of the standard normal distribution at u.
        """
        t = process.at_log_snr(-2 * (self.mean + self.std * torch.special.ndtri(u.double())))
        t = t if process.num_steps is None else t.round()
        return t.clamp(process.t_min, process.t_max)


@dataclass(frozen=True)
class LogitNormal(LogNormal):
    """Times for which `logit(t)` is normally distributed on `LinearFlow`, as in SD3.

    On `LinearFlow`, `ln(sigma / alpha)` equals `logit(t)`. Therefore, this class is `LogNormal`
    with different default arguments.

    Args:
        mean: mean of `logit(t)`. If it is above 0, t > 1/2 is drawn more often than t < 1/2, so
            noisy images are trained more often. The best values in SD3 are mean 0 and std 1.
        std: standard deviation of `logit(t)`.

    Source: Esser et al. 2024 (SD3, arXiv 2403.03206), Eq. 19.

    Example:
        >>> from lit_diffusion.processes import LinearFlow
        >>> LogitNormal().quantile(torch.tensor([0.5], dtype=torch.float64), LinearFlow()).item()
        0.5
    """

    mean: float = 0.0
    std: float = 1.0


@dataclass(frozen=True)
class Shifted:
    """Times of another distribution, with each noise level `sigma / alpha` multiplied by `shift`.

    On `LinearFlow`, t becomes `shift * t / (1 + (shift - 1) * t)`. Use a shift above 1 for larger
    images, because they need more noise.

    Args:
        base: the times to shift.
        shift: factor on the noise levels, > 0. A factor above 1 makes the times noisier. SD3's rule
            for a change from n to m pixels per image is `sqrt(m / n)`. From 256x256 to 1024x1024
            pixels, the rule gives 4, but the authors of SD3 preferred 3.

    Raises:
        ValueError: if shift <= 0.

    Source: Esser et al. 2024 (SD3, arXiv 2403.03206), Eq. 23.

    Example:
        >>> from lit_diffusion.processes import LinearFlow
        >>> u = torch.tensor([0.5], dtype=torch.float64)
        >>> round(Shifted(Uniform(), shift=3.0).quantile(u, LinearFlow()).item(), 3)
        0.75
    """

    base: TimestepDistribution
    shift: float = 3.0

    def __post_init__(self) -> None:
        check_shift(self.shift)

    def quantile(self, u: Tensor, process: Process, /) -> Tensor:
        """Return the shifted times of `base`. On a discrete process, they are rounded."""
        t = shift_times(self.base.quantile(u, process), self.shift, process)
        return t if process.num_steps is None else t.round()


def check_shift(shift: float) -> None:
    """Raise ValueError unless `shift`, a factor on noise levels, is positive and finite."""
    if not 0 < shift < math.inf:
        raise ValueError(f"shift must be > 0, got {shift}; 1 leaves the times as they are.")


def shift_times(t: Tensor, shift: float, process: Process) -> Tensor:
    """Compute the times (N,) float64 at which `sigma / alpha` is `shift` times as large as at t.

    The times are clamped to the range of the process.
    """
    alpha, sigma = process.alpha_sigma(t)
    shifted = process.at_log_snr(2 * (alpha / sigma / shift).log())
    return shifted.clamp(process.t_min, process.t_max)
