"""Which noise levels: random ones for training (draws -> u -> t), a grid of them for solvers.

A uniform u in [0, 1) stands for a noise level, 1 for the noisiest. Training draws u from a density
over bins of u, flat if none is set, and a quantile turns u into a time of the process. So one
mechanism, `draw_uniforms`, serves every curriculum and resampler. How the draws of one batch depend
on each other is a choice of its own: `Stratified`, `Antithetic` or `Independent`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_diffusion.protocols import Device, Draws, Process, Quantile, TimeGrid

LAST_UNIFORM = 1 - 2**-53  # 1 is none


def draw_uniforms(
    n: int,
    density: Tensor | None = None,
    draws: Draws | None = None,
    *,
    generator: torch.Generator | None = None,
    device: Device = None,
) -> Tensor:
    """n uniforms u in [0, 1), float64, each distributed by `density`.

    Args:
        n: how many.
        density: (num_bins,) unnormalised weights of equal bins over [0, 1]; None is uniform.
        draws: how the n depend on each other; None is Stratified().
        generator: of the random numbers; None is torch's global one.
        device: of the result.

    Example:
        >>> u = draw_uniforms(4)
        >>> sorted((u * 4).long().tolist())
        [0, 1, 2, 3]
    """
    u = (Stratified() if draws is None else draws).uniforms(n, generator, device)
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

    base: Quantile
    shift: float = 3.0

    def __post_init__(self) -> None:
        _check_shift(self.shift)

    def quantile(self, u: Tensor, process: Process, /) -> Tensor:
        """The base's time, shifted; a whole one where time is discrete."""
        t = _shifted(self.base.quantile(u, process), self.shift, process)
        return t if process.num_steps is None else t.round()


@dataclass(frozen=True)
class ShiftedGrid:
    """Another grid, its noise levels sigma / alpha `shift` times as large, as those of `Shifted`.

    Args:
        base: the grid to shift.
        shift: above 1 is noisier.

    Raises:
        ValueError: unless shift > 0.

    Source: Esser et al. 2024 (SD3, arXiv 2403.03206), Eq. 23.

    Example:
        >>> from lit_diffusion.processes import LinearFlow
        >>> [round(t, 3) for t in ShiftedGrid(Even(), shift=3.0).grid(LinearFlow(), 4).tolist()]
        [1.0, 0.9, 0.75, 0.5, 0.0]
    """

    base: TimeGrid
    shift: float = 3.0

    def __post_init__(self) -> None:
        _check_shift(self.shift)

    def grid(self, process: Process, steps: int, /) -> Tensor:
        """(steps + 1,) float64, falling to the clean time."""
        times = self.base.grid(process, steps)[:-1]
        return _to_clean(_shifted(times, self.shift, process).tolist(), process)


def _check_shift(shift: float) -> None:
    if not 0 < shift < math.inf:
        raise ValueError(f"shift must be > 0, got {shift}; 1 leaves the times as they are.")


def _shifted(t: Tensor, shift: float, process: Process) -> Tensor:
    alpha, sigma = process.alpha_sigma(t)
    moved = process.at_log_snr(2 * (alpha / sigma / shift).log())
    return moved.clamp(process.t_min, process.t_max)


@dataclass(frozen=True)
class Sections:
    """Whole times, evenly spaced within equal sections: improved-diffusion's respacing.

    The default of one section holds the first and the last time; a single step is t = 0 alone.
    Steps (10, 15, 20) put 10, 15 and 20 of them in thirds.

    Args:
        counts: steps per section; None is one section with all steps.

    Source: Nichol & Dhariwal 2021 (improved-diffusion), section 4; rounding is half to even.

    Example:
        >>> from lit_diffusion.processes import DiscreteVP, LinearBetas
        >>> Sections().grid(DiscreteVP(LinearBetas(1000)), 4).tolist()
        [999.0, 666.0, 333.0, 0.0, -1.0]
    """

    counts: tuple[int, ...] | None = None

    def grid(self, process: Process, steps: int, /) -> Tensor:
        """(steps + 1,) float64, falling to the clean time."""
        num_steps = _whole_steps(process, self)
        counts = (steps,) if self.counts is None else self.counts
        if sum(counts) != steps:
            raise ValueError(f"the counts must add up to the steps, got {counts} and {steps}.")
        times: list[int] = []
        start = 0
        for i, count in enumerate(counts):
            size = num_steps // len(counts) + (i < num_steps % len(counts))
            if not 0 < count <= size:
                raise ValueError(f"a section of {size} times can't be split into {count} steps.")
            times += _spread(start, size, count)
            start += size
        return _to_clean(times[::-1], process)


@dataclass(frozen=True)
class Stride:
    """Every k-th whole time from 0 on, with the k that gives as many as asked ("ddimN").

    The noisiest time is left out unless k divides it.

    Source: Song et al. 2021 (DDIM), appendix D.2.
    """

    def grid(self, process: Process, steps: int, /) -> Tensor:
        """(steps + 1,) float64, falling to the clean time.

        Raises:
            ValueError: where no whole stride gives that many.
        """
        num_steps = _whole_steps(process, self)
        for stride in range(1, num_steps + 1):
            times = range(0, num_steps, stride)
            if len(times) == steps:
                return _to_clean(times[::-1], process)
        raise ValueError(f"no whole stride splits {num_steps} times into {steps}; use Sections.")


@dataclass(frozen=True)
class Even:
    """Evenly spaced in t, from the noisiest time to the clean one; for every process.

    Example:
        >>> from lit_diffusion.processes import ContinuousVP
        >>> Even().grid(ContinuousVP(), 4).tolist()
        [1.0, 0.75, 0.5, 0.25, 0.0]
    """

    def grid(self, process: Process, steps: int, /) -> Tensor:
        """(steps + 1,) float64, falling to the clean time."""
        return torch.linspace(process.t_max, process.t_clean, steps + 1, dtype=torch.float64)


@dataclass(frozen=True)
class LogSNR:
    """Evenly spaced in log SNR from the noisiest time to the least noisy.

    High-order solvers want this. Cosine betas end at a log SNR of -20, where there is nothing to
    see yet: a third of the steps is spent before -10, the usual place to start.

    Args:
        noisiest: log SNR at which the grid starts, where the process ends with less.

    Raises:
        ValueError: by `grid`, where the process never has so much signal.

    Source: Lu et al. 2022 (DPM-Solver), section 3.4.

    Example:
        >>> from lit_diffusion.processes import EDMProcess
        >>> [round(sigma, 3) for sigma in LogSNR(noisiest=-2.0).grid(EDMProcess(), 3).tolist()]
        [2.718, 0.074, 0.002, 0.0]
    """

    noisiest: float = -math.inf

    def grid(self, process: Process, steps: int, /) -> Tensor:
        """(steps + 1,) float64, falling to the clean time."""
        noisiest, cleanest = _log_snr_ends(process, self.noisiest).tolist()
        between = torch.linspace(noisiest, cleanest, steps, dtype=torch.float64)
        return _to_clean(process.at_log_snr(between).tolist(), process)


@dataclass(frozen=True)
class Karras:
    """Evenly spaced in (sigma / alpha)^(1 / rho), from the noisiest time to the least noisy.

    Args:
        rho: 1 is even in the noise level, large is even in its logarithm.
        noisiest: log SNR at which the grid starts, where the process ends with less.

    Raises:
        ValueError: unless rho > 0, and by `grid`, where the process never has so much signal.

    Source: Karras et al. 2022 (EDM), Eq. 5.

    Example:
        >>> from lit_diffusion.processes import EDMProcess
        >>> [round(sigma, 3) for sigma in Karras().grid(EDMProcess(), 4).tolist()]
        [80.0, 9.723, 0.47, 0.002, 0.0]
    """

    rho: float = 7.0
    noisiest: float = -math.inf

    def __post_init__(self) -> None:
        if not self.rho > 0:
            raise ValueError(f"rho must be > 0, got {self.rho}; EDM's is 7.")

    def grid(self, process: Process, steps: int, /) -> Tensor:
        """(steps + 1,) float64, falling to the clean time."""
        ends = _log_snr_ends(process, self.noisiest)
        noisiest, cleanest = (ends / (-2 * self.rho)).exp().tolist()
        levels = torch.linspace(noisiest, cleanest, steps, dtype=torch.float64) ** self.rho
        return _to_clean(process.at_log_snr(-2 * levels.log()).tolist(), process)


def _log_snr_ends(process: Process, noisiest: float) -> Tensor:
    """(2,) float64 log SNR: of the noisiest time, or `noisiest` if higher; of the least noisy."""
    ends = torch.tensor([process.t_max, process.t_min], dtype=torch.float64)
    alpha, sigma = process.alpha_sigma(ends)
    found = 2 * (alpha / sigma).log()
    if not noisiest < found[1]:
        raise ValueError(
            f"noisiest must be below {found[1]:.2f}, the highest log SNR of {process}, got "
            f"{noisiest}; -10 is usual."
        )
    found[0] = max(float(found[0]), noisiest)
    return found


def _to_clean(times: Sequence[float], process: Process) -> Tensor:
    return torch.tensor([*times, process.t_clean], dtype=torch.float64)


def _spread(start: int, size: int, count: int) -> list[int]:
    stride = (size - 1) / (count - 1) if count > 1 else 1.0
    times, position = [], 0.0
    for _ in range(count):
        times.append(start + round(position))
        position += stride  # summed, not multiplied: ties round as in the reference
    return times


def _whole_steps(process: Process, grid: object) -> int:
    if process.num_steps is None:
        text = f"{grid} needs a process in discrete steps, got {process}"
        raise ValueError(f"{text}; use Even, LogSNR or Karras.")
    return process.num_steps
