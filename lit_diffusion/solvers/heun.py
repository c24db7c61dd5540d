"""Heun's method for the probability-flow ODE, which is EDM's solver."""

import math
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from lit_diffusion.grids import Karras
from lit_diffusion.protocols import Denoise, Process, RandnLike, TimeGrid, Watch
from lit_diffusion.solvers.steps import (
    batch_of,
    check_steps,
    grid_with_signal,
    level_of,
    x0_and_noise,
)


@dataclass(frozen=True)
class Heun:
    """Heun's second-order method, optionally with churn (noise that is added before each step).

    With `level = sigma / alpha` and `x = x_t / alpha`, the probability-flow ODE of any process is
    `dx / dlevel = noise(x_t, t)`, where `noise` is the network's estimate of the noise. A step uses
    the mean of the slopes `dx / dlevel` at its two ends. Only the step to the clean image is an
    Euler step. The argument `watch` of `sample` is called with x_t after churn.

    Args:
        steps: number of steps of the time grid. Sampling evaluates the network `2 * steps - 1`
            times.
        times: time grid. If None, the grid is `Karras(noisiest=-10)`.
        clip: whether to clamp each estimate of x0 to [-1, 1]. If True, the slope is computed from
            the clamped x0.
        churn: EDM's S_churn. Before each step, noise is added, which multiplies the noise level
            by `1 + min(churn / steps, sqrt(2) - 1)`. With 0, sampling is deterministic.
        churn_min: EDM's S_tmin, the lowest level to which churn is applied.
        churn_max: EDM's S_tmax, the highest level to which churn is applied.
        churn_noise: EDM's S_noise, a factor on the noise that churn adds. Values slightly above 1
            add more noise than the raised level requires.

    Raises:
        ValueError: if steps or a churn argument is out of range. The method `check` raises
            ValueError if the grid does not fit the process, or if alpha is 0 at the noisiest time
            of the grid.

    Source: Karras et al. 2022 (EDM), algorithms 1 and 2.

    Example:
        >>> Heun(steps=18, churn=40.0, churn_min=0.05, churn_max=50.0, churn_noise=1.003).steps
        18
    """

    steps: int = 18
    times: TimeGrid | None = None
    clip: bool = True
    churn: float = 0.0
    churn_min: float = 0.0
    churn_max: float = math.inf
    churn_noise: float = 1.0

    def __post_init__(self) -> None:
        check_steps(self.steps)
        if not self.churn >= 0:
            raise ValueError(f"churn must be >= 0, got {self.churn}; 0 is deterministic.")
        if not (0 <= self.churn_min <= self.churn_max and 0 <= self.churn_noise < math.inf):
            raise ValueError(
                "0 <= churn_min <= churn_max and 0 <= churn_noise < inf must hold, got "
                f"{self.churn_min}, {self.churn_max} and {self.churn_noise}."
            )

    def default_times(self, process: Process) -> TimeGrid:
        """Return `Karras(noisiest=-10)`, which is used if `times` is None."""
        return Karras(noisiest=-10.0)

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
        levels = level_of(process, times)
        x = process.prior(noise, times[0]) / process.alpha_sigma(times[0])[0]
        for i, (t, t_next) in enumerate(pairwise(times)):
            level = levels[i]
            if self.churn > 0 and self.churn_min <= level <= self.churn_max:
                raised = level * (1 + min(self.churn / self.steps, math.sqrt(2) - 1))
                t = process.at_log_snr(-2 * raised.log())
                raised = level_of(process, t)  # discrete processes limit t to t_max
                added = (raised**2 - level**2).clamp(min=0).sqrt()
                x, level = x + added * self.churn_noise * randn_like(x), raised
            x_t, x0, d_cur = self._evaluate(denoise, process, x, t)
            if watch is not None:
                watch(i, t, x_t, x0)
            h = levels[i + 1] - level
            x_next = x + h * d_cur
            if levels[i + 1] > 0:
                *_, d_prime = self._evaluate(denoise, process, x_next, t_next)
                x_next = x + h * (d_cur + d_prime) / 2
            x = x_next
        return x

    def check(self, process: Process, /) -> None:
        """Raise ValueError if the grid does not fit the process, or if alpha is 0 on the grid."""
        grid_with_signal(self.times or self.default_times(process), process, self.steps)

    def _evaluate(
        self, denoise: Denoise, process: Process, x: Tensor, t: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return x_t, x0 and the slope `dx / dlevel`, which is the estimate of the noise."""
        alpha, sigma = process.alpha_sigma(t)
        x_t = alpha * x
        return x_t, *x0_and_noise(denoise(x_t, batch_of(t, x)), x_t, alpha, sigma, self.clip)
