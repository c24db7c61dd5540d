"""Compare ways to train (arms) with a baseline, by the number of steps to a target FID.

All functions compute their results from FID curves and have no side effects.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from statistics import fmean

from lit_diffusion.lab.compare.curves import Arm, Crossing
from lit_diffusion.lab.compare.statistics import CONFIDENCE, Speedup, holm, speedup, welch
from lit_diffusion.metrics.auxiliary_metrics import DISTANCES

HEADLINE_SEEDS = 5
"""A result with fewer seeds of the arm or of the baseline is provisional."""


class Verdict(Enum):
    """Outcome of the comparison of an arm with the baseline."""

    FASTER = "faster"
    SLOWER = "slower"
    UNCLEAR = "unclear"  # significant, but not after Holm's correction
    NO_DIFFERENCE = "no difference shown"
    WORSE = "ends worse"  # no seed reached the target, no difference in speed, higher last FID
    LOST = "not finite at the end"  # faster, but the last FID of a seed is not finite
    MISSED = "does not reach the target"  # no seed reached the target, and speed is not measurable
    UNKNOWN = "not tested"  # there is no interval


@dataclass(frozen=True)
class Result:
    """Comparison of one arm with the baseline.

    Attributes:
        crossings: the step at which each seed of the arm reached the comparison's target.
        at: FID to which the speed-up is measured. This is the target if all seeds of the arm
            reached it. Otherwise, it is the lowest FID that all seeds of the arm and of the
            baseline reached, or the target if there is no such FID.
        holm_p: p-value of the speed-up after Holm's correction for the number of arms. None if
            there was no test.
        end_p: p-value of the test on last FIDs, corrected for the number of arms. None unless the
            verdict is WORSE.
    """

    arm: Arm
    crossings: tuple[Crossing, ...]
    speedup: Speedup
    at: float
    holm_p: float | None = None
    verdict: Verdict = Verdict.UNKNOWN
    end_p: float | None = None

    @property
    def num_reached(self) -> int:
        """Number of seeds that reached the target."""
        return sum(crossing.is_reached for crossing in self.crossings)


@dataclass(frozen=True)
class Comparison:
    """Comparison of arms with a baseline.

    Attributes:
        target: FID to reach.
        results: results of the other arms, the fastest first.
        metric: name of the metric, such as FID, pixels or val/loss.
        num_tests: number of tests that Holm's method corrects for: one per arm except the baseline,
            including arms that lack the data for this comparison.
    """

    baseline: Arm
    target: float
    results: tuple[Result, ...]
    metric: str
    num_tests: int

    @property
    def arms(self) -> tuple[Arm, ...]:
        """All arms, the baseline first."""
        return (self.baseline, *(result.arm for result in self.results))

    def ends_higher(self, result: Result) -> bool:
        """Whether an arm has a higher lowest FID (median over seeds) than the baseline."""
        return result.arm.median_best > self.baseline.median_best

    def falls_short(self, result: Result) -> bool:
        """Whether an arm cannot win, regardless of its speed.

        An arm cannot win if one of its seeds missed the target or ended without a finite FID. It
        also cannot win if its lowest FID is above the lowest FID of the baseline (both are medians
        over seeds).
        """
        reached_by_all = result.num_reached == len(result.crossings)
        return not reached_by_all or result.arm.nonfinite_ends > 0 or self.ends_higher(result)

    @property
    def winners(self) -> list[Result]:
        """Arms that are significantly faster and do not fall short, the fastest first."""
        faster = [result for result in self.results if result.verdict is Verdict.FASTER]
        return [result for result in faster if not self.falls_short(result)]

    @property
    def best(self) -> Result:
        """The fastest winner.

        If there is no winner, this is the fastest arm that does not fall short. If all arms fall
        short, this is the fastest arm.
        """
        return (self.winners or sorted(self.results, key=self.falls_short))[0]


def compare(
    arms: Sequence[Arm],
    baseline: str,
    target: float | None = None,
    metric: str = "FID",
    num_untested: int = 0,
) -> Comparison:
    """Compare arms with a baseline by the steps that they need to a target FID.

    The default target is the lowest FID that every seed of the baseline reached. The mean final FID
    of the baseline would be a worse target, because about half of the baseline's seeds miss it. In
    simulations with the default target, the 95% interval of the speed-up contains the true speed-up
    in 95% of cases. With the mean final FID as the target, the interval contains the true speed-up
    less often and is biased toward 1.

    The `arms` include the baseline. They do not include the `num_untested` arms whose runs lack
    this metric. Holm's method counts each untested arm as a test with a p-value of 1.

    Raises:
        ValueError: if there are fewer than two arms, if two arms have the same name, if there is no
            arm with the name of the baseline, if the target is not positive, or if the default
            target does not exist because a seed of the baseline has no finite FID.

    Example:
        >>> from lit_diffusion.lab.compare.curves import Curve
        >>> slow = Arm("GD", (Curve("0", (1e6, 2e6, 3e6, 4e6), (17.18, 8.14, 6.63, 6.04)),))
        >>> fast = Arm("ours", (Curve("0", (1e6, 2e6, 3e6, 4e6), (7.24, 5.91, 5.48, 5.40)),))
        >>> round(compare([slow, fast], "GD").results[0].speedup.ratio, 2)
        2.11
    """
    names = [arm.name for arm in arms]
    if len(arms) < 2 or len(set(names)) < len(names):
        raise ValueError(f"a comparison needs two arms or more, each once, got {names}.")
    if baseline not in names:
        raise ValueError(f"there is no arm {baseline!r} for the baseline; there are {names}.")
    base = arms[names.index(baseline)]
    if target is None and math.isinf(base.reached_by_all):
        seeds = [curve.seed for curve in base.curves if math.isinf(curve.best)]
        raise ValueError(
            f"the baseline {base.name} has no finite FID for seed {', '.join(seeds)}, so there is "
            "no FID that all its seeds reached; pass a target."
        )
    target = base.reached_by_all if target is None else target
    if not 0 < target < math.inf:
        raise ValueError(f"the target must be a positive FID, got {target:g}.")
    results = [_measure_speedup(arm, base, target) for arm in arms if arm is not base]
    num_tests = len(results) + num_untested
    adjusted = holm([*(result.speedup.p for result in results), *[None] * num_untested])
    results = [_set_verdict(result, p) for result, p in zip(results, adjusted, strict=False)]
    results = [_test_last_fid(result, base, target, num_tests) for result in results]
    # The true ratio may be anything below an upper bound, so upper bounds are sorted last.
    results.sort(key=lambda result: (result.speedup.is_upper_bound, -result.speedup.ratio))
    return Comparison(base, target, tuple(results), metric, num_tests)


def _measure_speedup(arm: Arm, base: Arm, target: float) -> Result:
    """Measure the speed-up of an arm. The verdict is MISSED or not yet set."""
    crossings, baseline = arm.crossings(target), base.crossings(target)
    num_reached = sum(crossing.is_reached for crossing in crossings)
    lowest_common = max(arm.reached_by_all, base.reached_by_all)
    misses = num_reached < len(crossings)
    at = lowest_common if misses and math.isfinite(lowest_common) else target
    measured = speedup(base.crossings(at), arm.crossings(at))
    is_unclear = math.isinf(lowest_common) or (measured.is_lower_bound and measured.is_upper_bound)
    if is_unclear and num_reached == 0 and any(crossing.is_reached for crossing in baseline):
        bound_only = replace(speedup(baseline, crossings), low=None, high=None, p=None)
        return Result(arm, crossings, bound_only, target, verdict=Verdict.MISSED)
    return Result(arm, crossings, measured, at)


def _set_verdict(result: Result, holm_p: float | None) -> Result:
    p, level = result.speedup.p, 1 - CONFIDENCE
    if p is None or holm_p is None:
        return result
    if holm_p >= level:
        verdict = Verdict.UNCLEAR if p < level else Verdict.NO_DIFFERENCE
    elif result.speedup.ratio < 1:
        verdict = Verdict.SLOWER
    else:
        verdict = Verdict.LOST if result.arm.nonfinite_ends else Verdict.FASTER
    return replace(result, holm_p=holm_p, verdict=verdict)


def _test_last_fid(result: Result, base: Arm, target: float, num_arms: int) -> Result:
    """Test the last FID of an arm that always missed the target and shows no difference in speed.

    If an arm stops improving above the target, the steps at which its seeds reach higher FIDs vary
    widely, and its speed has no clear meaning. The verdict is WORSE if the last log FID of the arm
    is significantly above the last log FID of the baseline (Welch's test, with Bonferroni's
    correction for the number of arms). The test requires that both were trained equally long and
    that all last FIDs are finite.
    """
    arm, verdict = result.arm, result.verdict
    missed = not result.num_reached and any(c.is_reached for c in base.crossings(target))
    if not missed or verdict not in (Verdict.NO_DIFFERENCE, Verdict.UNCLEAR, Verdict.UNKNOWN):
        return result
    shortest, longest = min(c.steps[-1] for c in arm.curves), max(c.steps[-1] for c in base.curves)
    if shortest < 0.99 * longest or arm.nonfinite_ends or base.nonfinite_ends:
        return result
    test = welch(*([math.log(curve.fids[-1]) for curve in each.curves] for each in (arm, base)))
    if test is None or test.difference <= 0 or num_arms * test.p >= 1 - CONFIDENCE:
        return result
    return replace(result, verdict=Verdict.WORSE, end_p=num_arms * test.p)


# Comparisons by images, and by other metrics of the same samples


def by_images(arms: Sequence[Arm]) -> list[Arm] | None:
    """Replace the steps in the curves of all arms with the number of training images seen so far.

    Returns:
        The changed arms. None if the number of images is unknown for some curve, or if all arms use
        the same number of images per step. In the second case, a comparison by images would equal a
        comparison by steps.
    """
    if not all(curve.images for arm in arms for curve in arm.curves):
        return None
    rates = [fmean(c.images[-1] / c.steps[-1] for c in arm.curves if c.images) for arm in arms]
    if max(rates) < 1.01 * min(rates):
        return None
    return [
        Arm(arm.name, tuple(replace(c, steps=c.images or (), images=None) for c in arm.curves))
        for arm in arms
    ]


def by_metric(arms: Sequence[Arm], name: str) -> list[Arm]:
    """Replace the FIDs of arms with the metric `name`, or with NaN where `name` is missing.

    The result leaves out arms that have a seed without a finite value of the metric.
    """
    converted = []
    for arm in arms:
        curves = []
        for curve in arm.curves:
            metrics = curve.other_metrics or ({},) * len(curve.steps)
            values = (each.get(name, math.nan) for each in metrics)
            fids = tuple(value if value > 0 else math.nan for value in values)
            curves.append(replace(curve, fids=fids, repeats=(), other_metrics=()))
        converted.append(Arm(arm.name, tuple(curves)))
    return [arm for arm in converted if math.isfinite(arm.reached_by_all)]


def by_other_metrics(comparison: Comparison) -> dict[str, Comparison]:
    """Repeat a comparison with each of `DISTANCES` instead of FID, each with its default target."""
    base = comparison.baseline.name
    arms_by_metric = {name: by_metric(comparison.arms, name) for name in DISTANCES}
    return {
        name: compare(arms, base, metric=name, num_untested=len(comparison.arms) - len(arms))
        for name, arms in arms_by_metric.items()
        if len(arms) > 1 and arms[0].name == base
    }


def leads(name: str, comparison: Comparison) -> bool:
    """Return whether an arm would win if it were the only arm compared with the baseline.

    There is then only one test, and therefore no correction for multiple tests.
    """
    base, target = comparison.baseline.name, comparison.target
    arms = [arm for arm in comparison.arms if arm.name in (name, base)]
    return len(arms) == 2 and bool(compare(arms, base, target).winners)
