"""What each arm of a table came to: arms_table.py FILE.csv [--target FID].

A row an arm, as Markdown: steps of each seed to the target; last FID, the same as the geometric
mean over all sets of samples, and lowest FID, each as mean +- standard deviation over seeds.
"""

import argparse
from collections.abc import Callable
from statistics import fmean, geometric_mean, stdev

from csv_tables import print_table

from lit_diffusion.lab.compare.curves import Arm, Curve, read_arms
from lit_diffusion.lab.compare.tables import format_fid


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


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file")
    parser.add_argument("--target", type=float)
    args = parser.parse_args()
    heads = ["arm", "steps to the target", "last FID", "over all sets", "lowest FID"]
    print_table(heads, [cells(arm, args.target) for arm in read_arms([args.file])])
