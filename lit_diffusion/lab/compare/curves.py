"""FID over training: when a run reaches a target, how much it wavers, how sure one FID is."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate, pairwise
from statistics import fmean, linear_regression, stdev


class Bound(Enum):
    """What is known of a number: itself, or only a bound."""

    EXACT = ""
    AT_MOST = "<= "
    MORE_THAN = "> "
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Crossing:
    """When a run reached a target.

    Attributes:
        step: of the crossing; of the first or last evaluation where the crossing is not between.
        bound: what `step` says of the crossing: EXACT; AT_MOST, where the first evaluation is good
            enough already; MORE_THAN, where none is (censored); UNKNOWN, of a mean of both.
    """

    step: float
    bound: Bound = Bound.EXACT

    def __str__(self) -> str:
        """As tables have it: "1,893", "> 4,000" or "unknown"."""
        steps = "" if self.bound is Bound.UNKNOWN else f"{self.step:,.0f}"
        return f"{self.bound.value}{steps}"


@dataclass(frozen=True)
class Curve:
    """FIDs of one training run.

    Args:
        seed: name of the run within its arm.
        steps: (N,) optimizer steps completed, or images seen; increasing from 0 or more, the last
            > 0, N >= 1.
        fids: (N,) > 0; NaN where the samples were not finite.
        images: (N,) images seen by then, increasing; None where that is not known.
        repeats: FIDs of the last weights from other samples, beside `fids[-1]`.
        looks: (N,) what the samples of each FID score by other measures, by their names
            (`metrics.auxiliary_metrics`); () where no evaluation tells.

    Raises:
        ValueError: If lengths differ, steps are not as above, or an FID is not positive.
    """

    seed: str
    steps: tuple[float, ...]
    fids: tuple[float, ...]
    images: tuple[float, ...] | None = None
    repeats: tuple[float, ...] = ()
    looks: tuple[Mapping[str, float], ...] = ()

    def __post_init__(self) -> None:
        steps, told = self.steps, f"seed {self.seed}:"
        if not steps or {len(self.fids), len(self.images or steps)} != {len(steps)}:
            raise ValueError(
                f"{told} a curve needs as many FIDs as steps, and one at least, got "
                f"{len(self.fids)} for {len(steps)}."
            )
        if steps[0] < 0 or not 0 < steps[-1] < math.inf:
            ends = f"{steps[0]:g} to {steps[-1]:g}"
            raise ValueError(
                f"{told} steps must be finite and >= 0, the last of them > 0, got {ends}."
            )
        for name, axis in (("steps", steps), ("images seen", self.images or ())):
            for before, after in pairwise(axis):
                if not before < after:
                    raise ValueError(
                        f"{told} {name} must increase, got {after:g} after {before:g}."
                    )
        if wrong := [fid for fid in (*self.fids, *self.repeats) if fid <= 0]:
            raise ValueError(f"{told} FIDs must be > 0, got {wrong[0]:g}.")

    @property
    def finite(self) -> tuple[list[float], list[float]]:
        """Steps and FIDs of the evaluations that gave a number."""
        kept = [(s, f) for s, f in zip(self.steps, self.fids, strict=True) if math.isfinite(f)]
        return [step for step, _ in kept], [fid for _, fid in kept]

    @property
    def best(self) -> float:
        """The lowest FID; infinite where none is finite."""
        return min(self.finite[1], default=math.inf)

    def at(self, step: float) -> float | None:
        """The FID at a step; None where it was not evaluated."""
        return dict(zip(self.steps, self.fids, strict=True)).get(step)

    def crossing(self, target: float) -> Crossing:
        """When the running minimum of the FID first reaches a target > 0.

        Between the evaluations k - 1 and k around the crossing, log FID is taken for linear:
        step = s_{k-1} + (s_k - s_{k-1}) (log m_{k-1} - log target) / (log m_{k-1} - log m_k),
        where m is the running minimum, which passes over NaN.

        Example:
            >>> curve = Curve("0", (1000, 2000, 3000), (16.0, 4.0, 3.0))
            >>> print(curve.crossing(8.0), "and", curve.crossing(2.0))
            1,500 and > 3,000
        """
        steps = self.steps
        lowest = list(accumulate(self.fids, min, initial=math.inf))[1:]
        k = next((k for k, fid in enumerate(lowest) if fid <= target), None)
        if k is None:
            return Crossing(steps[-1], Bound.MORE_THAN)
        if k == 0 or math.isinf(lowest[k - 1]):
            # A network that has it untrained: no ratio can be had from 0 steps.
            return Crossing(next(step for step in steps[k:] if step > 0), Bound.AT_MOST)
        share = math.log(lowest[k - 1] / target) / math.log(lowest[k - 1] / lowest[k])
        return Crossing(steps[k - 1] + share * (steps[k] - steps[k - 1]))


def late_oscillation(curve: Curve) -> float | None:
    """Standard deviation of log FID over the last third of the steps, trend included.

    None with fewer than three finite FIDs there.

    Source: the claim under Fig. 5 of "Why Diffusion Models are Stable and How to Make Them Faster".
    """
    _, logs = _late(curve)
    return stdev(logs) if len(logs) >= 3 else None


def late_wobble(curve: Curve) -> float | None:
    """Standard deviation of log FID about a straight line over the last third of the steps.

    The line is that of least squares, so a curve that goes on falling evenly does not wobble:
    sqrt(sum of squared residuals / (n - 2)). None with fewer than three finite FIDs there.
    """
    steps, logs = _late(curve)
    if len(logs) < 3:
        return None
    line = linear_regression(steps, logs)
    residuals = [y - line.slope * x - line.intercept for x, y in zip(steps, logs, strict=True)]
    return math.sqrt(sum(value**2 for value in residuals) / (len(logs) - 2))


def _late(curve: Curve) -> tuple[list[float], list[float]]:
    found = zip(*curve.finite, strict=True)
    late = [(s, math.log(f)) for s, f in found if s >= 2 / 3 * curve.steps[-1]]
    return [step for step, _ in late], [value for _, value in late]


@dataclass(frozen=True)
class Spread:
    """A standard deviation of log FID, about the relative one of FID; its degrees of freedom."""

    sd: float
    degrees: int


def sampling_spread(curves: Iterable[Curve]) -> Spread | None:
    """How much an FID depends on the samples: the spread over generation seeds at the last step.

    Variances of log FID are pooled over the runs, so what differs between runs does not count. None
    without repeats of finite FID.
    """
    squares, degrees = 0.0, 0
    for curve in curves:
        logs = [math.log(f) for f in (curve.fids[-1], *curve.repeats) if math.isfinite(f)]
        if len(logs) > 1:
            squares += sum((value - fmean(logs)) ** 2 for value in logs)
            degrees += len(logs) - 1
    return Spread(math.sqrt(squares / degrees), degrees) if degrees else None


def paired_spread(curves: Iterable[Curve]) -> Spread | None:
    """How much FIDs of several runs depend on the samples, but for what all owe to a set of them.

    With log FID x_rk of run r from its k-th set, the residuals x_rk - mean_k - mean_r + mean, with
    (runs - 1) (sets - 1) degrees of freedom. Runs whose k-th sets are not the same have nothing in
    common to take off, and this is `sampling_spread`. Runs with equal numbers of repeats, all of
    them finite, are taken together; None without two such runs.
    """
    alike: dict[int, list[list[float]]] = {}
    for curve in curves:
        fids = (curve.fids[-1], *curve.repeats)
        if all(math.isfinite(fid) for fid in fids):
            logs = [math.log(fid) for fid in fids]
            alike.setdefault(len(logs), []).append([value - fmean(logs) for value in logs])
    columns = [column for runs in alike.values() for column in zip(*runs, strict=True)]
    squares = sum((value - fmean(column)) ** 2 for column in columns for value in column)
    degrees = sum((len(runs) - 1) * (sets - 1) for sets, runs in alike.items())
    return Spread(math.sqrt(squares / degrees), degrees) if degrees else None
