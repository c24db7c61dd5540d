"""Reverse-time generators: from noise to an image, given a function that denoises.

A solver knows neither networks nor labels: `denoise(x_t, t)` hides parameterization and guidance,
`randn_like` the source of randomness. Coefficients are float64 scalars; images keep their dtype. x0
is clamped to [-1, 1] (`clip`) for pixels, never for latents.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lit_diffusion.gaussian import posterior
from lit_diffusion.protocols import Denoise, Denoised, Process, RandnLike, TimeGrid, Variance
from lit_diffusion.timesteps import LogSNR, Sections


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
        """Refuse a number of steps below 1."""
        _check_steps(self.steps)

    def sample(
        self, denoise: Denoise, process: Process, noise: Tensor, randn_like: RandnLike, /
    ) -> Tensor:
        """Standard normal noise (B, C, H, W) -> x0."""
        times = self._grid(process)
        steps = posterior(process, times)
        x = process.prior(noise, times[0])
        for i, t in enumerate(times[:-1]):
            step, seen = steps.at(i), denoise(x, _batch(t, x))
            log_variance = self.variance.log_variance(
                step.log_beta, step.log_variance, step.last, seen.logvar_frac
            )
            x = step.x0_coef * _clip(seen.x0, self.clip) + step.xt_coef * x
            if seen.shift is not None:
                x = x + log_variance.exp() * seen.shift
            if not step.last:
                x = x + (0.5 * log_variance).exp() * randn_like(x)
        return x

    def check(self, process: Process, /) -> None:
        """Raise ValueError where the grid does not fit the process."""
        self._grid(process)

    def _grid(self, process: Process) -> Tensor:
        return (self.times or Sections()).grid(process, self.steps)


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
        """Refuse a number of steps below 1 and a negative eta."""
        _check_steps(self.steps)
        if self.eta < 0:
            raise ValueError(f"eta must be >= 0, got {self.eta}; 0 is deterministic.")

    def sample(
        self, denoise: Denoise, process: Process, noise: Tensor, randn_like: RandnLike, /
    ) -> Tensor:
        """Standard normal noise (B, C, H, W) -> x0."""
        times, std = self._grid(process)
        alpha, sigma = process.alpha_sigma(times)
        x = process.prior(noise, times[0])
        for i, t in enumerate(times[:-1]):
            x0, direction = _x0_and_noise(
                denoise(x, _batch(t, x)), x, alpha[i], sigma[i], self.clip
            )
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
        times = (self.times or Sections()).grid(process, self.steps)
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
        """Refuse a number of steps below 1."""
        _check_steps(self.steps)

    def sample(
        self, denoise: Denoise, process: Process, noise: Tensor, randn_like: RandnLike, /
    ) -> Tensor:
        """Standard normal noise (B, C, H, W) -> x0."""
        times = self._grid(process)
        alpha, sigma = process.alpha_sigma(times)
        h = (alpha / sigma).log().diff()
        x = process.prior(noise, times[0])
        last_x0 = None
        for i, t in enumerate(times[:-1]):
            x0 = _clip(denoise(x, _batch(t, x)).x0, self.clip)
            middle = x0
            if last_x0 is not None and sigma[i + 1] > 0:
                middle = x0 + h[i] / h[i - 1] / 2 * (x0 - last_x0)
            x = sigma[i + 1] / sigma[i] * x - alpha[i + 1] * torch.expm1(-h[i]) * middle
            last_x0 = x0
        return x

    def check(self, process: Process, /) -> None:
        """Raise ValueError where the grid does not fit the process."""
        self._grid(process)

    def _grid(self, process: Process) -> Tensor:
        return (self.times or LogSNR()).grid(process, self.steps)


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
