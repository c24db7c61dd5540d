"""FID curves: when a run reaches a target, how steady it is, and how sure one FID is.

An arm is one way to train, as in a clinical trial: a config whose runs differ in the seed alone.
Each run has a curve, its FIDs by optimizer steps.
"""

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate, pairwise
from statistics import fmean, linear_regression, median, stdev
from typing import NamedTuple

from lit_diffusion.metrics.auxiliary_metrics import DISTANCES, FRACTIONS

OTHER_METRICS = (*DISTANCES, *(f"{name} floor" for name in DISTANCES), *FRACTIONS)
"""Columns of a CSV file with other metrics of the same samples."""


class Bound(Enum):
    """How far the step of a crossing is determined."""

    EXACT = ""
    AT_MOST = "<= "
    MORE_THAN = "> "
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Crossing:
    """When a run reached a target.

    Attributes:
        step: step of the crossing, or of the evaluation that bounds it.
        bound: AT_MOST if the first evaluation was good enough, MORE_THAN if none was (censored),
            UNKNOWN for a mean over both.
    """

    step: float
    bound: Bound = Bound.EXACT

    def __str__(self) -> str:
        """As tables show it: "1,893", "> 4,000" or "unknown"."""
        steps = "" if self.bound is Bound.UNKNOWN else f"{self.step:,.0f}"
        return f"{self.bound.value}{steps}"


def mean_crossing(crossings: Sequence[Crossing]) -> Crossing:
    """Geometric mean of steps: a bound where some are bounds, unknown where those disagree."""
    bounds = {crossing.bound for crossing in crossings} - {Bound.EXACT}
    if len(bounds) > 1:
        return Crossing(math.nan, Bound.UNKNOWN)
    return Crossing(math.exp(fmean(math.log(crossing.step) for crossing in crossings)), *bounds)


@dataclass(frozen=True)
class Curve:
    """FIDs of one training run.

    Args:
        seed: name of the run within its arm.
        steps: (N,) optimizer steps, or images seen; increasing from 0 or more, the last > 0.
        fids: (N,) > 0; NaN where the samples were not finite.
        images: (N,) training images seen by then, increasing; None if not recorded.
        repeats: FIDs of the last weights from other samples, beside `fids[-1]`.
        other_metrics: (N,) other metrics of the samples of each FID, by name; () if not recorded.

    Raises:
        ValueError: If lengths differ, steps are not as above, or an FID is not positive.
    """

    seed: str
    steps: tuple[float, ...]
    fids: tuple[float, ...]
    images: tuple[float, ...] | None = None
    repeats: tuple[float, ...] = ()
    other_metrics: tuple[Mapping[str, float], ...] = ()

    def __post_init__(self) -> None:
        steps, who = self.steps, f"seed {self.seed}:"
        if not steps or {len(self.fids), len(self.images or steps)} != {len(steps)}:
            raise ValueError(
                f"{who} a curve needs as many FIDs as steps, and one at least, got "
                f"{len(self.fids)} for {len(steps)}."
            )
        if steps[0] < 0 or not 0 < steps[-1] < math.inf:
            ends = f"{steps[0]:g} to {steps[-1]:g}"
            raise ValueError(
                f"{who} steps must be finite and >= 0, the last of them > 0, got {ends}."
            )
        for name, axis in (("steps", steps), ("images seen", self.images or ())):
            for before, after in pairwise(axis):
                if not before < after:
                    raise ValueError(f"{who} {name} must increase, got {after:g} after {before:g}.")
        if wrong := [fid for fid in (*self.fids, *self.repeats) if fid <= 0]:
            raise ValueError(f"{who} FIDs must be > 0, got {wrong[0]:g}.")

    @property
    def finite(self) -> tuple[list[float], list[float]]:
        """Steps and FIDs of the evaluations that gave a number."""
        points = [(s, f) for s, f in zip(self.steps, self.fids, strict=True) if math.isfinite(f)]
        return [step for step, _ in points], [fid for _, fid in points]

    @property
    def best(self) -> float:
        """The lowest FID; infinite where none is finite."""
        return min(self.finite[1], default=math.inf)

    def at(self, step: float) -> float | None:
        """The FID at a step; None where it was not evaluated."""
        return dict(zip(self.steps, self.fids, strict=True)).get(step)

    def crossing(self, target: float) -> Crossing:
        """When the running minimum of the FID first reaches a target > 0.

        Log FID is interpolated linearly between the evaluations k - 1 and k around the crossing:
        step = s_{k-1} + (s_k - s_{k-1}) (log m_{k-1} - log target) / (log m_{k-1} - log m_k),
        where m is the running minimum, which skips NaN.

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
            # Not step 0, where the untrained network is evaluated: it has no logarithm.
            return Crossing(next(step for step in steps[k:] if step > 0), Bound.AT_MOST)
        share = math.log(lowest[k - 1] / target) / math.log(lowest[k - 1] / lowest[k])
        return Crossing(steps[k - 1] + share * (steps[k] - steps[k - 1]))


@dataclass(frozen=True)
class Arm:
    """Runs that differ in their seed alone: a curve per seed, at least one."""

    name: str
    curves: tuple[Curve, ...]

    def __post_init__(self) -> None:
        seeds = [curve.seed for curve in self.curves]
        if len(set(seeds)) < len(seeds):
            raise ValueError(f"{self.name} has a seed twice: {', '.join(sorted(seeds))}.")

    @property
    def reached_by_all(self) -> float:
        """The lowest FID that every seed reached; infinite where one has no finite FID."""
        return max(curve.best for curve in self.curves)

    @property
    def median_best(self) -> float:
        """The lowest FID of the median seed; infinite where that one has no finite FID."""
        return median(curve.best for curve in self.curves)

    @property
    def nonfinite_ends(self) -> int:
        """Number of seeds whose last FID is not finite."""
        return sum(not math.isfinite(curve.fids[-1]) for curve in self.curves)

    @property
    def images_per_step(self) -> float | None:
        """Training images per optimizer step, the mean over runs; None if a run lacks it."""
        rates = [curve.images[-1] / curve.steps[-1] for curve in self.curves if curve.images]
        return fmean(rates) if len(rates) == len(self.curves) else None

    def fids_at(self, step: float) -> list[float]:
        """FIDs at a step, of the seeds that were evaluated there."""
        return [fid for curve in self.curves if (fid := curve.at(step)) is not None]

    def crossings(self, target: float) -> tuple[Crossing, ...]:
        """When each seed reached a target."""
        return tuple(curve.crossing(target) for curve in self.curves)


# How steady curves are, and how sure one FID is


def late_spreads(curve: Curve) -> tuple[float, float] | None:
    """Standard deviation of log FID over the last third of the steps, and that about its trend.

    The first counts a steady descent too. The second, about the line of least squares, is
    sqrt(sum of squared residuals / (n - 2)), and 0 for a curve that keeps falling evenly. None with
    fewer than three finite FIDs there.

    Source: the claim under Fig. 5 of "Why Diffusion Models are Stable and How to Make Them Faster".
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
    """A standard deviation of log FID (about that of FID, relative) and its degrees of freedom."""

    sd: float
    degrees: int


def sampling_spread(curves: Iterable[Curve]) -> Spread | None:
    """Spread of the last FID over sets of samples from the same weights.

    Variances of log FID are pooled over the runs, so differences between runs do not count. None
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
    """Spread of the last FID over sets of samples, less what all runs owe to a set.

    With log FID x_rk of run r from its k-th set, the residuals x_rk - mean_k - mean_r + mean have
    (runs - 1) (sets - 1) degrees of freedom. Where the k-th sets of the runs are not the same, they
    share nothing, and this estimates `sampling_spread`. Runs with equal numbers of repeats, all of
    them finite, are pooled; None without two such runs.
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


@dataclass(frozen=True)
class Stability:
    """How steadily a training loss fell: the number of spikes, and whether it diverged."""

    spikes: int
    diverged: bool

    @property
    def stable(self) -> bool:
        """Whether it neither spiked nor diverged."""
        return not (self.spikes or self.diverged)


def loss_stability(losses: Sequence[float]) -> Stability:
    """Count spikes of a training loss, each once however long it lasts, and detect divergence.

    A spike is a loss above twice the median of the up to 20 losses before it, spikes excluded; it
    lasts until the loss is below that again. (A factor of 2 is beyond the scatter of a diffusion
    loss over 64 images.) The loss diverged if it is not finite at some step, if its last spike
    does not end, or if the median of the last 20 is above the first.
    """
    if not all(math.isfinite(loss) for loss in losses):
        return Stability(0, True)
    calm, spikes, in_spike = [losses[0]], 0, False
    for loss in losses[1:]:
        was_in_spike, in_spike = in_spike, loss > 2 * median(calm)
        spikes += in_spike and not was_in_spike
        if not in_spike:
            calm = [*calm, loss][-20:]
    return Stability(spikes, in_spike or median(losses[-20:]) > losses[0])


# Curves as CSV


def read_arms(paths: Sequence[str]) -> list[Arm]:
    """Read arms from CSV files with a row per evaluation, as `compare` writes curves.csv.

    The columns arm, step and fid are needed; seed, images, repeat and other metrics may be there.
    Rows with a repeat of 1, 2, ... hold FIDs of the last step from other samples. An FID that is
    empty, nan or infinite was not finite.

    Raises:
        OSError: for a file that cannot be read.
        ValueError: for missing columns, cells that are no numbers, and no rows at all.
    """
    rows: dict[str, dict[str, list[dict[str, float]]]] = {}
    for path in paths:
        try:
            with open(path, newline="", encoding="utf-8-sig") as file:  # spreadsheets write a BOM
                reader = csv.DictReader(file, skipinitialspace=True)
                columns = reader.fieldnames or ()
                if missing := [name for name in ("arm", "step", "fid") if name not in columns]:
                    raise ValueError(
                        f"{path} needs the columns arm, step and fid, and has no "
                        f"{', '.join(missing)}."
                    )
                for row in reader:
                    numbers = _numbers(row, f"{path}, line {reader.line_num}")
                    seeds = rows.setdefault(row["arm"], {})
                    seeds.setdefault(row.get("seed") or "0", []).append(numbers)
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8: {error.reason}; save it as that.") from error
        except csv.Error as error:
            raise ValueError(f"{path} is no CSV file: {error}.") from error
    if not rows:
        raise ValueError(f"there are no rows in {', '.join(paths)}.")
    return [
        Arm(arm, tuple(_curve(arm, seed, each) for seed, each in seeds.items()))
        for arm, seeds in rows.items()
    ]


def _numbers(row: Mapping[str, str], where: str) -> dict[str, float]:
    if not row["arm"]:
        raise ValueError(f"{where}: the arm has no name.")
    defaults = {"step": "", "repeat": "0", "fid": "nan", "images": "nan"}
    numbers = {}
    for name in (*defaults, *(name for name in OTHER_METRICS if row.get(name))):
        text = row.get(name, "")
        try:
            numbers[name] = float(text if text != "" else defaults[name])
        except (TypeError, ValueError):  # TypeError for None, where a row is short
            raise ValueError(f"{where}: {name} must be a number, got {text!r}.") from None
    if math.isinf(numbers["fid"]):
        numbers["fid"] = math.nan
    return numbers


def _curve(arm: str, seed: str, rows: list[dict[str, float]]) -> Curve:
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
