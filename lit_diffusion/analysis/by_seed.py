"""Arms beside the baseline seed by seed: what runs of one seed have in common drops out."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, geometric_mean, stdev

from scipy.special import stdtr, stdtrit

from lit_diffusion.analysis.comparison import Arm, Comparison, Result
from lit_diffusion.analysis.curves import Bound, Curve
from lit_diffusion.analysis.speedup import CONFIDENCE, holm
from lit_diffusion.analysis.tables import Table
from lit_diffusion.analysis.wording import p_text, ratio_text, to_text

_CAPTION = (
    "Runs of one seed share initial weights, order of data, noise and seeds of samples, unless "
    "their arms differ in these. What they share drops out of differences by seed: paired t test "
    "on logs, 95% intervals, p-values corrected (Holm) for the arms of each column. The last FID "
    "is over the baseline's after as many steps (below 1 is better), the geometric mean of as many "
    "sets of samples as both have. No number (-) where a run has no such FID or was trained for "
    "another number of steps. The verdicts above do not use this."
)


@dataclass(frozen=True)
class Paired:
    """A paired t test of positive numbers, on their logs.

    Attributes:
        ratio: of geometric means, the first over the second.
        low: lower end of its 95% interval.
        high: upper end.
        p: two-sided, of the hypothesis that the ratio is 1.
        pairs: number of them.
    """

    ratio: float
    low: float
    high: float
    p: float
    pairs: int


def paired(first: Sequence[float], second: Sequence[float]) -> Paired | None:
    """Ratio of numbers that come in pairs, with its interval.

    With d_i = log first_i - log second_i: mean(d) +- t s_d / sqrt(n), for n - 1 degrees of freedom.

    Args:
        first: (n,) > 0.
        second: (n,) > 0, each in a pair with the one in its place.

    Returns:
        The test; None where it is not defined: fewer than two pairs, or all ratios equal.

    Source: Student 1908, "The probable error of a mean".

    Example:
        >>> found = paired([2.0, 4.2, 8.0], [1.0, 2.0, 4.1])
        >>> round(found.ratio, 2), round(found.p, 3)
        (2.02, 0.001)
    """
    logs = [math.log(a / b) for a, b in zip(first, second, strict=True)]
    if len(logs) < 2 or stdev(logs) < 1e-12:  # rounding alone
        return None
    mean, error, degrees = fmean(logs), stdev(logs) / math.sqrt(len(logs)), len(logs) - 1
    reach = float(stdtrit(degrees, (1 + CONFIDENCE) / 2)) * error
    p = 2 * float(stdtr(degrees, -abs(mean) / error))
    return Paired(math.exp(mean), math.exp(mean - reach), math.exp(mean + reach), p, len(logs))


def speed_by_seed(result: Result, base: Arm) -> Paired | None:
    """Speed-up to the FID that `result.speedup` is measured at.

    Args:
        result: of an arm.
        base: the baseline.

    Returns:
        The test; None without one, or where a seed that both have did not reach that FID, or had it
        at its first evaluation.
    """
    arm = result.arm
    own, other = (dict(zip(_seeds(a), a.crossings(result.at), strict=True)) for a in (arm, base))
    shared = _shared(arm, base)
    found = [(other[seed], own[seed]) for seed in shared]
    if any(crossing.bound is not Bound.EXACT for pair in found for crossing in pair):
        return None
    return paired([slow.step for slow, _ in found], [fast.step for _, fast in found])


def last_by_seed(arm: Arm, base: Arm) -> Paired | None:
    """Last FIDs of an arm over those of the baseline.

    Returns:
        The test; None without one, where the last steps differ by more than 1%, or where an FID is
        not finite.
    """
    own, other = (dict(zip(_seeds(a), a.curves, strict=True)) for a in (arm, base))
    pairs = [(own[seed], other[seed]) for seed in _shared(arm, base)]
    if not all(math.isclose(a.steps[-1], b.steps[-1], rel_tol=0.01) for a, b in pairs):
        return None
    sets = min((len(curve.repeats) for pair in pairs for curve in pair), default=0)
    fids = [(_last(a, sets), _last(b, sets)) for a, b in pairs]
    if not all(math.isfinite(fid) for pair in fids for fid in pair):
        return None
    return paired([a for a, _ in fids], [b for _, b in fids])


def by_seed_table(comparison: Comparison) -> Table | None:
    """Every arm that shares two seeds or more with the baseline; None where none has a test."""
    base = comparison.baseline
    results = [r for r in comparison.results if len(_shared(r.arm, base)) > 1]
    speeds = [speed_by_seed(result, base) for result in results]
    lasts = [last_by_seed(result.arm, base) for result in results]
    if not any((*speeds, *lasts)):
        return None
    rows = [
        (
            result.arm.name,
            str(len(_shared(result.arm, base))),
            f"{_text(speed, 'x')}{to_text(result, comparison)}" if speed else "-",
            p_text(p_of_speed),
            _text(last) if last else "-",
            p_text(p_of_last),
        )
        for result, speed, last, p_of_speed, p_of_last in zip(
            results, speeds, lasts, _corrected(speeds), _corrected(lasts), strict=True
        )
    ]
    last = f"last FID over {base.name}'s"
    heads = ("arm", "shared seeds", "speed-up", "p (speed-up)", last, "p (last FID)")
    return Table(_CAPTION, heads, tuple(rows))


def _corrected(tests: Sequence[Paired | None]) -> list[float | None]:
    """p-values after Holm, in the places of the tests."""
    adjusted = iter(holm([test.p for test in tests if test]))
    return [next(adjusted) if test else None for test in tests]


def _text(test: Paired, unit: str = "") -> str:
    """A ratio and its interval."""
    ratio, low, high = (
        f"{value:.2g}" if value < 0.1 else ratio_text(value)[:-1]
        for value in (test.ratio, test.low, test.high)
    )
    return f"{ratio}{unit} [{low}, {high}]"


def _seeds(arm: Arm) -> list[str]:
    return [curve.seed for curve in arm.curves]


def _shared(arm: Arm, base: Arm) -> list[str]:
    return sorted(set(_seeds(arm)) & set(_seeds(base)))


def _last(curve: Curve, sets: int) -> float:
    """The last FID, over so many more sets of samples; NaN where one is not finite."""
    fids = [curve.fids[-1], *curve.repeats[:sets]]
    return geometric_mean(fids) if all(map(math.isfinite, fids)) else math.nan
