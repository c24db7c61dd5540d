"""Exponential integrators in half-log-SNR: DPM-Solver++ and UniPC.

With lambda = log(alpha / sigma) the probability flow is, over a step from t to s,

    x_s = (sigma_s / sigma_t) x_t + sigma_s int e^lambda x0(lambda) dlambda,

so that all the error lies in how x0 changes within a step; solvers differ in how they guess that.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lit_diffusion.grids import LogSNR
from lit_diffusion.protocols import Denoise, Process, RandnLike, TimeGrid, Watch
from lit_diffusion.solvers.steps import (
    batch_of,
    check_steps,
    clipped,
    finite_grid,
    grid_with_signal,
)


@dataclass(frozen=True)
class DPMSolverPP:
    """DPM-Solver++ multistep (2M, 3M): higher order with one evaluation a step, by memory.

    With h = lambda_s - lambda_t and H = (1 + eta) h the step is

        x_s = (sigma_s / sigma_t) exp(-eta h) x_t - alpha_s (exp(-H) - 1) D
              + sigma_s sqrt(1 - exp(-2 eta h)) z,

    where D extrapolates x0 from the last `order` of it. The step to the clean image is of first
    order, and so is the first. Order 3 is the authors' (and diffusers', and k-diffusion's): its
    second difference counts half of what Taylor's does, so that its error, much smaller than that
    of order 2, falls no faster.

    Args:
        steps: evaluations of the network.
        times: grid; None is `LogSNR()`.
        clip: whether x0 is clamped to [-1, 1].
        order: 1, 2 or 3.
        eta: 0 is deterministic, 1 the reverse SDE (2M SDE).

    Raises:
        ValueError: for another order, a negative eta or a number of steps below 1.

    Source: Lu et al. 2022 (DPM-Solver++, arXiv 2211.01095), algorithm 2 and section 4.3; order 3 as
    in the authors' code.
    """

    steps: int = 20
    times: TimeGrid | None = None
    clip: bool = True
    order: int = 2
    eta: float = 0.0
    default_times: ClassVar[TimeGrid] = LogSNR()

    def __post_init__(self) -> None:
        check_steps(self.steps)
        if self.order not in (1, 2, 3) or not 0 <= self.eta < math.inf:
            raise ValueError(f"order must be 1, 2 or 3 and eta >= 0, got {self}.")

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
        times = finite_grid(self.times or self.default_times, process, self.steps)
        alpha, sigma = process.alpha_sigma(times)
        h = (alpha / sigma).log().diff()
        x = process.prior(noise, times[0])
        x0s: list[Tensor] = []
        for i, t in enumerate(times[:-1]):
            x0 = clipped(denoise(x, batch_of(t, x)).x0, self.clip)
            if watch is not None:
                watch(i, t, x, x0)
            x0s = [x0, *x0s[: self.order - 1]]
            if sigma[i + 1] == 0:
                return alpha[i + 1] * x0
            x = sigma[i + 1] / sigma[i] * x
            if self.eta > 0:  # h is infinite where there is no signal
                x = (-self.eta * h[i]).exp() * x
            x = x + alpha[i + 1] * self._pull(x0s, h[: i + 1])
            if self.eta > 0:
                std = sigma[i + 1] * (-torch.expm1(-2 * self.eta * h[i])).sqrt()
                x = x + std * randn_like(x)
        return x

    def check(self, process: Process, /) -> None:
        """Raise ValueError where the grid does not fit the process."""
        finite_grid(self.times or self.default_times, process, self.steps)

    def _pull(self, x0s: list[Tensor], h: Tensor) -> Tensor:
        """What x0, latest first, adds over the last of the steps h."""
        whole = (1 + self.eta) * h[-1]
        one = -torch.expm1(-whole)
        if len(x0s) == 1:
            return one * x0s[0]
        ratio = h[-2] / h[-1]
        slope = (x0s[0] - x0s[1]) / ratio
        if len(x0s) == 2:
            return one * (x0s[0] + slope / 2)
        ratio_2 = h[-3] / h[-1]
        bend = (slope - (x0s[1] - x0s[2]) / ratio_2) / (ratio + ratio_2)
        two = 1 - one / whole
        return one * x0s[0] + two * (slope + ratio * bend) - (two / whole - 0.5) * bend


@dataclass(frozen=True)
class DPMSolverPP2S:
    """DPM-Solver++(2S): a look at the middle of each step, from there x0 over all of it.

    Args:
        steps: of the grid: 2 steps - 1 evaluations of the network.
        times: grid; None is `LogSNR()`.
        clip: whether x0 is clamped to [-1, 1].
        eta: share of the posterior's standard deviation that is drawn anew, for which the step goes
            further down. 0 is deterministic; 1 is k-diffusion's `dpmpp_2s_ancestral`.

    Raises:
        ValueError: for a negative eta, one above 1 or a number of steps below 1.

    Source: Lu et al. 2022 (DPM-Solver++, arXiv 2211.01095), algorithm 1 with r = 1/2.
    """

    steps: int = 10
    times: TimeGrid | None = None
    clip: bool = True
    eta: float = 0.0
    default_times: ClassVar[TimeGrid] = LogSNR()

    def __post_init__(self) -> None:
        check_steps(self.steps)
        if not 0 <= self.eta <= 1:
            raise ValueError(f"eta must be in [0, 1], got {self.eta}; 0 is deterministic.")

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
        times = grid_with_signal(self.times or self.default_times, process, self.steps)
        alpha, sigma = process.alpha_sigma(times)
        levels = sigma / alpha
        x = process.prior(noise, times[0]) / alpha[0]
        for i, t in enumerate(times[:-1]):
            x0 = clipped(denoise(alpha[i] * x, batch_of(t, x)).x0, self.clip)
            if watch is not None:
                watch(i, t, alpha[i] * x, x0)
            if levels[i + 1] == 0:
                return alpha[i + 1] * x0
            up = self.eta * levels[i + 1] * (1 - (levels[i + 1] / levels[i]) ** 2).sqrt()
            down = (levels[i + 1] ** 2 - up**2).sqrt()
            middle = (levels[i] * down).sqrt()
            t_middle = process.at_log_snr(-2 * middle.log())
            x_middle = x0 + middle / levels[i] * (x - x0)
            denoised = denoise(process.alpha_sigma(t_middle)[0] * x_middle, batch_of(t_middle, x))
            x0 = clipped(denoised.x0, self.clip)
            x = x0 + down / levels[i] * (x - x0)
            if up > 0:
                x = x + up * randn_like(x)
        return x

    def check(self, process: Process, /) -> None:
        """Raise ValueError where the grid does not fit the process, or alpha is 0."""
        grid_with_signal(self.times or self.default_times, process, self.steps)


@dataclass(frozen=True)
class UniPC:
    """UniPC: a multistep predictor, corrected by the next step's own evaluation, at no cost.

    Orders fall to 1 towards both ends. B(h) = exp(-h) - 1, which the authors call bh2.

    Args:
        steps: evaluations of the network.
        times: grid; None is `LogSNR()`.
        clip: whether x0 is clamped to [-1, 1].
        order: of the predictor; the corrector adds one.

    Raises:
        ValueError: for an order or a number of steps below 1.

    Source: Zhao et al. 2023 (UniPC, arXiv 2302.04867), algorithms 5 and 6 (of x0).
    """

    steps: int = 10
    times: TimeGrid | None = None
    clip: bool = True
    order: int = 2
    default_times: ClassVar[TimeGrid] = LogSNR()

    def __post_init__(self) -> None:
        check_steps(self.steps)
        check_steps(self.order)

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
        times = grid_with_signal(self.times or self.default_times, process, self.steps)
        alpha, sigma = process.alpha_sigma(times)
        lambdas = (alpha / sigma).log()
        x = predicted = process.prior(noise, times[0])
        x0s: list[Tensor] = []
        for i, t in enumerate(times[:-1]):
            x0 = clipped(denoise(predicted, batch_of(t, x)).x0, self.clip)
            if x0s:
                x = _unified_step(x, x0s, x0, lambdas[: i + 1], alpha[i], sigma[i - 1 : i + 1])
            if watch is not None:
                watch(i, t, x, x0)
            if sigma[i + 1] == 0:
                return alpha[i + 1] * x0
            x0s = [x0, *x0s][: min(self.order, self.steps - i)]
            ends = sigma[i : i + 2]
            predicted = _unified_step(x, x0s, None, lambdas[: i + 2], alpha[i + 1], ends)
        return predicted

    def check(self, process: Process, /) -> None:
        """Raise ValueError where the grid does not fit the process, or alpha is 0."""
        grid_with_signal(self.times or self.default_times, process, self.steps)


def _unified_step(
    x: Tensor,
    x0s: list[Tensor],
    at_end: Tensor | None,
    lambdas: Tensor,
    alpha: Tensor,
    sigma: Tensor,
) -> Tensor:
    """The predictor from earlier x0s, latest first; the corrector with the one at the end too."""
    h = lambdas[-1] - lambdas[-2]
    places = [(lambdas[-2 - k] - lambdas[-2]) / h for k in range(1, len(x0s))]
    slopes = [(x0 - x0s[0]) / r for x0, r in zip(x0s[1:], places, strict=True)]
    if at_end is not None:
        places.append(h / h)
        slopes.append(at_end - x0s[0])
    one = -torch.expm1(-h)
    x0 = x0s[0]
    for weight, slope in zip(_unified_weights(places, h), slopes, strict=True):
        x0 = x0 + weight * slope
    return sigma[1] / sigma[0] * x + alpha * one * x0


def _unified_weights(places: list[Tensor], h: Tensor) -> Tensor:
    """rho with sum_k rho_k r_k^n = phi_n, exact for polynomials; 1/2 for one alone."""
    if len(places) < 2:
        return torch.full((len(places),), 0.5, dtype=torch.float64)
    part, moments = torch.expm1(-h), []
    for n in range(1, len(places) + 1):
        part = part / -h - 1 / math.factorial(n)
        moments.append(part * math.factorial(n) / torch.expm1(-h))
    powers = torch.stack(places) ** torch.arange(len(places), dtype=torch.float64)[:, None]
    rho: Tensor = torch.linalg.solve(powers, torch.stack(moments))
    return rho
