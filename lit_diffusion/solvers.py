"""Reverse-time generators: from noise to an image, given a function that denoises.

A solver knows neither networks nor labels: `denoise(x_t, t)` hides parameterization and guidance,
`randn_like` the source of randomness. Coefficients are float64 scalars; images keep their dtype. x0
is clamped to [-1, 1] (`clip`) for pixels, never for latents.
"""

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from lit_diffusion.gaussian import FixedSmall, posterior
from lit_diffusion.protocols import Denoise, Denoised, Process, RandnLike, TimeGrid, Variance, Watch
from lit_diffusion.timesteps import Karras, LogSNR, Sections


@dataclass(frozen=True)
class DDPM:
    """Ancestral sampling: draws from p(x_s | x_t), step by step.

    Args:
        variance: of each step: gaussian.FixedSmall, FixedLarge, or LearnedRange for networks
            trained with HybridLoss.
        steps: evaluations of the network.
        times: grid; None is `Sections()`, improved-diffusion's respacing.
        clip: whether x0 is clamped to [-1, 1].

    Source: Ho et al. 2020 (DDPM), algorithm 2; Nichol & Dhariwal 2021 for respacing and learned
    variance.
    """

    variance: Variance
    steps: int = 1000
    times: TimeGrid | None = None
    clip: bool = True

    def __post_init__(self) -> None:
        _check_steps(self.steps)

    def sample(
        self,
        denoise: Denoise,
        process: Process,
        noise: Tensor,
        randn_like: RandnLike,
        watch: Watch | None = None,
        /,
    ) -> Tensor:
        """Standard normal noise (B, C, H, W) -> x0."""
        times = _finite_grid(self.times or Sections(), process, self.steps)
        steps = posterior(process, times)
        x = process.prior(noise, times[0])
        for i, t in enumerate(times[:-1]):
            step, seen = steps.at(i), denoise(x, _batch(t, x))
            log_variance = self.variance.log_variance(
                step.log_beta, step.log_variance, step.last, seen.logvar_frac
            )
            x0 = _clip(seen.x0, self.clip)
            if watch is not None:
                watch(i, t, x, x0)
            x = step.x0_coef * x0 + step.xt_coef * x
            if seen.shift is not None:
                # guided-diffusion's posterior variance is not clipped here: 0 in the last step
                unclipped = isinstance(self.variance, FixedSmall)
                x = x + (step.variance if unclipped else log_variance.exp()) * seen.shift
            if not step.last:
                x = x + (0.5 * log_variance).exp() * randn_like(x)
        return x

    def check(self, process: Process, /) -> None:
        """Raise ValueError where the grid does not fit the process."""
        _finite_grid(self.times or Sections(), process, self.steps)


@dataclass(frozen=True)
class DDIM:
    """Deterministic for eta = 0, as random as DDPM with the small variance for eta = 1.

    Args:
        steps: evaluations of the network.
        eta: share of the posterior's standard deviation that is drawn anew.
        times: grid; None is `Sections()`.
        clip: whether x0 is clamped to [-1, 1]; the noise then follows the clamped x0.

    Source: Song et al. 2021 (DDIM), Eq. 12 and 16.
    """

    steps: int = 50
    eta: float = 0.0
    times: TimeGrid | None = None
    clip: bool = True

    def __post_init__(self) -> None:
        _check_steps(self.steps)
        if self.eta < 0:
            raise ValueError(f"eta must be >= 0, got {self.eta}; 0 is deterministic.")

    def sample(
        self,
        denoise: Denoise,
        process: Process,
        noise: Tensor,
        randn_like: RandnLike,
        watch: Watch | None = None,
        /,
    ) -> Tensor:
        """Standard normal noise (B, C, H, W) -> x0."""
        times, std = self._grid(process)
        alpha, sigma = process.alpha_sigma(times)
        x = process.prior(noise, times[0])
        for i, t in enumerate(times[:-1]):
            x0, direction = _x0_and_noise(
                denoise(x, _batch(t, x)), x, alpha[i], sigma[i], self.clip
            )
            if watch is not None:
                watch(i, t, x, x0)
            x = alpha[i + 1] * x0 + (sigma[i + 1] ** 2 - std[i] ** 2).sqrt() * direction
            if std[i] > 0:
                x = x + std[i] * randn_like(x)
        return x

    def invert(self, denoise: Denoise, process: Process, x0: Tensor, /) -> Tensor:
        """Noise (B, C, H, W) from which `sample` with eta = 0 returns to x0, up to its error.

        Source: Song et al. 2021 (DDIM), Eq. 14; the last step returns the noise itself.
        """
        times = self._grid(process)[0][:-1].flip(0)
        alpha, sigma = process.alpha_sigma(times)
        x = x0
        for i, t in enumerate(times):
            clean, noise = _x0_and_noise(denoise(x, _batch(t, x)), x, alpha[i], sigma[i], self.clip)
            if i + 1 < len(times):
                x = alpha[i + 1] * clean + sigma[i + 1] * noise
        return noise

    def check(self, process: Process, /) -> None:
        """Raise ValueError where the grid or eta does not fit the process."""
        self._grid(process)

    def _grid(self, process: Process) -> tuple[Tensor, Tensor]:
        """(steps + 1,) times, and the (steps,) standard deviations of new noise."""
        times = _finite_grid(self.times or Sections(), process, self.steps)
        std = self.eta * posterior(process, times).variance.sqrt()
        if (std > process.alpha_sigma(times)[1][1:]).any():
            raise ValueError(f"eta = {self.eta} is more noise than {process} has; use at most 1.")
        return times, std


@dataclass(frozen=True)
class DPMSolverPP:
    """DPM-Solver++(2M): second order with one evaluation a step, by remembering the last x0.

    In half-log-SNR lambda = log(alpha / sigma) with h = lambda_s - lambda_t, the step is
    x_s = (sigma_s / sigma_t) x_t - alpha_s (exp(-h) - 1) D, where D extrapolates x0 to the middle
    of the step. The first step and the one to the clean image are of first order.

    Args:
        steps: evaluations of the network.
        times: grid; None is `LogSNR()`.
        clip: whether x0 is clamped to [-1, 1].

    Source: Lu et al. 2022 (DPM-Solver++, arXiv 2211.01095), algorithm 2.
    """

    steps: int = 20
    times: TimeGrid | None = None
    clip: bool = True

    def __post_init__(self) -> None:
        _check_steps(self.steps)

    def sample(
        self,
        denoise: Denoise,
        process: Process,
        noise: Tensor,
        randn_like: RandnLike,
        watch: Watch | None = None,
        /,
    ) -> Tensor:
        """Standard normal noise (B, C, H, W) -> x0."""
        times = _finite_grid(self.times or LogSNR(), process, self.steps)
        alpha, sigma = process.alpha_sigma(times)
        h = (alpha / sigma).log().diff()
        x = process.prior(noise, times[0])
        last_x0 = None
        for i, t in enumerate(times[:-1]):
            x0 = _clip(denoise(x, _batch(t, x)).x0, self.clip)
            if watch is not None:
                watch(i, t, x, x0)
            middle = x0
            if last_x0 is not None and sigma[i + 1] > 0:
                middle = x0 + h[i] / h[i - 1] / 2 * (x0 - last_x0)
            x = sigma[i + 1] / sigma[i] * x - alpha[i + 1] * torch.expm1(-h[i]) * middle
            last_x0 = x0
        return x

    def check(self, process: Process, /) -> None:
        """Raise ValueError where the grid does not fit the process."""
        _finite_grid(self.times or LogSNR(), process, self.steps)


@dataclass(frozen=True)
class Heun:
    """Second order with two evaluations a step, and noise added back on the way if wanted.

    In level = sigma / alpha and x = x_t / alpha, the probability flow of any process is dx / dlevel
    = noise(x_t, t). A step follows the mean of the slopes at both of its ends. The step to the
    clean image is Euler's. `watch` sees x_t after noise was added.

    Args:
        steps: of the grid: 2 steps - 1 evaluations of the network.
        times: grid; None is `Karras()`.
        clip: whether x0 is clamped to [-1, 1]; the slope then follows the clamped x0.
        churn: S_churn, how much the level is raised before each step, in all: by the factor 1 +
            min(churn / steps, sqrt(2) - 1). 0 is deterministic.
        churn_min: S_tmin, the lowest level that is raised.
        churn_max: S_tmax, the highest.
        churn_noise: S_noise, standard deviation of what is added.

    Raises:
        ValueError: for a number of steps below 1, a negative churn, and by `check` for a process
            that ends without any signal.

    Source: Karras et al. 2022 (EDM), algorithms 1 and 2.
    """

    steps: int = 18
    times: TimeGrid | None = None
    clip: bool = True
    churn: float = 0.0
    churn_min: float = 0.0
    churn_max: float = math.inf
    churn_noise: float = 1.0

    def __post_init__(self) -> None:
        _check_steps(self.steps)
        if self.churn < 0:
            raise ValueError(f"churn must be >= 0, got {self.churn}; 0 is deterministic.")

    def sample(
        self,
        denoise: Denoise,
        process: Process,
        noise: Tensor,
        randn_like: RandnLike,
        watch: Watch | None = None,
        /,
    ) -> Tensor:
        """Standard normal noise (B, C, H, W) -> x0."""
        times = self._grid(process)
        levels = _level(process, times)
        x = process.prior(noise, times[0]) / process.alpha_sigma(times[0])[0]
        for i, (t, t_next) in enumerate(pairwise(times)):
            x, t, level = self._churned(x, t, levels[i], process, randn_like)
            x_t, x0, d_cur = self._look(denoise, process, x, t)
            if watch is not None:
                watch(i, t, x_t, x0)
            h = levels[i + 1] - level
            x_next = x + h * d_cur
            if levels[i + 1] > 0:
                *_, d_prime = self._look(denoise, process, x_next, t_next)
                x_next = x + h * (d_cur + d_prime) / 2
            x = x_next
        return x

    def check(self, process: Process, /) -> None:
        """Raise ValueError where the grid does not fit the process, or alpha is 0."""
        self._grid(process)

    def _grid(self, process: Process) -> Tensor:
        grid = self.times or Karras()
        times = grid.grid(process, self.steps)
        if not (process.alpha_sigma(times)[0] > 0).all():
            raise ValueError(
                f"Heun needs alpha > 0, which {process} does not keep on {grid}; use DDIM, or "
                "LogSNR(noisiest=-10)."
            )
        return times

    def _look(
        self, denoise: Denoise, process: Process, x: Tensor, t: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x_t, x0 and the slope, which is the noise."""
        alpha, sigma = process.alpha_sigma(t)
        x_t = alpha * x
        return x_t, *_x0_and_noise(denoise(x_t, _batch(t, x)), x_t, alpha, sigma, self.clip)

    def _churned(
        self, x: Tensor, t: Tensor, level: Tensor, process: Process, randn_like: RandnLike
    ) -> tuple[Tensor, Tensor, Tensor]:
        """State, time and level after noise is added."""
        if self.churn == 0 or not self.churn_min <= level <= self.churn_max:
            return x, t, level
        raised = level * (1 + min(self.churn / self.steps, math.sqrt(2) - 1))
        t = process.at_log_snr(-2 * raised.log())
        raised = _level(process, t)  # no more than the process has
        added = (raised**2 - level**2).clamp(min=0).sqrt()
        return x + added * self.churn_noise * randn_like(x), t, raised


def _finite_grid(grid: TimeGrid, process: Process, steps: int) -> Tensor:
    times = grid.grid(process, steps)
    if not times.isfinite().all():
        raise ValueError(
            f"{grid} has times that are not finite on {process}, whose noisiest has no signal (SNR "
            "= 0); use Even or Sections, or LogSNR(noisiest=-10)."
        )
    return times


def _level(process: Process, t: Tensor) -> Tensor:
    """Noise relative to the signal, sigma / alpha."""
    alpha, sigma = process.alpha_sigma(t)
    return sigma / alpha


def _batch(t: Tensor, x: Tensor) -> Tensor:
    """One time -> (B,) on the device of x."""
    return t.to(x.device).expand(len(x))


def _clip(x0: Tensor, clip: bool) -> Tensor:
    return x0.clamp(-1, 1) if clip else x0


def _x0_and_noise(
    seen: Denoised, x_t: Tensor, alpha: Tensor, sigma: Tensor, clip: bool
) -> tuple[Tensor, Tensor]:
    """Both parts of x_t; the noise agrees with the clipped x0."""
    if not clip:
        return seen.x0, seen.noise
    x0 = seen.x0.clamp(-1, 1)
    return x0, (x_t - alpha * x0) / sigma


def _check_steps(steps: int) -> None:
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}.")
