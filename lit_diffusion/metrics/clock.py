"""A sign of life from long evaluations: an estimate after the first batch, then lines."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from lightning.pytorch.utilities import rank_zero_info


class Clock:
    """Times the phases of an evaluation and says how long it will take.

    Args:
        title: of the lines that are printed.
        total: number of samples.
        every: seconds between lines after the first.
    """

    def __init__(self, title: str, total: int, every: float = 30.0) -> None:
        self.title = title
        self.total = total
        self._every = every
        self._phases: dict[str, float] = defaultdict(float)
        self._done = 0
        self._estimated = 0.0
        self._start = self._said = time.monotonic()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time inside to phase `name`."""
        start = time.monotonic()
        yield
        self._phases[name] += time.monotonic() - start

    def tick(self, samples: int) -> None:
        """Count samples that are finished."""
        now = time.monotonic()
        first = self._done == 0
        self._done = min(self._done + samples, self.total)
        if self._done == 0:
            return
        expected = sum(self._phases.values()) / self._done * self.total
        if first:
            self._estimated = expected
            rank_zero_info(f"{self.title}: {self.total} samples take about {expected:.3g} s.")
        elif now - self._said > self._every:
            self._said = now
            left = expected * (1 - self._done / self.total)
            rank_zero_info(f"{self.title}: {self._done} of {self.total}, {left:.0f} s left.")

    def seconds(self) -> dict[str, float]:
        """Of each phase, in all so far, and in all as estimated after the first batch."""
        total = time.monotonic() - self._start
        known = {**self._phases, "total": total, "estimated": self._estimated}
        return {name: round(value, 3) for name, value in known.items()}
