"""Whether a run was stable, from its training losses alone: diverged, spiking, or neither."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

WINDOW, FACTOR = 20, 2.0


@dataclass(frozen=True)
class Stability:
    """How steadily a loss fell: jumps, each counted once however long it lasted, or divergence.

    It diverged if it is not finite at some step, never came back from its last jump, or ends above
    where it began.
    """

    spikes: int
    diverged: bool

    @property
    def stable(self) -> bool:
        """Neither."""
        return not (self.spikes or self.diverged)


def stability(losses: Sequence[float]) -> Stability:
    """Jumps of a training loss above what it was just before.

    A loss jumps where it exceeds twice the median of the 20 losses before the jump, or of as many
    as there are; it is back where it is below that again. Losses of single batches scatter, and a
    factor of 2 is beyond that of a diffusion loss over 64 images; a median is not moved by the jump
    itself.
    """
    if not all(math.isfinite(loss) for loss in losses):
        return Stability(0, True)
    calm, spikes, jumped = [losses[0]], 0, False
    for loss in losses[1:]:
        was, jumped = jumped, loss > FACTOR * median(calm)
        spikes += jumped and not was
        if not jumped:
            calm = [*calm, loss][-WINDOW:]
    return Stability(spikes, jumped or median(losses[-WINDOW:]) > losses[0])
