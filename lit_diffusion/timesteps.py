"""Training times: uniforms -> u in [0, 1) -> times of the process.

u in [0, 1) is a noise level, larger is noisier. Training draws u from a piecewise constant density,
uniform by default, and a `TimestepDistribution` maps u to a time of the process. Curricula and
resamplers only set this density (`draw_uniforms`). `Stratified`, `Antithetic` and `Independent` are
joint distributions of the uniforms of a batch.
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
    """n values u in [0, 1), float64, each with marginal density `density`.

    Args:
        n: number of values.
        density: (num_bins,) unnormalised weights of equal bins over [0, 1]; None is uniform.
        uniforms: joint distribution of the n uniforms; None is Stratified().
        generator: source of randomness; None is torch's global generator.
        device: device of the result.

    Example:
        >>> u = draw_uniforms(4)
        >>> sorted((u * 4).long().tolist())
        [0, 1, 2, 3]
    """
    u = (Stratified() if uniforms is None else uniforms).uniforms(n, generator, device)
    return u if density is None else _inverse_cdf(u, density)


def bin_of(u: Tensor, num_bins: int) -> Tensor:
    """(B,) uniforms -> (B,) int64 indices of equal bins over [0, 1]."""
    return (u * num_bins).long().clamp(0, num_bins - 1)


def _inverse_cdf(u: Tensor, density: Tensor) -> Tensor:
    """Quantile function of a piecewise constant density, linear within a bin."""
    weights = density.to(device=u.device, dtype=torch.float64)
    if weights.is_cuda and torch.are_deterministic_algorithms_enabled():
        cdf = weights.expand(len(weights), -1).tril().sum(1)  # as cumsum raises an error there
    else:
        cdf = weights.cumsum(0)
    cdf = cdf / cdf[-1]  # ends at exactly 1, so that no u falls into empty bins at the end
    index = torch.searchsorted(cdf, u, right=True)
    mass = cdf.diff(prepend=cdf.new_zeros(1))[index]
    # Below 1 even after rounding, as the next bin may be empty.
    fraction = ((u - (cdf[index] - mass)) / mass).clamp(0, 1 - 2**-32)
    return (index + fraction) / len(cdf)


@dataclass(frozen=True)
class Independent:
    """Independent uniforms.

    Source: Ho et al. 2020 (DDPM), algorithm 1.
    """

    def uniforms(self, n: int, generator: torch.Generator | None, device: Device, /) -> Tensor:
        """(n,) float64 in [0, 1)."""
        return torch.rand(n, dtype=torch.float64, generator=generator, device=device)


@dataclass(frozen=True)
class Stratified:
    """One uniform from each of n equal strata of [0, 1), in random order.

    This lowers the variance of the loss.

    Source: Kingma et al. 2021 (VDM), appendix I.1, but with an independent offset in each stratum.
    """

    def uniforms(self, n: int, generator: torch.Generator | None, device: Device, /) -> Tensor:
        """(n,) float64 in [0, 1)."""
        u = torch.rand(n, dtype=torch.float64, generator=generator, device=device)
        u = (torch.randperm(n, generator=generator, device=device) + u) / n
        return u.clamp(max=LAST_UNIFORM)


@dataclass(frozen=True)
class Antithetic:
    """Pairs u and 1 - u.

    The second half of the batch mirrors the first. For odd n the last value of the first half has
    no partner.

    Source: Song et al. 2021 (DDIM), the authors' code. What VDM calls antithetic is `Stratified`.

    Example:
        >>> u = Antithetic().uniforms(5, None, None)
        >>> bool(torch.allclose(u[:2] + u[3:], torch.ones(2).double()))
        True
    """

    def uniforms(self, n: int, generator: torch.Generator | None, device: Device, /) -> Tensor:
        """(n,) float64 in [0, 1)."""
        first = torch.rand((n + 1) // 2, dtype=torch.float64, generator=generator, device=device)
        return torch.cat([first, (1 - first).clamp(max=LAST_UNIFORM)])[:n]


@dataclass(frozen=True)
class Uniform:
    """Uniform in u: uniform times, except on `EDMProcess`, where ln(sigma) is uniform.

    Source: Ho et al. 2020 (DDPM), algorithm 1.
    """

    def quantile(self, u: Tensor, process: Process, /) -> Tensor:
        """`process.from_unit(u)`."""
        return process.from_unit(u)


@dataclass(frozen=True)
class LogNormal:
    """ln(sigma / alpha) is normal, which concentrates training on intermediate noise levels.

    Levels outside the range of the process are clamped (a fraction of 2e-5 for EDM). In a discrete
    process, times are rounded to the nearest step.

    Args:
        mean: of ln(sigma / alpha). EDM: -1.2; EDM2: -0.4 for latents, -0.8 for 64x64 pixels.
        std: of ln(sigma / alpha). EDM: 1.2; EDM2: 1.0 and 1.6.

    Raises:
        ValueError: unless both are finite and std > 0.

    Source: Karras et al. 2022 (EDM), table 1 and section 5.
    """

    mean: float = -1.2
    std: float = 1.2

    def __post_init__(self) -> None:
        if not 0 < self.std < math.inf:
            raise ValueError(f"std must be > 0, got {self.std}.")
        if not math.isfinite(self.mean):
            raise ValueError(f"mean must be finite, got {self.mean}.")

    def quantile(self, u: Tensor, process: Process, /) -> Tensor:
        """The time of level exp(mean + std z), with z the standard normal quantile of u."""
        t = process.at_log_snr(-2 * (self.mean + self.std * torch.special.ndtri(u.double())))
        t = t if process.num_steps is None else t.round()
        return t.clamp(process.t_min, process.t_max)


@dataclass(frozen=True)
class LogitNormal(LogNormal):
    """logit(t) is normal on `LinearFlow`: SD3's name and defaults for `LogNormal`.

    logit(t) = ln(sigma / alpha) there.

    Args:
        mean: of logit(t); above 0 trains the noisy half more. SD3's best values are mean 0, std 1.
        std: of logit(t).

    Source: Esser et al. 2024 (SD3, arXiv 2403.03206), Eq. 19.
    """

    mean: float = 0.0
    std: float = 1.0


@dataclass(frozen=True)
class Shifted:
    """Times of another distribution, with each noise level sigma / alpha multiplied by `shift`.

    On `LinearFlow` t becomes shift t / (1 + (shift - 1) t). Larger images need more noise.

    Args:
        base: the times to shift.
        shift: above 1 is noisier. SD3's rule sqrt(m / n), from n to m pixels, gives 4 from 256^2 to
            1024^2; its authors preferred 3.

    Raises:
        ValueError: unless shift > 0.

    Source: Esser et al. 2024 (SD3, arXiv 2403.03206), Eq. 23.
    """

    base: TimestepDistribution
    shift: float = 3.0

    def __post_init__(self) -> None:
        check_shift(self.shift)

    def quantile(self, u: Tensor, process: Process, /) -> Tensor:
        """The time of the base, shifted; rounded if time is discrete."""
        t = shift_times(self.base.quantile(u, process), self.shift, process)
        return t if process.num_steps is None else t.round()


def check_shift(shift: float) -> None:
    """Raise ValueError unless a factor on noise levels is positive and finite."""
    if not 0 < shift < math.inf:
        raise ValueError(f"shift must be > 0, got {shift}; 1 leaves the times as they are.")


def shift_times(t: Tensor, shift: float, process: Process) -> Tensor:
    """Times (N,) float64 -> times with `shift` times the sigma / alpha, clamped to the process."""
    alpha, sigma = process.alpha_sigma(t)
    shifted = process.at_log_snr(2 * (alpha / sigma / shift).log())
    return shifted.clamp(process.t_min, process.t_max)
