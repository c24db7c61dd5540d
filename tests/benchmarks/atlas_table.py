"""Tables of docs/results/atlas.md: atlas_table.py docs/results/atlas-STUDY.csv [ARM ...]

1. Scores and distances at the end of training, divided by those of the baseline, and the score
   divided by that of the control: geometric means over seeds, with 95% intervals (Welch's t test on
   logarithms).
2. Speed-ups over the control, to the lowest distance that every seed of the control reaches, or
   "to" the lowest distance that every seed of both arms reaches. Recall and memorized samples at
   the end: means over seeds of the arm, and in brackets of its control.
3. The speed-up by FID beside the speed-up that a paper reports, and a verdict.
4. Settings with the best scores of atlas-tuning-STUDY.csv, which is in the same folder.
5. CPU times of a training step, of atlas-steps-STUDY.csv.

With names of arms, the first table has only these arms, and a p-value for each. It is the largest
one of the tests of its score against its control and against the baseline, with both of their
learning rates, and is corrected with Holm's method for these arms. An arm that cannot be tested
counts as p = 1, and so does an arm whose score is not the lower one in each test.
"""

import csv
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from arms_table import print_table, ratio

from lit_diffusion.lab.compare.comparison import Comparison, by_metric, compare
from lit_diffusion.lab.compare.curves import Arm, Curve, read_arms
from lit_diffusion.lab.compare.speedrun import TARGETS
from lit_diffusion.lab.compare.statistics import Speedup, TTest, holm, welch
from lit_diffusion.lab.compare.sweep import BASELINE
from lit_diffusion.lab.compare.tables import format_fid, format_p, format_speedup

CONTROLS = {
    "mdlrc": "lr-decay",
    "simple+info-noise": "simple",
    "contrastive": "contrastive-bias",
    "fdm": "linear",
    "dit-tread": "dit",
    "dit+sra": "dit",
}
"""Arm -> its control, where it is not the baseline."""

REPORTED = {
    ("mdlrc", BASELINE): 2.0,  # together with clts
    ("clts", BASELINE): 2.0,  # together with mdlrc
    (BASELINE, "simple"): 3.4,  # Min-SNR
    ("p2", "simple"): None,
    ("x0", BASELINE): None,
    ("muon", BASELINE): 1.35,
    ("optimal-transport", BASELINE): None,
    ("immiscible", BASELINE): 3.0,
    ("simple+info-noise", "simple"): 1.4,
    ("adaptive-timesteps", BASELINE): None,
    ("contrastive", BASELINE): 9.0,
    ("dispersive", BASELINE): None,
    ("fdm", "linear"): 2.0,
    ("dit-tread", "dit"): 14.0,
    ("dit+sra", "dit"): 3.0,
    ("magnitude-preserving", BASELINE): None,
}
"""(arm, arm that it is compared with) -> speed-up of training that a paper reports, if any."""

SECOND_LR = " at its second lr"
"""End of the name of a control that was trained with its second best learning rate."""

Measure = Callable[[Curve], float]


def at_end(name: str) -> Measure:
    """A metric of the last evaluation; NaN if the samples were not finite."""

    def of(curve: Curve) -> float:
        others = curve.other_metrics[-1] if curve.other_metrics else {}
        return {"fid": curve.fids[-1], **others}.get(name, math.nan)

    return of


def log_distance(name: str) -> Measure:
    return lambda curve: math.log(at_end(name)(curve))


def log_score(names: Sequence[str]) -> Measure:
    """Logarithm of the geometric mean of distances. Targets cancel in a ratio."""
    return lambda curve: fmean(log_distance(name)(curve) for name in names)


def test(arm: Arm, other: Arm, measure: Measure) -> TTest | None:
    """Welch's test; None if a run diverged, or if an arm has fewer than two seeds."""
    logs = [[measure(curve) for curve in each.curves] for each in (arm, other)]
    return welch(*logs) if all(math.isfinite(log) for each in logs for log in each) else None


def largest_p(tests: Sequence[TTest | None]) -> float | None:
    """Largest p-value; None if a test is missing, or if the arm does not have the lower score."""
    results = [each for each in tests if each and each.difference < 0]
    return max(each.p for each in results) if len(results) == len(tests) else None


def compared(arm: Arm, control: Arm, metric: str) -> Comparison | None:
    """Speed-up of an arm over its control; None if a run diverged."""
    arms = [arm, control] if metric == "fid" else by_metric([arm, control], metric)
    if len(arms) < 2 or math.isinf(control.reached_by_all):
        return None
    return compare(arms, control.name)


def faster(arm: Arm, control: Arm, metric: str) -> str:
    if (comparison := compared(arm, control, metric)) is None:
        return "diverged"
    (result,) = comparison.results
    end = f" to {format_fid(result.at)}" if result.at != comparison.target else ""
    return format_speedup(result.speedup) + end


def verdict(speedup: Speedup, reported: float | None) -> str:
    """What the 95% interval of a speed-up says about the speed-up that a paper reports."""
    if speedup.low is None or speedup.high is None:
        return "not shown"
    if speedup.high < 1:
        return "slower"
    if speedup.low > 1:
        return "faster" if reported is None else "holds" if reported <= speedup.high else "smaller"
    return "does not hold" if reported and speedup.high < reported else "not shown"


def both_means(arm: Arm, control: Arm, metric: str) -> str:
    means = [fmean(map(at_end(metric), each.curves)) for each in (arm, control)]
    return "{:.2f} ({:.2f})".format(*means)


def end_table(arms: Mapping[str, Arm], names: Sequence[str], only: Sequence[str]) -> None:
    baseline, score = arms[BASELINE], log_score(names)
    rows, ps = [], []
    has_control = [
        name for name in arms if name != BASELINE and CONTROLS.get(name, BASELINE) in arms
    ]
    for name in only or has_control:
        arm, control = arms[name], arms[CONTROLS.get(name, BASELINE)]
        tests = [test(arm, control, score), test(arm, baseline, score)]
        seconds = [arms.get(each.name + SECOND_LR) for each in (control, baseline)]
        ps.append(largest_p([*tests, *(test(arm, each, score) for each in seconds if each)]))
        tests += [test(arm, baseline, log_distance(each)) for each in names]
        cells = [ratio(each) if each else "not tested" for each in tests]
        rows.append([name, control.name, *cells])
    heads = ["arm", "control", "score / control's", "score"]
    heads += [name.replace("fid", "FID") for name in names]
    if only:
        heads.append("p")
        rows = [[*row, format_p(p)] for row, p in zip(rows, holm(ps), strict=True)]
    print_table(heads, rows)


def speed_table(arms: Mapping[str, Arm], names: Sequence[str]) -> None:
    rows = []
    for name, arm in arms.items():
        control = arms.get(CONTROLS.get(name, BASELINE), arm)
        if control is not arm:
            speedups = [faster(arm, control, each) for each in names]
            ends = [both_means(arm, control, each) for each in ("recall", "memorized")]
            rows.append([name, control.name, *speedups, *ends])
    heads = [*(name.replace("fid", "FID") for name in names), "recall", "memorized"]
    print_table(["arm", "control", *heads], rows)


def claims_table(arms: Mapping[str, Arm]) -> None:
    rows = []
    for (name, other), reported in REPORTED.items():
        if {name, other} <= arms.keys():
            comparison = compared(arms[name], arms[other], "fid")
            result = verdict(comparison.results[0].speedup, reported) if comparison else "diverged"
            speedup = faster(arms[name], arms[other], "fid")
            rows.append([name, other, f"{reported:g}x" if reported else "-", speedup, result])
    heads = ["arm", "compared with", "reported", "measured by FID, in steps", "verdict"]
    print_table(heads, rows)


def tuning_table(file: Path) -> None:
    best: dict[str, dict[str, str]] = {}
    for row in sorted(csv.DictReader(file.open()), key=lambda row: float(row["score"])):
        best.setdefault(row["arm"], row)
    rows = [[a, r["lr"], r["decay"], f"{float(r['score']):.2f}"] for a, r in best.items()]
    print_table(["arm", "lr", "EMA decay", "score on the tuning seed"], rows)


def steps_table(file: Path) -> None:
    rows = [
        [
            row["arm"],
            *(f"{float(row[name]):.2f}" for name in ("ratio to control", "ratio to baseline")),
        ]
        for row in csv.DictReader(file.open())
    ]
    print_table(["arm", "step time / control's", "step time / baseline's"], rows)


if __name__ == "__main__":
    file, only = Path(sys.argv[1]), sys.argv[2:]
    arms = {arm.name: arm for arm in read_arms([str(file)])}
    curves = [curve for arm in arms.values() for curve in arm.curves]
    names = [n for n in TARGETS if any(math.isfinite(at_end(n)(curve)) for curve in curves)]
    needed = {BASELINE, *only, *(CONTROLS.get(name, BASELINE) for name in only)}
    if missing := needed - arms.keys():
        sys.exit(f"{file} has no rows of {', '.join(sorted(missing))}.")
    end_table(arms, names, only)
    print()
    speed_table(arms, names)
    print()
    claims_table(arms)
    for stage, print_stage in {"tuning": tuning_table, "steps": steps_table}.items():
        if (other := file.with_stem(file.stem.replace("atlas", f"atlas-{stage}"))).exists():
            print()
            print_stage(other)
