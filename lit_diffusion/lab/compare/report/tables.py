"""The tables of a comparison: for people as text, for programs as numbers."""

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, stdev
from typing import Any, NamedTuple, TypeVar

from lit_diffusion.lab.compare.comparison import Arm, Comparison, Result, mean_crossing
from lit_diffusion.lab.compare.curves import (
    Bound,
    Curve,
    late_oscillation,
    late_wobble,
    paired_spread,
    sampling_spread,
)
from lit_diffusion.lab.compare.report.markdown import escaped
from lit_diffusion.lab.compare.report.wording import fid_text, p_text, reached_text, verdict_text

T = TypeVar("T")


@dataclass(frozen=True)
class Table:
    """Rows of (C,) cells under (C,) heads; `text_columns` hold words, not numbers."""

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
            | --- | ---: |
            | a | 2.1 |
        """
        words = {self.columns[0], *self.text_columns}
        sides = ["---" if name in words else "---:" for name in self.columns]
        head, *rows = ([escaped(cell) for cell in line] for line in (self.columns, *self.rows))
        lines = ["| " + " | ".join(line) + " |" for line in (head, sides, *rows)]
        return "\n".join([escaped(self.caption), "", *lines])


class MeanFID(NamedTuple):
    """Of an arm at a step: mean and sd (None for one) of its `finite` FIDs, of `seeds` seeds."""

    mean: float
    sd: float | None
    finite: int
    seeds: int

    def __str__(self) -> str:
        """Mean +- sd, and of how many seeds where some are not finite."""
        lacking = "" if self.finite == self.seeds else f" ({self.finite} of {self.seeds} seeds)"
        return f"{fid_text(self.mean, self.sd)}{lacking}"


def mean_fid(arm: Arm, step: float) -> MeanFID | None:
    """Mean FID of an arm over its seeds; None at a step where none has a finite FID."""
    found = [fid for curve in arm.curves if (fid := curve.at(step)) is not None]
    finite = [fid for fid in found if math.isfinite(fid)]
    if not finite:
        return None
    sd = stdev(finite) if len(finite) > 1 else None
    return MeanFID(fmean(finite), sd, len(finite), len(found))


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
    """An arm a row, with its verdict."""
    base, target = comparison.baseline, fid_text(comparison.target)
    told = {
        r.arm.name: (p_text(r.speedup.p), p_text(r.holm_p), verdict_text(r, comparison))
        for r in comparison.results
    } | {base.name: ("-", "-", "baseline")}
    rows = [
        (name, reached_text(crossings), str(mean_crossing(crossings)), *told[name])
        for name, crossings in comparison.crossings_by_arm().items()
    ]
    return Table(
        f"{unit.capitalize()} to FID {target}: geometric means over seeds. Speed-ups have their "
        f"95% interval. p (Holm) is corrected for the number of tests, {comparison.num_tests}.",
        ("arm", "seeds that reach it", unit, "p", "p (Holm)", "verdict"),
        tuple(rows),
        text_columns=("verdict",),
    )


def fid_table(arms: Sequence[Arm]) -> Table:
    """FID by arm and step, in the manner of the paper's Tables 2 and 3."""
    steps = spread_out(common_steps(arms), 6)
    rows = [(arm.name, *(str(mean_fid(arm, step) or "-") for step in steps)) for arm in arms]
    heads = ("arm", *(f"{step:,.0f}" for step in steps))
    caption = "FID after so many steps: mean +- standard deviation over seeds."
    return Table(caption, heads, tuple(rows))


def steadiness_table(arms: Sequence[Arm]) -> Table:
    """Late oscillation, and how much an FID varies with the samples and with the training seed."""
    rows = []
    for arm in arms:
        sampling = sampling_spread(arm.curves)
        lasts = [math.log(c.fids[-1]) for c in arm.curves if math.isfinite(c.fids[-1])]
        oscillation = _mean_percent(map(late_oscillation, arm.curves))
        about_line = _mean_percent(map(late_wobble, arm.curves))
        seeds = _mean_percent([stdev(lasts)] if len(lasts) > 1 else [])
        sets = f"{100 * sampling.sd:.1f}% ({sampling.degrees} repeats)" if sampling else "-"
        rows.append((arm.name, oscillation, about_line, seeds, sets))
    heads = ("late oscillation", "the same about a line", "between training seeds")
    return Table(
        "Standard deviations of log FID, as percent of the FID. Late oscillation: over the last "
        "third of the steps, mean over seeds; a steady descent counts too. About a line: about the "
        "straight line through log FID there. Training seeds: of the last FID. "
        "Samples: of the last FID, over sets of samples from the same weights; the difference of "
        f"two from different sets varies by 1.4 times that.{_left_between_runs(arms)}",
        ("arm", *heads, "between sets of samples"),
        tuple(rows),
    )


def _left_between_runs(arms: Sequence[Arm]) -> str:
    """What part of the spread over samples is not the same in all runs."""
    left = paired_spread(curve for arm in arms for curve in arm.curves)
    if left is None:
        return ""
    return (
        f" Less the mean of each set over all runs, {100 * left.sd:.1f}% is left ({left.degrees} "
        "degrees of freedom), and the difference of two runs on the same set varies by 1.4 times "
        "that."
    )


def _mean_percent(values: Iterable[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{100 * fmean(known):.1f}%" if known else "-"


def speedup_records(comparison: Comparison) -> list[dict[str, Any]]:
    """A row an arm, as numbers: what `verdict_table` says."""
    results = {result.arm.name: _result_record(result) for result in comparison.results}
    rows = []
    for name, crossings in comparison.crossings_by_arm().items():
        mean = mean_crossing(crossings)
        row = {
            "arm": name,
            "seeds": len(crossings),
            "reached": sum(crossing.bound is not Bound.MORE_THAN for crossing in crossings),
            "steps": None if mean.bound is Bound.UNKNOWN else mean.step,
            "bound": mean.bound.value.strip(),
        }
        found = results.get(name, {"verdict": "baseline"})
        rows.append(row | found | {"target": comparison.target})
    return rows


def _result_record(result: Result) -> dict[str, Any]:
    found = asdict(result.speedup)
    ratio, p, end = found.pop("ratio"), found.pop("p"), result.end
    tests = {"p": p, "p_holm": result.holm_p, "p_end": end.p if end else None}
    at = {"at_fid": result.at}
    return {"speedup": ratio, **found, **at, **tests, "verdict": result.verdict.value}


def fid_records(arms: Sequence[Arm]) -> list[dict[str, Any]]:
    """A row an arm and step."""
    rows = []
    for arm in arms:
        for step in sorted({step for curve in arm.curves for step in curve.steps}):
            mean = mean_fid(arm, step)
            row = {"arm": arm.name, "step": step, "seeds": sum(step in c.steps for c in arm.curves)}
            if mean is not None:
                row |= {"finite": mean.finite, "mean": mean.mean, "sd": mean.sd}
            rows.append(row)
    return rows


def curve_records(arms: Sequence[Arm]) -> list[dict[str, Any]]:
    """A row an evaluation: what the whole comparison is made of, as `read_arms` reads it."""
    return [row for arm in arms for curve in arm.curves for row in _curve_rows(arm.name, curve)]


def _curve_rows(arm: str, curve: Curve) -> list[dict[str, Any]]:
    images = curve.images or [None] * len(curve.steps)
    found = [(*point, 0) for point in zip(curve.steps, images, curve.fids, strict=True)]
    found += [(curve.steps[-1], images[-1], fid, k) for k, fid in enumerate(curve.repeats, start=1)]
    names = ("step", "images", "fid", "repeat")
    rows = [{"arm": arm, "seed": curve.seed, **dict(zip(names, row, strict=True))} for row in found]
    looks: list[Mapping[str, float]] = [*curve.looks, *({} for _ in rows[len(curve.looks) :])]
    return [{**row, **look} for row, look in zip(rows, looks, strict=True)]


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
