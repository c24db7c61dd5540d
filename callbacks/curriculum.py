"""Which noise levels are trained when: the curriculum timestep schedule (CLTS), and its controls.

Densities are over u in [0, 1], the place of a noise level (1 the noisiest), as probabilities of
equal bins. Bin i stands for its right edge u = (i + 1) / num_bins: the paper's t / T, t = 1..T.

Source: "Why diffusion models are stable and how to make them faster" (2023), section 4.2. The
controls are not in the paper.
"""

from dataclasses import dataclass
from math import inf, pi, sqrt
from typing import Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lit_diffusion.callbacks.trainer_state import Timesteps, TimestepWriter

Normalize = Literal["truncate", "mix"]


def clts_gamma(step: int, num_steps: int) -> float:
    """How far the curriculum has come after so many optimizer steps: min(step / num_steps, 1).

    Source: Eq. 8, held at 1 where it would make densities negative.

    Example:
        >>> clts_gamma(0, 50_000), clts_gamma(25_000, 50_000), clts_gamma(500_000, 50_000)
        (0.0, 0.5, 1.0)
    """
    if not 1 <= num_steps < inf:
        raise ValueError(
            f"num_steps must be at least 1 optimizer step, got {num_steps}: say how many the "
            "change of the density takes, as a tenth of the run."
        )
    return min(step / num_steps, 1.0)


def clts_density(
    step: int,
    num_steps: int,
    mean: float = 0.3,
    std: float = 1.0,
    num_bins: int = 1000,
    normalize: Normalize = "truncate",
    device: torch.device | str | None = None,
) -> Tensor:
    """From uniform to a Gaussian: p = (1 - gamma) uniform + gamma N(mean, std^2).

    Args:
        step: optimizer steps completed.
        num_steps: optimizer steps until only the Gaussian is left.
        mean: noise level u that is trained most, in [0, 1].
        std: in units of u; 1.0 is the paper's sigma = T.
        num_bins: number of equal bins over [0, 1]; T gives the paper's density over t.
        normalize: "truncate" makes the Gaussian sum to 1 on the bins and then mixes, so that gamma
            is its share of the draws; "mix" mixes with the Gaussian of Eq. 7 as it is, of which
            only 38% lie in [0, 1] at the default, and then makes the sum 1.
        device: of the result.

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
    exponent = _exponent(mean, std, num_bins, device)
    if normalize == "truncate":
        return (1 - gamma) / num_bins + gamma * exponent.softmax(0)
    mixed = (1 - gamma) + gamma * exponent.exp() / (std * sqrt(2 * pi))
    return mixed / mixed.sum()


def importance_weight(density: Tensor) -> Tensor:
    """The factor on the loss that undoes an unnormalised density (num_bins,): 1 / (num_bins * p).

    Example:
        >>> importance_weight(torch.tensor([1.0, 3.0]))
        tensor([2.0000, 0.6667])
    """
    return density.sum() / (len(density) * density)


def total_variation(density: Tensor) -> Tensor:
    """Distance of an unnormalised density from uniform: sum |p - 1 / num_bins| / 2.

    Example:
        >>> round(total_variation(clts_density(50_000, 50_000)).item(), 3)
        0.028
    """
    return (density / density.sum() - 1 / len(density)).abs().sum() / 2


def _exponent(mean: float, std: float, num_bins: int, device: torch.device | str | None) -> Tensor:
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


@dataclass(eq=False)
class _Curriculum(TimestepWriter):
    num_steps: int
    mean: float = 0.3
    std: float = 1.0
    num_bins: int = 1000
    normalize: Normalize = "truncate"

    def __post_init__(self) -> None:
        self.density_at(0)  # refuses bad arguments

    def density_at(self, step: int, device: torch.device | str | None = None) -> Tensor:
        """`clts_density` with the arguments of this callback."""
        return clts_density(
            step, self.num_steps, self.mean, self.std, self.num_bins, self.normalize, device
        )

    def numbers_at(self, step: int, device: torch.device) -> dict[str, float | Tensor]:
        """gamma, and how far the density is from uniform."""
        return {
            "clts/gamma": clts_gamma(step, self.num_steps),
            "clts/tv": total_variation(self.density_at(step, device)),
        }


class TimestepCurriculum(_Curriculum):
    """CLTS: training times are drawn from a density that goes from uniform to a Gaussian.

    At each training batch `timestep_density` = `clts_density(trainer.global_step, ...)`, the same
    on every rank, and exact on resume with nothing saved. The loss is not reweighted: the objective
    changes. Logs `clts/gamma` and `clts/tv`, the distance from uniform: 0.028 at most at the
    default, 3.5 of 128 draws.

    Steps are `trainer.global_step`, which counts accumulated batches once and, in manual
    optimization, every step of every optimizer.

    Args:
        num_steps: optimizer steps until only the Gaussian is left. The paper reports 50,000 for
            CIFAR-10 and 300,000 for ImageNet-128.
        mean, std, num_bins, normalize: as of `clts_density`.

    Raises:
        ValueError: bad arguments; at fit start, a module without `timestep_density` (see
            `protocols.HasTimesteps`) or with two callbacks that set it; at the first batch, one
            that something else sets.

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
    """Control: CLTS as a factor num_bins * p on the loss, under times as they are drawn anyway.

    Under uniform times its gradients equal those of `TimestepCurriculum`, which has the same
    arguments, in expectation; only their variance differs.

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
    """Control: times from the CLTS density, with the factor 1 / (num_bins * p) on the loss.

    Its gradients equal those of uniform times in expectation: what CLTS gains and this does not is
    due to the change of the objective. The arguments are those of `TimestepCurriculum`; the
    Gaussian must be wide enough that no noise level is left out.

    Example:
        >>> curriculum = ImportanceWeightedCurriculum(num_steps=100, num_bins=4)
        >>> density, weight = curriculum.timesteps_at(100, torch.device("cpu"))
        >>> (density * weight).round(decimals=9).tolist()
        [0.25, 0.25, 0.25, 0.25]
    """

    writes = ("timestep_density", "timestep_weight")

    def timesteps_at(self, step: int, device: torch.device) -> Timesteps:
        """Density and weight."""
        density = self.density_at(step, device)
        return Timesteps(density, importance_weight(density))

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse what `TimestepCurriculum` refuses, and densities that can't be undone."""
        super().on_fit_start(trainer, pl_module)
        if not self.density_at(self.num_steps).all():
            raise ValueError(
                "importance weights need a density above 0 everywhere, and a Gaussian of std "
                f"{self.std} at {self.mean} is 0 in some bins; use a larger std."
            )


@dataclass(eq=False)
class ShiftingGaussian(TimestepWriter):
    """Comparator: times from a Gaussian whose mean moves from the noisiest level to the cleanest.

    It moves evenly. Logs `shifting/mean` and `shifting/tv`. Steps are counted as by
    `TimestepCurriculum`.

    Args:
        num_steps: optimizer steps until the mean is at `end`, where it stays.
        start: first mean, a noise level u in [0, 1].
        end: last mean, in [0, 1].
        std: in units of u; the paper gives none.
        num_bins: number of equal bins over [0, 1].

    Source: section 4.2 of the paper, which tried it and dropped it; it gives no formula.

    Example:
        >>> shifting = ShiftingGaussian(num_steps=100, num_bins=8)
        >>> [int(shifting.density_at(step).argmax()) for step in (0, 50, 100, 150)]
        [7, 3, 0, 0]
    """

    writes = ("timestep_density",)

    num_steps: int
    start: float = 1.0
    end: float = 0.0
    std: float = 0.25
    num_bins: int = 1000

    def __post_init__(self) -> None:
        for step in (0, self.num_steps):
            self.density_at(step)  # refuses bad arguments

    def density_at(self, step: int, device: torch.device | str | None = None) -> Tensor:
        """(num_bins,) float64, with sum 1, after so many optimizer steps."""
        return _exponent(self._mean_at(step), self.std, self.num_bins, device).softmax(0)

    def _mean_at(self, step: int) -> float:
        return self.start + (self.end - self.start) * clts_gamma(step, self.num_steps)

    def timesteps_at(self, step: int, device: torch.device) -> Timesteps:
        """The density."""
        return Timesteps(timestep_density=self.density_at(step, device))

    def numbers_at(self, step: int, device: torch.device) -> dict[str, float | Tensor]:
        """The mean, and how far the density is from uniform."""
        return {
            "shifting/mean": self._mean_at(step),
            "shifting/tv": total_variation(self.density_at(step, device)),
        }
