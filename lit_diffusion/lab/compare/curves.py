"""Analyze FID as a function of training steps: when it reaches a target, how much it varies.

An arm (a term from clinical trials) is one way to train. The runs of an arm differ only in the
seed. The curve of a run is its FID as a function of optimizer steps.
"""

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate, pairwise
from statistics import fmean, linear_regression, median, stdev
from typing import NamedTuple

from lit_diffusion.files import checked_read
from lit_diffusion.metrics.auxiliary_metrics import DISTANCES, FRACTIONS

OTHER_METRICS = (*DISTANCES, *(f"{name} floor" for name in DISTANCES), *FRACTIONS)
"""Columns of CSV files that contain other metrics of the samples of each FID."""


class Bound(Enum):
    """Whether the step of a crossing is exact or a bound."""

    EXACT = ""
    AT_MOST = "<= "
    MORE_THAN = "> "
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Crossing:
    """The step at which a run reached a target.

    Attributes:
        step: the step at which the target was reached. If only a bound is known, this is the step
            of the evaluation that gives the bound.
        bound: AT_MOST if the first evaluation was already at the target. MORE_THAN if no evaluation
            reached the target (a censored value). UNKNOWN for a mean over steps with both kinds of
            bounds.

    Example:
        >>> print(Crossing(1893), Crossing(4000, Bound.MORE_THAN))
        1,893 > 4,000
    """

    step: float
    bound: Bound = Bound.EXACT

    @property
    def is_reached(self) -> bool:
        """Whether an evaluation reached the target."""
        return self.bound is not Bound.MORE_THAN

    def __str__(self) -> str:
        """Format for tables: "1,893", "> 4,000" or "unknown"."""
        steps = "" if self.bound is Bound.UNKNOWN else f"{self.step:,.0f}"
        return f"{self.bound.value}{steps}"


def mean_crossing(crossings: Sequence[Crossing]) -> Crossing:
    """Compute the geometric mean of steps.

    If some steps are upper bounds, the result is an upper bound. If some steps are lower bounds,
    the result is a lower bound. If both kinds of bounds occur, the result is unknown.
    """
    bounds = {crossing.bound for crossing in crossings} - {Bound.EXACT}
    if len(bounds) > 1:
        return Crossing(math.nan, Bound.UNKNOWN)
    return Crossing(math.exp(fmean(math.log(crossing.step) for crossing in crossings)), *bounds)


@dataclass(frozen=True)
class Curve:
    """FIDs of one training run.

    Args:
        seed: name of the run within its arm, usually the training seed.
        steps: (N,) optimizer steps or numbers of training images; increasing, >= 0, and the last >
            0.
        fids: (N,) FIDs > 0; NaN where the samples were not finite.
        images: (N,) numbers of training images seen at these steps, increasing; None if not
            recorded.
        repeats: further FIDs of the last weights, each with a new set of samples.
        other_metrics: (N,) dictionaries, one for each FID: other metrics of the same samples, by
            name. () if not recorded.

    Raises:
        ValueError: if lengths differ, if steps do not increase or are out of range, or if an FID is
            not positive.
    """

    seed: str
    steps: tuple[float, ...]
    fids: tuple[float, ...]
    images: tuple[float, ...] | None = None
    repeats: tuple[float, ...] = ()
    other_metrics: tuple[Mapping[str, float], ...] = ()

    def __post_init__(self) -> None:
        steps, run = self.steps, f"seed {self.seed}:"
        if not steps or {len(self.fids), len(self.images or steps)} != {len(steps)}:
            raise ValueError(
                f"{run} a curve needs as many FIDs as steps, and one at least, got "
                f"{len(self.fids)} for {len(steps)}."
            )
        if steps[0] < 0 or not 0 < steps[-1] < math.inf:
            ends = f"{steps[0]:g} to {steps[-1]:g}"
            raise ValueError(
                f"{run} steps must be finite and >= 0, the last of them > 0, got {ends}."
            )
        for name, axis in (("steps", steps), ("images seen", self.images or ())):
            for before, after in pairwise(axis):
                if not before < after:
                    raise ValueError(f"{run} {name} must increase, got {after:g} after {before:g}.")
        if wrong := [fid for fid in (*self.fids, *self.repeats) if fid <= 0]:
            raise ValueError(f"{run} FIDs must be > 0, got {wrong[0]:g}.")

    @property
    def finite(self) -> tuple[list[float], list[float]]:
        """Steps and FIDs of the evaluations with a finite FID."""
        points = [(s, f) for s, f in zip(self.steps, self.fids, strict=True) if math.isfinite(f)]
        return [step for step, _ in points], [fid for _, fid in points]

    @property
    def best(self) -> float:
        """The lowest FID; infinite if none is finite."""
        return min(self.finite[1], default=math.inf)

    def at(self, step: float) -> float | None:
        """The FID at a step; None if it was not evaluated there."""
        return dict(zip(self.steps, self.fids, strict=True)).get(step)

    def crossing(self, target: float) -> Crossing:
        """Compute the step at which the running minimum of the FID first reaches a target > 0.

        Let s be the steps of the evaluations, m the running minimum of the FID (which ignores NaN),
        and k the first evaluation with `m[k] <= target`. Log FID is interpolated linearly between
        evaluations k - 1 and k. The result is

            s[k-1] + (s[k] - s[k-1]) * log(m[k-1] / target) / log(m[k-1] / m[k])

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
            # Not step 0 (the untrained network), because steps are averaged on a log scale.
            return Crossing(next(step for step in steps[k:] if step > 0), Bound.AT_MOST)
        fraction = math.log(lowest[k - 1] / target) / math.log(lowest[k - 1] / lowest[k])
        return Crossing(steps[k - 1] + fraction * (steps[k] - steps[k - 1]))


@dataclass(frozen=True)
class Arm:
    """Runs that differ only in their seed: one curve per seed, at least one."""

    name: str
    curves: tuple[Curve, ...]

    @property
    def reached_by_all(self) -> float:
        """The lowest FID that every seed reached; infinite if a seed has no finite FID."""
        return max(curve.best for curve in self.curves)

    @property
    def median_best(self) -> float:
        """Median over seeds of the lowest FID of each seed.

        It is infinite if the median seed has no finite FID.
        """
        return median(curve.best for curve in self.curves)

    @property
    def nonfinite_ends(self) -> int:
        """Number of seeds whose last FID is not finite."""
        return sum(not math.isfinite(curve.fids[-1]) for curve in self.curves)

    def fids_at(self, step: float) -> list[float]:
        """FIDs at a step, of all seeds that were evaluated there."""
        return [fid for curve in self.curves if (fid := curve.at(step)) is not None]

    def crossings(self, target: float) -> tuple[Crossing, ...]:
        """The step at which each seed reached a target."""
        return tuple(curve.crossing(target) for curve in self.curves)


# How much FID varies


def late_spreads(curve: Curve) -> tuple[float, float] | None:
    """Compute standard deviations of log FID over the last third of the steps.

    Returns:
        The total standard deviation, and the standard deviation around a least-squares line, which
        is `sqrt(sum of squared residuals / (n - 2))`. A steady descent of the FID raises only the
        total standard deviation. None if there are fewer than three finite FIDs.

    Source: section 4.3 of "Why diffusion models are stable and how to make them faster" (2023),
    which blames a large momentum for the late oscillation of FID in its Fig. 5.
    """
    points = zip(*curve.finite, strict=True)
    late = [(step, math.log(fid)) for step, fid in points if step >= 2 / 3 * curve.steps[-1]]
    if len(late) < 3:
        return None
    steps, logs = zip(*late, strict=True)
    line = linear_regression(steps, logs)
    residuals = [y - line.slope * x - line.intercept for x, y in late]
    return stdev(logs), math.sqrt(sum(value**2 for value in residuals) / (len(logs) - 2))


class Spread(NamedTuple):
    """Standard deviation of log FID, with its degrees of freedom.

    If `sd` is small, it is approximately the standard deviation of FID divided by the mean FID. For
    example, 0.05 means that FID varies by about 5%.
    """

    sd: float
    degrees: int


def sampling_spread(curves: Iterable[Curve]) -> Spread | None:
    """Estimate the spread of the last FID over sets of samples from the same weights.

    The variance of log FID within each run is pooled over runs, so the result does not include
    differences between runs.

    Returns:
        The spread; None if no run has at least two finite FIDs of its last weights.
    """
    squares, degrees = 0.0, 0
    for curve in curves:
        logs = [math.log(f) for f in (curve.fids[-1], *curve.repeats) if math.isfinite(f)]
        if len(logs) > 1:
            squares += sum((value - fmean(logs)) ** 2 for value in logs)
            degrees += len(logs) - 1
    return Spread(math.sqrt(squares / degrees), degrees) if degrees else None


def paired_spread(curves: Iterable[Curve]) -> Spread | None:
    """Estimate the spread of the last FID over sets of samples, without effects common to all runs.

    If all runs generate their k-th set of samples from the same seeds, the choice of these seeds
    may raise or lower the FIDs of all runs alike. This effect is removed, because it cancels when
    runs are compared. If the k-th set has different seeds in each run, there is nothing to remove,
    and the result estimates the same value as `sampling_spread`.

    Let `x_rk` be the log FID of run r on its k-th set. The spread is computed from the residuals
    `x_rk - mean_k - mean_r + mean`, which have `(runs - 1) * (sets - 1)` degrees of freedom. Runs
    with the same number of sets form a group, and the variances of the groups are pooled. A run is
    left out if one of its last FIDs is not finite.

    Returns:
        The spread. It can be computed if at least two runs have the same number of sets, and this
        number is at least 2. Otherwise, the result is None.
    """
    groups: dict[int, list[list[float]]] = {}
    for curve in curves:
        fids = (curve.fids[-1], *curve.repeats)
        if all(math.isfinite(fid) for fid in fids):
            logs = [math.log(fid) for fid in fids]
            groups.setdefault(len(logs), []).append([value - fmean(logs) for value in logs])
    columns = [column for runs in groups.values() for column in zip(*runs, strict=True)]
    squares = sum((value - fmean(column)) ** 2 for column in columns for value in column)
    degrees = sum((len(runs) - 1) * (sets - 1) for sets, runs in groups.items())
    return Spread(math.sqrt(squares / degrees), degrees) if degrees else None


class Stability(NamedTuple):
    """Stability of a training loss: the number of spikes, and whether it diverged."""

    spikes: int
    diverged: bool


def loss_stability(losses: Sequence[float]) -> Stability:
    """Count spikes of a training loss, and detect divergence.

    A spike begins when the loss exceeds twice the median of the last 20 losses (or fewer, at the
    beginning) that do not belong to a spike. The spike ends when the loss no longer exceeds this
    threshold. A spike counts once, regardless of its length.

    The loss counts as diverged if it is not finite at some step, if its last spike does not end, or
    if the median of the last 20 losses is above the first loss.

    Example:
        >>> loss_stability([1.0, 0.9, 0.8, 5.0, 4.0, 0.8, 0.7])
        Stability(spikes=1, diverged=False)
    """
    if not all(math.isfinite(loss) for loss in losses):
        return Stability(0, True)
    recent, spikes, in_spike = [losses[0]], 0, False
    for loss in losses[1:]:
        was_in_spike, in_spike = in_spike, loss > 2 * median(recent)
        spikes += in_spike and not was_in_spike
        if not in_spike:
            recent = [*recent, loss][-20:]
    return Stability(spikes, in_spike or median(losses[-20:]) > losses[0])


# Curves as CSV


def read_arms(paths: Sequence[str]) -> list[Arm]:
    """Read arms from CSV files with one row per evaluation, in the format of curves.csv.

    The columns arm, step and fid are required. The columns seed, images and repeat, and columns of
    other metrics, are optional. A row with repeat 1, 2, ... contains a further FID of the last
    step, computed from a new set of samples. An FID that is empty, nan or infinite is read as NaN.

    Raises:
        OSError: if a file cannot be read.
        ValueError: if columns are missing, cells are not numbers, or there are no rows.
    """
    rows: dict[str, dict[str, list[dict[str, float]]]] = {}
    for path in paths:
        with checked_read(path, "CSV file in UTF-8") as csv_path:
            text = csv_path.read_text("utf-8-sig")  # spreadsheets write a BOM
            reader = csv.DictReader(io.StringIO(text, newline=""), skipinitialspace=True)
            lines = [(reader.line_num, row) for row in reader]
        columns = reader.fieldnames or ()
        if missing := [name for name in ("arm", "step", "fid") if name not in columns]:
            raise ValueError(
                f"{path} needs the columns arm, step and fid, and has no {', '.join(missing)}."
            )
        for line, row in lines:
            numbers = _parse_row(row, f"{path}, line {line}")
            seeds = rows.setdefault(row["arm"], {})
            seeds.setdefault(row.get("seed") or "0", []).append(numbers)
    if not rows:
        raise ValueError(f"there are no rows in {', '.join(paths)}.")
    return [
        Arm(arm, tuple(_build_curve(arm, seed, each) for seed, each in seeds.items()))
        for arm, seeds in rows.items()
    ]


def _parse_row(row: Mapping[str, str], where: str) -> dict[str, float]:
    if not row["arm"]:
        raise ValueError(f"{where}: the arm has no name.")
    defaults = {"step": "", "repeat": "0", "fid": "nan", "images": "nan"}
    numbers = {}
    for name in (*defaults, *(name for name in OTHER_METRICS if row.get(name))):
        text = row.get(name, "")
        try:
            numbers[name] = float(text if text != "" else defaults[name])
        except (TypeError, ValueError):  # TypeError for None, in short rows
            raise ValueError(f"{where}: {name} must be a number, got {text!r}.") from None
    if math.isinf(numbers["fid"]):
        numbers["fid"] = math.nan
    return numbers


def _build_curve(arm: str, seed: str, rows: list[dict[str, float]]) -> Curve:
    rows = sorted(rows, key=lambda row: (row["step"], row["repeat"]))
    points = [row for row in rows if not row["repeat"]]
    steps, fids, images = (tuple(row[k] for row in points) for k in ("step", "fid", "images"))
    repeats = tuple(row["fid"] for row in rows if row["repeat"] and row["step"] in steps[-1:])
    others = tuple({k: v for k, v in row.items() if k in OTHER_METRICS} for row in points)
    try:
        return Curve(
            seed,
            steps,
            fids,
            None if any(map(math.isnan, images)) else images,
            repeats,
            others if any(others) else (),
        )
    except ValueError as error:
        raise ValueError(f"arm {arm}, {error}") from error
