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
    """Time grid that consists of the last steps of another grid.

    Args:
        base: the grid whose last steps are used.
        whole: number of steps of `base`. A call of `grid` must not ask for more steps.

    Example:
        >>> from lit_diffusion.grids import Even
        >>> from lit_diffusion.processes import LinearFlow
        >>> Tail(Even(), whole=4).grid(LinearFlow(), 2).tolist()
        [0.5, 0.25, 0.0]
    """

    base: TimeGrid
    whole: int

    def grid(self, process: Process, steps: int, /) -> Tensor:
        """Return float64 times (steps + 1,) in decreasing order, ending with the clean time."""
        return self.base.grid(process, self.whole)[-steps - 1 :]


def truncate_solver(solver: Any, strength: float, process: Process) -> Any:
    """Return a solver that takes only the last steps of another solver.

    Args:
        solver: solver to shorten, a dataclass with `steps` and `times`.
        strength: fraction of the steps to take, in (0, 1]. At least one step is taken.
        process: the forward process, on which the solver's default grid may depend.

    Raises:
        ValueError: if strength is not in (0, 1], or if the solver is not a dataclass with `steps`
            and `times`.

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
    steps = max(1, round(strength * solver.steps))
    # Heun divides its churn by the number of steps.
    churn = {"churn": solver.churn * (steps / solver.steps)} if hasattr(solver, "churn") else {}
    return replace(solver, times=times, steps=steps, **churn)


def _editable_grid(solver: Any, process: Process) -> TimeGrid:
    grid = time_grid_of(solver, process)
    if grid is None or not (is_dataclass(solver) and hasattr(solver, "steps")):
        raise ValueError(
            "editing images needs a solver that is a dataclass with `steps` and `times`, and "
            f"{type(solver).__name__} is not; use another solver, such as DDIM."
        )
    return grid


class NoisedImagePrior:
    """A process whose prior is a noised image, for sampling that starts from an image.

    Args:
        process: the forward process. Only its method `prior` is replaced.
        x0: (B, C, H, W) images to start from, encoded by the module's codec.

    Example:
        >>> from lit_diffusion.processes import LinearFlow
        >>> process = NoisedImagePrior(LinearFlow(), x0=torch.ones(1, 1, 2, 2))
        >>> process.prior(torch.zeros(1, 1, 2, 2), torch.tensor(0.25)).unique()
        tensor([0.7500])
    """

    def __init__(self, process: Process, x0: Tensor) -> None:
        self._process, self._x0 = process, x0

    def __getattr__(self, name: str) -> object:
        return getattr(self._process, name)

    def __repr__(self) -> str:
        return repr(self._process)

    def prior(self, noise: Tensor, t: Tensor, /) -> Tensor:
        """Return the noised image `alpha * x0 + sigma * noise`."""
        alpha, sigma = self._process.alpha_sigma(t)
        return alpha.to(noise.dtype) * self._x0 + sigma.to(noise.dtype) * noise


@dataclass(frozen=True)
class RePaint:
    """RePaint: inpainting by ancestral sampling of the unknown part of an image.

    After each step, the known part of the image is replaced with `known`, noised to the level that
    the step has reached. Every step but the last is taken `resamples` times. Before each
    repetition, added noise returns the image to the level at which the step starts. The repetitions
    make the known and the unknown part consistent.

    Args:
        known: (B, C, H, W) x0, which is preserved where `mask` is 1.
        mask: (B, 1, H, W) or broadcastable. The mask is 1 where `known` is preserved, and 0 where
            the image is generated.
        steps: number of steps of the time grid.
        resamples: number of times that each step is taken. With 1, no step is repeated.
        times: time grid. If None, the grid is `Sections()` for a process in discrete time and
            `LogSNR(noisiest=-10)` for a process in continuous time.
        clip: whether to clamp each estimate of x0 to [-1, 1].
        variance: variance of each step. If None, it is the variance that the network has learned,
            or `FixedSmall()` if the network does not learn a variance. `FixedSmall` is exact if the
            data are a single point, and too small otherwise. For example, Gaussian data with a
            standard deviation of 0.180 were sampled in 100 steps, each taken 10 times. The samples
            had a standard deviation of 0.153 with `FixedSmall`, 0.188 with `FixedLarge`, and 0.187
            with the exact variance.

    Raises:
        ValueError: if steps < 1 or resamples < 1.

    Source: Lugmayr et al. 2022 (RePaint, arXiv 2201.09865), algorithm 1, with a jump length of
        one step.

    Example:
        >>> known, mask = torch.zeros(1, 1, 8, 8), torch.ones(1, 1, 8, 8)
        >>> mask[..., 4:] = 0  # generate the right half
        >>> RePaint(known, mask, steps=100).resamples
        10
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
        """Map standard normal noise (B, C, H, W) to x0, which equals `known` where `mask` is 1."""
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
                if k + 1 < rounds:  # back to t: sample from q(x_t | x_s)
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
    """Return a RePaint solver with the steps, times and clipping of another solver.

    If `solver` has an attribute `variance`, RePaint uses this variance too.

    Args:
        solver: solver from which RePaint takes its settings, a dataclass with `steps` and `times`.
        process: the forward process, on which the solver's default grid may depend.
        known: (B, C, H, W) x0, which is preserved where `mask` is 1.
        mask: (B, 1, H, W) or broadcastable. The mask is 1 where `known` is preserved, and 0 where
            the image is generated.
        resamples: number of times that each step is taken.

    Raises:
        ValueError: if the solver is not a dataclass with `steps` and `times`.

    Example:
        >>> from lit_diffusion.processes import LinearFlow
        >>> from lit_diffusion.solvers import DDIM
        >>> known, mask = torch.zeros(1, 1, 8, 8), torch.ones(1, 1, 8, 8)
        >>> repaint_solver(DDIM(steps=20), LinearFlow(), known, mask).steps
        20
    """
    times, clip = _editable_grid(solver, process), getattr(solver, "clip", False)
    variance = getattr(solver, "variance", None)
    return RePaint(known, mask, solver.steps, resamples, times, clip, variance)
