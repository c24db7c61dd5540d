"""Whether a run was stable, from its training losses alone: diverged, spiking, or neither."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class Stability:
    """How steadily a loss fell.

    Attributes:
        spikes: number of times that the loss jumped, each counted once however long it lasted.
        diverged: whether it is not finite at some step, never came back from its last jump, or ends
            above where it began.
    """

    spikes: int
    diverged: bool

    @property
    def stable(self) -> bool:
        """Neither."""
        return not (self.spikes or self.diverged)


def stability(losses: Sequence[float], window: int = 20, factor: float = 2.0) -> Stability:
    """Jumps of a training loss above what it was just before.

    A loss jumps where it exceeds `factor` times the median of the `window` losses before the jump,
    or of as many as there are; it is back where it is below that again. Losses of single batches
    scatter, and a factor of 2 is beyond that of a diffusion loss over 64 images; a median is not
    moved by the jump itself.

    Args:
        losses: one an optimizer step, in order; at least one.
        window: losses that one is compared with, >= 1.
        factor: > 1.

    Raises:
        ValueError: without losses, or for a window or a factor out of range.

    Example:
        >>> stability([1.0] * 20 + [1.1, 5.0, 4.0, 1.0, 0.9])
        Stability(spikes=1, diverged=False)
        >>> stability([1.0] * 20 + [5.0, 6.0, 7.0])
        Stability(spikes=1, diverged=True)
        >>> stability([1.0] * 20 + [float("nan")])
        Stability(spikes=0, diverged=True)
    """
    if window < 1 or not factor > 1:
        raise ValueError(f"window >= 1 and factor > 1 must hold, got {window} and {factor}.")
    if not losses:
        raise ValueError("a run without losses is neither stable nor not; log train/loss.")
    calm, spikes, jumped = [losses[0]], 0, False
    if not all(math.isfinite(loss) for loss in losses):
        return Stability(0, True)
    for loss in losses[1:]:
        was, jumped = jumped, loss > factor * median(calm)
        spikes += jumped and not was
        if not jumped:
            calm = [*calm, loss][-window:]
    return Stability(spikes, jumped or median(losses[-window:]) > losses[0])
