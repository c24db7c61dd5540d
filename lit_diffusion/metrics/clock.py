"""A sign of life from long evaluations: an estimate after the first batch, then lines."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from lightning.pytorch.utilities import rank_zero_info


class EvaluationClock:
    """Times the phases of an evaluation of `total` samples and says how long it will take.

    Lines begin with `title`, and come `every` so many seconds after the first.
    """

    def __init__(self, title: str, total: int, every: float = 30.0) -> None:
        self._title, self._total, self._every = title, total, every
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
        self._done = min(self._done + samples, self._total)
        if self._done == 0:
            return
        expected = sum(self._phases.values()) / self._done * self._total
        if not self._estimated:
            self._estimated = expected
            rank_zero_info(f"{self._title}: {self._total} samples take about {expected:.3g} s.")
        elif time.monotonic() - self._said > self._every:
            self._said = time.monotonic()
            left = expected * (1 - self._done / self._total)
            rank_zero_info(f"{self._title}: {self._done} of {self._total}, {left:.0f} s left.")

    def seconds(self) -> dict[str, float]:
        """Of each phase, in all so far, and in all as estimated after the first batch."""
        total = time.monotonic() - self._start
        known = {**self._phases, "total": total, "estimated": self._estimated}
        return {name: round(value, 3) for name, value in known.items()}
