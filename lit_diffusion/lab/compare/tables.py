"""Tables of a comparison: Markdown for reading, and CSV records for programs."""

import csv
import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from statistics import fmean, stdev
from typing import Any, NamedTuple, TypeVar

from lit_diffusion.lab.compare.comparison import Comparison, Result, Verdict
from lit_diffusion.lab.compare.curves import (
    Arm,
    Bound,
    Crossing,
    late_spreads,
    mean_crossing,
    paired_spread,
    sampling_spread,
)
from lit_diffusion.lab.compare.statistics import (
    Speedup,
    TTest,
    holm,
    last_fid_by_seed,
    shared_seeds,
    speedup_by_seed,
)
from lit_diffusion.metrics.auxiliary_metrics import DISTANCES, FRACTIONS

T = TypeVar("T")

_MARKUP = re.compile(
    r"""[\\`*~|]               # escapes, code, bold, strike-through, cells
    | (?<![A-Za-z0-9])_        # italics, but not inside of words
    | _(?![A-Za-z0-9])
    | <(?=[A-Za-z/!?])         # tags and addresses
    | &(?=\#?\w+;)             # entities
    | (?<=\])[(\[]             # links
    | ^(?:\#|>(?!\s\d)|[+-](?=\s))  # titles, quotes (but not bounds: > 4,000), lists
    """,
    re.VERBOSE,
)


def escape_markdown(text: str) -> str:
    r"""Escape Markdown in a text, and join its lines.

    Example:
        >>> print(escape_markdown("a|b **bold** <b> num_fake < 5 [1.2, 1.5]"))
        a\|b \*\*bold\*\* \<b> num_fake < 5 [1.2, 1.5]
    """
    return _MARKUP.sub(r"\\\g<0>", " ".join(text.split()))


class Table(NamedTuple):
    """A table of text cells, with a caption, column heads, and rows."""

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        """Format the table in Markdown, under its caption.

        Example:
            >>> print(Table("FIDs.", ("arm", "FID"), (("a", "2.1"),)).markdown())
            FIDs.
            <BLANKLINE>
            | arm | FID |
            | --- | --- |
            | a | 2.1 |
        """
        head, *rows = [map(escape_markdown, row) for row in (self.columns, *self.rows)]
        lines = [
            "| " + " | ".join(row) + " |" for row in (head, ["---"] * len(self.columns), *rows)
        ]
        return "\n".join([escape_markdown(self.caption), "", *lines])


# Formatting of numbers


def format_fid(fid: float, sd: float | None = None) -> str:
    """Format an FID and its standard deviation, both with the same number of decimals.

    Example:
        >>> format_fid(0.40734), format_fid(6.04, 0.1234), format_fid(123.4)
        ('0.407', '6.04 +- 0.12', '123.4')
    """
    if not math.isfinite(fid):
        return "not finite"
    places = 3 if fid < 1 else 2 if fid < 100 else 1
    return f"{fid:.{places}f}" + ("" if sd is None else f" +- {sd:.{places}f}")


def format_mean(values: Sequence[float]) -> str:
    """Format mean +- standard deviation of the finite values; "-" if there are none.

    Example:
        >>> format_mean([4.0, 6.0]), format_mean([2.0, math.nan])
        ('5.00 +- 1.41', '2.00 (1 of 2 seeds)')
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return "-"
    seeds = f" ({len(finite)} of {len(values)} seeds)" * (len(finite) < len(values))
    return format_fid(fmean(finite), stdev(finite) if len(finite) > 1 else None) + seeds


def format_p(p: float | None) -> str:
    """Format a p-value, such as "0.017" or "< 0.001"; "-" for None.

    Example:
        >>> format_p(0.0172), format_p(0.0002), format_p(None)
        ('0.017', '< 0.001', '-')
    """
    return "-" if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}" if p < 0.1 else f"{p:.2f}"


def format_equation(p: float | None) -> str:
    """Format a p-value in a sentence, such as "p = 0.017" or "p < 0.001"."""
    text = format_p(p)
    return f"p {text}" if text[0] == "<" else f"p = {text}"


def format_ratio(ratio: float) -> str:
    """Format a ratio with three digits, such as 2.11 or 12.3."""
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:.3g}"


def format_speedup(speedup: Speedup) -> str:
    """Format a speed-up with its interval.

    Example:
        >>> format_speedup(Speedup(1.8, 1.5, 2.2, 0.01))
        '1.80x [1.50, 2.20]'
        >>> format_speedup(Speedup(1.8, 1.5, float("inf"), 0.01, is_lower_bound=True))
        'at least 1.80x [1.50, -]'
    """
    if speedup.is_lower_bound and speedup.is_upper_bound:
        return "unknown"
    bound = "at least " * speedup.is_lower_bound + "at most " * speedup.is_upper_bound
    text = f"{bound}{format_ratio(speedup.ratio)}x"
    if speedup.low is None or speedup.high is None:
        return text
    low = "-" if speedup.low == 0 else format_ratio(speedup.low)
    high = "-" if math.isinf(speedup.high) else format_ratio(speedup.high)
    return f"{text} [{low}, {high}]"


def format_target(result: Result, comparison: Comparison) -> str:
    """Format the FID to which a speed-up is measured, as in " to 0.306"; "" if it is the target.

    If this FID (`result.at`) differs from the target but both round to the same number, the text
    gives both with more digits, as in " to 0.2693, not 0.2691".
    """
    if result.at == comparison.target:
        return ""
    at, target, places = format_fid(result.at), format_fid(comparison.target), 3
    if at != target:
        return f" to {at}"
    while at == target and places < 12:
        places += 1
        at, target = f"{result.at:.{places}f}", f"{comparison.target:.{places}f}"
    return f" to {at}, not {target}"


def format_verdict(result: Result, comparison: Comparison) -> str:
    """Format the verdict on an arm, with the reason if it is faster but does not win."""
    text = str(result.verdict.value)
    if result.verdict is Verdict.WORSE:
        return f"{text} ({format_equation(result.end_p)})"
    if result.verdict is not Verdict.FASTER or not comparison.falls_short(result):
        return text
    if comparison.ends_higher(result):
        return f"{text}, but ends higher"
    reached = f"{result.num_reached} of {len(result.crossings)} seeds"
    return f"{text}, {reached} reach {format_fid(comparison.target)}"


# Tables of a comparison


def speedup_table(comparison: Comparison, unit: str = "steps") -> Table:
    """Make a table with one row per arm: steps to the target, speed-up, p-values and verdict."""

    def steps(name: str, crossings: Sequence[Crossing]) -> tuple[str, ...]:
        reached = sum(crossing.is_reached for crossing in crossings)
        return name, f"{reached} of {len(crossings)}", str(mean_crossing(crossings))

    base = comparison.baseline
    first = (*steps(base.name, base.crossings(comparison.target)), "-", "-", "-", "baseline")
    rows = [
        (
            *steps(result.arm.name, result.crossings),
            format_speedup(result.speedup) + format_target(result, comparison),
            format_p(result.speedup.p),
            format_p(result.holm_p),
            format_verdict(result, comparison),
        )
        for result in comparison.results
    ]
    return Table(
        f"{unit.capitalize()} to {comparison.metric} {format_fid(comparison.target)}: geometric "
        f"means over seeds. Speed-ups over {base.name} have 95% intervals. p (Holm) "
        f"is corrected for the number of tests, {comparison.num_tests}.",
        ("arm", "seeds that reach it", unit, "speed-up", "p", "p (Holm)", "verdict"),
        (first, *rows),
    )


def other_metrics_table(others: Mapping[str, Comparison]) -> Table | None:
    """Make a table of speed-ups by metrics other than FID; None if there are no such metrics."""
    if not others:
        return None
    cells: dict[str, dict[str, str]] = {}
    for name, other in others.items():
        for result in other.results:
            speed = format_speedup(result.speedup) + format_target(result, other)
            cells.setdefault(result.arm.name, {})[name] = f"{speed} {format_verdict(result, other)}"
    rows = tuple((arm, *(row.get(name, "-") for name in others)) for arm, row in cells.items())
    targets = ", ".join(f"{name} {format_fid(other.target)}" for name, other in others.items())
    caption = f"""Speed-ups over the baseline by other Frechet distances of the same samples. The
        target of each distance is the lowest value that all seeds of the baseline reach: {targets}.
        held-out: FID against held-out images. pixels and random-cnn (an untrained network): other
        features, against the same reference images as FID."""
    return Table(caption, ("arm", *others), rows)


def last_samples_table(arms: Sequence[Arm]) -> Table | None:
    """Make a table of all metrics of the last samples; None if only FID was recorded."""

    def last(arm: Arm, name: str) -> list[float]:
        metrics = [curve.other_metrics[-1] if curve.other_metrics else {} for curve in arm.curves]
        return [each[name] for each in metrics] if all(name in each for each in metrics) else []

    names = [name for name in (*DISTANCES, *FRACTIONS) if any(last(arm, name) for arm in arms)]
    if not names:
        return None
    rows = [
        (
            arm.name,
            format_mean([curve.fids[-1] for curve in arm.curves]),
            *(format_mean(last(arm, name)) for name in names),
        )
        for arm in arms
    ]
    floors = {
        name: next(filter(None, (last(a, f"{name} floor") for a in arms)), []) for name in names
    }
    real = ", ".join(f"{k} {format_fid(fmean(floor))}" for k, floor in floors.items() if floor)
    caption = f"""The last samples of each arm: mean +- standard deviation over seeds. Arms may have
        been trained for different numbers of steps. For real images: {real}. memorized: fraction
        of samples that are nearer to a training image than the median held-out image is."""
    return Table(caption, ("arm", "FID", *names), tuple(rows))


def common_steps(arms: Sequence[Arm]) -> list[float]:
    """List the steps at which all runs were evaluated.

    If no step is common to all runs, list the steps at which all runs of the first arm were
    evaluated.
    """
    shared = [set.intersection(*(set(c.steps) for c in arm.curves)) for arm in arms]
    return sorted(set.intersection(*shared) or shared[0])


def evenly_spaced(steps: Sequence[T], limit: int) -> list[T]:
    """Choose at most `limit` of the steps, including the last, with equal spacing if possible.

    Example:
        >>> evenly_spaced([1, 2, 3, 4, 5, 6, 7, 8], 5)
        [2, 4, 6, 8]
    """
    even = (n for n in range(min(limit, len(steps)), 2, -1) if len(steps) % n == 0)
    count = next(even, min(limit, len(steps)))
    return [steps[round((k + 1) * len(steps) / count) - 1] for k in range(count)]


def fid_table(comparison: Comparison) -> Table:
    """Make a table of FID by arm (rows) and step (columns)."""
    steps = evenly_spaced(common_steps(comparison.arms), 6)
    rows = [
        (arm.name, *(format_mean(arm.fids_at(step)) for step in steps)) for arm in comparison.arms
    ]
    heads = ("arm", *(f"{step:,.0f}" for step in steps))
    caption = f"{comparison.metric} after so many steps: mean +- standard deviation over seeds."
    return Table(caption, heads, tuple(rows))


def steadiness_table(comparison: Comparison) -> Table:
    """Make a table of the spread of FID: late in training, between seeds, between sample sets."""

    def percent(spread: float) -> str:
        return f"{100 * spread:.1f}%"

    metric, rows = comparison.metric, []
    for arm in comparison.arms:
        late_pairs = [spreads for curve in arm.curves if (spreads := late_spreads(curve))]
        means = [percent(fmean(values)) for values in zip(*late_pairs, strict=True)] or ["-", "-"]
        last_logs = [math.log(c.fids[-1]) for c in arm.curves if math.isfinite(c.fids[-1])]
        seeds = percent(stdev(last_logs)) if len(last_logs) > 1 else "-"
        sampling = sampling_spread(arm.curves)
        sets = f"{percent(sampling.sd)} ({sampling.degrees} repeats)" if sampling else "-"
        rows.append((arm.name, *means, seeds, sets))
    caption = f"""Standard deviations of log {metric}, in percent. Late oscillation: over the last
        third of the steps, mean over seeds; includes a steady descent. Around a line: around a
        least-squares line over the same steps. Between training seeds and between sets of samples:
        of the last value."""
    paired = paired_spread(curve for arm in comparison.arms for curve in arm.curves)
    if paired is not None:
        caption += (
            f" Without the effects that a set of samples has on all runs, {100 * paired.sd:.1f}% "
            f"remains between sets of samples ({paired.degrees} degrees of freedom)."
        )
    heads = ("late oscillation", "the same around a line", "between training seeds")
    return Table(caption, ("arm", *heads, "between sets of samples"), tuple(rows))


def by_seed_table(comparison: Comparison) -> Table | None:
    """Make a table of paired tests for arms that share seeds with the baseline.

    Returns:
        The table; None if no test is possible.
    """
    base, metric = comparison.baseline, comparison.metric
    results = [r for r in comparison.results if len(shared_seeds(r.arm, base)) > 1]
    speeds = [speedup_by_seed(result.arm, base, result.at) for result in results]
    lasts = [last_fid_by_seed(result.arm, base) for result in results]
    if not any((*speeds, *lasts)):
        return None
    adjusted = (holm([test.p if test else None for test in tests]) for tests in (speeds, lasts))
    rows = [
        (
            result.arm.name,
            str(len(shared_seeds(result.arm, base))),
            f"{_format_test(speed, 'x')}{format_target(result, comparison)}" if speed else "-",
            format_p(speed_p),
            _format_test(last) if last else "-",
            format_p(last_p),
        )
        for result, speed, last, speed_p, last_p in zip(
            results, speeds, lasts, *adjusted, strict=True
        )
    ]
    caption = f"""Runs with the same seed share initial weights, order of data, noise and sampling
        seeds, unless their arms differ in these. A comparison seed by seed removes the variation
        that they share. Paired t tests on logs, with 95% intervals; p-values are corrected (Holm)
        within a column. The last {metric} is the geometric mean over sets of samples, with equally
        many sets and after equally many steps for both arms."""
    last_head = f"last {metric} over {base.name}'s"
    heads = ("arm", "shared seeds", "speed-up", "p (speed-up)", last_head, f"p (last {metric})")
    return Table(caption, heads, tuple(rows))


def _format_test(test: TTest, unit: str = "") -> str:
    ratio, low, high = (
        f"{value:.2g}" if value < 0.1 else format_ratio(value)
        for value in map(math.exp, (test.difference, test.low, test.high))
    )
    return f"{ratio}{unit} [{low}, {high}]"


# Records for CSV files


def speedup_records(comparison: Comparison) -> list[dict[str, Any]]:
    """Make one record per arm, with the numbers of `speedup_table`."""
    results = {result.arm.name: result for result in comparison.results}
    rows = []
    for arm in comparison.arms:
        crossings = arm.crossings(comparison.target)
        mean = mean_crossing(crossings)
        row: dict[str, Any] = {
            "arm": arm.name,
            "seeds": len(crossings),
            "reached": sum(crossing.is_reached for crossing in crossings),
            "steps": None if mean.bound is Bound.UNKNOWN else mean.step,
            "bound": mean.bound.value.strip(),
        }
        if result := results.get(arm.name):
            speed = asdict(result.speedup)
            ratio, p = speed.pop("ratio"), speed.pop("p")
            row |= {"speedup": ratio, **speed, "at_fid": result.at}
            row |= {"p": p, "p_holm": result.holm_p, "p_end": result.end_p}
        row["verdict"] = result.verdict.value if result else "baseline"
        rows.append(row | {"target": comparison.target})
    return rows


def fid_records(arms: Sequence[Arm]) -> list[dict[str, Any]]:
    """Make one record per arm and step: mean and standard deviation of the seeds' finite FIDs."""
    rows = []
    for arm in arms:
        for step in sorted({step for curve in arm.curves for step in curve.steps}):
            fids = arm.fids_at(step)
            finite = [fid for fid in fids if math.isfinite(fid)]
            row: dict[str, Any] = {"arm": arm.name, "step": step, "seeds": len(fids)}
            if finite:
                sd = stdev(finite) if len(finite) > 1 else None
                row |= {"finite": len(finite), "mean": fmean(finite), "sd": sd}
            rows.append(row)
    return rows


def curve_records(arms: Sequence[Arm]) -> list[dict[str, Any]]:
    """Make one record per evaluation, in the format of `read_arms`."""
    rows: list[dict[str, Any]] = []
    for arm in arms:
        for curve in arm.curves:
            steps, run = curve.steps, {"arm": arm.name, "seed": curve.seed}
            images = curve.images or (None,) * len(steps)
            others = curve.other_metrics or ({},) * len(steps)
            for step, count, fid, other in zip(steps, images, curve.fids, others, strict=True):
                row = {"step": step, "images": count, "fid": fid, "repeat": 0}
                rows.append({**run, **row, **other})
            for k, fid in enumerate(curve.repeats, start=1):
                row = {"step": steps[-1], "images": images[-1], "fid": fid, "repeat": k}
                rows.append(run | row)
    return rows


def to_csv(records: Iterable[Mapping[str, Any]]) -> str:
    """Format records as CSV. None becomes an empty cell, and integers have no decimal point.

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
    for row in rows:
        is_whole = {k: isinstance(v, float) and v.is_integer() for k, v in row.items()}
        writer.writerow({k: int(v) if is_whole[k] else v for k, v in row.items()})
    return text.getvalue()
