"""Arms beside the baseline seed by seed: what runs of one seed have in common drops out."""

import math
from collections.abc import Iterable
from itertools import chain
from statistics import fmean, geometric_mean, stdev

from lit_diffusion.lab.compare.comparison import Arm, Comparison, Result
from lit_diffusion.lab.compare.curves import Bound, Curve
from lit_diffusion.lab.compare.report.tables import Table
from lit_diffusion.lab.compare.report.wording import p_text, ratio_text, to_text
from lit_diffusion.lab.compare.speedup import TTest, holm, t_test

_CAPTION = (
    "Runs of one seed share initial weights, order of data, noise and seeds of samples, unless "
    "their arms differ in these. What they share drops out of differences by seed: paired t test "
    "on logs, 95% intervals, p-values corrected (Holm) for the arms of each column. The last FID "
    "is over the baseline's after as many steps (below 1 is better), the geometric mean of as many "
    "sets of samples as both have. No number (-) where a run has no such FID or was trained for "
    "another number of steps. The verdicts above do not use this."
)


def paired(pairs: Iterable[tuple[float, float]]) -> TTest | None:
    """A paired t test on logs, so of the log of a ratio of geometric means.

    With d_i = log first_i - log second_i: mean(d) +- t s_d / sqrt(n), for n - 1 degrees of freedom.

    None where that is not defined: fewer than two pairs, or all ratios equal.

    Source: Student 1908, "The probable error of a mean".
    """
    logs = [math.log(a / b) for a, b in pairs]
    if len(logs) < 2 or stdev(logs) < 1e-12:  # rounding alone
        return None
    return t_test(fmean(logs), stdev(logs) / math.sqrt(len(logs)), len(logs) - 1)


def speed_by_seed(result: Result, base: Arm) -> TTest | None:
    """Log of the speed-up over the baseline to the FID that `result.speedup` is measured at.

    None without a test, or where a seed that both have did not reach that FID, or had it at its
    first evaluation.
    """
    crossings = [[c.crossing(result.at) for c in pair] for pair in _pairs(result.arm, base)]
    if any(crossing.bound is not Bound.EXACT for pair in crossings for crossing in pair):
        return None
    return paired((slow.step, fast.step) for fast, slow in crossings)


def last_by_seed(arm: Arm, base: Arm) -> TTest | None:
    """Log of the last FIDs of an arm over those of the baseline.

    None without a test, where last steps differ by more than 1%, or where an FID is not finite.
    """
    pairs = _pairs(arm, base)
    if not all(math.isclose(a.steps[-1], b.steps[-1], rel_tol=0.01) for a, b in pairs):
        return None
    sets = min((len(curve.repeats) for pair in pairs for curve in pair), default=0)
    fids = [(_last(own, sets), _last(other, sets)) for own, other in pairs]
    return paired(fids) if all(map(math.isfinite, chain(*fids))) else None


def by_seed_table(comparison: Comparison) -> Table | None:
    """Every arm that shares two seeds or more with the baseline; None where none has a test."""
    base = comparison.baseline
    results = [r for r in comparison.results if len(_pairs(r.arm, base)) > 1]
    speeds = [speed_by_seed(result, base) for result in results]
    lasts = [last_by_seed(result.arm, base) for result in results]
    if not any((*speeds, *lasts)):
        return None
    rows = []
    corrected = (holm([t.p if t else None for t in tests]) for tests in (speeds, lasts))
    tests = zip(results, speeds, lasts, *corrected, strict=True)
    for result, speed, last, p_speed, p_last in tests:
        shared, to = len(_pairs(result.arm, base)), to_text(result, comparison)
        by_steps = f"{_text(speed, 'x')}{to}" if speed else "-"
        by_last = _text(last) if last else "-"
        numbers = (str(shared), by_steps, p_text(p_speed), by_last, p_text(p_last))
        rows.append((result.arm.name, *numbers))
    last_head = f"last FID over {base.name}'s"
    heads = ("arm", "shared seeds", "speed-up", "p (speed-up)", last_head, "p (last FID)")
    return Table(_CAPTION, heads, tuple(rows))


def _text(test: TTest, unit: str = "") -> str:
    ratio, low, high = (
        f"{value:.2g}" if value < 0.1 else ratio_text(value)[:-1]
        for value in map(math.exp, (test.difference, test.low, test.high))
    )
    return f"{ratio}{unit} [{low}, {high}]"


def _pairs(arm: Arm, base: Arm) -> list[tuple[Curve, Curve]]:
    """Curves of an arm and of the baseline, of each seed that both have."""
    other = {curve.seed: curve for curve in base.curves}
    own = sorted(arm.curves, key=lambda curve: curve.seed)
    return [(curve, other[curve.seed]) for curve in own if curve.seed in other]


def _last(curve: Curve, sets: int) -> float:
    fids = [curve.fids[-1], *curve.repeats[:sets]]
    return geometric_mean(fids) if all(map(math.isfinite, fids)) else math.nan
