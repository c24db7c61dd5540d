"""What arms of a table came to: arms_table.py FILE.csv [ARM=CONTROL ...] [--target FID] [--at STEP]

A row an arm, as Markdown: steps of each seed to the target; last FID, the same as the geometric
mean over all sets of samples, and lowest FID, each as mean +- standard deviation over seeds.
--at 400: all distances after so many steps instead, interpolated in log distance; "-" for an arm
with a run that was not evaluated so early or so late.

A row a pair ARM=CONTROL: the speed-up of the arm over its control, the same by seed, and by seed
the last FID over the control's, as `lit-diffusion compare` has them for the two alone. Intervals
are of 95%; p-values are corrected (Holm) for the pairs, in each column by itself.
--at 300,600: the FID over the control's after so many steps instead, by seed, without p-values.
"""

import argparse
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import fmean, geometric_mean, stdev

import numpy as np

from lit_diffusion.lab.compare.comparison import Result, compare
from lit_diffusion.lab.compare.curves import Arm, Curve, read_arms
from lit_diffusion.lab.compare.statistics import (
    TTest,
    holm,
    last_fid_by_seed,
    paired,
    shared_seeds,
    speedup_by_seed,
)
from lit_diffusion.lab.compare.tables import format_fid, format_p, format_speedup
from lit_diffusion.metrics.auxiliary_metrics import DISTANCES

HEADS = ["arm", "steps to the target", "last FID", "over all sets", "lowest FID"]
PAIR_HEADS = ["arm", "its control", "seeds", "speed-up", "by seed"]
PAIR_HEADS += ["last FID over the control's, by seed"]


def cells(arm: Arm, target: float | None) -> list[str]:
    def mean(fid: Callable[[Curve], float]) -> str:
        fids = [fid(curve) for curve in arm.curves]
        return format_fid(fmean(fids), stdev(fids) if len(fids) > 1 else None)

    steps = "-" if target is None else "; ".join(map(str, arm.crossings(target)))
    if arm.nonfinite_ends:
        return [arm.name, steps, "not finite", "", ""]
    over_all = mean(lambda curve: geometric_mean([curve.fids[-1], *curve.repeats]))
    last, lowest = mean(lambda curve: curve.fids[-1]), mean(lambda curve: curve.best)
    return [arm.name, steps, last, over_all, lowest]


def cells_at(arm: Arm, step: float) -> list[str]:
    """FID and the other distances after `step` steps; "-" for those that a run does not have."""
    has_step = all(curve.steps[0] <= step <= curve.steps[-1] for curve in arm.curves)

    def mean(values_of: Callable[[Curve], Sequence[float]]) -> str:
        logs = [np.interp(step, curve.steps, np.log(values_of(curve))) for curve in arm.curves]
        values = [math.exp(each) for each in logs]
        has_sd = len(values) > 1 and all(map(math.isfinite, values))
        return format_fid(fmean(values), stdev(values) if has_sd else None)

    def other(name: str) -> str:
        if not all(any(name in each for each in curve.other_metrics) for curve in arm.curves):
            return "-"
        return mean(lambda c: [metrics.get(name, math.nan) for metrics in c.other_metrics])

    if not has_step:
        return [arm.name, *["-"] * (1 + len(DISTANCES))]
    return [arm.name, mean(lambda curve: curve.fids), *map(other, DISTANCES)]


def tests_of(arm: Arm, control: Arm) -> tuple[Result, TTest, TTest]:
    result = compare([arm, control], control.name).results[0]
    speed, last = speedup_by_seed(arm, control, result.at), last_fid_by_seed(arm, control)
    if result.speedup.p is None or speed is None or last is None:
        raise SystemExit(f"{arm.name} and {control.name} cannot be tested.")
    return result, speed, last


def ratio(test: TTest, unit: str = "") -> str:
    """The ratio of a test on logs, with its interval."""
    mean, low, high = map(math.exp, (test.difference, test.low, test.high))
    return f"{mean:.2f}{unit} [{low:.2f}, {high:.2f}]"


def pair_rows(pairs: Sequence[tuple[Arm, Arm]]) -> Iterator[list[str]]:
    tests = [tests_of(*pair) for pair in pairs]
    columns = [[result.speedup.p, speed.p, last.p] for result, speed, last in tests]
    p_values = zip(*map(holm, zip(*columns, strict=True)), strict=True)
    for (arm, control), (result, speed, last), ps in zip(pairs, tests, p_values, strict=True):
        seeds = f"{len(arm.curves)}, {len(control.curves)}"
        faster = f"{format_speedup(result.speedup)} to {format_fid(result.at)}, p {format_p(ps[0])}"
        by_seed = f"{ratio(speed, 'x')}, p {format_p(ps[1])}"
        at_end = f"{ratio(last)}, p {format_p(ps[2])}"
        yield [arm.name, control.name, seeds, faster, by_seed, at_end]


def fid_ratio(arm: Arm, control: Arm, step: float) -> str:
    """FID over the control's after `step` steps, over shared seeds; 95% interval if there are two.

    The FID of the last step is the geometric mean over all its sets of samples.
    """

    def log_fid(curve: Curve) -> float:
        sets = curve.repeats if step == curve.steps[-1] else ()
        return math.log(geometric_mean([curve.fids[curve.steps.index(step)], *sets]))

    logs = [(log_fid(a), log_fid(b)) for a, b in shared_seeds(arm, control)]
    test = paired(*zip(*logs, strict=True))
    return ratio(test) if test else f"{math.exp(fmean(a - b for a, b in logs)):.2f}"


def print_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """As Markdown."""
    for row in (heads, ["---"] * len(heads), *rows):
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file")
    parser.add_argument("pairs", nargs="*")
    parser.add_argument("--target", type=float)
    parser.add_argument("--at", metavar="STEP,STEP,...")
    args = parser.parse_intermixed_args()
    arms = {arm.name: arm for arm in read_arms([args.file])}
    pairs = [tuple(arms[name] for name in pair.split("=")) for pair in args.pairs]
    steps = args.at.split(",") if args.at else []
    if pairs and steps:
        rows = [[a.name, b.name, *(fid_ratio(a, b, float(s)) for s in steps)] for a, b in pairs]
        print_table([*PAIR_HEADS[:2], *steps], rows)
    elif pairs:
        print_table(PAIR_HEADS, pair_rows(pairs))
    elif steps:
        rows = [cells_at(arm, float(args.at)) for arm in arms.values()]
        print_table(["arm", "FID", *DISTANCES], rows)
    else:
        print_table(HEADS, [cells(arm, args.target) for arm in arms.values()])
