"""Functions that solvers share: validated grids, and parts of a step."""

from dataclasses import is_dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from lit_diffusion.protocols import Denoised, Process, Solver, TimeGrid


def finite_grid(grid: TimeGrid, process: Process, steps: int) -> Tensor:
    """(steps + 1,) times of the grid.

    Raises:
        ValueError: if a time is not finite, or not less noisy than the one before.
    """
    times = grid.grid(process, steps)
    if not times.isfinite().all():
        raise ValueError(
            f"{grid} has times that are not finite on {process}, whose noisiest has no signal (SNR "
            "= 0); use Even or Sections, or LogSNR(noisiest=-10)."
        )
    if not (times.diff() < 0).all():
        raise ValueError(
            f"{grid} has times that do not fall on {process}, {times[:3].tolist()}, ...; use fewer "
            "steps, or a grid that stays within the process."
        )
    return times


def grid_with_signal(grid: TimeGrid, process: Process, steps: int) -> Tensor:
    """(steps + 1,) times of the grid, all with alpha > 0.

    Raises:
        ValueError: if alpha is 0, a time is not finite, or not less noisy than the one before.
    """
    if not (process.alpha_sigma(grid.grid(process, steps))[0] > 0).all():
        raise ValueError(
            f"the solver needs alpha > 0, which {process} does not have on {grid}; use "
            "LogSNR(noisiest=-10), or the solver DDIM or Euler."
        )
    return finite_grid(grid, process, steps)


def time_grid_of(solver: Any, process: Process) -> TimeGrid | None:
    """The solver's grid, or its default on this process; None if it has neither."""
    grid: TimeGrid | None = getattr(solver, "times", None)
    if grid is None and hasattr(solver, "default_times"):
        return cast(TimeGrid, solver.default_times(process))
    return grid


def with_grid(solver: Any, process: Process) -> Any:
    """The solver with the grid that it takes on this process as its `times`, for records.

    Example:
        >>> from lit_diffusion.processes import LinearFlow
        >>> from lit_diffusion.solvers import UniPC
        >>> with_grid(UniPC(), LinearFlow())
        UniPC(steps=10, times=LogSNR(noisiest=-10.0), clip=True, order=2)
    """
    grid = time_grid_of(solver, process)
    has_times = is_dataclass(solver) and hasattr(solver, "times")
    return replace(solver, times=grid) if has_times else solver


def solver_times(solver: Solver, process: Process) -> Tensor:
    """(number of function evaluations,) float64: times of the network calls of a solver, in order.

    They are recorded from a run on one pixel with a dummy denoiser.
    """
    times = []

    def denoise(x_t: Tensor, t: Tensor) -> Denoised:
        times.append(t)
        return Denoised(x_t, x_t, x_t)

    solver.sample(denoise, process, torch.zeros(1, 1, 1, 1), torch.zeros_like)
    return torch.cat(times)


def level_of(process: Process, t: Tensor) -> Tensor:
    """The noise level sigma / alpha."""
    alpha, sigma = process.alpha_sigma(t)
    return sigma / alpha


def batch_of(t: Tensor, x: Tensor) -> Tensor:
    """One time, on the CPU -> (B,) on the device of x, filled there as a copy would be waited for.

    The attribute `time` of the result is the time as a number, for what is decided on the host.
    """
    batch = torch.full((len(x),), float(t), dtype=t.dtype, device=x.device)
    batch.time = float(t)  # type: ignore[attr-defined]
    return batch


def clipped(x0: Tensor, clip: bool) -> Tensor:
    """x0, clamped to [-1, 1] if `clip`."""
    return x0.clamp(-1, 1) if clip else x0


def x0_and_noise(
    denoised: Denoised, x_t: Tensor, alpha: Tensor, sigma: Tensor, clip: bool
) -> tuple[Tensor, Tensor]:
    """Estimates of x0 and noise; with `clip`, x0 is clamped and the noise recomputed from it."""
    if not clip:
        return denoised.x0, denoised.noise
    x0 = denoised.x0.clamp(-1, 1)
    return x0, (x_t - alpha * x0) / sigma


def check_steps(steps: int) -> None:
    """Raise ValueError unless steps >= 1."""
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}.")
