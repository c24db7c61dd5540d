"""What every solver's step is made of."""

from torch import Tensor

from lit_diffusion.protocols import Denoised, Process, TimeGrid


def finite_grid(grid: TimeGrid, process: Process, steps: int) -> Tensor:
    """(steps + 1,) times of the grid.

    Raises:
        ValueError: where one is not finite, or is no less noisy than the one before.
    """
    times = grid.grid(process, steps)
    if not times.isfinite().all():
        raise ValueError(
            f"{grid} has times that are not finite on {process}, whose noisiest has no signal (SNR "
            "= 0); use Even or Sections, or LogSNR(noisiest=-10)."
        )
    if not (times.diff() < 0).all():
        raise ValueError(
            f"{grid} has times that do not fall on {process}, {times[:3].tolist()}, ...; fewer "
            "steps may, or a grid that stays within the process."
        )
    return times


def level_of(process: Process, t: Tensor) -> Tensor:
    """Noise relative to the signal, sigma / alpha."""
    alpha, sigma = process.alpha_sigma(t)
    return sigma / alpha


def batch_of(t: Tensor, x: Tensor) -> Tensor:
    """One time -> (B,) on the device of x."""
    return t.to(x.device).expand(len(x))


def clipped(x0: Tensor, clip: bool) -> Tensor:
    """x0, in [-1, 1] if asked."""
    return x0.clamp(-1, 1) if clip else x0


def x0_and_noise(
    seen: Denoised, x_t: Tensor, alpha: Tensor, sigma: Tensor, clip: bool
) -> tuple[Tensor, Tensor]:
    """Both parts of x_t; the noise agrees with the clipped x0."""
    if not clip:
        return seen.x0, seen.noise
    x0 = seen.x0.clamp(-1, 1)
    return x0, (x_t - alpha * x0) / sigma


def check_steps(steps: int) -> None:
    """Raise ValueError for less than one."""
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}.")
