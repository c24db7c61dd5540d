"""Table of docs/results/paper-at-its-regime.md: regime_table.py docs/results/regime-LR.csv ...

For each learning rate and each pair of arms, the table has the FID of the arm divided by the FID of
its control, after a fifth of the steps and at the end. Each ratio is a geometric mean over seeds
with its 95% interval (paired t test on log FID). The p-values of the three primary pairs are
corrected with Holm's method, per lr and column. Two arms are equivalent if the 90% interval of
their ratio lies between 0.95 and 1.05.
"""

import math
import sys
from pathlib import Path
from statistics import geometric_mean

from arms_table import print_table
from scipy.stats import ttest_rel

from lit_diffusion.lab.compare.curves import Arm, Curve, read_arms
from lit_diffusion.lab.compare.statistics import holm, paired, shared_seeds
from lit_diffusion.lab.compare.tables import format_p

CLTS = "clts-target-1500"
PRIMARY = [(f"mdlrc+{CLTS}", "baseline"), ("mdlrc", "lr-decay"), (CLTS, "baseline")]
OTHERS = [("min-snr", "baseline"), ("lr-decay", "beta1-0.8"), ("beta1-0.8", "baseline")]
MARGIN = 0.05


def log_fid(curve: Curve, step: float) -> float:
    """Log FID after `step` steps; at the end, of the geometric mean over all sets of samples."""
    sets = curve.repeats if step == curve.steps[-1] else ()
    return math.log(geometric_mean([curve.fids[curve.steps.index(step)], *sets]))


def logs(arm: Arm, control: Arm, part: float) -> list[tuple[float, float]]:
    """Log FIDs of both arms for each seed that both have, after a part of the steps."""
    pairs = shared_seeds(arm, control)
    return [tuple(log_fid(c, part * c.steps[-1]) for c in pair) for pair in pairs]


def cell(values: list[tuple[float, float]], p: float | None) -> str:
    first, second = zip(*values, strict=True)
    test = paired(first, second)
    if test is None:
        return f"{math.exp(first[0] - second[0]):.2f}" if len(values) == 1 else "-"
    ratio, low, high = (math.exp(x) for x in (test.difference, test.low, test.high))
    narrow = ttest_rel(first, second).confidence_interval(1 - 2 * MARGIN)
    equivalent = math.log(1 - MARGIN) < narrow.low and narrow.high < math.log(1 + MARGIN)
    text = f"{ratio:.2f} [{low:.2f}, {high:.2f}]"
    text += "" if p is None else f", p {format_p(p)}"
    return text + (", equivalent" if equivalent else "")


def rows(arms: dict[str, Arm], lr: str) -> list[list[str]]:
    found = [
        (arms[a], arms[b], (a, b) in PRIMARY)
        for a, b in PRIMARY + OTHERS
        if a in arms and b in arms
    ]
    columns = []
    for part in (0.2, 1.0):
        values = [logs(a, b, part) for a, b, _ in found]
        tests = [paired(*zip(*each, strict=True)) for each in values]
        ps = holm([t and t.p for t, (*_, main) in zip(tests, found, strict=True) if main])
        ps += [None] * (len(found) - len(ps))
        columns.append([cell(v, p) for v, p in zip(values, ps, strict=True)])
    return [
        [lr, a.name, b.name, str(len(shared_seeds(a, b))), *cells]
        for (a, b, _), *cells in zip(found, *columns, strict=True)
    ]


if __name__ == "__main__":
    heads = ["lr", "arm", "its control", "seeds", "after 20%", "at the end"]
    studies = {Path(f).stem.removeprefix("regime-"): read_arms([f]) for f in sys.argv[1:]}
    tables = [rows({arm.name: arm for arm in arms}, lr) for lr, arms in studies.items()]
    print_table(heads, [row for table in tables for row in table])
