"""The tables of a comparison: for people as text, for programs as numbers."""

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any, TypeVar

from lit_diffusion.analysis.comparison import Arm, Comparison, mean_crossing
from lit_diffusion.analysis.curves import (
    Bound,
    Crossing,
    late_oscillation,
    late_wobble,
    paired_spread,
    sampling_spread,
)
from lit_diffusion.analysis.markdown import escaped
from lit_diffusion.analysis.stability import Stability
from lit_diffusion.analysis.wording import (
    fid_text,
    p_text,
    reached_text,
    verdict_text,
)

T = TypeVar("T")


@dataclass(frozen=True)
class Table:
    """Text in rows and columns.

    Attributes:
        caption: a sentence that says what is shown.
        columns: (C,) heads.
        rows: each (C,), beginning with what the row is about.
        text_columns: heads of the columns that hold words, not numbers.
    """

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    text_columns: tuple[str, ...] = ()

    def markdown(self) -> str:
        """As a table in Markdown, under its caption.

        Example:
            >>> print(Table("FIDs.", ("arm", "FID"), (("a", "2.1"),)).markdown())
            FIDs.
            <BLANKLINE>
            | arm | FID |
            |---|---|
            | a | 2.1 |
        """
        lines = [self.columns, ("---",) * len(self.columns), *self.rows]
        cells = [[escaped(cell) for cell in line] for line in lines]
        text = ["| " + " | ".join(line) + " |" for line in cells]
        text[1] = "|" + "---|" * len(self.columns)
        return "\n".join([escaped(self.caption), "", *text])


@dataclass(frozen=True)
class Mean:
    """FIDs of one arm at one step.

    Attributes:
        mean: over the seeds with a finite FID.
        sd: their standard deviation; None for one seed.
        count: of them.
        seeds: of the arm that were evaluated there.
    """

    mean: float
    sd: float | None
    count: int
    seeds: int

    def __str__(self) -> str:
        """Mean +- sd, and of how many seeds where some are not finite."""
        lacking = "" if self.count == self.seeds else f" ({self.count} of {self.seeds} seeds)"
        return f"{fid_text(self.mean, self.sd)}{lacking}"


def mean_fid(arm: Arm, step: float) -> Mean | None:
    """Mean FID of an arm over its seeds; None at a step where none has a finite FID."""
    found = [fid for curve in arm.curves if (fid := curve.at(step)) is not None]
    finite = [fid for fid in found if math.isfinite(fid)]
    if not finite:
        return None
    return Mean(fmean(finite), stdev(finite) if len(finite) > 1 else None, len(finite), len(found))


def common_steps(arms: Sequence[Arm]) -> list[float]:
    """Steps at which every run of every arm was evaluated; of the first arm, if there are none."""
    shared = [set.intersection(*(set(c.steps) for c in arm.curves)) for arm in arms]
    return sorted(set.intersection(*shared) or shared[0])


def spread_out(steps: Sequence[T], limit: int) -> list[T]:
    """At most `limit` of the steps, the last among them, at equal distances where that is possible.

    Example:
        >>> spread_out([1, 2, 3, 4, 5, 6, 7, 8], 5)
        [2, 4, 6, 8]
    """
    even = (n for n in range(min(limit, len(steps)), 2, -1) if len(steps) % n == 0)
    count = next(even, min(limit, len(steps)))
    return [steps[round((k + 1) * len(steps) / count) - 1] for k in range(count)]


def verdict_table(comparison: Comparison, unit: str = "steps") -> Table:
    """An arm a row, with its verdict.

    Args:
        comparison: whose arms.
        unit: in which the way to the target is measured.
    """
    target = fid_text(comparison.target)
    base = comparison.baseline
    rows = [(*_steps_cells(base, comparison.crossings), "-", "-", "baseline")]
    for r in comparison.results:
        told = (p_text(r.speedup.p), p_text(r.holm_p), verdict_text(r, comparison))
        rows.append((*_steps_cells(r.arm, r.crossings), *told))
    return Table(
        f"{unit.capitalize()} to FID {target}: geometric means over seeds. Speed-ups have their "
        f"95% interval. p (Holm) is corrected for the number of tests, {comparison.num_tests}.",
        ("arm", "seeds that reach it", unit, "p", "p (Holm)", "verdict"),
        tuple(rows),
        text_columns=("verdict",),
    )


def _steps_cells(arm: Arm, crossings: Sequence[Crossing]) -> tuple[str, str, str]:
    return arm.name, reached_text(crossings), str(mean_crossing(crossings))


def fid_table(arms: Sequence[Arm], limit: int = 6) -> Table:
    """FID by arm and step, in the manner of the paper's Tables 2 and 3."""
    steps = spread_out(common_steps(arms), limit)
    rows = [(arm.name, *(str(mean_fid(arm, step) or "-") for step in steps)) for arm in arms]
    heads = ("arm", *(f"{step:,.0f}" for step in steps))
    return Table(
        "FID after so many steps: mean +- standard deviation over seeds.", heads, tuple(rows)
    )


def steadiness_table(arms: Sequence[Arm]) -> Table:
    """Late oscillation, and how much an FID varies with the samples and with the training seed."""
    rows = []
    for arm in arms:
        sampling = sampling_spread(arm.curves)
        rows.append(
            (
                arm.name,
                _percent(_mean_known(late_oscillation(curve) for curve in arm.curves)),
                _percent(_mean_known(late_wobble(curve) for curve in arm.curves)),
                _percent(_seed_spread(arm)),
                f"{_percent(sampling.sd)} ({sampling.degrees} repeats)" if sampling else "-",
            )
        )
    return Table(
        "Standard deviations of log FID, as percent of the FID. Late oscillation: over the last "
        "third of the steps, mean over seeds; a steady descent counts too. About a line: about the "
        "straight line through log FID there. Training seeds: of the last FID. "
        "Samples: of the last FID, over sets of samples from the same weights; the difference of "
        f"two from different sets varies by 1.4 times that.{_left_between_runs(arms)}",
        (
            "arm",
            "late oscillation",
            "the same about a line",
            "between training seeds",
            "between sets of samples",
        ),
        tuple(rows),
    )


def _left_between_runs(arms: Sequence[Arm]) -> str:
    """What part of the spread over samples is not the same in all runs."""
    left = paired_spread(curve for arm in arms for curve in arm.curves)
    if left is None:
        return ""
    return (
        f" Less the mean of each set over all runs, {_percent(left.sd)} is left ({left.degrees} "
        "degrees of freedom), and the difference of two runs on the same set varies by 1.4 times "
        "that."
    )


def stability_table(runs: Mapping[str, Sequence[Stability]], every: str) -> Table:
    """How many runs of each arm diverged or spiked.

    Args:
        runs: of each arm, by its name; also those that got no FID.
        every: how often their losses were looked at, in words.
    """
    rows = [
        (
            name,
            str(len(found)),
            str(sum(run.diverged for run in found)),
            str(sum(run.spikes > 0 and not run.diverged for run in found)),
            f"{sum(not run.stable for run in found)} of {len(found)}",
        )
        for name, found in runs.items()
    ]
    return Table(
        f"From the training loss of {every}, with runs that take no part above. Diverged: the loss "
        "was not finite, did not come back from a jump, or ended above where it began. Spiking: it "
        "jumped above twice the median of the up to 20 such losses before, and came back.",
        ("arm", "runs", "diverged", "spiking", "unstable"),
        tuple(rows),
    )


def speedup_records(comparison: Comparison) -> list[dict[str, Any]]:
    """A row an arm, as numbers: what `verdict_table` tells."""
    base = comparison.baseline
    first = _record(base, comparison.crossings) | {"verdict": "baseline"}
    others = [
        _record(r.arm, r.crossings)
        | {
            "speedup": r.speedup.ratio,
            "low": r.speedup.low,
            "high": r.speedup.high,
            "is_lower_bound": r.speedup.is_lower_bound,
            "is_upper_bound": r.speedup.is_upper_bound,
            "at_fid": r.at,
            "p": r.speedup.p,
            "p_holm": r.holm_p,
            "p_end": r.end.p if r.end else None,
            "verdict": r.verdict.value,
        }
        for r in comparison.results
    ]
    return [row | {"target": comparison.target} for row in (first, *others)]


def _record(arm: Arm, crossings: Sequence[Crossing]) -> dict[str, Any]:
    mean = mean_crossing(crossings)
    missed = sum(crossing.bound is Bound.MORE_THAN for crossing in crossings)
    return {
        "arm": arm.name,
        "seeds": len(arm.curves),
        "reached": len(arm.curves) - missed,
        "steps": None if mean.bound is Bound.UNKNOWN else mean.step,
        "bound": mean.bound.value.strip(),
    }


def fid_records(arms: Sequence[Arm]) -> list[dict[str, Any]]:
    """A row an arm and step."""
    rows = []
    for arm in arms:
        for step in sorted({step for curve in arm.curves for step in curve.steps}):
            mean = mean_fid(arm, step)
            row = {"arm": arm.name, "step": step, "seeds": sum(step in c.steps for c in arm.curves)}
            if mean is not None:
                row |= {"finite": mean.count, "mean": mean.mean, "sd": mean.sd}
            rows.append(row)
    return rows


def curve_records(arms: Sequence[Arm]) -> list[dict[str, Any]]:
    """A row an evaluation: what the whole comparison is made of."""
    return [
        {"arm": arm.name, "seed": curve.seed, "step": step, "fid": fid, "images": images}
        for arm in arms
        for curve in arm.curves
        for step, fid, images in zip(
            curve.steps, curve.fids, curve.images or [None] * len(curve.steps), strict=True
        )
    ]


def to_csv(records: Iterable[Mapping[str, Any]]) -> str:
    """Records as CSV, with a column for every name; None is empty, whole numbers have no point.

    Example:
        >>> print(to_csv([{"arm": "a", "step": 100.0}, {"arm": "b", "fid": 2.5}]), end="")
        arm,step,fid
        a,100,
        b,,2.5
    """
    rows = list(records)
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _plain(value) for name, value in row.items()} for row in rows)
    return text.getvalue()


def _plain(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _mean_known(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _seed_spread(arm: Arm) -> float | None:
    logs = [math.log(c.fids[-1]) for c in arm.curves if math.isfinite(c.fids[-1])]
    return stdev(logs) if len(logs) > 1 else None


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}%"
