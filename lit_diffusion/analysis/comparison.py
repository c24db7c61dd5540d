"""Which arm of an experiment reaches the baseline's FID in fewer steps, and whether that is noise.

An arm is a way to train; its runs differ in the seed alone. Pure functions from curves to results.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import chain
from statistics import fmean, median

from lit_diffusion.analysis.curves import Bound, Crossing, Curve, first_crossing
from lit_diffusion.analysis.speedup import CONFIDENCE, Speedup, holm, speedup, welch

HEADLINE_SEEDS = 5
"""A claim about an arm of fewer seeds is provisional."""

FIRST_ROWS = 12
"""Arms in the figure that a reader sees first, on a screen of usual height."""


@dataclass(frozen=True)
class Arm:
    """Runs that differ in their seed alone.

    Args:
        name: of the arm.
        curves: one a seed, at least one.

    Raises:
        ValueError: for a seed that is there twice.
    """

    name: str
    curves: tuple[Curve, ...]

    def __post_init__(self) -> None:
        seeds = [curve.seed for curve in self.curves]
        if len(set(seeds)) < len(seeds):
            raise ValueError(f"{self.name} has a seed twice: {', '.join(sorted(seeds))}.")

    @property
    def reached(self) -> float:
        """The FID that every seed reached; infinite where one has no finite FID."""
        return max(curve.best for curve in self.curves)

    @property
    def typical(self) -> float:
        """The lowest FID of the median seed; infinite where that one has no finite FID."""
        return median(curve.best for curve in self.curves)

    @property
    def lost(self) -> int:
        """Number of seeds whose last FID is not finite."""
        return sum(not math.isfinite(curve.fids[-1]) for curve in self.curves)

    def crossings(self, target: float) -> tuple[Crossing, ...]:
        """When each seed reached a target."""
        return tuple(first_crossing(c.steps, c.fids, target) for c in self.curves)


class Verdict(Enum):
    """What the seeds can say of an arm beside the baseline."""

    FASTER = "faster"
    SLOWER = "slower"
    UNCLEAR = "unclear"  # a difference, but not after Holm's correction
    NO_DIFFERENCE = "no difference shown"
    WORSE = "ends worse"  # and no seed reached the target, but of its speed too little was shown
    LOST = "not finite at the end"  # faster, but a seed's last FID is no number
    MISSED = "does not get there"  # and has no FID at which its speed could be measured
    UNKNOWN = "cannot be told"  # no interval


@dataclass(frozen=True)
class End:
    """Last FIDs of an arm beside those of the baseline, which was trained for no more steps.

    Attributes:
        fid: of the arm, the geometric mean over seeds.
        baseline: the baseline's.
        p: of the hypothesis that they are equal (Welch, on log FID), times the number of arms.
        of_speed: what the steps to an FID would have said.
    """

    fid: float
    baseline: float
    p: float
    of_speed: Verdict


@dataclass(frozen=True)
class Result:
    """An arm beside the baseline.

    Attributes:
        arm: which.
        crossings: of the comparison's target, one a seed.
        speedup: over the baseline.
        at: FID that the speed-up is measured at: the target, or where a seed of the arm never
            reached that, the lowest FID that every seed of both arms reached.
        holm_p: `speedup.p` adjusted for the number of tests; None without a test.
        verdict: in a word.
        end: what the verdict `WORSE` stands on; None with any other.
    """

    arm: Arm
    crossings: tuple[Crossing, ...]
    speedup: Speedup
    at: float
    holm_p: float | None
    verdict: Verdict
    end: End | None = None

    @property
    def sure(self) -> float:
        """The corrected p-value that the verdict stands on; 0 where it needs none."""
        return self.end.p if self.end else self.holm_p or 0.0

    @property
    def steps(self) -> Crossing:
        """Geometric mean of the steps to the target over seeds, or a bound of it."""
        return mean_crossing(self.crossings)


@dataclass(frozen=True)
class Comparison:
    """Arms beside a baseline.

    Attributes:
        baseline: arm that the others are compared with.
        target: FID to reach.
        crossings: of the baseline's seeds.
        results: of the other arms, the fastest first.
        num_tests: arms with a test, for which Holm's correction corrects.
    """

    baseline: Arm
    target: float
    crossings: tuple[Crossing, ...]
    results: tuple[Result, ...]
    num_tests: int

    @property
    def arms(self) -> tuple[Arm, ...]:
        """All of them, the baseline first."""
        return (self.baseline, *(result.arm for result in self.results))

    @property
    def faster(self) -> list[Result]:
        """Arms that beat the baseline by more than noise: first those that do not fall short."""
        faster = [r for r in self.results if r.verdict in (Verdict.FASTER, Verdict.LOST)]
        return sorted(faster, key=self.falls_short)

    @property
    def best(self) -> Result:
        """The first of `faster`; of all, in the same order, where there is none."""
        return (self.faster or sorted(self.results, key=self.falls_short))[0]

    @property
    def winners(self) -> list[Result]:
        """The best arm and those that it does not lead by more than noise, if it wins."""
        able = [result for result in self.faster if not self.falls_short(result)]
        return able[:1] + [result for result in able[1:] if not _is_ahead(able[0], result)]

    def first(self, count: int = FIRST_ROWS) -> tuple[Result, ...]:
        """The fastest arms for a first look: those that win, then others with a test."""
        winners = self.winners
        order = sorted(self.results, key=lambda r: (r not in winners, r.holm_p is None))
        shown = order[:count]
        return tuple(result for result in self.results if result in shown)

    @property
    def lead(self) -> Speedup | None:
        """Speed-up of the best arm over the next, where both are faster than the baseline."""
        faster = self.faster[:2]
        return lead_over(*faster) if len(faster) == 2 else None

    def falls_short(self, result: Result) -> bool:
        """Whether an arm that may be fast does not win.

        A seed missed the target or ended without a finite FID, or the median seed ends worse than
        the baseline's.

        Where one seed of the baseline failed, the target is easy: an arm may be fast to it and yet
        end worse than most seeds of the baseline do.
        """
        missed = any(crossing.bound is Bound.MORE_THAN for crossing in result.crossings)
        return missed or result.arm.lost > 0 or result.arm.typical > self.baseline.typical


def compare(arms: Sequence[Arm], baseline: str, target: float | None = None) -> Comparison:
    """Speed-ups of arms over a baseline, with intervals and verdicts.

    The target is, unless given, the lowest FID that every seed of the baseline reached. (Their mean
    final FID would be missed by half of the baseline's own seeds. In simulations the intervals for
    the FID that all reach cover the true ratio in 95 of 100 cases; those for the mean do not, and
    draw every ratio towards 1.)

    Args:
        arms: at least two, with names of their own.
        baseline: name of one of them.
        target: FID > 0; None is what every seed of the baseline reached.

    Raises:
        ValueError: for fewer than two arms, equal names, an unknown baseline, or a target that is
            not positive or cannot be found.

    Example:
        >>> slow = Arm("GD", (Curve("0", (1e6, 2e6, 3e6, 4e6), (17.18, 8.14, 6.63, 6.04)),))
        >>> fast = Arm("ours", (Curve("0", (1e6, 2e6, 3e6, 4e6), (7.24, 5.91, 5.48, 5.40)),))
        >>> round(compare([slow, fast], "GD").results[0].speedup.ratio, 2)
        2.11
    """
    base = _baseline(arms, baseline)
    target = _target(base, target)
    others = [_result(arm, base, target) for arm in arms if arm is not base]
    adjusted = iter(holm([r.speedup.p for r in others if r.speedup.p is not None]))
    judged = [r if r.speedup.p is None else _judged(r, next(adjusted)) for r in others]
    judged = [_unless_worse(r, base, target, len(others)) for r in judged]
    # A ratio that is an upper bound only may be anything below: it stands before no other.
    ranked = tuple(sorted(judged, key=lambda r: (r.speedup.is_upper_bound, -r.speedup.ratio)))
    num_tests = sum(result.holm_p is not None for result in ranked)
    crossings = base.crossings(target)
    return Comparison(base, target, crossings, ranked, num_tests)


def lead_over(first: Result, other: Result) -> Speedup:
    """Speed-up of an arm over another, to the target that both were compared at."""
    return speedup(other.crossings, first.crossings)


def _is_ahead(first: Result, other: Result) -> bool:
    """Whether an arm leads another by more than noise."""
    low = lead_over(first, other).low
    return low is not None and low > 1


def mean_crossing(crossings: Sequence[Crossing]) -> Crossing:
    """Geometric mean of steps; a bound where some are, and unknown where those disagree.

    Example:
        >>> print(mean_crossing([Crossing(1000), Crossing(4000, Bound.MORE_THAN)]))
        > 2,000
    """
    bounds = {crossing.bound for crossing in crossings} - {Bound.EXACT}
    if len(bounds) > 1:
        return Crossing(math.nan, Bound.UNKNOWN)
    mean = math.exp(fmean(math.log(crossing.step) for crossing in crossings))
    return Crossing(mean, *bounds)


def by_images(arms: Sequence[Arm]) -> list[Arm] | None:
    """The arms with images seen in the place of steps; None where some run does not tell."""
    if any(curve.images is None for arm in arms for curve in arm.curves):
        return None
    return [
        Arm(arm.name, tuple(replace(c, steps=c.images or (), images=None) for c in arm.curves))
        for arm in arms
    ]


def images_a_step(arm: Arm) -> float | None:
    """Images seen for each optimizer step, the mean over runs; None where one does not tell."""
    rates = [c.images[-1] / c.steps[-1] for c in arm.curves if c.images and c.steps[-1]]
    return fmean(rates) if len(rates) == len(arm.curves) else None


def same_images_a_step(arms: Sequence[Arm]) -> bool:
    """Whether a comparison by images would say what one by steps does, or cannot be made."""
    rates = [images_a_step(arm) for arm in arms]
    known = [rate for rate in rates if rate is not None]
    return len(known) < len(rates) or max(known) < 1.01 * min(known)


def _baseline(arms: Sequence[Arm], name: str) -> Arm:
    names = [arm.name for arm in arms]
    if len(arms) < 2 or len(set(names)) < len(names):
        raise ValueError(f"a comparison needs two arms or more, each once, got {names}.")
    if name not in names:
        raise ValueError(f"there is no arm {name!r} for the baseline; there are {names}.")
    return arms[names.index(name)]


def _target(base: Arm, target: float | None) -> float:
    if target is None:
        target = base.reached
        if math.isinf(target):
            lost = [curve.seed for curve in base.curves if math.isinf(curve.best)]
            raise ValueError(
                f"the baseline {base.name} has no finite FID for seed {', '.join(lost)}, so no FID "
                "that all its seeds reached; give a target."
            )
    if not 0 < target < math.inf:
        raise ValueError(f"the target must be a positive FID, got {target:g}.")
    return target


def _result(arm: Arm, base: Arm, target: float) -> Result:
    """Without Holm's correction."""
    crossings = arm.crossings(target)
    is_short = any(crossing.bound is Bound.MORE_THAN for crossing in crossings)
    common = max(arm.reached, base.reached)
    at = common if is_short and math.isfinite(common) else target
    found = speedup(base.crossings(at), arm.crossings(at))
    is_open = math.isinf(common) or (found.is_lower_bound and found.is_upper_bound)
    if is_open and _reached(base.crossings(target)) and not _reached(crossings):
        bound = speedup(base.crossings(target), crossings)
        bound = replace(bound, low=None, high=None, p=None)
        return Result(arm, crossings, bound, target, None, Verdict.MISSED)
    return Result(arm, crossings, found, at, None, Verdict.UNKNOWN)


def _reached(crossings: Sequence[Crossing]) -> bool:
    """Whether any seed reached the target."""
    return any(crossing.bound is not Bound.MORE_THAN for crossing in crossings)


def _judged(result: Result, holm_p: float) -> Result:
    p, level = result.speedup.p, 1 - CONFIDENCE
    assert p is not None
    if holm_p < level and result.speedup.ratio > 1:
        verdict = Verdict.LOST if result.arm.lost else Verdict.FASTER
    elif holm_p < level:
        verdict = Verdict.SLOWER
    else:
        verdict = Verdict.UNCLEAR if p < level else Verdict.NO_DIFFERENCE
    return replace(result, holm_p=holm_p, verdict=verdict)


def _unless_worse(result: Result, base: Arm, target: float, count: int) -> Result:
    """The result; or that the arm ends worse, where it missed the target and its speed says little.

    An arm that is fast at first and then stands still has no speed: its seeds pass the FID where
    they stay at steps far apart, and nothing could be told of it.
    """
    told = result.verdict not in (Verdict.NO_DIFFERENCE, Verdict.UNCLEAR, Verdict.UNKNOWN)
    if told or _reached(result.crossings) or not _reached(base.crossings(target)):
        return result
    end = _end(result, base, count)
    is_worse = end is not None and end.fid > end.baseline and end.p < 1 - CONFIDENCE
    return replace(result, verdict=Verdict.WORSE, end=end) if is_worse else result


def _end(result: Result, base: Arm, count: int) -> End | None:
    """None without a test, for an arm that was trained for less, or if an FID is not finite."""
    arm = result.arm
    logs = [[math.log(curve.fids[-1]) for curve in a.curves] for a in (arm, base)]
    if not (is_as_long(arm, base) and all(map(math.isfinite, chain(*logs)))):
        return None
    test = welch(*logs)
    if test is None:
        return None
    fid, baseline = (math.exp(fmean(values)) for values in logs)
    return End(fid, baseline, min(1.0, count * test.p), result.verdict)


def is_as_long(arm: Arm, base: Arm) -> bool:
    """Whether every seed of an arm was trained for as long as the baseline, up to 1%."""
    own = min(curve.steps[-1] for curve in arm.curves)
    return own >= 0.99 * max(curve.steps[-1] for curve in base.curves)
