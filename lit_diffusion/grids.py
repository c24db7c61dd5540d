"""Time grids: the times between which a solver takes its steps.

Each class has a method `grid`, which returns the times for a process and a number of steps. The
result is a float64 tensor of shape (steps + 1,), with the noisiest time first. The last time is
`process.t_clean`, the time of the clean image.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_diffusion.protocols import Process, TimeGrid
from lit_diffusion.timesteps import check_shift, shift_times


@dataclass(frozen=True)
class Sections:
    """Integer times that are evenly spaced within sections of equal length.

    By default, there is one section: the grid goes from the noisiest time T - 1 to time 0, and then
    to the clean time. A grid with a single step goes from time 0 to the clean time. With
    `counts=(10, 15, 20)`, the times of the process are divided into three sections. The grid
    consists of 10 times from the least noisy section, 15 from the next and 20 from the noisiest.

    Args:
        counts: number of times in each section, beginning with the least noisy section. The sum of
            the counts must equal the number of steps. None means one section with all steps.

    Source: Nichol & Dhariwal 2021 (improved-diffusion), section 4. As in the authors' code, times
    are rounded to the nearest integer, with ties to even.

    Example:
        >>> from lit_diffusion.processes import DiscreteVP, LinearBetas
        >>> Sections().grid(DiscreteVP(LinearBetas(1000)), 4).tolist()
        [999.0, 666.0, 333.0, 0.0, -1.0]
    """

    counts: tuple[int, ...] | None = None

    def grid(self, process: Process, steps: int, /) -> Tensor:
        """Return `steps + 1` times in float64, from the noisiest time to the clean time."""
        num_steps = _discrete_steps(process, self)
        counts = (steps,) if self.counts is None else self.counts
        if sum(counts) != steps:
            raise ValueError(f"the counts must add up to the steps, got {counts} and {steps}.")
        times: list[int] = []
        start = 0
        for i, count in enumerate(counts):
            size = num_steps // len(counts) + (i < num_steps % len(counts))
            if not 0 < count <= size:
                raise ValueError(f"a section of {size} times can't be split into {count} steps.")
            stride = (size - 1) / (count - 1) if count > 1 else 1.0
            position = 0.0
            for _ in range(count):
                times.append(start + round(position))
                position += stride  # not i * stride: improved-diffusion rounds ties of these sums
            start += size
        return _append_clean_time(times[::-1], process)


@dataclass(frozen=True)
class Stride:
    """Every k-th integer time from 0, where k is the smallest stride that gives `steps` times.

    Improved-diffusion calls this grid "ddimN", where N is the number of steps. The noisiest time
    T - 1 is part of the grid only if T - 1 is a multiple of the stride k.

    Source: Song et al. 2021 (DDIM), appendix D.2.

    Example:
        >>> from lit_diffusion.processes import DiscreteVP, LinearBetas
        >>> Stride().grid(DiscreteVP(LinearBetas(1000)), 4).tolist()
        [750.0, 500.0, 250.0, 0.0, -1.0]
    """

    def grid(self, process: Process, steps: int, /) -> Tensor:
        """Return `steps + 1` times in float64, from the noisiest time to the clean time.

        Raises:
            ValueError: if no stride gives `steps` times.
        """
        num_steps = _discrete_steps(process, self)
        for stride in range(1, num_steps + 1):
            times = range(0, num_steps, stride)
            if len(times) == steps:
                return _append_clean_time(times[::-1], process)
        raise ValueError(f"no integer stride selects {steps} of {num_steps} times; use Sections.")


@dataclass(frozen=True)
class Even:
    """Times that are evenly spaced in t, from the noisiest time to the clean time.

    Example:
        >>> from lit_diffusion.processes import ContinuousVP
        >>> Even().grid(ContinuousVP(), 4).tolist()
        [1.0, 0.75, 0.5, 0.25, 0.0]
    """

    def grid(self, process: Process, steps: int, /) -> Tensor:
        """Return `steps + 1` times in float64, from the noisiest time to the clean time."""
        return torch.linspace(process.t_max, process.t_clean, steps + 1, dtype=torch.float64)


@dataclass(frozen=True)
class LogSNR:
    """Times that are evenly spaced in log SNR, from the noisiest to the least noisy time.

    This grid suits high-order solvers. With `CosineBetas`, set `noisiest=-10`, because x_t has
    hardly any signal at a log SNR below -10. Without this bound, the grid for 1000 cosine betas
    would start at a log SNR of -20, and a third of its steps would be below -10.

    Args:
        noisiest: lowest log SNR of the grid. If the log SNR of the process is never that low, the
            grid starts at the noisiest time of the process.

    Raises:
        ValueError: from `grid`, if `noisiest` is not below the highest log SNR of the process.

    Source: Lu et al. 2022 (DPM-Solver, arXiv 2206.00927), section 3.3.

    Example:
        >>> from lit_diffusion.processes import EDMProcess
        >>> [round(sigma, 3) for sigma in LogSNR(noisiest=-2.0).grid(EDMProcess(), 3).tolist()]
        [2.718, 0.074, 0.002, 0.0]
    """

    noisiest: float = -math.inf

    def grid(self, process: Process, steps: int, /) -> Tensor:
        """Return `steps + 1` times in float64, from the noisiest time to the clean time."""
        noisiest, cleanest = _log_snr_ends(process, self.noisiest).tolist()
        between = torch.linspace(noisiest, cleanest, steps, dtype=torch.float64)
        return _append_clean_time(process.at_log_snr(between).tolist(), process)


@dataclass(frozen=True)
class Karras:
    """Times that are evenly spaced in `(sigma / alpha)**(1 / rho)`, as in EDM.

    Args:
        rho: number > 0 that sets the spacing. With rho = 1, the times are evenly spaced in the
            noise level `sigma / alpha`. With a large rho, the times are almost evenly spaced in the
            logarithm of the noise level.
        noisiest: lowest log SNR of the grid. If the log SNR of the process is never that low, the
            grid starts at the noisiest time of the process.

    Raises:
        ValueError: if rho <= 0. The method `grid` also raises this error if `noisiest` is not below
            the highest log SNR of the process.

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
            raise ValueError(f"rho must be > 0, got {self.rho}; EDM uses 7.")

    def grid(self, process: Process, steps: int, /) -> Tensor:
        """Return `steps + 1` times in float64, from the noisiest time to the clean time."""
        ends = _log_snr_ends(process, self.noisiest)
        noisiest, cleanest = (ends / (-2 * self.rho)).exp().tolist()
        levels = torch.linspace(noisiest, cleanest, steps, dtype=torch.float64) ** self.rho
        return _append_clean_time(process.at_log_snr(-2 * levels.log()).tolist(), process)


@dataclass(frozen=True)
class ShiftedGrid:
    """Times of another grid, with each noise level `sigma / alpha` multiplied by `shift`.

    Use this grid to sample from a model that was trained with `timesteps.Shifted`.

    Args:
        base: the grid to shift.
        shift: factor on the noise levels, > 0. A factor above 1 makes the times noisier.

    Raises:
        ValueError: if shift <= 0.

    Source: Esser et al. 2024 (SD3, arXiv 2403.03206), Eq. 23.

    Example:
        >>> from lit_diffusion.processes import LinearFlow
        >>> [round(t, 3) for t in ShiftedGrid(Even(), shift=3.0).grid(LinearFlow(), 4).tolist()]
        [1.0, 0.9, 0.75, 0.5, 0.0]
    """

    base: TimeGrid
    shift: float = 3.0

    def __post_init__(self) -> None:
        check_shift(self.shift)

    def grid(self, process: Process, steps: int, /) -> Tensor:
        """Return `steps + 1` times in float64, from the noisiest time to the clean time."""
        times = self.base.grid(process, steps)[:-1]
        return _append_clean_time(shift_times(times, self.shift, process).tolist(), process)


def check_finite(times: Tensor, grid: TimeGrid, process: Process) -> None:
    """Raise ValueError unless the times of a grid are finite.

    Example:
        >>> from lit_diffusion.processes import LinearFlow
        >>> check_finite(Even().grid(LinearFlow(), 4), Even(), LinearFlow())
    """
    if not times.isfinite().all():
        raise ValueError(
            f"{grid} has times that are not finite on {process}, whose noisiest time has no signal "
            "(SNR = 0); use Even or Sections, or LogSNR(noisiest=-10)."
        )


def _log_snr_ends(process: Process, noisiest: float) -> Tensor:
    """Return the lowest log SNR of a grid, at least `noisiest`, and the highest, (2,) float64."""
    ends = torch.tensor([process.t_max, process.t_min], dtype=torch.float64)
    alpha, sigma = process.alpha_sigma(ends)
    log_snr = 2 * (alpha / sigma).log()
    if not noisiest < log_snr[1]:
        raise ValueError(
            f"noisiest must be below {log_snr[1]:.2f}, the highest log SNR of {process}, got "
            f"{noisiest}; -10 is usual."
        )
    log_snr[0] = max(float(log_snr[0]), noisiest)
    return log_snr


def _append_clean_time(times: Sequence[float], process: Process) -> Tensor:
    return torch.tensor([*times, process.t_clean], dtype=torch.float64)


def _discrete_steps(process: Process, grid: object) -> int:
    if process.num_steps is None:
        text = f"{grid} needs a process in discrete steps, got {process}"
        raise ValueError(f"{text}; use Even, LogSNR or Karras.")
    return process.num_steps
