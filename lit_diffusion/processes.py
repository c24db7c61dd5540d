"""Forward processes: how an image turns into noise, x_t = alpha(t) x0 + sigma(t) noise.

A process is tables and formulas, no more: what the network outputs, which times are trained on and
how one samples live elsewhere. Its tables are float64 and never module buffers, so no precision
plugin casts them, no EMA averages them and no checkpoint holds them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from lit_diffusion.gaussian import expand_as


def _check_steps(num_steps: int) -> None:
    if num_steps < 2:
        raise ValueError(f"num_steps must be at least 2, got {num_steps}.")


class BetaSchedule(Protocol):
    """Variances added per step."""

    def betas(self) -> Tensor:
        """(num_steps,) float64 in (0, 1)."""


@dataclass(frozen=True)
class LinearBetas:
    """beta from 1e-4 to 0.02 over 1000 steps, scaled so that other step counts end as noisy.

    Args:
        num_steps: T, at least 20, where the last beta is 1.

    Source: Ho et al. 2020 (DDPM), section 4; scaling by 1000 / T from improved-diffusion.
    """

    num_steps: int = 1000

    def betas(self) -> Tensor:
        """(num_steps,) float64."""
        _check_steps(self.num_steps)
        scale = 1000 / self.num_steps
        return torch.linspace(1e-4 * scale, 0.02 * scale, self.num_steps, dtype=torch.float64)


@dataclass(frozen=True)
class CosineBetas:
    """alpha-bar falls as a squared cosine, which destroys the image more slowly than linear betas.

    Args:
        num_steps: T.

    Source: Nichol & Dhariwal 2021 (improved-diffusion), Eq. 17, with s = 0.008 and beta at most
    0.999.
    """

    num_steps: int = 1000

    def betas(self) -> Tensor:
        """(num_steps,) float64."""
        _check_steps(self.num_steps)
        u = torch.arange(self.num_steps + 1, dtype=torch.float64) / self.num_steps
        return _betas_of(torch.cos((u + 0.008) / 1.008 * math.pi / 2) ** 2)


@dataclass(frozen=True)
class SigmoidBetas:
    """alpha-bar falls as a sigmoid: less time near both ends, which suits images above 64x64.

    Args:
        num_steps: T.
        start: where on the sigmoid u = 0 lies.
        end: where on the sigmoid u = 1 lies.
        tau: temperature; larger is closer to a straight line.

    Source: Jabri et al. 2022 (arXiv 2212.11972), appendix B; Chen 2023 (arXiv 2301.10972),
    algorithm 1.
    """

    num_steps: int = 1000
    start: float = -3.0
    end: float = 3.0
    tau: float = 1.0

    def betas(self) -> Tensor:
        """(num_steps,) float64."""
        _check_steps(self.num_steps)
        u = torch.arange(self.num_steps + 1, dtype=torch.float64) / self.num_steps
        falling = torch.sigmoid(-(u * (self.end - self.start) + self.start) / self.tau)
        return _betas_of((falling - falling[-1]) / (falling[0] - falling[-1]))


@dataclass(frozen=True)
class GivenBetas:
    """Betas as a list.

    Args:
        values: T of them, each in (0, 1); the last may be 1.

    Example:
        >>> DiscreteVP(GivenBetas([0.1, 0.2, 0.3])).num_steps
        3
    """

    values: Sequence[float]

    def betas(self) -> Tensor:
        """(num_steps,) float64."""
        _check_steps(len(self.values))
        return torch.tensor(self.values, dtype=torch.float64)


@dataclass(frozen=True)
class ZeroTerminalSNR:
    """Another schedule, bent so that its last step leaves nothing of the image.

    sqrt(alpha-bar) is moved to end at 0 and scaled to begin as before. Epsilon can't be trained on
    it: predict Velocity or Sample. Solvers in log SNR start below it, as `LogSNR(noisiest=-10)`.

    Args:
        base: the schedule to bend.

    Source: Lin et al. 2023 (Common Diffusion Noise Schedules and Sample Steps are Flawed, arXiv
    2305.08891), algorithm 1.
    """

    base: BetaSchedule

    def betas(self) -> Tensor:
        """(num_steps,) float64; the last is 1."""
        alpha = (1 - self.base.betas()).cumprod(0).sqrt()
        alpha = (alpha - alpha[-1]) * alpha[0] / (alpha[0] - alpha[-1])
        alpha_bar = torch.cat([torch.ones(1, dtype=torch.float64), alpha**2])
        return 1 - alpha_bar[1:] / alpha_bar[:-1]


def _betas_of(alpha_bar: Tensor) -> Tensor:
    """(T + 1,) alpha-bar, up to a factor, at u = 0, 1/T, ..., 1 -> (T,) betas, clipped."""
    return (1 - alpha_bar[1:] / alpha_bar[:-1]).clamp(max=0.999)


@dataclass(eq=False)
class DiscreteVP:
    """Variance-preserving process in T steps: alpha^2 = alpha-bar, sigma^2 = 1 - alpha-bar.

    Times are 0 (least noisy) ... T - 1; -1 is the clean image. Between whole times log SNR is
    interpolated linearly (alpha-bar where an end is clean or without signal), so every solver and
    time grid works.

    Args:
        betas: schedule of the variances.
        rescale_labels: whether the network gets t * 1000 / T instead of t, which
            improved-diffusion does unless T is 1000.

    Raises:
        ValueError: where a beta is outside (0, 1); the last may be 1.

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
                f"{self.betas}; use more steps."
            )
        # Entry i belongs to t = i - 1, so that the clean image is entry 0.
        self._alpha_bar = torch.cat([torch.ones(1, dtype=torch.float64), (1 - table).cumprod(0)])
        self._on_device: dict[torch.device, Tensor] = {}

    @property
    def t_max(self) -> float:
        """T - 1."""
        return self.num_steps - 1.0

    @property
    def num_steps(self) -> int:
        """T."""
        return len(self._alpha_bar) - 1

    def alpha_sigma(self, t: Tensor, /) -> tuple[Tensor, Tensor]:
        """sqrt(alpha-bar) and sqrt(1 - alpha-bar), float64, for t in [-1, T - 1]."""
        alpha_bar = self._alpha_bar_at(t)
        return alpha_bar.sqrt(), (1 - alpha_bar).sqrt()

    def noise_label(self, t: Tensor, /) -> Tensor:
        """t, or t * 1000 / T."""
        return t * (1000 / self.num_steps) if self.rescale_labels else t

    def from_unit(self, u: Tensor, /) -> Tensor:
        """The step whose share [i / T, (i + 1) / T) of uniforms holds u."""
        return (u.double() * self.num_steps).floor().clamp(max=self.t_max)

    def at_log_snr(self, log_snr: Tensor, /) -> Tensor:
        """Time of a log SNR in [-1, T - 1]: the inverse of the interpolation in `alpha_sigma`."""
        table = self._table(log_snr.device)
        falling = torch.logit(table[1:])
        log_snr = log_snr.double()
        upper = torch.searchsorted(-falling, -log_snr).clamp(1, self.num_steps - 1)
        left, right = falling[upper - 1], falling[upper]
        between = (upper - 1 + (left - log_snr) / (left - right)).clamp(max=self.t_max)
        signal = torch.sigmoid(log_snr)
        if table[-1] == 0:
            near_noise = self.t_max - signal / table[-2]
            between = torch.where(log_snr < falling[-2], near_noise, between)
        return torch.where(log_snr > falling[0], (1 - signal) / (1 - table[1]) - 1, between)

    def prior(self, noise: Tensor, t: Tensor, /) -> Tensor:
        """Standard normal noise itself."""
        return noise

    def _alpha_bar_at(self, t: Tensor) -> Tensor:
        table = self._table(t.device)
        position = t.double() + 1
        low = position.floor().long().clamp(0, self.num_steps)
        high = (low + 1).clamp(max=self.num_steps)
        fraction = position - low
        by_log_snr = torch.sigmoid(torch.logit(table[low]).lerp(torch.logit(table[high]), fraction))
        linear = table[low].lerp(table[high], fraction)
        between = torch.where((low == 0) | (table[high] == 0), linear, by_log_snr)
        return torch.where(fraction == 0, table[low], between)

    def _table(self, device: torch.device) -> Tensor:
        if device not in self._on_device:
            self._on_device[device] = self._alpha_bar.to(device)
        return self._on_device[device]


@dataclass(frozen=True)
class ContinuousVP:
    """Variance-preserving process in continuous time, the limit of linear betas.

    alpha^2 = exp(-B), sigma^2 = 1 - exp(-B) with B(t) = beta_min t + beta_d t^2 / 2, for t in [0,
    1]. The noise label is 999 t.

    Args:
        beta_min: slope of B at the clean end.
        beta_d: how much steeper B is at the noisy end.
        t_min: least noisy time that is trained on.

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
        if not (self.beta_min > 0 and self.beta_d > 0 and 0 < self.t_min < 1):
            raise ValueError(f"beta_min > 0, beta_d > 0 and 0 < t_min < 1 must hold, got {self}.")

    def alpha_sigma(self, t: Tensor, /) -> tuple[Tensor, Tensor]:
        """exp(-B / 2) and sqrt(1 - exp(-B)), float64."""
        t = t.double()
        b = self.beta_min * t + self.beta_d * t**2 / 2
        return (-b / 2).exp(), (-torch.expm1(-b)).sqrt()

    def noise_label(self, t: Tensor, /) -> Tensor:
        """999 t."""
        return 999 * t

    def from_unit(self, u: Tensor, /) -> Tensor:
        """Linear from t_min to 1."""
        return self.t_min + (1 - self.t_min) * u.double()

    def at_log_snr(self, log_snr: Tensor, /) -> Tensor:
        """The root of B(t) = log(1 + 1 / SNR)."""
        log_snr = log_snr.double()
        b = torch.logaddexp(torch.zeros_like(log_snr), -log_snr)
        return 2 * b / (self.beta_min + (self.beta_min**2 + 2 * self.beta_d * b).sqrt())

    def prior(self, noise: Tensor, t: Tensor, /) -> Tensor:
        """Standard normal noise itself."""
        return noise


@dataclass(frozen=True)
class LinearFlow:
    """Flow matching's straight line: alpha = 1 - t and sigma = t, for t in [0, 1].

    Also called rectified flow. What its networks output is `FlowVelocity`, what they see of the
    time is 1000 t. t = 1 is pure noise: solvers in log SNR start below it, as
    `LogSNR(noisiest=-10)`; `Euler` starts there.

    Args:
        t_min: least noisy time that is trained on.

    Raises:
        ValueError: unless 0 < t_min < 1.

    Source: Lipman et al. 2023 (Flow Matching, arXiv 2210.02747), Eq. 20-23 with sigma_min = 0 and
    time reversed; Liu et al. 2023 (Rectified Flow, arXiv 2209.03003), Eq. 1. 1000 t as in Esser et
    al. 2024 (SD3, arXiv 2403.03206).

    Example:
        >>> alpha, sigma = LinearFlow().alpha_sigma(torch.tensor([0.25, 1.0]))
        >>> alpha.tolist(), sigma.tolist()
        ([0.75, 0.0], [0.25, 1.0])
    """

    t_min: float = 1e-5
    t_max: ClassVar[float] = 1.0
    t_clean: ClassVar[float] = 0.0
    num_steps: ClassVar[int | None] = None

    def __post_init__(self) -> None:
        if not 0 < self.t_min < 1:
            raise ValueError(f"0 < t_min < 1 must hold, got {self.t_min}.")

    def alpha_sigma(self, t: Tensor, /) -> tuple[Tensor, Tensor]:
        """1 - t and t, float64."""
        return 1 - t.double(), t.double()

    def noise_label(self, t: Tensor, /) -> Tensor:
        """1000 t."""
        return 1000 * t

    def from_unit(self, u: Tensor, /) -> Tensor:
        """Linear from t_min to 1."""
        return self.t_min + (1 - self.t_min) * u.double()

    def at_log_snr(self, log_snr: Tensor, /) -> Tensor:
        """1 / (1 + SNR^(1/2))."""
        return torch.sigmoid(-log_snr.double() / 2)

    def prior(self, noise: Tensor, t: Tensor, /) -> Tensor:
        """Noise of standard deviation t."""
        return noise * expand_as(t, noise)


@dataclass(frozen=True)
class EDMProcess:
    """Noise is added and the image stays: alpha = 1 and sigma = t.

    The noise label is ln(sigma) / 4, EDM's c_noise. Uniforms u are even in ln(sigma); EDM's own
    times are `LogNormal`.

    Args:
        sigma_min: least noise, in units of x0.
        sigma_max: most noise. `Heun` begins at 148 at most, unless its times are `Karras()`.

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
        """sigma_min."""
        return self.sigma_min

    @property
    def t_max(self) -> float:
        """sigma_max."""
        return self.sigma_max

    def alpha_sigma(self, t: Tensor, /) -> tuple[Tensor, Tensor]:
        """1 and t, float64."""
        t = t.double()
        return torch.ones_like(t), t

    def noise_label(self, t: Tensor, /) -> Tensor:
        """ln(sigma) / 4."""
        return t.log() / 4

    def from_unit(self, u: Tensor, /) -> Tensor:
        """sigma_min^(1 - u) sigma_max^u."""
        return self.sigma_min * (self.sigma_max / self.sigma_min) ** u.double()

    def at_log_snr(self, log_snr: Tensor, /) -> Tensor:
        """SNR^(-1/2)."""
        return (-log_snr.double() / 2).exp()

    def prior(self, noise: Tensor, t: Tensor, /) -> Tensor:
        """Noise of standard deviation sigma."""
        return noise * expand_as(t, noise)


@dataclass(frozen=True)
class VE(EDMProcess):
    """Variance-exploding process: noise from 0.02 to 100, uniform in ln(sigma).

    The noise label is ln(sigma / 2) and predicts the noise: `Epsilon` with `Uniform` times. (Song
    et al. learn the score times sigma, which is the noise with another sign.)

    Args:
        sigma_min: least noise, in units of x0.
        sigma_max: most noise.

    Source: Song et al. 2021 (score SDEs), appendix C; Karras et al. 2022 (EDM), table 1, column VE.
    """

    sigma_min: float = 0.02
    sigma_max: float = 100.0

    def noise_label(self, t: Tensor, /) -> Tensor:
        """ln(sigma / 2)."""
        return (t / 2).log()
