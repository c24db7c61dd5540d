"""Image editing: sampling from a noised image (SDEdit), and inpainting (RePaint)."""

from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lit_diffusion.gaussian import FixedSmall, LearnedRange, posterior
from lit_diffusion.protocols import Denoise, Process, RandnLike, TimeGrid, Variance, Watch
from lit_diffusion.solvers.ancestral import ancestral_grid
from lit_diffusion.solvers.steps import batch_of, check_steps, clipped, finite_grid, time_grid_of


@dataclass(frozen=True)
class Tail:
    """The last steps of another grid.

    Args:
        base: the whole grid.
        whole: number of steps of the whole grid, at least as many as `grid` returns.
    """

    base: TimeGrid
    whole: int

    def grid(self, process: Process, steps: int, /) -> Tensor:
        """(steps + 1,) float64, falling to the clean time."""
        return self.base.grid(process, self.whole)[-steps - 1 :]


def truncate_solver(solver: Any, strength: float, process: Process) -> Any:
    """The solver with only the last fraction `strength` of its steps, at least one step.

    Raises:
        ValueError: unless 0 < strength <= 1, or for a solver without a grid.

    Source: Meng et al. 2022 (SDEdit), section 3.

    Example:
        >>> from lit_diffusion.processes import LinearFlow
        >>> from lit_diffusion.solvers import DDIM
        >>> truncate_solver(DDIM(steps=20), 0.3, LinearFlow()).steps
        6
    """
    if not 0 < strength <= 1:
        raise ValueError(f"strength must be above 0 and at most 1, got {strength}.")
    times = Tail(_editable_grid(solver, process), solver.steps)
    return replace(solver, times=times, steps=max(1, round(strength * solver.steps)))


def _editable_grid(solver: Any, process: Process) -> TimeGrid:
    grid = time_grid_of(solver, process)
    if grid is None or not (is_dataclass(solver) and hasattr(solver, "steps")):
        raise ValueError(
            f"images are edited on the steps and times of the solver, and {type(solver).__name__} "
            "is no dataclass with both; use another, such as DDIM."
        )
    return grid


class NoisedImagePrior:
    """A process whose prior is a noised image, for solvers that start from one.

    Args:
        process: provides everything but the prior.
        x0: (B, C, H, W) encoded images to start from.
    """

    def __init__(self, process: Process, x0: Tensor) -> None:
        self._process, self._x0 = process, x0

    def __getattr__(self, name: str) -> object:
        return getattr(self._process, name)

    def __repr__(self) -> str:
        return repr(self._process)

    def prior(self, noise: Tensor, t: Tensor, /) -> Tensor:
        """alpha x0 + sigma noise."""
        alpha, sigma = self._process.alpha_sigma(t)
        return alpha.to(noise.dtype) * self._x0 + sigma.to(noise.dtype) * noise


@dataclass(frozen=True)
class RePaint:
    """Ancestral sampling of the unknown part of an image.

    Each step replaces the known part of its result by `known`, noised to the new level. It is taken
    `resamples` times, with noise added back in between, so that both parts become consistent.

    Args:
        known: (B, C, H, W) x0, of which the masked part is kept.
        mask: (B, 1, H, W) or broadcastable; 1 where `known` is kept, 0 where it is generated.
        steps: steps of the grid.
        resamples: number of times that each step is taken; 1 is plain replacement.
        times: grid; None is `Sections()` in discrete time, `LogSNR(noisiest=-10)` in continuous
            time.
        clip: whether x0 is clamped to [-1, 1].
        variance: variance of each step; None is the one that the network has learned, if any,
            otherwise `FixedSmall()`. FixedSmall is exact for data that are single points, and too
            small for others: Gaussian data with a standard deviation of 0.180 get 0.153 in 100
            steps, each taken 10 times (FixedLarge 0.188, the exact variance 0.187).

    Raises:
        ValueError: if steps < 1 or resamples < 1.

    Source: Lugmayr et al. 2022 (RePaint, arXiv 2201.09865), algorithm 1, with jumps of one step.
    """

    known: Tensor = field(repr=False)
    mask: Tensor = field(repr=False)
    steps: int = 100
    resamples: int = 10
    times: TimeGrid | None = None
    clip: bool = True
    variance: Variance | None = None

    def __post_init__(self) -> None:
        check_steps(self.steps)
        if self.resamples < 1:
            raise ValueError(f"resamples must be at least 1, got {self.resamples}.")

    def sample(
        self,
        denoise: Denoise,
        process: Process,
        noise: Tensor,
        randn_like: RandnLike,
        watch: Watch | None = None,
        /,
    ) -> Tensor:
        """Standard normal noise (B, C, H, W) -> x0, equal to `known` where `mask` is 1."""
        times = finite_grid(self.times or ancestral_grid(process), process, self.steps)
        alpha, sigma = (v.to(noise.dtype) for v in process.alpha_sigma(times))  # on the CPU
        posteriors, x = posterior(process, times), process.prior(noise, times[0])
        for i, t in enumerate(times[:-1]):
            step = posteriors.at(i)
            rounds = 1 if step.last else self.resamples
            for k in range(rounds):
                denoised = denoise(x, batch_of(t, x))
                x0 = clipped(denoised.x0, self.clip)
                if watch is not None and k == 0:
                    watch(i, t, x, x0)
                x_s = step.x0_coef * x0 + step.xt_coef * x
                if not step.last:
                    bounds = step.log_beta, step.log_variance, step.last
                    fraction = denoised.logvar_frac
                    learned = FixedSmall() if fraction is None else LearnedRange()
                    log_variance = (self.variance or learned).log_variance(*bounds, fraction)
                    x_s = x_s + (0.5 * log_variance).exp() * randn_like(x)
                known_s = alpha[i + 1] * self.known + sigma[i + 1] * randn_like(x)
                x_s = torch.where(self.mask > 0.5, known_s, x_s)
                if k + 1 < rounds:  # back to t, by q(x_t | x_s)
                    ratio = alpha[i] / alpha[i + 1]
                    x = ratio * x_s + (0.5 * step.log_beta).exp() * randn_like(x)
            x = x_s
        return x

    def check(self, process: Process, /) -> None:
        """Raise ValueError if the grid does not fit the process."""
        finite_grid(self.times or ancestral_grid(process), process, self.steps)


def repaint_solver(
    solver: Any, process: Process, known: Tensor, mask: Tensor, resamples: int = 10
) -> RePaint:
    """RePaint with the steps, times, clipping and, if it has one, variance of another solver.

    Raises:
        ValueError: for a solver without a grid.
    """
    times, clip = _editable_grid(solver, process), getattr(solver, "clip", False)
    variance = getattr(solver, "variance", None)
    return RePaint(known, mask, solver.steps, resamples, times, clip, variance)
