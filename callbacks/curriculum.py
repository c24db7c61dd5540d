"""Curriculum timestep schedule (CLTS): a density of noise levels that changes in training.

A noise level is described by its rank u in [0, 1], where 0 is the cleanest level and 1 the
noisiest. A density is a vector of probabilities, one for each of num_bins equal bins of u. The
probability of bin i is computed at its right edge, `u = (i + 1) / num_bins`.
This is the paper's `t / T` with t = 1, ..., T.

Source: "Why diffusion models are stable and how to make them faster" (2023), section 4.2. The
controls are not in the paper.
"""

from dataclasses import dataclass
from math import inf, pi, sqrt
from typing import Literal

import torch
from torch import Tensor

from .trainer_state import Timesteps, TimestepWriter, importance_weight, total_variation

Normalize = Literal["truncate", "mix"]


def clts_gamma(step: int, num_steps: int) -> float:
    """Progress of the curriculum after `step` optimizer steps: `min(step / num_steps, 1)`.

    Source: Eq. 8. The progress is clipped at 1, because densities would be negative beyond 1.

    Example:
        >>> clts_gamma(0, 50_000), clts_gamma(25_000, 50_000), clts_gamma(500_000, 50_000)
        (0.0, 0.5, 1.0)
    """
    if not 1 <= num_steps < inf:
        raise ValueError(
            f"num_steps must be at least 1 optimizer step, got {num_steps}: pass the number of "
            "steps in which the density changes, such as a tenth of the run."
        )
    return min(step / num_steps, 1.0)


def gaussian_log_density(
    mean: float, std: float, num_bins: int, device: torch.device | str | None = None
) -> Tensor:
    """Log density of `N(mean, std**2)` at each bin of u, without the normalizing constant.

    Returns:
        (num_bins,) float64, `-(u - mean)**2 / (2 * std**2)` at u = 1 / num_bins, ..., 1.

    Example:
        >>> gaussian_log_density(mean=0.5, std=0.5, num_bins=4).tolist()
        [-0.125, -0.0, -0.125, -0.5]
    """
    if num_bins < 1:
        raise ValueError(f"num_bins must be at least 1, got {num_bins}.")
    if not 0 <= mean <= 1:
        raise ValueError(f"a mean is a noise level u in [0, 1], got {mean}; divide t by T.")
    if not 1 <= std * num_bins < inf:
        raise ValueError(
            f"std must be at least the width of a bin, 1 / {num_bins}, and finite, got {std}."
        )
    u = torch.arange(1, num_bins + 1, dtype=torch.float64, device=device) / num_bins
    return -((u - mean) ** 2) / (2 * std**2)


def clts_density(
    step: int,
    num_steps: int,
    mean: float = 0.3,
    std: float = 1.0,
    num_bins: int = 1000,
    normalize: Normalize = "truncate",
    device: torch.device | str | None = None,
) -> Tensor:
    """Density p, which changes from the uniform density to a Gaussian as `step` grows.

    It is `p = (1 - gamma) * uniform + gamma * N(mean, std**2)` with
    `gamma = clts_gamma(step, num_steps)`.

    Args:
        step: optimizer steps completed.
        num_steps: optimizer steps until only the Gaussian is left.
        mean: noise level u that is trained most, in [0, 1].
        std: standard deviation of the Gaussian in units of u; 1.0 is the paper's sigma = T.
        num_bins: number of equal bins over [0, 1]. With num_bins = T, the result is the paper's
            density over t.
        normalize: how the Gaussian and the uniform density are mixed. "truncate" normalizes the
            Gaussian over the bins first, so that a fraction gamma of the samples comes from it.
            "mix" adds the Gaussian of Eq. 7 unchanged and normalizes the sum. With the default mean
            and std, only 38% of that Gaussian lies in [0, 1].
        device: device of the result.

    Returns:
        (num_bins,) float64, with sum 1.

    Source: Eq. 7 and 8.

    Example:
        >>> clts_density(0, 50_000, num_bins=4).tolist()
        [0.25, 0.25, 0.25, 0.25]
        >>> clts_density(50_000, 50_000, num_bins=4).round(decimals=3).tolist()
        [0.272, 0.267, 0.247, 0.214]
    """
    if normalize not in ("truncate", "mix"):
        raise ValueError(f"normalize must be 'truncate' or 'mix', got {normalize!r}.")
    gamma = clts_gamma(step, num_steps)
    exponent = gaussian_log_density(mean, std, num_bins, device)
    if normalize == "truncate":
        return (1 - gamma) / num_bins + gamma * exponent.softmax(0)
    mixed = (1 - gamma) + gamma * exponent.exp() / (std * sqrt(2 * pi))
    return mixed / mixed.sum()


@dataclass(eq=False)
class _Curriculum(TimestepWriter):
    num_steps: int
    mean: float = 0.3
    std: float = 1.0
    num_bins: int = 1000
    normalize: Normalize = "truncate"

    def __post_init__(self) -> None:
        self.density_at(0)  # raises an error for invalid arguments

    def density_at(self, step: int, device: torch.device | str | None = None) -> Tensor:
        """`clts_density` with this callback's arguments."""
        return clts_density(
            step, self.num_steps, self.mean, self.std, self.num_bins, self.normalize, device
        )

    def numbers_at(self, step: int, device: torch.device) -> dict[str, float | Tensor]:
        """`clts/gamma`, and the total variation `clts/tv` between the density and uniform."""
        return {
            "clts/gamma": clts_gamma(step, self.num_steps),
            "clts/tv": total_variation(self.density_at(step, device)),
        }


class TimestepCurriculum(_Curriculum):
    """CLTS: samples training times from a density that moves from uniform to a Gaussian.

    In each training batch, the callback sets the module's `timestep_density` to the `clts_density`
    of step `trainer.global_step`. The density is equal on all ranks. It depends only on the step,
    so a resume is exact without saved state. The loss is not reweighted, so the objective changes.

    Logs `clts/gamma`, the progress of the curriculum, and `clts/tv`, the total variation between
    the density and the uniform density. With the default arguments, `clts/tv` is at most 0.028.
    This means that 3.5 of 128 samples get a different noise level.

    `trainer.global_step` counts accumulated batches once. In manual optimization it counts every
    step of every optimizer.

    Args:
        num_steps: optimizer steps until only the Gaussian is left. The paper reports 50,000 for
            CIFAR-10 and 300,000 for ImageNet-128.
        mean: noise level u that is trained most, in [0, 1].
        std: standard deviation of the Gaussian in units of u; 1.0 is the paper's sigma = T.
        num_bins: number of equal bins over [0, 1]. With num_bins = T, the density is the paper's
            density over t.
        normalize: how the Gaussian and the uniform density are mixed, "truncate" or "mix"; see
            `clts_density`.

    Raises:
        ValueError: if an argument is invalid. At fit start, also if the module has no
            `timestep_density` (see `protocols.HasTimesteps`), or if another callback sets this
            attribute too. At the first batch, also if other code has set `timestep_density`.

    Source: Eq. 7 and 8 of "Why diffusion models are stable and how to make them faster" (2023).

    Example:
        >>> TimestepCurriculum(num_steps=50_000).density_at(step=25_000).shape
        torch.Size([1000])
    """

    writes = ("timestep_density",)

    def timesteps_at(self, step: int, device: torch.device) -> Timesteps:
        """The density."""
        return Timesteps(timestep_density=self.density_at(step, device))


class CurriculumWeight(_Curriculum):
    """Control for `TimestepCurriculum`: multiplies the loss by `num_bins * p` at unchanged times.

    Here, p is the CLTS density. If times are uniform, the expected gradients equal the expected
    gradients with `TimestepCurriculum`, and only their variance differs. The class takes the same
    arguments as `TimestepCurriculum`.

    Example:
        >>> curriculum = CurriculumWeight(num_steps=100, num_bins=4)
        >>> density, weight = curriculum.timesteps_at(0, torch.device("cpu"))
        >>> density, weight.tolist()
        (None, [1.0, 1.0, 1.0, 1.0])
    """

    writes = ("timestep_weight",)

    def timesteps_at(self, step: int, device: torch.device) -> Timesteps:
        """The weight."""
        return Timesteps(timestep_weight=self.num_bins * self.density_at(step, device))


class ImportanceWeightedCurriculum(_Curriculum):
    """Control for `TimestepCurriculum`: uses CLTS times, and divides the loss by `num_bins * p`.

    Here, p is the CLTS density. The expected gradients equal the expected gradients with uniform
    times. Any gain of CLTS over this control is therefore due to the changed objective. The class
    takes the same arguments as `TimestepCurriculum`. The Gaussian must be wide enough that no bin
    has probability 0.

    Example:
        >>> curriculum = ImportanceWeightedCurriculum(num_steps=100, num_bins=4)
        >>> density, weight = curriculum.timesteps_at(100, torch.device("cpu"))
        >>> (density * weight).round(decimals=9).tolist()
        [0.25, 0.25, 0.25, 0.25]
    """

    writes = ("timestep_density", "timestep_weight")

    def __post_init__(self) -> None:
        if not self.density_at(self.num_steps).all():
            raise ValueError(
                "importance weights need a density above 0 everywhere, and a Gaussian with std "
                f"{self.std} and mean {self.mean} is 0 in some bins; use a larger std."
            )

    def timesteps_at(self, step: int, device: torch.device) -> Timesteps:
        """Density and weight."""
        density = self.density_at(step, device)
        return Timesteps(density, importance_weight(density))
