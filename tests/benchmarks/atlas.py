"""Train the runs of docs/results/atlas.md, and write their results as CSV files.

    python tests/benchmarks/atlas.py digits-textbook --out runs/atlas --csv docs/results

Each arm is tuned on one seed: runs with several learning rates are scored with four decays of the
EMA. The arm is then trained with the learning rate and the decay that scored best, with three other
seeds. To continue after a stop, run the same command again. Tuning writes atlas-tuning-STUDY.csv,
and training writes atlas-STUDY.csv. --only trains some of the arms. Arms that are joined by +, such
as muon+x0, are trained together.

--stage selects other seeds, and another name of the CSV file:

* confirmation: ten seeds, for arms that were tuned before. The baseline and the controls are also
  trained with their second best learning rate. Add the baseline ("") and the controls to --only.
* recipe: ten seeds, for joined arms. They are tuned like single arms.
* test: ten seeds that are used for nothing else, for the recipe and the baseline.
* second-test: ten more of these seeds, for changes of the recipe and the baseline.

--steps trains for another number of steps, which becomes a part of the arm's name.

The studies on MNIST and CIFAR-10 use what was tuned on the digits. They read data/ and
mnist-cnn.safetensors or cifar10-cnn.safetensors in the current folder, which configs/mnist.yaml and
configs/arms/patches-small/cifar10.yaml describe.
"""

import argparse
import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from atlas_table import SECOND_LR, control_of
from runs_to_csv import finished, table

from lit_diffusion.cli.loggers import read_evaluations
from lit_diffusion.lab.compare.run_folders import collect_runs
from lit_diffusion.lab.compare.speedrun import TARGETS
from lit_diffusion.lab.compare.sweep import BASELINE, PlannedRun, Sweep, plan_sweep
from lit_diffusion.lab.compare.tables import to_csv

Row = dict[str, Any]

CONFIGS = Path(__file__).parents[2] / "configs"
WIDTHS = Path(__file__).with_name("atlas-widths.yaml")
TUNING_SEED = 10
SEEDS = {
    "screen": (0, 1, 2),
    "confirmation": tuple(range(40, 50)),
    "recipe": tuple(range(11, 21)),
    "test": tuple(range(50, 60)),
    "second-test": tuple(range(60, 70)),
}
LRS = (1e-3, 2e-3, 4e-3)
EVALUATIONS = 5
"""Number of evaluations of a run."""


@dataclass(frozen=True)
class Study:
    """A recipe, and the arms that are added to it.

    Attributes:
        experiment: configs of the recipe, which is the arm "baseline".
        arms: configs of each arm, joined by +, in the order in which they are trained.
        steps: optimizer steps of a run.
        tuned_in: the study whose tuning is used; None to tune.
        suffix: end of the names of arms, if `steps` is not that of the recipe.
    """

    experiment: tuple[str, ...]
    arms: tuple[str, ...]
    steps: int
    tuned_in: str | None = None
    suffix: str = ""


PARTS = (
    "",  # the baseline
    *("muon", "x0", "simple", "digits-textbook/mdlrc", "digits-textbook/lr-decay"),
    *("optimal-transport", "simple+info-noise", "contrastive", "digits-textbook/contrastive-bias"),
    *("digits-textbook/contrastive-corrected", "dispersive", "digits-textbook/clts", "immiscible"),
    *("digits/adaptive-timesteps", "p2", "epsilon", "digits/linear", "digits-textbook/fdm"),
    *("digits/dit", "digits/dit-tread", "digits/dit+digits/sra", "digits/magnitude-preserving"),
)
"""The arms, in the order in which they are trained."""

OF_TEXTBOOK = (
    *("simple+info-noise", "digits-textbook/clts", "digits/adaptive-timesteps"),
    *("digits/linear", "digits-textbook/fdm"),
)
"""Arms that choose the training times or the gamma of Min-SNR, and linear, the control of fdm."""

OF_DIGITS = (
    *("contrastive", "digits-textbook/contrastive-bias", "digits-textbook/contrastive-corrected"),
    *("digits/dit", "digits/dit-tread", "digits/dit+digits/sra", "digits/magnitude-preserving"),
)
"""Arms with the size or the mean of the digits, and contrastive, whose control is one of them."""


def without(*arms: str) -> tuple[str, ...]:
    return tuple(arm for arm in PARTS if arm not in arms)


CIFAR10 = ("patches-small", "arms/patches-small/cifar10")

STUDIES = {
    "digits-textbook": Study(("digits-ablation", "arms/digits/textbook"), PARTS, 500),
    "digits-balanced": Study(
        ("digits-ablation", "arms/digits/balanced"), without(*OF_TEXTBOOK), 600
    ),
    "mnist": Study(("mnist", "arms/digits/textbook"), without(*OF_DIGITS), 500, "digits-textbook"),
    "mnist-balanced": Study(("mnist", "arms/digits/balanced"), (), 600, "digits-balanced"),
    "mnist-shifted": Study(
        ("mnist", "arms/digits/balanced", "arms/mnist/shifted-noise"), (), 600, "digits-balanced"
    ),
    "cifar10": Study(
        (*CIFAR10, "arms/digits/textbook"), without(*OF_DIGITS), 500, "digits-textbook"
    ),
    "cifar10-balanced": Study((*CIFAR10, "arms/digits/balanced"), (), 600, "digits-balanced"),
}


def run(
    study: Study, arm: str, seeds: Sequence[int], out: Path, jobs: int, **options: object
) -> list[PlannedRun]:
    """Train one arm with one or more seeds. Runs that finished before are not repeated.

    Args:
        options: options of the fits. The runs of an arm with other options need another `out`.

    Raises:
        SystemExit: if a run did not finish, and its training did not diverge.
    """
    experiment = [str(CONFIGS / f"{name}.yaml") for name in study.experiment]
    if [*seeds] == [TUNING_SEED]:  # tuning compares decays of the EMA
        experiment.append(str(WIDTHS))
    files = [str(CONFIGS / "arms" / f"{name}.yaml") for name in arm.split("+") if name]
    if study.suffix:
        options["trainer__max_steps"] = study.steps
    fixed = [f"--{name.replace('__', '.')}={value}" for name, value in options.items()]
    runs = plan_sweep(experiment, ["+".join(files)] if arm else [], seeds, out, fixed)
    runs = [each for each in runs if each.arm == arm_name(arm)]  # a plan contains the baseline, too
    sweep = Sweep(runs, jobs)
    sweep.run()
    for each in runs:  # a fit that failed for another reason must not count as diverged
        if each not in sweep.finished and not collect_runs([str(each.folder)])[0].diverged:
            raise SystemExit(f"{each.name} did not finish. Run the same command again.")
    return runs


def score(record: Row) -> float:
    """Geometric mean of the four distances, each divided by its target in the speedrun."""
    distances = {"fid": record["value"], **record["second_look"]}
    if not all(distances[name] for name in TARGETS):  # samples were not finite
        return math.inf
    return math.exp(fmean(math.log(distances[name] / target) for name, target in TARGETS.items()))


def tune(study: Study, arm: str, out: Path, jobs: int) -> list[Row]:
    """Score each learning rate and each decay of the EMA.

    Learning rates are added until the best one is neither the lowest nor the highest.

    Raises:
        SystemExit: if the training diverged with each learning rate.
    """
    rows: list[Row] = []
    lrs = {*LRS}
    while True:
        for lr in sorted(lrs - {row["lr"] for row in rows}):
            options = {"model__optimizer__lr": lr, "trainer__val_check_interval": study.steps}
            (tuned,) = run(study, arm, [TUNING_SEED], out / f"tune-{lr:g}", jobs, **options)
            records = read_evaluations(tuned.folder / "evaluations.jsonl")
            scores = {record["weights"].removeprefix("ema_"): score(record) for record in records}
            scores = scores or {"0.99": math.inf}  # the training diverged
            rows += [
                {"arm": tuned.arm + study.suffix, "lr": lr, "decay": decay, "score": value}
                for decay, value in scores.items()
            ]
        rows.sort(key=lambda row: row["score"])
        best = rows[0]["lr"]
        if math.isinf(rows[0]["score"]):
            raise SystemExit(f"{rows[0]['arm']} diverged with the learning rates {sorted(lrs)}.")
        if min(lrs) < best < max(lrs):
            return rows
        lrs.add(2 * best if best == max(lrs) else best / 2)


def train(
    study: Study, arm: str, settings: tuple[float, str], stage: str, out: Path, jobs: int
) -> list[Row]:
    """Train an arm with the seeds of a stage. Returns a row per evaluation of the finished runs."""
    lr, decay = settings
    options = {
        "model__optimizer__lr": lr,
        "trainer__val_check_interval": study.steps // EVALUATIONS,
        "trainer__callbacks__EMA__decays": f"[{decay}]",
    }
    folder = out / f"lr-{lr:g}-ema-{decay}"
    runs = run(study, arm, SEEDS[stage], folder, jobs, **options)
    collected = collect_runs([str(each.folder) for each in runs])
    rows = table([each for each in collected if finished(each)], False)
    return [row | {"arm": row["arm"] + study.suffix} for row in rows]


def arm_name(arm: str) -> str:
    """Name of an arm in the folders of runs, as `sweep` forms it."""
    return "+".join(Path(part).stem for part in arm.split("+")) or BASELINE


def best_settings(tuning: Path, name: str) -> list[tuple[float, str]]:
    """Learning rates of an arm, the best first, each with the EMA decay that scored best."""
    rows = [row for row in csv.DictReader(tuning.open()) if row["arm"] == name]
    decays: dict[float, str] = {}
    for row in sorted(rows, key=lambda row: float(row["score"])):
        decays.setdefault(float(row["lr"]), row["decay"])
    return [*decays.items()]


def replace_rows(file: Path, rows: Sequence[Row]) -> None:
    """Write rows of an arm to a CSV file, in place of older rows of this arm."""
    old = [*csv.DictReader(file.open())] if file.exists() else []
    arms = {row["arm"] for row in rows}
    file.write_text(to_csv([*(row for row in old if row["arm"] not in arms), *rows]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--out", type=Path, default=Path("runs/atlas"))
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--only", nargs="+", metavar="ARM")
    parser.add_argument("--stage", choices=SEEDS, default="screen")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--jobs", type=int, default=1)
    args = parser.parse_args()
    if args.stage != "screen" and not args.only:
        parser.error(f"--stage {args.stage} needs --only with the names of the arms")
    for part in "+".join(args.only or []).split("+"):
        if part and not (CONFIGS / "arms" / f"{part}.yaml").exists():
            parser.error(f"configs/arms has no {part}.yaml")
    study, out = STUDIES[args.study], args.out / args.study
    if args.steps:
        suffix = f" in {args.steps} steps"
        study, out = replace(study, steps=args.steps, suffix=suffix), out / f"steps-{args.steps}"
    controls = {control_of(arm_name(arm)) for arm in study.arms}
    for arm in args.only or study.arms:
        tuning = args.csv / f"atlas-tuning-{study.tuned_in or args.study}.csv"
        if study.tuned_in is None and args.stage in ("screen", "recipe"):
            replace_rows(tuning, tune(study, arm, out, args.jobs))
        best, second, *_ = best_settings(tuning, arm_name(arm) + study.suffix)
        rows = train(study, arm, best, args.stage, out, args.jobs)
        if args.stage == "confirmation" and arm_name(arm) in controls:
            others = train(study, arm, second, args.stage, out, args.jobs)
            rows += [row | {"arm": row["arm"] + SECOND_LR} for row in others]
        stage = "" if args.stage == "screen" else f"{args.stage}-"
        replace_rows(args.csv / f"atlas-{stage}{args.study}.csv", rows)


if __name__ == "__main__":
    main()
