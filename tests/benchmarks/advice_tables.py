"""The tables of docs/results/digits-advice.md: advice_tables.py ADVICE.csv ABLATION.csv.

An arm of ADVICE.csv is a piece of advice joined with a factor of the lr. ABLATION.csv adds runs of
the baseline and of constant beta1. Printed as Markdown:
- advice left in or out: FID at the end (geometric mean, lowest and highest seed), its ratio to the
  baseline's (Welch on logs, 95%; p after Holm) and by seed (paired t);
- how many runs were unstable at 1, 3 and 10 times the lr, which is the best of the optimizer;
- constant beta1 crossed with the lr: FID at the end.
"""

import argparse
import csv
import math
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean

from lit_diffusion.lab.compare.curves import Curve, Stability, read_arms
from lit_diffusion.lab.compare.statistics import TTest, holm, paired, welch
from lit_diffusion.lab.compare.tables import format_fid, format_p


@dataclass(frozen=True)
class Run:
    """The last FID of a run: the geometric mean over sets of samples, infinite without one.

    And how steady its training losses were; None where not every step's is known.
    """

    arm: str
    seed: str
    last_fid: float
    stability: Stability | None


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
FACTORS = (1.0, 3.0, 10.0)
BETA_FACTORS = (0.3, 1.0, 3.0)
BETAS = ("0", "0.5", "0.8", "0.9", "0.95", "0.99")


def cell(arm: str) -> tuple[str, float]:
    """Advice and factor of the lr of an arm: clip+lr-x3 is ("clip", 3).

    Raises:
        ValueError: for an arm that the tables have no place for.
    """
    parts = arm.split("+")
    factors = [float(match[1]) for p in parts if (match := re.search(r"-x([\d.]+)$", p))]
    names = [re.sub(r"-x[\d.]+$", "", p) for p in parts if not p.startswith("lr-x")]
    name, factor = (*names, "baseline")[0], (*factors, 1.0)[0]
    is_listed = (name in ADVICE and factor in FACTORS) or (is_beta(name) and factor in BETA_FACTORS)
    is_absolute = "sgd" in parts and len(parts) > 1  # an lr-x* would be of Adam's lr
    if not is_listed or is_absolute or len(names) > 1 or len(factors) > 1:
        raise ValueError(f"{arm} is no piece of advice with a factor of its lr.")
    return name, factor


def is_beta(name: str) -> bool:
    """The baseline is beta1-0.9."""
    return name == "baseline" or name in [f"beta1-{beta}" for beta in BETAS]


def read(file: str) -> list[Run]:
    stabilities = {}
    for row in csv.DictReader(Path(file).read_text().splitlines()):
        steady = Stability(int(row["spikes"]), row["diverged"] == "1")
        stabilities[row["arm"], row["seed"]] = steady if row["losses_every"] == "1" else None
    return [
        Run(arm.name, run.seed, last_fid(run), stabilities[arm.name, run.seed])
        for arm in read_arms([file])
        for run in arm.curves
    ]


def last_fid(run: Curve) -> float:
    fids = [run.fids[-1], *run.repeats]
    return geometric_mean(fids) if all(map(math.isfinite, fids)) else math.inf


def cells(advice: list[Run], ablation: list[Run]) -> Cells:
    """The runs by advice and factor; of a seed that is in both files, the first."""
    in_advice = {(run.arm, run.seed) for run in advice}
    more = [run for run in ablation if is_beta(run.arm) and (run.arm, run.seed) not in in_advice]
    by_cell: Cells = defaultdict(list)
    for run in advice + more:
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
    ours, theirs = ({run.seed: run.last_fid for run in group} for group in (runs, baseline))
    if not all(map(math.isfinite, (*ours.values(), *theirs.values()))):
        return None, None
    shared = sorted(ours.keys() & theirs.keys())
    logs = [[math.log(fid) for fid in fids.values()] for fids in (ours, theirs)]
    pairs = [[math.log(each[seed]) for seed in shared] for each in (ours, theirs)]
    return welch(*logs), paired(*pairs)


def ratio(test: TTest | None) -> str:
    if test is None:
        return "-"
    mean, low, high = map(math.exp, (test.difference, test.low, test.high))
    return f"{mean:.2f} [{low:.2f}, {high:.2f}]"


def row(*texts: str) -> None:
    print("| " + " | ".join(texts) + " |")


def advice_table(by_cell: Cells) -> None:
    """At the best lr."""
    tests = {name: against(by_cell[name, 1], by_cell["baseline", 1]) for name in list(ADVICE)[1:]}
    p_values = {name: test.p for name, (test, _) in tests.items() if test}
    corrected = dict(zip(p_values, holm(list(p_values.values())), strict=True))
    row("arm", "what differs", "FID", "over the baseline's", "p (Holm)", "by seed")
    row(*["---"] * 6)
    for name, text in ADVICE.items():
        test, pairs = tests.get(name, (None, None))
        p = format_p(corrected.get(name))
        row(name, text, fids(by_cell[name, 1]), ratio(test), p, ratio(pairs))


def stability_table(by_cell: Cells) -> None:
    """At one, three and ten times the best lr."""
    row("arm", *(f"unstable at {k:g}x" for k in FACTORS), "FID at 3x", "FID at 10x")
    row(*["---"] * 6)
    for name in ADVICE:
        each = [by_cell[name, factor] for factor in FACTORS]
        row(name, *map(unstable, each), *map(fids, each[1:]))


def momentum_table(by_cell: Cells) -> None:
    row("beta1", "FID at 0.3x", "1x", "3x", "unstable at 0.3x", "3x")
    row(*["---"] * 6)
    for beta in BETAS:
        name = "baseline" if beta == "0.9" else f"beta1-{beta}"
        each = [by_cell[name, factor] for factor in BETA_FACTORS]
        row(beta, *map(fids, each), *map(unstable, (each[0], each[2])))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("advice")
    parser.add_argument("ablation")
    args = parser.parse_args()
    by_cell = cells(read(args.advice), read(args.ablation))
    advice_table(by_cell)
    print()
    stability_table(by_cell)
    print()
    momentum_table(by_cell)


if __name__ == "__main__":
    main()
