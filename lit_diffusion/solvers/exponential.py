"""Exponential integrators in half-log-SNR: DPM-Solver++ and UniPC.

With `lambda = log(alpha / sigma)`, a step of the probability flow from t to s is

    x_s = (sigma_s / sigma_t) * x_t + sigma_s * integral(exp(lambda) * x0(lambda) dlambda).

Here, x0(lambda) is the network's estimate of x0 at each lambda between the times t and s. A solver
evaluates the network only at a few values of lambda, and approximates x0(lambda) in between. This
approximation is the only source of error. Solvers differ only in how they approximate x0(lambda).
"""

import math
from dataclasses import dataclass

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
    """DPM-Solver++ multistep (2M, 3M): second or third order with one evaluation per step.

    With `h = lambda_s - lambda_t` and `H = (1 + eta) * h`, the step is

        x_s = (sigma_s / sigma_t) * exp(-eta * h) * x_t - alpha_s * (exp(-H) - 1) * D
              + sigma_s * sqrt(1 - exp(-2 * eta * h)) * z.

    Here, D extrapolates the last `order` estimates of x0, and z is standard normal noise. The first
    step and the step to the clean image are first order.

    With `order=3`, the solver converges only with second order, because the coefficient of the
    second difference is half of that in the Taylor series. The authors' code, diffusers and
    k-diffusion use the same coefficient. Nevertheless, the error is smaller than with `order=2`.

    Args:
        steps: number of steps, each of which evaluates the network once.
        times: time grid. If None, the grid is `LogSNR(noisiest=-10)`.
        clip: whether to clamp each estimate of x0 to [-1, 1].
        order: 1, 2 or 3.
        eta: amount of noise that steps add, as in the formula above. With 0, sampling is
            deterministic. With 1, the solver follows the reverse SDE. With 1 and `order=2`, the
            solver is known as "2M SDE".

    Raises:
        ValueError: if the order is not 1, 2 or 3, if eta is negative or infinite, or if steps < 1.

    Source: Lu et al. 2022 (DPM-Solver++, arXiv 2211.01095), algorithm 2 and section 4. Order 3
    follows the authors' code, and the formula with `eta` follows k-diffusion (sample_dpmpp_2m_sde).

    Example:
        >>> DPMSolverPP(steps=20, order=2)
        DPMSolverPP(steps=20, times=None, clip=True, order=2, eta=0.0)
    """

    steps: int = 20
    times: TimeGrid | None = None
    clip: bool = True
    order: int = 2
    eta: float = 0.0

    def __post_init__(self) -> None:
        check_steps(self.steps)
        if self.order not in (1, 2, 3) or not 0 <= self.eta < math.inf:
            raise ValueError(f"order must be 1, 2 or 3 and eta >= 0, got {self}.")

    def default_times(self, process: Process) -> TimeGrid:
        """Return `LogSNR(noisiest=-10)`, which is used if `times` is None."""
        return LogSNR(noisiest=-10.0)

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
            if self.eta > 0:  # with eta = 0, h may be infinite: the grid may start at alpha = 0
                x = (-self.eta * h[i]).exp() * x
            x = x + alpha[i + 1] * self._x0_term(x0s, h[: i + 1])
            if self.eta > 0:
                std = sigma[i + 1] * (-torch.expm1(-2 * self.eta * h[i])).sqrt()
                x = x + std * randn_like(x)
        return x

    def check(self, process: Process, /) -> None:
        """Raise ValueError if the grid does not fit the process."""
        finite_grid(self.times or self.default_times(process), process, self.steps)

    def _x0_term(self, x0s: list[Tensor], h: Tensor) -> Tensor:
        """`-(exp(-H) - 1) * D`, from the estimates of x0, latest first, and all h so far."""
        h_eta = (1 + self.eta) * h[-1]  # H
        phi_1 = -torch.expm1(-h_eta)
        if len(x0s) == 1:
            return phi_1 * x0s[0]
        r0 = h[-2] / h[-1]
        d1_0 = (x0s[0] - x0s[1]) / r0
        if len(x0s) == 2:
            return phi_1 * (x0s[0] + d1_0 / 2)
        r1 = h[-3] / h[-1]
        d2 = (d1_0 - (x0s[1] - x0s[2]) / r1) / (r0 + r1)
        phi_2 = 1 - phi_1 / h_eta
        return phi_1 * x0s[0] + phi_2 * (d1_0 + r0 * d2) - (phi_2 / h_eta - 0.5) * d2


@dataclass(frozen=True)
class DPMSolverPP2S:
    """DPM-Solver++(2S): each step uses an estimate of x0 at the midpoint of the step.

    Args:
        steps: number of steps of the time grid. Sampling evaluates the network `2 * steps - 1`
            times.
        times: time grid. If None, the grid is `LogSNR(noisiest=-10)`.
        clip: whether to clamp each estimate of x0 to [-1, 1].
        eta: standard deviation of the noise that a step adds, divided by the standard deviation of
            the posterior `q(x_s | x_t, x0)`. With 0, sampling is deterministic. Otherwise, a step
            first goes below the next noise level of the grid, and then adds noise up to this level.
            With 1, the solver equals k-diffusion's `dpmpp_2s_ancestral`.

    Raises:
        ValueError: if not 0 <= eta <= 1, or if steps < 1.

    Source: Lu et al. 2022 (DPM-Solver++, arXiv 2211.01095), algorithm 1 with r = 1/2.

    Example:
        >>> DPMSolverPP2S(steps=10)  # 19 evaluations of the network
        DPMSolverPP2S(steps=10, times=None, clip=True, eta=0.0)
    """

    steps: int = 10
    times: TimeGrid | None = None
    clip: bool = True
    eta: float = 0.0

    def __post_init__(self) -> None:
        check_steps(self.steps)
        if not 0 <= self.eta <= 1:
            raise ValueError(f"eta must be in [0, 1], got {self.eta}; 0 is deterministic.")

    def default_times(self, process: Process) -> TimeGrid:
        """Return `LogSNR(noisiest=-10)`, which is used if `times` is None."""
        return LogSNR(noisiest=-10.0)

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
        times = grid_with_signal(self.times or self.default_times(process), process, self.steps)
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
        """Raise ValueError if the grid does not fit the process, or if alpha is 0 on the grid."""
        grid_with_signal(self.times or self.default_times(process), process, self.steps)


@dataclass(frozen=True)
class UniPC:
    """UniPC: a multistep predictor and corrector with one evaluation of the network per step.

    The corrector needs no further evaluation, because it uses the estimate of x0 that the next step
    needs anyway. In the first steps and in the last steps, the order is lower. The function `B(h)`
    of the paper is `exp(-h) - 1`, which the authors call "bh2".

    Args:
        steps: number of steps, each of which evaluates the network once.
        times: time grid. If None, the grid is `LogSNR(noisiest=-10)`.
        clip: whether to clamp each estimate of x0 to [-1, 1].
        order: order of the predictor. The corrector raises the order of the solver by one.

    Raises:
        ValueError: if order < 1 or steps < 1.

    Source: Zhao et al. 2023 (UniPC, arXiv 2302.04867), section 3, in its form for data
    prediction.

    Example:
        >>> UniPC(steps=10).order
        2
    """

    steps: int = 10
    times: TimeGrid | None = None
    clip: bool = True
    order: int = 2

    def __post_init__(self) -> None:
        check_steps(self.steps)
        if self.order < 1:
            raise ValueError(f"order must be at least 1, got {self.order}.")

    def default_times(self, process: Process) -> TimeGrid:
        """Return `LogSNR(noisiest=-10)`, which is used if `times` is None."""
        return LogSNR(noisiest=-10.0)

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
        times = grid_with_signal(self.times or self.default_times(process), process, self.steps)
        alpha, sigma = process.alpha_sigma(times)
        lambdas = (alpha / sigma).log()
        x = predicted = process.prior(noise, times[0])
        x0s: list[Tensor] = []
        for i, t in enumerate(times[:-1]):
            x0 = clipped(denoise(predicted, batch_of(t, x)).x0, self.clip)
            if x0s:
                x = _unipc_step(x, x0s, x0, lambdas[: i + 1], alpha[i], sigma[i - 1 : i + 1])
            if watch is not None:
                watch(i, t, x, x0)
            if sigma[i + 1] == 0:
                return alpha[i + 1] * x0
            x0s = [x0, *x0s][: min(self.order, self.steps - i)]
            predicted = _unipc_step(x, x0s, None, lambdas[: i + 2], alpha[i + 1], sigma[i : i + 2])
        return predicted

    def check(self, process: Process, /) -> None:
        """Raise ValueError if the grid does not fit the process, or if alpha is 0 on the grid."""
        grid_with_signal(self.times or self.default_times(process), process, self.steps)


def _unipc_step(
    x: Tensor,
    x0s: list[Tensor],
    x0_end: Tensor | None,
    lambdas: Tensor,
    alpha: Tensor,
    sigma: Tensor,
) -> Tensor:
    """One step of the predictor, or of the corrector if `x0_end` is not None.

    `x0_end` is the estimate of x0 at the end of the step. `x0s` are the estimates at earlier times,
    latest first.
    """
    h = lambdas[-1] - lambdas[-2]
    rs = [(lambdas[-2 - k] - lambdas[-2]) / h for k in range(1, len(x0s))]
    differences = [(x0 - x0s[0]) / r for x0, r in zip(x0s[1:], rs, strict=True)]
    if x0_end is not None:
        rs.append(h / h)
        differences.append(x0_end - x0s[0])
    phi_1 = -torch.expm1(-h)
    x0 = x0s[0]
    for rho, difference in zip(_unipc_weights(rs, h), differences, strict=True):
        x0 = x0 + rho * difference
    return sigma[1] / sigma[0] * x + alpha * phi_1 * x0


def _unipc_weights(rs: list[Tensor], h: Tensor) -> Tensor:
    """Solve `sum_k rho_k * r_k**(n - 1) = b_n`, n = 1, ..., K, for rho_k. For K = 1, it is 1/2."""
    if len(rs) < 2:
        return torch.full((len(rs),), 0.5, dtype=torch.float64)
    h_phi, b = torch.expm1(-h), []
    for n in range(1, len(rs) + 1):
        h_phi = h_phi / -h - 1 / math.factorial(n)
        b.append(h_phi * math.factorial(n) / torch.expm1(-h))
    powers = torch.stack(rs) ** torch.arange(len(rs), dtype=torch.float64)[:, None]
    return torch.linalg.solve(powers, torch.stack(b))
