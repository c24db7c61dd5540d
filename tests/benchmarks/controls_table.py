"""Methods beside their own controls: controls_table.py RUNS ARM=CONTROL [ARM=CONTROL ...].

A row a pair, as Markdown: the speed-up of the arm over its control as `compare` has it (Welch, as
if their runs were independent); the same by seed (runs of one seed share initial weights, order of
data and seeds of samples, which drop out of the differences: paired t); and by seed the last FID
over the control's, mean of all sets of samples. Intervals are of 95%, p after Holm over the pairs.
"""

import argparse
import math
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from statistics import fmean, geometric_mean, stdev

from scipy.special import stdtr, stdtrit

from lit_diffusion.analysis.comparison import Arm, Result, compare
from lit_diffusion.analysis.speedup import CONFIDENCE, holm
from lit_diffusion.analysis.wording import fid_text, p_text, speedup_text
from lit_diffusion.commands.experiment import find_runs
from lit_diffusion.commands.findings import arms_of
from lit_diffusion.commands.selection import select

Paired = tuple[float, float, float, float]
"""Ratio, the ends of its interval, p."""


def paired(differences: Sequence[float]) -> Paired:
    """Of differences of logs."""
    mean, degrees = fmean(differences), len(differences) - 1
    error = stdev(differences) / math.sqrt(len(differences))
    reach = float(stdtrit(degrees, (1 + CONFIDENCE) / 2)) * error
    p = 2 * float(stdtr(degrees, -abs(mean) / error))
    return math.exp(mean), math.exp(mean - reach), math.exp(mean + reach), p


def by_seed(values: dict[str, float], control: dict[str, float]) -> Paired:
    """Of the seeds that both have: the arm's values over the control's."""
    shared = sorted(values.keys() & control.keys())
    return paired([math.log(values[seed] / control[seed]) for seed in shared])


def steps(arm: Arm, at: float) -> dict[str, float]:
    crossings = zip(arm.curves, arm.crossings(at), strict=True)
    return {curve.seed: crossing.step for curve, crossing in crossings}


def last(arm: Arm) -> dict[str, float]:
    """The geometric mean over all sets of samples."""
    return {c.seed: geometric_mean([c.fids[-1], *c.repeats]) for c in arm.curves}


def found(arm: Arm, control: Arm) -> tuple[Result, Paired, Paired]:
    result = compare([arm, control], control.name).results[0]
    speed = by_seed(steps(control, result.at), steps(arm, result.at))
    return result, speed, by_seed(last(arm), last(control))


def text(test: Paired, p: float, unit: str = "") -> str:
    ratio, low, high, _ = test
    return f"{ratio:.2f}{unit} [{low:.2f}, {high:.2f}], p {p_text(p)}"


def row(*cells: str) -> None:
    print("| " + " | ".join(cells) + " |")


def table(pairs: Sequence[tuple[Arm, Arm]]) -> None:
    results, speeds, fids = zip(*(found(*pair) for pair in pairs), strict=True)
    ps = [result.speedup.p or 1.0 for result in results]
    corrected = [holm(values) for values in (ps, [s[3] for s in speeds], [f[3] for f in fids])]
    row(
        "arm", "its control", "seeds", "speed-up", "by seed", "last FID over the control's, by seed"
    )
    row(*["---"] * 6)
    for (arm, control), result, speed, fid, first, second, third in zip(
        pairs, results, speeds, fids, *corrected, strict=True
    ):
        seeds = f"{len(arm.curves)}, {len(control.curves)}"
        told = f"{speedup_text(result.speedup)} to {fid_text(result.at)}, p {p_text(first)}"
        row(arm.name, control.name, seeds, told, text(speed, second, "x"), text(fid, third))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path)
    parser.add_argument("pairs", nargs="+")
    args = parser.parse_args()
    names = [pair.split("=") for pair in args.pairs]
    folders = [str(args.runs / name) for name in dict.fromkeys(chain(*names))]
    arms = {arm.name: arm for arm in arms_of(select(find_runs(folders)))}
    table([(arms[first], arms[control]) for first, control in names])


if __name__ == "__main__":
    main()
