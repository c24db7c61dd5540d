"""A curriculum of noise levels that the CLTS paper tried and rejected, for comparison."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lit_diffusion.callbacks.curriculum import clts_gamma, gaussian_log_density
from lit_diffusion.callbacks.trainer_state import Timesteps, TimestepWriter, total_variation


@dataclass(eq=False)
class ShiftingGaussian(TimestepWriter):
    """Samples timesteps from a Gaussian whose mean moves from the noisiest level to the cleanest.

    The mean moves linearly in `trainer.global_step`. Logs `shifting/mean` and `shifting/tv`, the
    total variation distance between the density and the uniform density.

    Args:
        num_steps: optimizer steps until the mean reaches `end`, where it stays.
        start: initial mean, a noise level u in [0, 1].
        end: final mean, in [0, 1].
        std: standard deviation in units of u, which the paper does not give.
        num_bins: number of equal bins over [0, 1].

    Source: section 4.2 of "Why diffusion models are stable and how to make them faster" (2023),
    which gives no formula.

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
        """Probability of each bin at optimizer step `step`: (num_bins,) float64, sums to 1."""
        return gaussian_log_density(self._mean_at(step), self.std, self.num_bins, device).softmax(0)

    def _mean_at(self, step: int) -> float:
        return self.start + (self.end - self.start) * clts_gamma(step, self.num_steps)

    def timesteps_at(self, step: int, device: torch.device) -> Timesteps:
        """The timestep density at optimizer step `step`."""
        return Timesteps(timestep_density=self.density_at(step, device))

    def numbers_at(self, step: int, device: torch.device) -> dict[str, float | Tensor]:
        """Logged values: the mean, and the distance of the density from uniform."""
        return {
            "shifting/mean": self._mean_at(step),
            "shifting/tv": total_variation(self.density_at(step, device)),
        }
