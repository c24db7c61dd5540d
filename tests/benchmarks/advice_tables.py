"""The tables of docs/results/digits-advice.md: advice_tables.py ADVICE.csv ABLATION.csv.

An arm of ADVICE.csv is a piece of advice joined with a factor of the lr, of which 1 is the best of
the optimizer. ABLATION.csv adds runs of the baseline and of constant beta1. A ratio of FIDs at the
end is by Welch on logs (95%, p after Holm), "by seed" by a paired t-test.
"""

import math
import re
import sys
from collections import defaultdict
from dataclasses import dataclass
from statistics import geometric_mean

from arms_table import ratio
from csv_tables import print_table, read_rows

from lit_diffusion.lab.compare.curves import Stability, read_arms
from lit_diffusion.lab.compare.statistics import TTest, holm, paired, welch
from lit_diffusion.lab.compare.tables import format_fid, format_p


@dataclass(frozen=True)
class Run:
    arm: str
    seed: str
    last_fid: float  # geometric mean over sets of samples, infinite without one
    stability: Stability | None  # of the training losses; None where not every step's is known


Cells = dict[tuple[str, float], list[Run]]
ADVICE = {
    "baseline": "Adam, warm-up, no clipping, EMA, noise prediction, cosine betas",
    "no-warmup": "no warm-up",
    "clip": "gradients clipped to a norm of 1",
    "adamw": "AdamW (weight decay 0.01)",
    "sgd": "SGD, momentum 0.9",
    "rmsprop": "RMSprop",
    "no-ema": "no EMA",
    "x0": "x0 prediction, unweighted",
    "velocity": "velocity prediction",
    "linear": "linear betas",
}
BETAS = {f"beta1-{beta}": beta for beta in ("0", "0.5", "0.8", "0.9", "0.95", "0.99")}


def cell(arm: str) -> tuple[str, float]:
    """Advice and factor of the lr of an arm: clip+lr-x3 is ("clip", 3)."""
    parts = arm.split("+")
    factors = [float(match[1]) for p in parts if (match := re.search(r"-x([\d.]+)$", p))]
    names = [re.sub(r"-x[\d.]+$", "", p) for p in parts if not p.startswith("lr-x")]
    return (*names, "baseline")[0], (*factors, 1.0)[0]


def read(file: str) -> list[Run]:
    stabilities = {}
    for row in read_rows(file):
        steady = Stability(int(row["spikes"]), row["diverged"] == "1")
        stabilities[row["arm"], row["seed"]] = steady if row["losses_every"] == "1" else None
    runs = []
    for arm in read_arms([file]):
        for curve in arm.curves:
            fids = [curve.fids[-1], *curve.repeats]
            last = geometric_mean(fids) if all(map(math.isfinite, fids)) else math.inf
            runs.append(Run(arm.name, curve.seed, last, stabilities[arm.name, curve.seed]))
    return runs


def cells(advice: list[Run], ablation: list[Run]) -> Cells:
    """The runs by advice and factor; of a seed that is in both files, the first."""
    in_advice = {(run.arm, run.seed) for run in advice}
    by_cell: Cells = defaultdict(list)
    constant = [run for run in ablation if run.arm in BETAS or run.arm == "baseline"]
    for run in [*advice, *(r for r in constant if (r.arm, r.seed) not in in_advice)]:
        by_cell[cell(run.arm)].append(run)
    return by_cell


def fids(runs: list[Run]) -> str:
    """The geometric mean over seeds, the lowest and the highest."""
    finite = sorted(fid for run in runs if math.isfinite(fid := run.last_fid))
    if not finite:
        return "-"
    lost = f", {len(finite)} of {len(runs)}" * (len(finite) < len(runs))
    spread = f"{format_fid(finite[0])} to {format_fid(finite[-1])}"
    return f"{format_fid(geometric_mean(finite))} ({spread}{lost})"


def unstable(runs: list[Run]) -> str:
    """Diverged and spiking runs of those that logged every step, as in compare's table."""
    stabilities = [run.stability for run in runs if run.stability]
    if not stabilities:
        return "-"
    bad = sum(not one.stable for one in stabilities)
    diverged = sum(one.diverged for one in stabilities)
    return f"{bad} of {len(stabilities)}" + (f" ({diverged} diverged)" if diverged else "")


def against(runs: list[Run], baseline: list[Run]) -> tuple[TTest | None, TTest | None]:
    """Last FIDs beside those of the baseline, and by seed; None where a run has none."""
    ours, theirs = ({run.seed: math.log(run.last_fid) for run in each} for each in (runs, baseline))
    if not all(map(math.isfinite, (*ours.values(), *theirs.values()))):
        return None, None
    shared = sorted(ours.keys() & theirs.keys())
    pairs = [[each[seed] for seed in shared] for each in (ours, theirs)]
    return welch(list(ours.values()), list(theirs.values())), paired(*pairs)


def print_advice(by_cell: Cells) -> None:
    tests = {name: against(by_cell[name, 1], by_cell["baseline", 1]) for name in list(ADVICE)[1:]}
    p_values = [test.p if test else None for test, _ in tests.values()]
    corrected = dict(zip(tests, holm(p_values), strict=True))
    rows = []
    for name, text in ADVICE.items():
        ratios = [ratio(test) if test else "-" for test in tests.get(name, (None, None))]
        p = format_p(corrected.get(name))
        rows.append([name, text, fids(by_cell[name, 1]), ratios[0], p, ratios[1]])
    heads = ["arm", "what differs", "FID", "over the baseline's", "p (Holm)", "by seed"]
    print_table(heads, rows)


def print_stability(by_cell: Cells) -> None:
    rows = []
    for name in ADVICE:
        each = [by_cell[name, factor] for factor in (1.0, 3.0, 10.0)]
        rows.append([name, *map(unstable, each), *map(fids, each[1:])])
    heads = ["arm", *(f"unstable at {k}x" for k in (1, 3, 10)), "FID at 3x", "FID at 10x"]
    print_table(heads, rows)


def print_momentum(by_cell: Cells) -> None:
    rows = []
    for name, beta in BETAS.items():
        name = "baseline" if beta == "0.9" else name
        each = [by_cell[name, factor] for factor in (0.3, 1.0, 3.0)]
        rows.append([beta, *map(fids, each), *map(unstable, (each[0], each[2]))])
    print_table(["beta1", "FID at 0.3x", "1x", "3x", "unstable at 0.3x", "3x"], rows)


if __name__ == "__main__":
    by_cell = cells(*map(read, sys.argv[1:]))
    for print_part in (print_advice, print_stability, print_momentum):
        print_part(by_cell)
        print()
