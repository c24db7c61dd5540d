"""Solvers DDPM, DDIM, Euler and EulerAncestral, whose steps use the posterior `q(x_s | x_t, x0)`.

A step goes from time t to the less noisy time s.
"""

import math
from dataclasses import dataclass

from torch import Tensor

from lit_diffusion.gaussian import FixedSmall, posterior
from lit_diffusion.grids import Even, Karras, LogSNR, Sections
from lit_diffusion.protocols import Denoise, Process, RandnLike, TimeGrid, Variance, Watch
from lit_diffusion.solvers.steps import batch_of, check_steps, clipped, finite_grid, x0_and_noise


def ancestral_grid(process: Process) -> TimeGrid:
    """Return `Sections()` for discrete time, or `LogSNR(noisiest=-10)` for continuous time."""
    return LogSNR(noisiest=-10.0) if process.num_steps is None else Sections()


@dataclass(frozen=True)
class DDPM:
    """Ancestral sampling: each step draws x_s from `p(x_s | x_t)`.

    Args:
        variance: variance of each step: `FixedSmall()`, `FixedLarge()` or `LearnedRange()` of
            `lit_diffusion.gaussian`. `LearnedRange` needs a network trained with `HybridLoss`.
        steps: number of steps, each of which evaluates the network once.
        times: time grid. If None, the grid is `LogSNR(noisiest=-10)` for a process in continuous
            time. For a process in discrete time, it is `Sections()`, improved-diffusion's
            respacing.
        clip: whether to clamp each estimate of x0 to [-1, 1].

    Source: Ho et al. 2020 (DDPM), algorithm 2; Nichol & Dhariwal 2021 for respacing and learned
    variance.

    Example:
        >>> DDPM(variance=FixedSmall(), steps=250).steps
        250
    """

    variance: Variance
    steps: int = 1000
    times: TimeGrid | None = None
    clip: bool = True

    def __post_init__(self) -> None:
        check_steps(self.steps)

    def default_times(self, process: Process) -> TimeGrid:
        """Return `Sections()` for discrete time, or `LogSNR(noisiest=-10)` for continuous time."""
        return ancestral_grid(process)

    def sample(
        self,
        denoise: Denoise,
        process: Process,
        noise: Tensor,
        randn_like: RandnLike,
        watch: Watch | None = None,
        /,
    ) -> Tensor:
        """Map standard normal noise (B, C, H, W) to x0."""
        times = finite_grid(self.times or self.default_times(process), process, self.steps)
        posteriors = posterior(process, times)
        x = process.prior(noise, times[0])
        for i, t in enumerate(times[:-1]):
            step = posteriors.at(i)
            denoised = denoise(x, batch_of(t, x))
            log_variance = self.variance.log_variance(
                step.log_beta, step.log_variance, step.last, denoised.logvar_frac
            )
            x0 = clipped(denoised.x0, self.clip)
            if watch is not None:
                watch(i, t, x, x0)
            x = step.x0_coef * x0 + step.xt_coef * x
            if denoised.shift is not None:
                # As in guided-diffusion, the posterior variance is unclipped, so the last shift
                # is 0.
                unclipped = isinstance(self.variance, FixedSmall)
                x = x + (step.variance if unclipped else log_variance.exp()) * denoised.shift
            if not step.last:
                x = x + (0.5 * log_variance).exp() * randn_like(x)
        return x

    def check(self, process: Process, /) -> None:
        """Raise ValueError if the grid does not fit the process."""
        finite_grid(self.times or self.default_times(process), process, self.steps)


@dataclass(frozen=True)
class DDIM:
    """DDIM, which is deterministic if eta = 0, and equals `DDPM(variance=FixedSmall())` if eta = 1.

    Args:
        steps: number of steps, each of which evaluates the network once.
        eta: standard deviation of the noise that a step adds, divided by the standard deviation of
            the posterior `q(x_s | x_t, x0)`.
        times: time grid. If None, the grid is `Sections()` for a process in discrete time and
            `LogSNR(noisiest=-10)` for a process in continuous time.
        clip: whether to clamp each estimate of x0 to [-1, 1]. If True, the estimate of the noise is
            computed from the clamped x0.

    Source: Song et al. 2021 (DDIM), Eq. 12 and 16.

    Example:
        >>> DDIM(steps=50, eta=0.0).eta
        0.0
    """

    steps: int = 50
    eta: float = 0.0
    times: TimeGrid | None = None
    clip: bool = True

    def __post_init__(self) -> None:
        check_steps(self.steps)
        if not 0 <= self.eta < math.inf:
            raise ValueError(f"eta must be >= 0 and finite, got {self.eta}; 0 is deterministic.")

    def default_times(self, process: Process) -> TimeGrid:
        """Return `Sections()` for discrete time, or `LogSNR(noisiest=-10)` for continuous time."""
        return ancestral_grid(process)

    def sample(
        self,
        denoise: Denoise,
        process: Process,
        noise: Tensor,
        randn_like: RandnLike,
        watch: Watch | None = None,
        /,
    ) -> Tensor:
        """Map standard normal noise (B, C, H, W) to x0."""
        times, std = self._times_and_std(process)
        alpha, sigma = process.alpha_sigma(times)
        x = process.prior(noise, times[0])
        for i, t in enumerate(times[:-1]):
            t_batch = batch_of(t, x, until=None if std[i] > 0 else times[i + 1])
            x0, direction = x0_and_noise(denoise(x, t_batch), x, alpha[i], sigma[i], self.clip)
            if watch is not None:
                watch(i, t, x, x0)
            x = alpha[i + 1] * x0 + (sigma[i + 1] ** 2 - std[i] ** 2).sqrt() * direction
            if std[i] > 0:
                x = x + std[i] * randn_like(x)
        return x

    def invert(self, denoise: Denoise, process: Process, x0: Tensor, /) -> Tensor:
        """Compute noise (B, C, H, W) from which `sample` with eta = 0 approximately recovers x0.

        The result is the model's estimate of the noise at the noisiest time.

        Source: Song et al. 2021 (DDIM), Eq. 14.
        """
        times = self._times_and_std(process)[0][:-1].flip(0)
        alpha, sigma = process.alpha_sigma(times)
        x = x0
        for i, t in enumerate(times):
            clean, noise = x0_and_noise(
                denoise(x, batch_of(t, x)), x, alpha[i], sigma[i], self.clip
            )
            if i + 1 < len(times):
                x = alpha[i + 1] * clean + sigma[i + 1] * noise
        return noise

    def check(self, process: Process, /) -> None:
        """Raise ValueError if the grid or eta does not fit the process."""
        self._times_and_std(process)

    def _times_and_std(self, process: Process) -> tuple[Tensor, Tensor]:
        """(steps + 1,) times, and (steps,) standard deviations of the noise that steps add."""
        times = finite_grid(self.times or self.default_times(process), process, self.steps)
        std = self.eta * posterior(process, times).variance.sqrt()
        if (std > process.alpha_sigma(times)[1][1:]).any():
            raise ValueError(
                f"eta = {self.eta} adds more noise than {process} has at the end of a step; "
                "use at most 1."
            )
        return times, std


@dataclass(frozen=True)
class Euler(DDIM):
    """Euler's method for the probability-flow ODE: `DDIM` on times that are evenly spaced.

    A step of DDIM holds the estimates of x0 and noise constant. Therefore, it is an Euler step of
    the ODE for `x_t / alpha` as a function of `sigma / alpha`, as in k-diffusion. On `LinearFlow`,
    the step is also an Euler step for x_t as a function of t.

    Args:
        steps: number of steps, each of which evaluates the network once.
        eta: standard deviation of the noise that a step adds, divided by the standard deviation of
            the posterior `q(x_s | x_t, x0)`. With 0, sampling is deterministic.
        times: time grid. If None, the grid is `Even()`.
        clip: whether to clamp each estimate of x0 to [-1, 1].

    Source: Lipman et al. 2023 (Flow Matching), section 6; Karras et al. 2022 (EDM), algorithm 1
    without its second evaluation.

    Example:
        >>> from lit_diffusion.processes import LinearFlow
        >>> Euler(steps=4).default_times(LinearFlow())
        Even()
    """

    def default_times(self, process: Process) -> TimeGrid:
        """Return `Even()`, which is used if `times` is None."""
        return Even()


@dataclass(frozen=True)
class EulerAncestral(DDIM):
    """Euler ancestral sampling, which is DDIM with eta = 1 on a Karras grid.

    From each noise level of the grid, the solver takes an Euler step that ends below the next level
    of the grid, and then adds noise to reach this next level. k-diffusion calls this solver
    `sample_euler_ancestral`.

    Args:
        steps: number of steps, each of which evaluates the network once.
        eta: standard deviation of the noise that a step adds, divided by the standard deviation of
            the posterior `q(x_s | x_t, x0)`.
        times: time grid. If None, the grid is `Karras(noisiest=-10)`.
        clip: whether to clamp each estimate of x0 to [-1, 1].

    Source: Song et al. 2021 (DDIM), Eq. 16.

    Example:
        >>> EulerAncestral(steps=50)
        EulerAncestral(steps=50, eta=1.0, times=None, clip=True)
    """

    eta: float = 1.0

    def default_times(self, process: Process) -> TimeGrid:
        """Return `Karras(noisiest=-10)`, which is used if `times` is None."""
        return Karras(noisiest=-10.0)
