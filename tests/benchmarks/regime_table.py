"""Tables of docs/results/paper-at-its-regime.md.

    python tests/benchmarks/regime_table.py docs/results/regime-[0-9]*.csv
    python tests/benchmarks/regime_table.py docs/results/cifar10-pilot-*.csv

The name of each file ends in its learning rate. For each learning rate and each pair of arms, the
table has the FID of the arm divided by the FID of its control, after a fifth of the steps and at
the end, and the same ratio for the held-out FID at the end. Each ratio is a geometric mean over
seeds with its 95% interval (paired t test on the logarithm). The p-values of FID are corrected with
Holm's method for the three primary pairs of a column. A pair that cannot be tested counts as p = 1.
"""

import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, geometric_mean

from arms_table import print_table
from scipy.stats import ttest_rel

from lit_diffusion.lab.compare.curves import Arm, Curve, read_arms
from lit_diffusion.lab.compare.statistics import TTest, holm, paired, shared_seeds
from lit_diffusion.lab.compare.tables import format_p

CLTS = ("clts-target-1500", "clts", "clts-target-400")
"""Names of the arm with CLTS alone, in the studies."""

MARGIN = 0.05
"""Arms are equivalent if their ratio is 1 up to this margin (two one-sided tests at 5%)."""

Measure = Callable[[Curve], float]
Logs = list[tuple[float, float]]


def fid_after(part: float) -> Measure:
    """FID after a part of the steps; at the end, the geometric mean over all sets of samples."""

    def fid(curve: Curve) -> float:
        step = part * curve.steps[-1]
        sets = curve.repeats if part == 1 else ()
        return geometric_mean([curve.fids[curve.steps.index(step)], *sets])

    return fid


def at_end(name: str) -> Measure:
    """Another metric of the last evaluation's samples."""
    return lambda curve: curve.other_metrics[-1].get(name, math.nan)


MEASURES = {
    "FID after 20%": fid_after(0.2),
    "FID at the end": fid_after(1),
    "held-out FID at the end": at_end("held-out"),
}


def logs(arm: Arm, control: Arm, measure: Measure) -> Logs:
    """Logarithms of a measure of both arms, for each seed that both have."""
    pairs = [(measure(a), measure(b)) for a, b in shared_seeds(arm, control)]
    return [(math.log(a), math.log(b)) for a, b in pairs]


def test(values: Logs) -> TTest | None:
    """Paired t test; None if there are fewer than two seeds, or a run has no finite FID."""
    if len(values) < 2 or not all(math.isfinite(x) for pair in values for x in pair):
        return None
    return paired(*zip(*values, strict=True))


def cell(values: Logs, p: float | None) -> str:
    if broken := sum(not math.isfinite(a) for a, _ in values):
        return f"diverged ({broken} of {len(values)} seeds)"
    result = test(values)
    if result is None:
        return f"{math.exp(fmean(a - b for a, b in values)):.2f}" if values else "-"
    ratio, low, high = (math.exp(x) for x in (result.difference, result.low, result.high))
    narrow = ttest_rel(*zip(*values, strict=True)).confidence_interval(0.90)
    equivalent = math.log(1 - MARGIN) < narrow.low and narrow.high < math.log(1 + MARGIN)
    text = f"{ratio:.2f} [{low:.2f}, {high:.2f}]" + ("" if p is None else f", p {format_p(p)}")
    return text + (", equivalent" if equivalent else "")


def rows(lr: str, arms: dict[str, Arm]) -> list[list[str]]:
    clts = next(name for name in CLTS if name in arms)
    primary = [(f"mdlrc+{clts}", "baseline"), ("mdlrc", "lr-decay"), (clts, "baseline")]
    others = [("min-snr", "baseline"), ("lr-decay", "beta1-0.8"), ("beta1-0.8", "baseline")]
    columns = {}
    for name, measure in MEASURES.items():
        values = {
            pair: logs(arms[pair[0]], arms[pair[1]], measure) if arms.keys() >= {*pair} else []
            for pair in primary + others
        }
        tests = [test(values[pair]) for pair in primary]
        ps = dict(zip(primary, holm([each and each.p for each in tests]), strict=True))
        if "held-out" in name:  # a secondary measure, whose interval must agree
            ps = {}
        columns[name] = {pair: cell(values[pair], ps.get(pair)) for pair in values}
    return [
        [lr, a, b, str(len(shared_seeds(arms[a], arms[b]))), *(c[a, b] for c in columns.values())]
        for a, b in primary + others
        if arms.keys() >= {a, b}
    ]


def decisions(lr: str, arms: dict[str, Arm]) -> str:
    """Corrected p-values of the three tests of the plan: (a) after 20%, (b) and (c) at the end."""
    clts = next(name for name in CLTS if name in arms)
    early, late = fid_after(0.2), fid_after(1)
    pairs = {"(a)": (f"mdlrc+{clts}", "baseline", early), "(b)": ("mdlrc", "lr-decay", late)}
    pairs["(c)"] = (clts, "baseline", late)
    tests = [
        test(logs(arms[a], arms[b], measure)) if arms.keys() >= {a, b} else None
        for a, b, measure in pairs.values()
    ]
    ps = holm([each and each.p for each in tests])
    texts = [f"{name} p {format_p(p)}" for name, p in zip(pairs, ps, strict=True)]
    return f"Decisions at an lr of {lr}: {', '.join(texts)}."


def memorized(lr: str, arm: Arm) -> list[str]:
    fractions = [at_end("memorized")(curve) for curve in arm.curves]
    return [lr, arm.name, str(len(fractions)), f"{fmean(fractions):.2f}"]


if __name__ == "__main__":
    studies = {re.split("regime-|pilot-", Path(file).stem)[1]: file for file in sys.argv[1:]}
    arms = {lr: {arm.name: arm for arm in read_arms([file])} for lr, file in studies.items()}
    heads = ["lr", "arm", "its control", "seeds", *MEASURES]
    print_table(heads, [row for lr, each in arms.items() for row in rows(lr, each)])
    print()
    heads = ["lr", "arm", "seeds", "memorized samples at the end"]
    print_table(heads, [memorized(lr, arm) for lr, each in arms.items() for arm in each.values()])
    print()
    print("\n".join(decisions(lr, each) for lr, each in arms.items()))
