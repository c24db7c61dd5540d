"""Tables of docs/results/atlas.md: atlas_table.py docs/results/atlas-STUDY.csv [ARM ...]

1. Scores and distances at the end of training, divided by those of the baseline, and the score
   divided by that of the control: geometric means over seeds, with 95% intervals (paired t test on
   logarithms, because runs with the same seed share initial weights, data order and noise).
2. Speed-ups over the control, to the lowest distance that every seed of the control reaches, or
   "to" the lowest distance that every seed of both arms reaches. Recall and memorized samples at
   the end: means over seeds of the arm, and in brackets of its control.
3. Distances at the end of runs of the baseline with other numbers of steps.
4. FIDs at the end beside the speed-ups that papers report, and verdicts. Arms in
   atlas-confirmation-STUDY.csv have the seeds of that file.
5. Settings with the best scores of atlas-tuning-STUDY.csv, which is in the same folder.
6. CPU times of a training step, of atlas-steps-STUDY.csv.

With names of arms, the first table has only these arms. Two columns follow. The first one is a
p-value: the largest one of the tests of the score against the control and the baseline, with both
of their learning rates, corrected with Holm's method for these arms. An arm that cannot be tested
counts as p = 1, and so does an arm whose score is not the lower one in each test. The second column
is the largest upper end of the intervals of the four distances.
"""

import csv
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from arms_table import print_table, ratio

from lit_diffusion.lab.compare.comparison import by_metric, compare
from lit_diffusion.lab.compare.curves import Arm, Curve, read_arms
from lit_diffusion.lab.compare.speedrun import TARGETS
from lit_diffusion.lab.compare.statistics import TTest, holm, paired, shared_seeds
from lit_diffusion.lab.compare.sweep import BASELINE
from lit_diffusion.lab.compare.tables import format_fid, format_p, format_speedup

CONTROLS = {
    "mdlrc": "lr-decay",
    "contrastive": "contrastive-bias",
    "fdm": "linear",
    "dit-tread": "dit",
}

REPORTED: dict[str, float | None] = {
    "x0": None,
    "muon": 1.35,
    "p2": None,
    "optimal-transport": None,
    "immiscible": 3.0,
    "simple+info-noise": 1.4,
    "adaptive-timesteps": None,
    "contrastive": 9.0,
    "dispersive": None,
    "fdm": 2.0,
    "dit-tread": 14.0,
    "dit+sra": 3.0,
    "magnitude-preserving": None,
    "mdlrc": None,  # 2x together with clts
    "clts": None,
}
"""Arm -> speed-up of training that the abstract of its paper reports, if any."""

USUAL_STEPS = 500
"""Optimizer steps of a run of `textbook`, of which the study has runs of other lengths."""

SECOND_LR = " at its second lr"
"""End of the name of a control that was trained with its second best learning rate."""

Measure = Callable[[Curve], float]


def control_of(arm: str) -> str:
    """Name of the control of an arm: "a" for the arm "a+b", otherwise the baseline by default."""
    return CONTROLS.get(arm) or arm.rpartition("+")[0] or BASELINE


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
    """Paired test; None if a run diverged, or if the arms share fewer than two seeds."""
    pairs = shared_seeds(arm, other)
    return paired(*([measure(pair[i]) for pair in pairs] for i in (0, 1)))


def largest_p(tests: Sequence[TTest | None]) -> float | None:
    """Largest p-value; None if a test is missing, or if the arm does not have the lower score."""
    results = [each for each in tests if each and each.difference < 0]
    return max(each.p for each in results) if len(results) == len(tests) else None


def faster(arm: Arm, control: Arm, metric: str) -> str:
    arms = [arm, control] if metric == "fid" else by_metric([arm, control], metric)
    if len(arms) < 2 or math.isinf(control.reached_by_all):
        return "diverged"
    comparison = compare(arms, control.name)
    (result,) = comparison.results
    end = f" to {format_fid(result.at)}" if result.at != comparison.target else ""
    return format_speedup(result.speedup) + end


def both_means(arm: Arm, control: Arm, metric: str) -> str:
    means = [fmean(map(at_end(metric), each.curves)) for each in (arm, control)]
    return "{:.2f} ({:.2f})".format(*means)


def end_table(arms: Mapping[str, Arm], names: Sequence[str], only: Sequence[str]) -> None:
    baseline, score = arms[BASELINE], log_score(names)
    rows, ps, highest = [], [], []
    has_control = [name for name in arms if name != BASELINE and control_of(name) in arms]
    for name in only or has_control:
        arm, control = arms[name], arms[control_of(name)]
        tests = [test(arm, control, score), test(arm, baseline, score)]
        if only:
            seconds = [arms[each.name + SECOND_LR] for each in (control, baseline)]
            ps.append(largest_p([*tests, *(test(arm, each, score) for each in seconds)]))
        distances = [test(arm, baseline, log_distance(each)) for each in names]
        highest.append(max(math.exp(each.high) if each else math.inf for each in distances))
        cells = [ratio(each) if each else "not tested" for each in [*tests, *distances]]
        rows.append([name, control.name, *cells])
    heads = ["arm", "control", "score / control's", "score"]
    heads += [name.replace("fid", "FID") for name in names]
    if only:
        heads += ["p", "largest upper end"]
        ends = [f"{high:.2f}" for high in highest]
        rows = [[*row, format_p(p), end] for row, p, end in zip(rows, holm(ps), ends, strict=True)]
    print_table(heads, rows)


def speed_table(arms: Mapping[str, Arm], names: Sequence[str]) -> None:
    rows = []
    for name, arm in arms.items():
        control = arms.get(control_of(name), arm)
        if control is not arm:
            speedups = [faster(arm, control, each) for each in names]
            ends = [both_means(arm, control, each) for each in ("recall", "memorized")]
            rows.append([name, control.name, *speedups, *ends])
    heads = [*(name.replace("fid", "FID") for name in names), "recall", "memorized"]
    print_table(["arm", "control", *heads], rows)


def mean_distance(arm: Arm, name: str) -> float:
    """Mean of the logarithm of a distance at the end."""
    return fmean(map(log_distance(name), arm.curves))


def lengths_table(lengths: Mapping[int, Arm], names: Sequence[str]) -> None:
    rows = [
        [str(steps), *(f"{math.exp(mean_distance(arm, name)):.3f}" for name in names)]
        for steps, arm in lengths.items()
    ]
    print_table(["steps of the run", *(name.replace("fid", "FID") for name in names)], rows)


def lengths_of_baseline(arms: Mapping[str, Arm]) -> dict[int, Arm]:
    """Number of steps -> runs of the baseline; empty if there are only runs of the usual length."""
    of_length = re.compile(f"{BASELINE} in (\\d+) steps")
    lengths = {int(m[1]): arm for name, arm in arms.items() if (m := of_length.fullmatch(name))}
    return dict(sorted({**lengths, USUAL_STEPS: arms[BASELINE]}.items())) if lengths else {}


def equal_length(
    lengths: Mapping[int, Arm], start: int, log_ratio: float, name: str = "fid"
) -> float:
    """Steps of a run of the baseline whose distance is a factor times that after `start` steps.

    The log of the distance is interpolated and extrapolated linearly in the log of the steps.
    """
    steps = sorted(lengths)
    logs = [mean_distance(lengths[each], name) for each in steps]
    target = logs[steps.index(start)] + log_ratio
    i = next((i for i in range(1, len(logs) - 1) if target > logs[i]), len(logs) - 1)
    slope = math.log(steps[i] / steps[i - 1]) / (logs[i] - logs[i - 1])
    return steps[i] * math.exp(slope * (target - logs[i]))


def verdict(p: float | None, low: float, high: float, reported: float | None) -> str:
    """What a test and an interval of the speed-up say about the speed-up that a paper reports."""
    is_significant = p is not None and p < 0.05
    if is_significant and high < 1:
        return "slower"
    if is_significant and low > 1:
        return "faster" if reported is None else "holds" if reported <= high else "smaller"
    return "excluded" if reported and high < reported else "open"


def claims_table(
    pairs: Sequence[tuple[Arm, Arm]], lengths: Mapping[int, Arm], steps: Mapping[str, float]
) -> None:
    """Table of (arm, control); `steps` has the ratios of the times of a step."""
    tests = [test(arm, control, log_distance("fid")) for arm, control in pairs]
    ps = holm([each.p if each else None for each in tests])
    rows = []
    for (arm, control), result, p in zip(pairs, tests, ps, strict=True):
        reported = REPORTED[arm.name]
        known = [
            arm.name,
            control.name,
            str(len(arm.curves)),
            f"{reported:g}x" if reported else "-",
        ]
        if result is None:
            rows.append([*known, "not tested", "-", "-", "-", "open"])
            continue
        logs = (result.difference, result.high, result.low)
        middle, low, high = (
            equal_length(lengths, USUAL_STEPS, each) / USUAL_STEPS for each in logs
        )
        cells = [ratio(result), format_p(p), f"{middle:.2f}x [{low:.2f}, {high:.2f}]"]
        cells += [f"{middle / steps[arm.name]:.2f}x", verdict(p, low, high, reported)]
        rows.append([*known, *cells])
    heads = ["arm", "control", "seeds", "reported", "FID / control's", "p", "speed-up in steps"]
    print_table([*heads, "in time", "verdict"], rows)


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


def main(file: Path, only: Sequence[str]) -> None:
    all_arms = {arm.name: arm for arm in read_arms([str(file)])}
    arms = {name: arm for name, arm in all_arms.items() if not name.endswith(" steps")}
    curves = [curve for arm in arms.values() for curve in arm.curves]
    names = [n for n in TARGETS if any(math.isfinite(at_end(n)(curve)) for curve in curves)]
    needed = {BASELINE, *only, *(control_of(name) for name in only)}
    needed |= {name + SECOND_LR for name in needed - {*only}}
    if only and (missing := needed - arms.keys()):
        sys.exit(f"{file} has no rows of {', '.join(sorted(missing))}.")
    end_table(arms, names, only)
    print()
    speed_table(arms, names)
    lengths = lengths_of_baseline(all_arms)
    tuning, steps, confirmation = (
        file.with_stem(file.stem.replace("atlas", f"atlas-{stage}"))
        for stage in ("tuning", "steps", "confirmation")
    )
    if lengths:
        print()
        lengths_table(lengths, names)
        confirmed = {arm.name: arm for arm in read_arms([str(confirmation)])}
        sources = {name: confirmed if name in confirmed else arms for name in REPORTED}
        pairs = [(s[name], s[control_of(name)]) for name, s in sources.items()]
        rows = csv.DictReader(steps.open())
        print()
        claims_table(pairs, lengths, {row["arm"]: float(row["ratio to control"]) for row in rows})
    for table, path in ((tuning_table, tuning), (steps_table, steps)):
        if path.exists():
            print()
            table(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
