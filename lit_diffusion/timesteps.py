"""Which noise levels are trained: uniforms -> u in [0, 1) -> times of the process.

A uniform u in [0, 1) stands for a noise level, 1 for the noisiest. Training draws u from a density
over bins of u, flat if none is set, and a `TimestepDistribution` turns u into a time of the
process. So one mechanism, `draw_uniforms`, serves every curriculum and resampler. How the uniforms
of one batch depend on each other is a choice of its own: `Stratified`, `Antithetic` or
`Independent`.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_diffusion.protocols import Device, Process, TimestepDistribution, UniformDraws

LAST_UNIFORM = 1 - 2**-53  # 1 is none


def draw_uniforms(
    n: int,
    density: Tensor | None = None,
    uniforms: UniformDraws | None = None,
    *,
    generator: torch.Generator | None = None,
    device: Device = None,
) -> Tensor:
    """n uniforms u in [0, 1), float64, each distributed by `density`.

    Args:
        n: how many.
        density: (num_bins,) unnormalised weights of equal bins over [0, 1]; None is uniform.
        uniforms: how the n depend on each other; None is Stratified().
        generator: of the random numbers; None is torch's global one.
        device: of the result.

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
    # CUDA has no cumulative sum that Trainer(deterministic=True) lets pass.
    summed = weights.cpu() if torch.are_deterministic_algorithms_enabled() else weights
    cdf = summed.cumsum(0).to(u.device)
    cdf = cdf / cdf[-1]  # ends at 1, so that no u falls into empty bins behind it
    index = torch.searchsorted(cdf, u, right=True)
    share = cdf.diff(prepend=cdf.new_zeros(1))[index]
    # Clear of the next bin, which may be empty, also after rounding.
    within = ((u - (cdf[index] - share)) / share).clamp(0, 1 - 2**-32)
    return (index + within) / len(cdf)


@dataclass(frozen=True)
class Independent:
    """Every uniform is drawn for itself.

    Source: Ho et al. 2020 (DDPM), algorithm 1.
    """

    def uniforms(self, n: int, generator: torch.Generator | None, device: Device, /) -> Tensor:
        """(n,) float64 in [0, 1)."""
        return torch.rand(n, dtype=torch.float64, generator=generator, device=device)


@dataclass(frozen=True)
class Stratified:
    """One uniform from each n-th of [0, 1), in random order.

    Together they cover it evenly, which lowers the variance of the loss.

    Source: Kingma et al. 2021 (VDM), appendix I.1, with the offsets drawn for each stratum.
    """

    def uniforms(self, n: int, generator: torch.Generator | None, device: Device, /) -> Tensor:
        """(n,) float64 in [0, 1)."""
        u = torch.rand(n, dtype=torch.float64, generator=generator, device=device)
        u = (torch.randperm(n, generator=generator, device=device) + u) / n
        return u.clamp(max=LAST_UNIFORM)


@dataclass(frozen=True)
class Antithetic:
    """Pairs u and 1 - u: a noisy level for every clean one.

    The second half of the batch mirrors the first. Of an odd n, the last of the first half is
    alone.

    Source: Song et al. 2021 (DDIM), the authors' code; VDM calls antithetic what is `Stratified`.

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
    """Every time is as likely as every other.

    Source: Ho et al. 2020 (DDPM), algorithm 1.
    """

    def quantile(self, u: Tensor, process: Process, /) -> Tensor:
        """`process.from_unit(u)`."""
        return process.from_unit(u)


@dataclass(frozen=True)
class LogNormal:
    """ln(sigma / alpha) is normal: most training goes where there is something to learn.

    Levels beyond the ends of the process become its ends (2e-5 of EDM's); a process in discrete
    steps gets the nearest step.

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
    """logit(t) of `LinearFlow` is normal: that is ln(sigma / alpha), so `LogNormal` by its name.

    Args:
        mean: of logit(t); above 0 trains the noisy half more. SD3's best are 0 and 1.
        std: of logit(t).

    Source: Esser et al. 2024 (SD3, arXiv 2403.03206), Eq. 19.
    """

    mean: float = 0.0
    std: float = 1.0


@dataclass(frozen=True)
class Shifted:
    """The noise levels sigma / alpha of other times, each `shift` times as large.

    On `LinearFlow` t becomes shift t / (1 + (shift - 1) t). Larger images want more noise.

    Args:
        base: the times to shift.
        shift: above 1 is noisier. SD3's sqrt(m / n), from n to m pixels, would be 4 from 256^2 to
            1024^2; its authors liked 3 best.

    Raises:
        ValueError: unless shift > 0.

    Source: Esser et al. 2024 (SD3, arXiv 2403.03206), Eq. 23.
    """

    base: TimestepDistribution
    shift: float = 3.0

    def __post_init__(self) -> None:
        check_shift(self.shift)

    def quantile(self, u: Tensor, process: Process, /) -> Tensor:
        """The base's time, shifted; a whole one where time is discrete."""
        t = shift_times(self.base.quantile(u, process), self.shift, process)
        return t if process.num_steps is None else t.round()


def check_shift(shift: float) -> None:
    """Raise ValueError unless a factor on noise levels is positive and finite."""
    if not 0 < shift < math.inf:
        raise ValueError(f"shift must be > 0, got {shift}; 1 leaves the times as they are.")


def shift_times(t: Tensor, shift: float, process: Process) -> Tensor:
    """Times (N,) float64 -> times whose sigma / alpha is `shift` times as large, in the process."""
    alpha, sigma = process.alpha_sigma(t)
    moved = process.at_log_snr(2 * (alpha / sigma / shift).log())
    return moved.clamp(process.t_min, process.t_max)
