"""Tables of docs/results/atlas.md: atlas_table.py docs/results/atlas-STUDY.csv [ARM ...]

A row per arm, which is compared with its control. "Score" is the arm's score at the end, divided by
that of its control: a geometric mean over seeds, with a 95% interval (Welch's t test on logs). The
next columns are the speed-ups to the lowest distance that every seed of the control reaches, or
"to" the lowest distance that every seed of both arms reaches. The last two columns are means over
seeds at the end: of the arm, and in brackets of its control. The table of tuned learning rates and
EMA decays comes from atlas-tuning-STUDY.csv in the same folder.

With names of arms, only these arms have a row, and the p-values of their scores are corrected with
Holm's method for these arms.
"""

import csv
import math
import sys
from pathlib import Path
from statistics import fmean

from arms_table import print_table, ratio

from lit_diffusion.lab.compare.comparison import by_metric, compare
from lit_diffusion.lab.compare.curves import Arm, Curve, read_arms
from lit_diffusion.lab.compare.speedrun import TARGETS
from lit_diffusion.lab.compare.statistics import TTest, holm, welch
from lit_diffusion.lab.compare.sweep import BASELINE
from lit_diffusion.lab.compare.tables import format_fid, format_p, format_speedup

CONTROLS = {
    "p2": "simple",
    "mdlrc": "lr-decay",
    "simple+info-noise": "simple",
    "contrastive": "contrastive-bias",
    "fdm": "linear",
    "dit-tread": "dit",
    "dit+sra": "dit",
}
"""Arm -> its control, where it is not the baseline."""


def log_score(curve: Curve) -> float:
    """Logarithm of the score at the end, as atlas.py computes it."""
    distances = {"fid": curve.fids[-1], **curve.other_metrics[-1]}
    return fmean(math.log(distances[name] / target) for name, target in TARGETS.items())


def score_test(arm: Arm, control: Arm) -> TTest | None:
    """Welch's test of log scores; None if a run diverged, or if there are fewer than two seeds."""
    scores = [[log_score(curve) for curve in each.curves] for each in (arm, control)]
    if not all(math.isfinite(score) for each in scores for score in each):
        return None
    return welch(*scores)


def faster(arm: Arm, control: Arm, metric: str) -> str:
    arms = [arm, control] if metric == "fid" else by_metric([arm, control], metric)
    if len(arms) < 2:
        return "diverged"
    comparison = compare(arms, control.name)
    (result,) = comparison.results
    end = f" to {format_fid(result.at)}" if result.at != comparison.target else ""
    return format_speedup(result.speedup) + end


def at_end(arm: Arm, control: Arm, metric: str) -> str:
    means = [fmean(curve.other_metrics[-1][metric] for curve in a.curves) for a in (arm, control)]
    return "{:.2f} ({:.2f})".format(*means)


def row(arm: Arm, control: Arm, test: TTest | None, p: str) -> list[str]:
    seeds = f"{len(arm.curves)}, {len(control.curves)}"
    speedups = [faster(arm, control, name) for name in TARGETS]
    ends = [at_end(arm, control, name) for name in ("recall", "memorized")]
    score = ratio(test) + p if test else "not tested"
    return [arm.name, control.name, seeds, score, *speedups, *ends]


if __name__ == "__main__":
    file, only = Path(sys.argv[1]), sys.argv[2:]
    arms = {arm.name: arm for arm in read_arms([str(file)])}
    pairs = [
        (arm, arms[control])
        for arm in arms.values()
        if (control := CONTROLS.get(arm.name, BASELINE)) in arms and control != arm.name
        if arm.name in (only or arms)
    ]
    tests = [score_test(arm, control) for arm, control in pairs]
    ps = holm([test and test.p for test in tests])
    texts = [f", p {format_p(p)}" if only else "" for p in ps]
    rows = [row(*pair, test, p) for pair, test, p in zip(pairs, tests, texts, strict=True)]
    heads = ["arm", "control", "seeds", "score", *TARGETS, "recall", "memorized"]
    print_table([name.replace("fid", "FID") for name in heads], rows)
    tuning = file.with_stem(file.stem.replace("atlas", "atlas-tuning"))
    if tuning.exists():
        best: dict[str, dict[str, str]] = {}
        for each in sorted(csv.DictReader(tuning.open()), key=lambda each: float(each["score"])):
            best.setdefault(each["arm"], each)
        print()
        print_table(
            ["arm", "lr", "EMA decay", "score on the tuning seed"],
            [[a, r["lr"], r["decay"], f"{float(r['score']):.2f}"] for a, r in best.items()],
        )
