"""Statistical tests to compare arms (ways to train): t tests, Holm's correction, speed-ups."""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, geometric_mean, stdev, variance
from typing import Any

from scipy.stats import ttest_ind, ttest_rel

from lit_diffusion.lab.compare.curves import Arm, Bound, Crossing, Curve

CONFIDENCE = 0.95


@dataclass(frozen=True)
class TTest:
    """Result of a two-sided t test: the difference of means, its 95% interval, and its p-value."""

    difference: float
    low: float
    high: float
    p: float


def welch(first: Sequence[float], second: Sequence[float]) -> TTest | None:
    """Run Welch's t test for the difference of means of two samples, with scipy's `ttest_ind`.

    Returns:
        The result; None if a sample has fewer than two values, or if both samples have zero
        variance.

    Source: Welch 1947, "The generalization of Student's problem when several different population
    variances are involved".
    """
    if min(len(first), len(second)) < 2 or variance(first) + variance(second) == 0:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # zero variance in one sample is allowed
        result = ttest_ind(first, second, equal_var=False)
    return _to_ttest(result, fmean(first) - fmean(second))


def paired(first: Sequence[float], second: Sequence[float]) -> TTest | None:
    """Run a paired t test for the mean difference of two samples, with scipy's `ttest_rel`.

    Returns:
        The result; None if there are fewer than two pairs, if a value is not finite, or if all
        differences are equal.

    Source: Student 1908, "The probable error of a mean".
    """
    differences = [a - b for a, b in zip(first, second, strict=True)]
    is_finite = all(map(math.isfinite, differences))
    if len(differences) < 2 or not is_finite or stdev(differences) < 1e-12:  # equal up to rounding
        return None
    return _to_ttest(ttest_rel(first, second), fmean(differences))


def _to_ttest(result: Any, difference: float) -> TTest:
    interval = result.confidence_interval(CONFIDENCE)
    return TTest(difference, float(interval.low), float(interval.high), float(result.pvalue))


def holm(ps: Sequence[float | None]) -> list[float | None]:
    """Adjust p-values for multiple tests with Holm's method.

    With m tests and p-values `p_1 <= p_2 <= ...`, the adjusted `p_k` is the maximum over j <= k of
    `min((m - j + 1) * p_j, 1)`. None stands for a test that could not be run on the data. It counts
    among the m tests as if its p-value were 1, because otherwise the data would determine the
    number of tests.

    Source: Holm 1979, "A simple sequentially rejective multiple test procedure".

    Example:
        >>> holm([0.01, 0.04, None])
        [0.03, 0.08, None]
    """
    ascending = sorted((p, k) for k, p in enumerate(ps) if p is not None)
    adjusted, highest = list(ps), 0.0
    for rank, (p, k) in enumerate(ascending):
        highest = max(highest, min((len(ps) - rank) * p, 1.0))
        adjusted[k] = highest
    return adjusted


@dataclass(frozen=True)
class Speedup:
    """Ratio of the baseline's steps to an arm's steps, both to the same FID.

    Attributes:
        ratio: geometric mean over seeds of the steps that the baseline needs to reach the FID,
            divided by the same mean for the arm; 2 means that the arm needs half the steps.
        low: lower end of the 95% interval; 0 if `ratio` is an upper bound, None if there is no
            interval.
        high: upper end of the 95% interval; infinite if `ratio` is a lower bound, None if there is
            no interval.
        p: two-sided p-value for a ratio of 1; None if there is no interval.
        is_lower_bound: whether the true ratio may be larger, because a seed of the baseline never
            reached the FID, or because a seed of the arm had reached it by its first evaluation.
        is_upper_bound: whether the true ratio may be smaller, because a seed of the arm never
            reached the FID, or because a seed of the baseline had reached it by its first
            evaluation.
    """

    ratio: float
    low: float | None
    high: float | None
    p: float | None
    is_lower_bound: bool = False
    is_upper_bound: bool = False


def speedup(baseline: Sequence[Crossing], arm: Sequence[Crossing]) -> Speedup:
    """Measure how many times fewer steps an arm needs than the baseline.

    The interval comes from Welch's t test on the logarithms of the steps at which the runs reached
    the FID. If only a bound on such a step is known, the test uses this bound, so the ratio is a
    bound too. If the ratio is a lower bound, the interval has no upper end. If the ratio is an
    upper bound, the interval starts at 0. There is no interval for a lower bound <= 1 or an upper
    bound >= 1, because such a bound does not show which arm is faster.
    """
    bounds, other = ({crossing.bound for crossing in each} for each in (baseline, arm))
    may_be_larger = Bound.MORE_THAN in bounds or Bound.AT_MOST in other
    may_be_smaller = Bound.MORE_THAN in other or Bound.AT_MOST in bounds
    slow, fast = ([math.log(crossing.step) for crossing in each] for each in (baseline, arm))
    ratio = math.exp(fmean(slow) - fmean(fast))
    test = welch(slow, fast)
    leaves_direction_open = (may_be_smaller and ratio >= 1) or (may_be_larger and ratio <= 1)
    if test is None or leaves_direction_open:
        return Speedup(ratio, None, None, None, may_be_larger, may_be_smaller)
    low = 0.0 if may_be_smaller else math.exp(test.low)
    high = math.inf if may_be_larger else math.exp(test.high)
    return Speedup(ratio, low, high, test.p, may_be_larger, may_be_smaller)


# Paired by seed: runs of one seed share initial weights, data order and noise, which cancel.


def shared_seeds(arm: Arm, baseline: Arm) -> list[tuple[Curve, Curve]]:
    """Pair the curves of an arm and of the baseline, for each seed that both have."""
    others = {curve.seed: curve for curve in baseline.curves}
    curves = sorted(arm.curves, key=lambda curve: curve.seed)
    return [(curve, others[curve.seed]) for curve in curves if curve.seed in others]


def speedup_by_seed(arm: Arm, baseline: Arm, fid: float) -> TTest | None:
    """Run a paired t test of the log speed-up to an FID, over shared seeds.

    Returns:
        The result; None if `paired` returns None, or if only a bound is known for the step at which
        a run reached the FID.
    """
    pairs = shared_seeds(arm, baseline)
    slow = [other.crossing(fid) for _, other in pairs]
    fast = [curve.crossing(fid) for curve, _ in pairs]
    if any(crossing.bound is not Bound.EXACT for crossing in (*slow, *fast)):
        return None
    return paired(*([math.log(crossing.step) for crossing in each] for each in (slow, fast)))


def last_fid_by_seed(arm: Arm, baseline: Arm) -> TTest | None:
    """Run a paired t test of the log ratio of last FIDs (arm / baseline), over shared seeds.

    The final weights of a run may have several FIDs, each from its own set of samples. The last FID
    of the run is their geometric mean. If runs have different numbers of sets, only the first k
    sets of each run are used, where k is the smallest number of sets.

    Returns:
        The result; None if `paired` returns None, if the two runs of a seed end at steps that
        differ by more than 1%, or if an FID is not finite.
    """
    pairs = shared_seeds(arm, baseline)
    if not all(math.isclose(a.steps[-1], b.steps[-1], rel_tol=0.01) for a, b in pairs):
        return None
    sets = min((len(curve.repeats) for pair in pairs for curve in pair), default=0)
    logs = [
        [math.log(geometric_mean((c.fids[-1], *c.repeats[:sets]))) for c in curves]
        for curves in zip(*pairs, strict=True)
    ]
    return paired(*logs) if logs else None
