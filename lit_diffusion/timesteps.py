"""Which noise levels: random ones for training (u -> quantile -> t), a grid of them for solvers.

u in [0, 1) is the rank of a noise level, 1 the noisiest. Training draws u from a density over bins
of u, uniform if none is set, and a quantile turns u into a time of the process. So one mechanism,
`draw_uniforms`, serves every curriculum and resampler.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lit_diffusion.protocols import Process


def draw_uniforms(
    n: int,
    density: Tensor | None = None,
    *,
    stratified: bool = True,
    generator: torch.Generator | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """n ranks u in [0, 1), float64, each distributed by `density`.

    Args:
        n: how many.
        density: (num_bins,) unnormalised weights of equal bins over [0, 1]; None is uniform.
        stratified: draw one from each n-th of the distribution, in random order: each u has the
            same distribution, and together they cover it evenly, which lowers the variance of the
            loss (Kingma et al. 2021 (VDM), appendix I.1).
        generator: of the random numbers; None is torch's global one.
        device: of the result.

    Example:
        >>> u = draw_uniforms(4)
        >>> sorted((u * 4).long().tolist())
        [0, 1, 2, 3]
    """
    u = torch.rand(n, dtype=torch.float64, generator=generator, device=device)
    if stratified:
        u = (torch.randperm(n, generator=generator, device=device) + u) / n
    return u if density is None else _inverse_cdf(u, density)


def bin_of(u: Tensor, num_bins: int) -> Tensor:
    """(B,) ranks -> (B,) int64 indices of equal bins over [0, 1]."""
    return (u * num_bins).long().clamp(0, num_bins - 1)


def _inverse_cdf(u: Tensor, density: Tensor) -> Tensor:
    """Quantile function of a piecewise constant density, linear within a bin."""
    weights = density.to(device=u.device, dtype=torch.float64)
    cdf = weights.cumsum(0) / weights.sum()
    index = torch.searchsorted(cdf, u, right=True).clamp(max=len(cdf) - 1)
    share = weights[index] / weights.sum()
    within = ((u - (cdf[index] - share)) / share).clamp(0, 1 - 2**-52)
    return (index + within) / len(cdf)


@dataclass(frozen=True)
class Uniform:
    """Every time is as likely as every other.

    Source: Ho et al. 2020 (DDPM), algorithm 1.
    """

    def quantile(self, u: Tensor, process: Process, /) -> Tensor:
        """The time of rank u."""
        return process.from_unit(u)


@dataclass(frozen=True)
class Sections:
    """Whole times, evenly spaced within equal sections of the process.

    This is improved-diffusion's respacing.

    The default of one section always holds the first and the last time. Steps (10, 15, 20) put 10,
    15 and 20 of them in thirds.

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
        return _descending(times, process)


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
            if len(range(0, num_steps, stride)) == steps:
                return _descending(list(range(0, num_steps, stride)), process)
        raise ValueError(f"no whole stride splits {num_steps} times into {steps}; use Sections.")


@dataclass(frozen=True)
class LogSNR:
    """Evenly spaced in log SNR from the noisiest time to the least noisy.

    High-order solvers want this.

    Source: Lu et al. 2022 (DPM-Solver), section 3.4.
    """

    def grid(self, process: Process, steps: int, /) -> Tensor:
        """(steps + 1,) float64, falling to the clean time."""
        ends = torch.tensor([process.t_max, process.t_min], dtype=torch.float64)
        alpha, sigma = process.alpha_sigma(ends)
        noisiest, cleanest = (2 * (alpha / sigma).log()).tolist()
        between = torch.linspace(noisiest, cleanest, steps, dtype=torch.float64)
        times = process.at_log_snr(between)
        return torch.cat([times, torch.tensor([process.t_clean], dtype=torch.float64)])


def _spread(start: int, size: int, count: int) -> list[int]:
    stride = (size - 1) / (count - 1) if count > 1 else 1.0
    times, position = [], 0.0
    for _ in range(count):
        times.append(start + round(position))
        position += stride  # summed, not multiplied: ties round as in the reference
    return times


def _whole_steps(process: Process, grid: object) -> int:
    if process.num_steps is None:
        raise ValueError(f"{grid} needs a process in discrete steps, got {process}; use LogSNR.")
    return process.num_steps


def _descending(times: list[int], process: Process) -> Tensor:
    return torch.tensor([*reversed(times), process.t_clean], dtype=torch.float64)
