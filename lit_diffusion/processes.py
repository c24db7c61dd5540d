"""Forward processes, which turn images into noise: `x_t = alpha(t) * x0 + sigma(t) * noise`.

A process defines alpha(t), sigma(t) and the range of t. It does not define the parameterization,
the training times or the solver. The tables of a process are float64 tensors, but not buffers of a
module. Therefore, precision plugins do not cast them, EMA does not average them, and checkpoints do
not contain them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from lit_diffusion.gaussian import expand_as


def _check_steps(num_steps: int) -> None:
    if num_steps < 2:
        raise ValueError(f"num_steps must be at least 2, got {num_steps}.")


class BetaSchedule(Protocol):
    """The variances beta of the noise that a discrete process adds in each step."""

    def betas(self) -> Tensor:
        """Return the betas (num_steps,) float64, in (0, 1)."""


@dataclass(frozen=True)
class LinearBetas:
    """Betas that rise linearly from `1e-4 * 1000 / T` to `0.02 * 1000 / T` in T steps.

    Args:
        num_steps: number of steps T, at least 20. With T = 20, the last beta is 1.

    Source: Ho et al. 2020 (DDPM), section 4. The factor `1000 / T` is from improved-diffusion.

    Example:
        >>> LinearBetas(1000).betas()[[0, -1]].tolist()
        [0.0001, 0.02]
    """

    num_steps: int = 1000

    def betas(self) -> Tensor:
        """Return the betas (num_steps,) float64."""
        _check_steps(self.num_steps)
        scale = 1000 / self.num_steps
        return torch.linspace(1e-4 * scale, 0.02 * scale, self.num_steps, dtype=torch.float64)


@dataclass(frozen=True)
class CosineBetas:
    """Betas for which alpha-bar falls like a squared cosine.

    Cosine betas destroy the image more slowly than linear betas.

    Args:
        num_steps: number of steps T.

    Source: Nichol & Dhariwal 2021 (improved-diffusion, arXiv 2102.09672), Eq. 17, with s = 0.008.
    No beta is above 0.999.

    Example:
        >>> alpha, _ = DiscreteVP(CosineBetas(1000)).alpha_sigma(torch.tensor([500]))
        >>> round(alpha.item(), 2)
        0.7
    """

    num_steps: int = 1000

    def betas(self) -> Tensor:
        """Return the betas (num_steps,) float64."""
        _check_steps(self.num_steps)
        u = torch.arange(self.num_steps + 1, dtype=torch.float64) / self.num_steps
        return _betas_from_alpha_bar(torch.cos((u + 0.008) / 1.008 * math.pi / 2) ** 2)


@dataclass(frozen=True)
class SigmoidBetas:
    """Betas for which alpha-bar falls like a sigmoid.

    Compared with cosine betas, fewer of the T steps have almost no noise or almost no signal.
    Sigmoid betas suit images larger than 64x64 pixels.

    Args:
        num_steps: number of steps T.
        start: argument of the sigmoid at the clean image.
        end: argument of the sigmoid after the last step.
        tau: divisor of the arguments. With a larger tau, the curve of alpha-bar is closer to a
            straight line.

    Source: Jabri et al. 2022 (arXiv 2212.11972), appendix B; Chen 2023 (arXiv 2301.10972),
    algorithm 1.

    Example:
        >>> alpha, sigma = DiscreteVP(SigmoidBetas(1000)).alpha_sigma(torch.tensor([499]))
        >>> round(alpha.item(), 2), round(sigma.item(), 2)
        (0.71, 0.71)
    """

    num_steps: int = 1000
    start: float = -3.0
    end: float = 3.0
    tau: float = 1.0

    def betas(self) -> Tensor:
        """Return the betas (num_steps,) float64."""
        _check_steps(self.num_steps)
        u = torch.arange(self.num_steps + 1, dtype=torch.float64) / self.num_steps
        sigmoid = torch.sigmoid(-(u * (self.end - self.start) + self.start) / self.tau)
        return _betas_from_alpha_bar((sigmoid - sigmoid[-1]) / (sigmoid[0] - sigmoid[-1]))


@dataclass(frozen=True)
class GivenBetas:
    """Betas that are given as a list.

    Args:
        values: T betas in (0, 1). The last beta may be 1.

    Example:
        >>> DiscreteVP(GivenBetas([0.1, 0.2, 0.3])).num_steps
        3
    """

    values: Sequence[float]

    def betas(self) -> Tensor:
        """Return the betas (num_steps,) float64."""
        _check_steps(len(self.values))
        return torch.tensor(self.values, dtype=torch.float64)


@dataclass(frozen=True)
class ZeroTerminalSNR:
    """Betas of another schedule, rescaled so that the SNR of the last step is 0.

    The square root of alpha-bar is shifted so that it ends at 0, and scaled so that its first value
    does not change. Train with `Velocity` or `Sample`, because x0 cannot be computed from the
    output of `Epsilon` at an SNR of 0. Every solver works with its default grid. If you set a
    different grid for `Heun`, `DPMSolverPP2S` or `UniPC`, the grid must start at an SNR above 0,
    because these solvers divide by alpha. `LogSNR(noisiest=-10)` is such a grid.

    Args:
        base: the schedule to rescale.

    Source: Lin et al. 2023 (Common Diffusion Noise Schedules and Sample Steps are Flawed, arXiv
    2305.08891), algorithm 1.

    Example:
        >>> alpha, _ = DiscreteVP(ZeroTerminalSNR(LinearBetas(100))).alpha_sigma(torch.tensor([99]))
        >>> alpha.item()
        0.0
    """

    base: BetaSchedule

    def betas(self) -> Tensor:
        """Return the betas (num_steps,) float64. The last beta is 1."""
        alpha = (1 - self.base.betas()).cumprod(0).sqrt()
        alpha = (alpha - alpha[-1]) * alpha[0] / (alpha[0] - alpha[-1])
        alpha_bar = torch.cat([torch.ones(1, dtype=torch.float64), alpha**2])
        return 1 - alpha_bar[1:] / alpha_bar[:-1]


def _betas_from_alpha_bar(alpha_bar: Tensor) -> Tensor:
    """Compute betas (T,), at most 0.999, from alpha-bar (T + 1,) at u = 0, 1/T, ..., 1.

    A constant factor on alpha-bar has no effect.
    """
    return (1 - alpha_bar[1:] / alpha_bar[:-1]).clamp(max=0.999)


@dataclass(eq=False)
class DiscreteVP:
    """Variance-preserving process in T steps: `alpha**2 = alpha_bar`, `sigma**2 = 1 - alpha_bar`.

    Times range from 0 (least noisy) to T - 1. Time -1 is the clean image. Solvers may also evaluate
    times between integers, for which the log SNR is interpolated linearly between the two
    neighboring integers. If the log SNR of a neighbor is infinite (the clean image, or a step with
    an SNR of 0), alpha-bar is interpolated instead.

    Args:
        betas: schedule of the betas.
        rescale_labels: whether the network gets `t * 1000 / T` instead of t as the noise label, as
            in improved-diffusion.

    Raises:
        ValueError: if a beta is outside (0, 1). As an exception, the last beta may be 1.

    Source: Ho et al. 2020 (DDPM), Eq. 4; Nichol & Dhariwal 2021 for `rescale_labels`.

    Example:
        >>> alpha, sigma = DiscreteVP(CosineBetas(50)).alpha_sigma(torch.tensor([-1.0, 10, 49]))
        >>> bool(((alpha**2 + sigma**2 - 1).abs() < 1e-12).all())
        True
    """

    betas: BetaSchedule
    rescale_labels: bool = False
    t_min: ClassVar[float] = 0.0
    t_clean: ClassVar[float] = -1.0

    def __post_init__(self) -> None:
        table = self.betas.betas()
        if not ((table > 0).all() and (table[:-1] < 1).all() and table[-1] <= 1):
            raise ValueError(
                f"betas must lie in (0, 1), got {table.min():.4g} to {table.max():.4g} from "
                f"{self.betas!s:.100}; use more steps, or other arguments."
            )
        # Column i is for t in [i - 1, i). Column 0 starts at the clean image.
        alpha_bar = torch.cat([torch.ones(1, dtype=torch.float64), (1 - table).cumprod(0)])
        next_alpha_bar = torch.cat([alpha_bar[1:], alpha_bar[-1:]])
        has_log_snr = (alpha_bar < 1) & (next_alpha_bar > 0)
        self._table = torch.stack(
            [alpha_bar, next_alpha_bar, alpha_bar.logit(), next_alpha_bar.logit(), has_log_snr]
        )
        self._ends_in_noise = bool(alpha_bar[-1] == 0)
        self._copies: dict[torch.device, Tensor] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for `copy` and `pickle`, without the copies of the table on devices."""
        return {**vars(self), "_copies": {}}

    @property
    def t_max(self) -> float:
        """The noisiest time, `T - 1`."""
        return self.num_steps - 1.0

    @property
    def num_steps(self) -> int:
        """The number of steps T."""
        return self._table.shape[1] - 1

    def alpha_sigma(self, t: Tensor, /) -> tuple[Tensor, Tensor]:
        """Return `sqrt(alpha_bar)` and `sqrt(1 - alpha_bar)` in float64, for t in [-1, T - 1]."""
        position = t.double() + 1
        column = position.long().clamp(0, self.num_steps)
        low, high, low_log_snr, high_log_snr, has_log_snr = self._table_on(t.device)[:, column]
        fraction = position - column
        by_log_snr = torch.sigmoid(low_log_snr.lerp(high_log_snr, fraction))
        # At a fraction of 0, linear interpolation returns the exact entry of the table.
        alpha_bar = torch.where(fraction * has_log_snr == 0, low.lerp(high, fraction), by_log_snr)
        return alpha_bar.sqrt(), (1 - alpha_bar).sqrt()

    def noise_label(self, t: Tensor, /) -> Tensor:
        """Return the noise label: t, or `t * 1000 / T` with `rescale_labels`."""
        return t * (1000 / self.num_steps) if self.rescale_labels else t

    def from_unit(self, u: Tensor, /) -> Tensor:
        """Return the step i for which u is in [i / T, (i + 1) / T)."""
        return (u.double() * self.num_steps).floor().clamp(max=self.t_max)

    def at_log_snr(self, log_snr: Tensor, /) -> Tensor:
        """Return the time in [-1, T - 1] at which the log SNR has this value."""
        alpha_bars, _, log_snrs, _, _ = self._table_on(log_snr.device)[:, 1:]  # decreasing
        log_snr = log_snr.double()
        upper = torch.searchsorted(-log_snrs, -log_snr).clamp(1, self.num_steps - 1)
        left, right = log_snrs[upper - 1], log_snrs[upper]
        t = (upper - 1 + (left - log_snr) / (left - right)).clamp(max=self.t_max)
        alpha_bar = torch.sigmoid(log_snr)
        if self._ends_in_noise:
            near_noise = self.t_max - alpha_bar / alpha_bars[-2]
            t = torch.where(log_snr < log_snrs[-2], near_noise, t)
        near_clean = (1 - alpha_bar) / (1 - alpha_bars[0]) - 1
        return torch.where(log_snr > log_snrs[0], near_clean, t)

    def prior(self, noise: Tensor, t: Tensor, /) -> Tensor:
        """Return the standard normal noise, unchanged."""
        return noise

    def _table_on(self, device: torch.device) -> Tensor:
        """Return the table (5, T + 1) on a device.

        The rows are alpha-bar at the start and at the end of each interval, the logits of these two
        values, and whether both logits are finite. The process keeps one copy per device. It does
        not keep the fake tensors of torch.compile.
        """
        table = self._copies.get(device)
        if table is None:
            table = self._table.to(device, non_blocking=True)
            if type(table) is Tensor:
                self._copies[device] = table
        return table


@dataclass(frozen=True)
class ContinuousVP:
    """Variance-preserving process in continuous time, the limit of linear betas.

    For t in [0, 1], `alpha**2 = exp(-B(t))` and `sigma**2 = 1 - exp(-B(t))`, with
    `B(t) = beta_min * t + beta_d * t**2 / 2`. The network gets `999 * t` as its noise label.

    Args:
        beta_min: slope of B at t = 0.
        beta_d: difference between the slopes of B at t = 1 and t = 0.
        t_min: least noisy time in training.

    Raises:
        ValueError: unless beta_min > 0, beta_d > 0 and 0 < t_min < 1.

    Source: Song et al. 2021 (score SDEs), appendix C; Karras et al. 2022 (EDM), table 1, column VP.

    Example:
        >>> alpha, sigma = ContinuousVP().alpha_sigma(torch.tensor([1e-5, 1.0]))
        >>> (sigma / alpha).tolist()
        [0.0010004..., 152.16...]
    """

    beta_min: float = 0.1
    beta_d: float = 19.9
    t_min: float = 1e-5
    t_max: ClassVar[float] = 1.0
    t_clean: ClassVar[float] = 0.0
    num_steps: ClassVar[int | None] = None

    def __post_init__(self) -> None:
        are_rates = 0 < self.beta_min < math.inf and 0 < self.beta_d < math.inf
        if not (are_rates and 0 < self.t_min < 1):
            raise ValueError(f"0 < beta_min, beta_d < inf and 0 < t_min < 1 must hold, got {self}.")

    def alpha_sigma(self, t: Tensor, /) -> tuple[Tensor, Tensor]:
        """Return `exp(-B / 2)` and `sqrt(1 - exp(-B))`, float64."""
        t = t.double()
        b = self.beta_min * t + self.beta_d * t**2 / 2
        return (-b / 2).exp(), (-torch.expm1(-b)).sqrt()

    def noise_label(self, t: Tensor, /) -> Tensor:
        """Return the noise label `999 * t`."""
        return 999 * t

    def from_unit(self, u: Tensor, /) -> Tensor:
        """Map u linearly to the range from t_min to 1."""
        return self.t_min + (1 - self.t_min) * u.double()

    def at_log_snr(self, log_snr: Tensor, /) -> Tensor:
        """Return the t for which `B(t) = log(1 + 1 / SNR)`."""
        log_snr = log_snr.double()
        b = torch.logaddexp(torch.zeros_like(log_snr), -log_snr)
        return 2 * b / (self.beta_min + (self.beta_min**2 + 2 * self.beta_d * b).sqrt())

    def prior(self, noise: Tensor, t: Tensor, /) -> Tensor:
        """Return the standard normal noise, unchanged."""
        return noise


@dataclass(frozen=True)
class LinearFlow:
    """Linear path of flow matching: `alpha = 1 - t` and `sigma = t`, for t in [0, 1].

    This path is also called rectified flow. The usual parameterization is `FlowVelocity`. The
    network gets `label_scale * t` as its noise label. At time 1, x_t is pure noise and has an SNR
    of 0, but every solver works with its default grid. If you set a different grid for `Heun`,
    `DPMSolverPP2S` or `UniPC`, the grid must start at an SNR above 0, because these solvers divide
    by alpha. `LogSNR(noisiest=-10)` is such a grid.

    Args:
        t_min: least noisy time in training.
        label_scale: factor on t in the noise label. With 1000, the derivative of the network's
            output with respect to t is large. `MeanFlow`, whose target contains this derivative,
            trains better with 1.

    Raises:
        ValueError: unless 0 < t_min < 1 and 0 < label_scale < inf.

    Source: Lipman et al. 2023 (Flow Matching, arXiv 2210.02747), Eq. 20-23 with sigma_min = 0 and
    time reversed; Liu et al. 2023 (Rectified Flow, arXiv 2209.03003), Eq. 1. The noise label
    `1000 * t` is from Esser et al. 2024 (SD3, arXiv 2403.03206).

    Example:
        >>> alpha, sigma = LinearFlow().alpha_sigma(torch.tensor([0.25, 1.0]))
        >>> alpha.tolist(), sigma.tolist()
        ([0.75, 0.0], [0.25, 1.0])
    """

    t_min: float = 1e-5
    label_scale: float = field(default=1000.0, repr=False)
    t_max: ClassVar[float] = 1.0
    t_clean: ClassVar[float] = 0.0
    num_steps: ClassVar[int | None] = None

    def __post_init__(self) -> None:
        if not (0 < self.t_min < 1 and 0 < self.label_scale < math.inf):
            numbers = f"{self.t_min} and {self.label_scale}"
            raise ValueError(f"0 < t_min < 1 and 0 < label_scale < inf must hold, got {numbers}.")

    def alpha_sigma(self, t: Tensor, /) -> tuple[Tensor, Tensor]:
        """Return `1 - t` and `t`, float64."""
        return 1 - t.double(), t.double()

    def noise_label(self, t: Tensor, /) -> Tensor:
        """Return the noise label `label_scale * t`."""
        return self.label_scale * t

    def from_unit(self, u: Tensor, /) -> Tensor:
        """Map u linearly to the range from t_min to 1."""
        return self.t_min + (1 - self.t_min) * u.double()

    def at_log_snr(self, log_snr: Tensor, /) -> Tensor:
        """Return the time `1 / (1 + SNR**(1/2))`."""
        return torch.sigmoid(-log_snr.double() / 2)

    def prior(self, noise: Tensor, t: Tensor, /) -> Tensor:
        """Return noise with standard deviation t."""
        return noise * expand_as(t, noise)


@dataclass(frozen=True)
class EDMProcess:
    """EDM's process, which adds noise without scaling the image: `alpha = 1` and `sigma = t`.

    The network gets `ln(sigma) / 4` as its noise label, which EDM calls c_noise. `Uniform` times
    are uniform in `ln(sigma)`. EDM trains with `LogNormal` times instead.

    Args:
        sigma_min: smallest noise level, in units of x0.
        sigma_max: largest noise level, in units of x0. If sigma_max is above 148, pass
            `times=Karras()` to the solver `Heun`, because the default grid of `Heun` has no noise
            levels above 148 (a log SNR of -10).

    Raises:
        ValueError: unless 0 < sigma_min < sigma_max.

    Source: Karras et al. 2022 (EDM), table 1, columns VE and EDM.

    Example:
        >>> EDMProcess().from_unit(torch.tensor([0.0, 0.5, 1.0])).tolist()
        [0.002, 0.4, 80.0]
    """

    sigma_min: float = 0.002
    sigma_max: float = 80.0
    t_clean: ClassVar[float] = 0.0
    num_steps: ClassVar[int | None] = None

    def __post_init__(self) -> None:
        if not 0 < self.sigma_min < self.sigma_max < math.inf:
            raise ValueError(f"0 < sigma_min < sigma_max must hold, got {self}.")

    @property
    def t_min(self) -> float:
        """The least noisy time, sigma_min."""
        return self.sigma_min

    @property
    def t_max(self) -> float:
        """The noisiest time, sigma_max."""
        return self.sigma_max

    def alpha_sigma(self, t: Tensor, /) -> tuple[Tensor, Tensor]:
        """Return the scales `1` and `t`, float64."""
        t = t.double()
        return torch.ones_like(t), t

    def noise_label(self, t: Tensor, /) -> Tensor:
        """Return the noise label `ln(sigma) / 4`."""
        return t.log() / 4

    def from_unit(self, u: Tensor, /) -> Tensor:
        """Return the noise level `sigma_min**(1 - u) * sigma_max**u`."""
        return self.sigma_min * (self.sigma_max / self.sigma_min) ** u.double()

    def at_log_snr(self, log_snr: Tensor, /) -> Tensor:
        """Return the noise level `SNR**(-1/2)`."""
        return (-log_snr.double() / 2).exp()

    def prior(self, noise: Tensor, t: Tensor, /) -> Tensor:
        """Return noise with standard deviation sigma."""
        return noise * expand_as(t, noise)


@dataclass(frozen=True)
class VE(EDMProcess):
    """Variance-exploding process: `EDMProcess` with noise levels from 0.02 to 100.

    The network gets `ln(sigma / 2)` as its noise label. To train as in Song et al., use the
    parameterization `Epsilon` and `Uniform` times. The network of Song et al. learns sigma times
    the score, which is the target of `Epsilon` with the opposite sign.

    Args:
        sigma_min: smallest noise level, in units of x0.
        sigma_max: largest noise level, in units of x0.

    Source: Song et al. 2021 (score SDEs), appendix C; Karras et al. 2022 (EDM), table 1, column VE.

    Example:
        >>> alpha, sigma = VE().alpha_sigma(torch.tensor([0.5, 100.0]))
        >>> alpha.tolist(), sigma.tolist()
        ([1.0, 1.0], [0.5, 100.0])
    """

    sigma_min: float = 0.02
    sigma_max: float = 100.0

    def noise_label(self, t: Tensor, /) -> Tensor:
        """Return the noise label `ln(sigma / 2)`."""
        return (t / 2).log()
