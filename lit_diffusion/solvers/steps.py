"""Functions that solvers share: validated grids, and parts of a step."""

from dataclasses import is_dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from lit_diffusion.grids import check_finite
from lit_diffusion.protocols import Denoised, Process, Solver, TimeGrid


def finite_grid(grid: TimeGrid, process: Process, steps: int) -> Tensor:
    """Compute the times of a grid, and check that they are finite and strictly decreasing.

    Returns:
        (steps + 1,) float64.

    Raises:
        ValueError: if a time is not finite, or is not below the previous time.

    Example:
        >>> from lit_diffusion.grids import Even
        >>> from lit_diffusion.processes import LinearFlow
        >>> finite_grid(Even(), LinearFlow(), 2).tolist()
        [1.0, 0.5, 0.0]
    """
    times = grid.grid(process, steps)
    check_finite(times, grid, process)
    if not (times.diff() < 0).all():
        raise ValueError(
            f"{grid} has times that do not decrease on {process}, {times[:3].tolist()}, ...; use "
            "fewer steps, or a grid that stays within the times of the process."
        )
    return times


def grid_with_signal(grid: TimeGrid, process: Process, steps: int) -> Tensor:
    """Compute the times of a grid with `finite_grid`, and check that alpha > 0 at each time.

    Returns:
        (steps + 1,) float64.

    Raises:
        ValueError: if alpha is 0 at a time, if a time is not finite, or if a time is not below the
            previous time.

    Example:
        >>> from lit_diffusion.grids import LogSNR
        >>> from lit_diffusion.processes import LinearFlow
        >>> [round(t, 2) for t in grid_with_signal(LogSNR(-4.0), LinearFlow(), 2).tolist()]
        [0.88, 0.0, 0.0]
    """
    if not (process.alpha_sigma(grid.grid(process, steps))[0] > 0).all():
        raise ValueError(
            f"the solver needs alpha > 0, but {process} has alpha = 0 on {grid}; use "
            "LogSNR(noisiest=-10), or the solver DDIM or Euler."
        )
    return finite_grid(grid, process, steps)


def time_grid_of(solver: Any, process: Process) -> TimeGrid | None:
    """Return `solver.times`, or else the default grid of the solver; None if it has neither.

    Example:
        >>> from lit_diffusion.processes import LinearFlow
        >>> from lit_diffusion.solvers import DDIM
        >>> time_grid_of(DDIM(), LinearFlow())
        LogSNR(noisiest=-10.0)
    """
    grid: TimeGrid | None = getattr(solver, "times", None)
    if grid is None and hasattr(solver, "default_times"):
        return cast(TimeGrid, solver.default_times(process))
    return grid


def with_grid(solver: Any, process: Process) -> Any:
    """Copy a solver, and set `times` of the copy to the grid that the solver uses for `process`.

    Evaluation records store this copy. The solver itself may have `times=None`, which would not
    show which grid was used. A solver that is not a dataclass with `times` is returned as it is.

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
    """List the times at which a solver calls the network, in order.

    The function runs the solver on one pixel with a dummy denoiser, which records the time t of
    each call.

    Returns:
        (number of function evaluations,) float64.

    Example:
        >>> from lit_diffusion.processes import LinearFlow
        >>> from lit_diffusion.solvers import Euler
        >>> solver_times(Euler(steps=2), LinearFlow()).tolist()
        [1.0, 0.5]
    """
    times = []

    def denoise(x_t: Tensor, t: Tensor) -> Denoised:
        times.append(t)
        return Denoised(x_t, x_t, x_t)

    solver.sample(denoise, process, torch.zeros(1, 1, 1, 1), torch.zeros_like)
    return torch.cat(times)


def level_of(process: Process, t: Tensor) -> Tensor:
    """Compute the noise level sigma / alpha at times t.

    Example:
        >>> from lit_diffusion.processes import LinearFlow
        >>> level_of(LinearFlow(), torch.tensor(0.5)).item()
        1.0
    """
    alpha, sigma = process.alpha_sigma(t)
    return sigma / alpha


def batch_of(t: Tensor, x: Tensor, until: Tensor | None = None) -> Tensor:
    """Return a tensor (B,) filled with the time t, on the device of the B images x.

    t is a scalar on the CPU. The result has two attributes, which the host can read without
    synchronizing with the device. `time` is t as a Python number. `until`, which `MeanFlow` needs,
    is the time at which a deterministic step from t ends, or None if no deterministic step begins
    at t.

    Example:
        >>> batch_of(torch.tensor(0.5), torch.zeros(2, 1, 8, 8))
        tensor([0.5000, 0.5000])
    """
    # A copy of t to the device would make the host wait.
    batch = torch.full((len(x),), float(t), dtype=t.dtype, device=x.device)
    batch.time = float(t)  # type: ignore[attr-defined]
    batch.until = None if until is None else float(until)  # type: ignore[attr-defined]
    return batch


def clipped(x0: Tensor, clip: bool) -> Tensor:
    """Clamp x0 to [-1, 1] if `clip`.

    Example:
        >>> clipped(torch.tensor([0.5, 3.0]), clip=True)
        tensor([0.5000, 1.0000])
    """
    return x0.clamp(-1, 1) if clip else x0


def x0_and_noise(
    denoised: Denoised, x_t: Tensor, alpha: Tensor, sigma: Tensor, clip: bool
) -> tuple[Tensor, Tensor]:
    """Return estimates of x0 and noise. With `clip`, compute the noise from the clamped x0.

    Example:
        >>> one = torch.ones(1)
        >>> x0, noise = x0_and_noise(Denoised(3 * one, one), 4 * one, one, one, clip=True)
        >>> x0.item(), noise.item()
        (1.0, 3.0)
    """
    if not clip:
        return denoised.x0, denoised.noise
    x0 = denoised.x0.clamp(-1, 1)
    return x0, (x_t - alpha * x0) / sigma


def check_steps(steps: int) -> None:
    """Raise ValueError unless steps >= 1.

    Example:
        >>> check_steps(20)
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}.")
