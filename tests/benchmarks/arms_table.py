"""What each arm of a table came to: arms_table.py FILE.csv [--target FID | --at STEP].

A row an arm, as Markdown: steps of each seed to the target; last FID, the same as the geometric
mean over all sets of samples, and lowest FID, each as mean +- standard deviation over seeds.

--at 400: all distances after so many steps instead, interpolated in log distance.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from statistics import fmean, geometric_mean, stdev

import numpy as np
from csv_tables import print_table

from lit_diffusion.lab.compare.curves import Arm, Curve, read_arms
from lit_diffusion.lab.compare.tables import format_fid
from lit_diffusion.metrics.auxiliary_metrics import DISTANCES


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
    """FID and the other distances after `step` steps."""

    def mean(values_of: Callable[[Curve], Sequence[float]]) -> str:
        logs = [np.interp(step, curve.steps, np.log(values_of(curve))) for curve in arm.curves]
        values = [math.exp(each) for each in logs]
        return format_fid(fmean(values), stdev(values))

    def other(name: str) -> str:
        return mean(lambda curve: [metrics[name] for metrics in curve.other_metrics])

    return [arm.name, mean(lambda curve: curve.fids), *map(other, DISTANCES)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file")
    parser.add_argument("--target", type=float)
    parser.add_argument("--at", type=float, metavar="STEP")
    args = parser.parse_args()
    arms = read_arms([args.file])
    if args.at:
        print_table(["arm", "FID", *DISTANCES], [cells_at(arm, args.at) for arm in arms])
    else:
        heads = ["arm", "steps to the target", "last FID", "over all sets", "lowest FID"]
        print_table(heads, [cells(arm, args.target) for arm in arms])
