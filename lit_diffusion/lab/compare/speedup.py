"""How many times faster one arm reaches the target than another, and how sure that is.

Welch's t test on log steps, over training seeds.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, variance

from scipy.special import stdtr, stdtrit

from lit_diffusion.lab.compare.curves import Bound, Crossing

CONFIDENCE = 0.95


@dataclass(frozen=True)
class TTest:
    """A t test: a difference of means, its 95% interval, and p of a difference of 0."""

    difference: float
    low: float
    high: float
    degrees: float
    p: float


def welch(first: Sequence[float], second: Sequence[float]) -> TTest | None:
    """Difference of two means with its interval, for samples of unequal variance.

    With v_i = s_i^2 / n_i: t = (m_1 - m_2) / sqrt(v_1 + v_2), with
    (v_1 + v_2)^2 / (v_1^2 / (n_1 - 1) + v_2^2 / (n_2 - 1)) degrees of freedom.

    None where that is not defined: a sample of one, or no spread in either.

    Source: Welch 1947, "The generalization of Student's problem when several different population
    variances are involved".
    """
    if min(len(first), len(second)) < 2:
        return None
    v1, v2 = variance(first) / len(first), variance(second) / len(second)
    if v1 + v2 == 0:
        return None
    degrees = (v1 + v2) ** 2 / (v1**2 / (len(first) - 1) + v2**2 / (len(second) - 1))
    return t_test(fmean(first) - fmean(second), math.sqrt(v1 + v2), degrees)


def t_test(difference: float, error: float, degrees: float) -> TTest:
    """The two-sided test of a difference with this standard error."""
    reach = float(stdtrit(degrees, (1 + CONFIDENCE) / 2)) * error
    p = 2 * float(stdtr(degrees, -abs(difference) / error))
    return TTest(difference, difference - reach, difference + reach, degrees, p)


@dataclass(frozen=True)
class Speedup:
    """Steps of the baseline over steps of an arm, both to the same FID.

    Attributes:
        ratio: of geometric means over seeds; 2 is half the steps.
        low: lower end of the 95% interval; 0 where the truth may be any smaller, None without an
            interval.
        high: upper end; infinite where the truth may be any larger, None without an interval.
        p: two-sided, of the hypothesis that the ratio is 1; None without an interval.
        is_lower_bound: whether the truth may be larger: seeds of the baseline never reached it, or
            some of the arm did before the first evaluation.
        is_upper_bound: whether the truth may be smaller.
    """

    ratio: float
    low: float | None
    high: float | None
    p: float | None
    is_lower_bound: bool = False
    is_upper_bound: bool = False


def speedup(baseline: Sequence[Crossing], arm: Sequence[Crossing]) -> Speedup:
    """How many times fewer steps an arm needs than the baseline.

    The ratio of geometric means over seeds, with Welch's interval for the difference of mean log
    steps. A crossing that is known by a bound only enters with that bound, which makes the ratio a
    bound too: the interval is open on the side where the truth may lie further out. Where both
    sides are open there is no interval.

    Example:
        >>> found = speedup([Crossing(4.0e6)], [Crossing(1.8928e6)])
        >>> round(found.ratio, 2), found.low
        (2.11, None)
    """
    of_base, of_arm = ({c.bound for c in crossings} for crossings in (baseline, arm))
    more = Bound.MORE_THAN in of_base or Bound.AT_MOST in of_arm
    less = Bound.MORE_THAN in of_arm or Bound.AT_MOST in of_base
    slow, fast = ([math.log(c.step) for c in crossings] for crossings in (baseline, arm))
    ratio = math.exp(fmean(slow) - fmean(fast))
    test = welch(slow, fast)
    leaves_direction_open = (less and ratio >= 1) or (more and ratio <= 1)
    if test is None or leaves_direction_open:
        return Speedup(ratio, None, None, None, more, less)
    low = 0.0 if less else math.exp(test.low)
    high = math.inf if more else math.exp(test.high)
    return Speedup(ratio, low, high, test.p, more, less)


def holm(ps: Sequence[float | None]) -> list[float | None]:
    """p-values adjusted for their number, so that one in twenty families errs; None is no test.

    In rising order, p_(k) becomes max over j <= k of min((m - j + 1) p_(j), 1).

    Source: Holm 1979, "A simple sequentially rejective multiple test procedure".
    """
    rising = sorted((p, k) for k, p in enumerate(ps) if p is not None)
    adjusted, highest = list(ps), 0.0
    for done, (p, k) in enumerate(rising):
        highest = max(highest, min((len(rising) - done) * p, 1.0))
        adjusted[k] = highest
    return adjusted
