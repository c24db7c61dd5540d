"""Which arm of an experiment reaches the baseline's FID in fewer steps, and whether that is noise.

An arm is a way to train; its runs differ in the seed alone. Pure functions from curves to results.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import chain
from statistics import fmean, median

from lit_diffusion.lab.compare.curves import Bound, Crossing, Curve
from lit_diffusion.lab.compare.speedup import CONFIDENCE, Speedup, holm, speedup, welch

HEADLINE_SEEDS = 5
"""A claim about an arm of fewer seeds is provisional."""

FIRST_ROWS = 12
"""Arms in the figure that a reader sees first, on a screen of usual height."""


@dataclass(frozen=True)
class Arm:
    """Runs that differ in their seed alone: a curve a seed, at least one."""

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
        return tuple(curve.crossing(target) for curve in self.curves)


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
    """Geometric means of the last FIDs of an arm and of the baseline, trained for no more steps.

    `p`: of the hypothesis that they are equal (Welch, on log FID), times the number of arms.
    """

    fid: float
    baseline: float
    p: float


@dataclass(frozen=True)
class Result:
    """An arm beside the baseline.

    Attributes:
        crossings: of the comparison's target, one a seed.
        at: FID that the speed-up is measured at: the target, or where a seed of the arm never
            reached that, the lowest FID that every seed of both arms reached.
        holm_p: `speedup.p` adjusted for the number of tests; None without a test.
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


@dataclass(frozen=True)
class Comparison:
    """Arms beside a baseline.

    Attributes:
        target: FID to reach.
        results: of the other arms, the fastest first.
    """

    baseline: Arm
    target: float
    results: tuple[Result, ...]

    @property
    def num_tests(self) -> int:
        """Arms with a test, for which Holm's correction corrects."""
        return sum(result.holm_p is not None for result in self.results)

    @property
    def arms(self) -> tuple[Arm, ...]:
        """All of them, the baseline first."""
        return (self.baseline, *(result.arm for result in self.results))

    @property
    def crossings(self) -> tuple[Crossing, ...]:
        """Of the target, by the baseline's seeds."""
        return self.baseline.crossings(self.target)

    def crossings_by_arm(self) -> dict[str, tuple[Crossing, ...]]:
        """Of the target, the baseline's first."""
        return {arm.name: arm.crossings(self.target) for arm in self.arms}

    @property
    def faster(self) -> list[Result]:
        """Arms that beat the baseline by more than noise: first those that do not fall short."""
        faster = (Verdict.FASTER, Verdict.LOST)
        return sorted([r for r in self.results if r.verdict in faster], key=self.falls_short)

    @property
    def best(self) -> Result:
        """The first of `faster`; of all, in the same order, where there is none."""
        return (self.faster or sorted(self.results, key=self.falls_short))[0]

    @property
    def winners(self) -> list[Result]:
        """The best arm and those that it does not lead by more than noise, if it wins."""
        able = [result for result in self.faster if not self.falls_short(result)]
        return able[:1] + [r for r in able[1:] if (lead_over(able[0], r).low or 0) <= 1]

    def first(self, count: int = FIRST_ROWS) -> tuple[Result, ...]:
        """The fastest arms for a first look: those that win, then others with a test."""
        winners = self.winners
        order = sorted(self.results, key=lambda r: (r not in winners, r.holm_p is None))
        return tuple(result for result in self.results if result in order[:count])

    def falls_short(self, result: Result) -> bool:
        """Whether an arm that may be fast does not win.

        A seed missed the target or ended without a finite FID, or the median seed ends worse than
        the baseline's: where one seed of that failed, an arm may be fast to an easy target.
        """
        arm = result.arm
        return misses(result.crossings) or arm.lost > 0 or arm.typical > self.baseline.typical


def compare(arms: Sequence[Arm], baseline: str, target: float | None = None) -> Comparison:
    """Speed-ups of arms over a baseline, with intervals and verdicts.

    The target is, unless given, the lowest FID that every seed of the baseline reached. (Their mean
    final FID would be missed by half of the baseline's own seeds. In simulations the intervals for
    the FID that all reach cover the true ratio in 95 of 100 cases; those for the mean do not, and
    draw every ratio towards 1.)

    Raises:
        ValueError: for fewer than two arms, equal names, an unknown baseline, or a target that is
            not positive or cannot be found.

    Example:
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
    target = _target(base, target)
    others = [_result(arm, base, target) for arm in arms if arm is not base]
    adjusted = holm([result.speedup.p for result in others])
    judged = [_judged(result, p) for result, p in zip(others, adjusted, strict=True)]
    judged = [_unless_worse(result, base, target, len(others)) for result in judged]
    # A ratio that is an upper bound only may be anything below: it stands before no other.
    judged.sort(key=lambda r: (r.speedup.is_upper_bound, -r.speedup.ratio))
    return Comparison(base, target, tuple(judged))


def lead_over(first: Result, other: Result) -> Speedup:
    """Speed-up of an arm over another, to the target that both were compared at."""
    return speedup(other.crossings, first.crossings)


def misses(crossings: Iterable[Crossing]) -> bool:
    """Whether a seed did not reach the target."""
    return any(crossing.bound is Bound.MORE_THAN for crossing in crossings)


def mean_crossing(crossings: Sequence[Crossing]) -> Crossing:
    """Geometric mean of steps; a bound where some are, and unknown where those disagree."""
    bounds = {crossing.bound for crossing in crossings} - {Bound.EXACT}
    if len(bounds) > 1:
        return Crossing(math.nan, Bound.UNKNOWN)
    mean = math.exp(fmean(math.log(crossing.step) for crossing in crossings))
    return Crossing(mean, *bounds)


def by_measure(arms: Sequence[Arm], name: str) -> list[Arm]:
    """The arms that know another distance, which has the place of FID; lost where a seed lacks it.

    An arm knows it where each of its seeds tells it once.
    """
    looked = [arm for arm in arms if all(curve.looks for curve in arm.curves)]
    found = [Arm(arm.name, tuple(_with(curve, name) for curve in arm.curves)) for arm in looked]
    return [arm for arm in found if math.isfinite(arm.reached)]


def _with(curve: Curve, name: str) -> Curve:
    values = (look.get(name, math.nan) for look in curve.looks)
    fids = tuple(value if value > 0 else math.nan for value in values)
    return replace(curve, fids=fids, repeats=(), looks=())


def by_images(arms: Sequence[Arm]) -> list[Arm] | None:
    """The arms with images in the place of steps; None where unknown, or as many a step in all."""
    rates = [rate for arm in arms if (rate := images_a_step(arm)) is not None]
    if len(rates) < len(arms) or max(rates) < 1.01 * min(rates):
        return None
    return [
        Arm(arm.name, tuple(replace(c, steps=c.images or (), images=None) for c in arm.curves))
        for arm in arms
    ]


def images_a_step(arm: Arm) -> float | None:
    """Images seen for each optimizer step, the mean over runs; None where one does not tell."""
    rates = [c.images[-1] / c.steps[-1] for c in arm.curves if c.images]
    return fmean(rates) if len(rates) == len(arm.curves) else None


def _target(base: Arm, target: float | None) -> float:
    if target is None and math.isinf(base.reached):
        lost = [curve.seed for curve in base.curves if math.isinf(curve.best)]
        raise ValueError(
            f"the baseline {base.name} has no finite FID for seed {', '.join(lost)}, so no FID "
            "that all its seeds reached; give a target."
        )
    target = base.reached if target is None else target
    if not 0 < target < math.inf:
        raise ValueError(f"the target must be a positive FID, got {target:g}.")
    return target


def _result(arm: Arm, base: Arm, target: float) -> Result:
    """Without Holm's correction."""
    crossings, common = arm.crossings(target), max(arm.reached, base.reached)
    at = common if misses(crossings) and math.isfinite(common) else target
    found = speedup(base.crossings(at), arm.crossings(at))
    is_open = math.isinf(common) or (found.is_lower_bound and found.is_upper_bound)
    if is_open and _reached(base.crossings(target)) and not _reached(crossings):
        bound = replace(speedup(base.crossings(target), crossings), low=None, high=None, p=None)
        return Result(arm, crossings, bound, target, None, Verdict.MISSED)
    return Result(arm, crossings, found, at, None, Verdict.UNKNOWN)


def _reached(crossings: Sequence[Crossing]) -> bool:
    return any(crossing.bound is not Bound.MORE_THAN for crossing in crossings)


def _judged(result: Result, holm_p: float | None) -> Result:
    p, level = result.speedup.p, 1 - CONFIDENCE
    if p is None or holm_p is None:
        return result
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
    they stay at steps far apart. It must have been trained for as long, with finite last FIDs.
    """
    told = result.verdict not in (Verdict.NO_DIFFERENCE, Verdict.UNCLEAR, Verdict.UNKNOWN)
    if told or _reached(result.crossings) or not _reached(base.crossings(target)):
        return result
    logs = [[math.log(curve.fids[-1]) for curve in arm.curves] for arm in (result.arm, base)]
    own = min(curve.steps[-1] for curve in result.arm.curves)
    is_as_long = own >= 0.99 * max(curve.steps[-1] for curve in base.curves)
    test = welch(*logs) if is_as_long and all(map(math.isfinite, chain(*logs))) else None
    if test is None or test.difference <= 0 or count * test.p >= 1 - CONFIDENCE:
        return result
    fid, baseline = (math.exp(fmean(values)) for values in logs)
    return replace(result, verdict=Verdict.WORSE, end=End(fid, baseline, count * test.p))
