"""A Gaussian curriculum of noise levels, which the CLTS paper tried and rejected.

It serves as a comparison with CLTS (`TimestepCurriculum`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lit_diffusion.callbacks.curriculum import (
    Timesteps,
    TimestepWriter,
    clts_gamma,
    gaussian_log_density,
    total_variation,
)


@dataclass(eq=False)
class ShiftingGaussian(TimestepWriter):
    """Samples noise levels from a Gaussian whose mean moves from noisy to clean levels.

    The mean moves linearly with the number of optimizer steps (`trainer.global_step`). The callback
    logs the mean as `shifting/mean`. It logs the total variation distance between the density of
    the noise levels and the uniform density as `shifting/tv`.

    Args:
        num_steps: optimizer steps until the mean reaches `end`, where it stays.
        start: initial mean, as a noise level u in [0, 1]. 1 is the noisiest level.
        end: final mean, as a noise level u in [0, 1].
        std: standard deviation of u. The paper does not give a value.
        num_bins: number of equal bins over [0, 1] in which the density is represented.

    Source: section 4.2 of "Why diffusion models are stable and how to make them faster" (2023). The
    paper describes this curriculum in words, without a formula.

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
            self.density_at(step)  # raises for invalid arguments

    def density_at(self, step: int, device: torch.device | str | None = None) -> Tensor:
        """Return the probability of each bin after `step` optimizer steps: (num_bins,) float64."""
        return gaussian_log_density(self._mean_at(step), self.std, self.num_bins, device).softmax(0)

    def _mean_at(self, step: int) -> float:
        return self.start + (self.end - self.start) * clts_gamma(step, self.num_steps)

    def timesteps_at(self, step: int, device: torch.device) -> Timesteps:
        """Return the timestep density after `step` optimizer steps."""
        return Timesteps(timestep_density=self.density_at(step, device))

    def numbers_at(self, step: int, device: torch.device) -> dict[str, float | Tensor]:
        """Return the values to log: the mean, and the total variation distance from uniform."""
        return {
            "shifting/mean": self._mean_at(step),
            "shifting/tv": total_variation(self.density_at(step, device)),
        }
