"""Rules and results of the speedrun, a race to reach targets on the digits in the fewest steps.

The data, the seeds, the targets and the maximum size of the network are fixed, so that the results
of different people can be compared. docs/speedrun.md explains the rules.
"""

import csv
import math
import os
import platform
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

from lit_diffusion.files import check_regular
from lit_diffusion.lab.compare.curves import Bound, Crossing, Curve, mean_crossing
from lit_diffusion.lab.compare.statistics import speedup
from lit_diffusion.lab.compare.sweep import LOG, PlannedRun
from lit_diffusion.lab.compare.tables import Table, format_speedup, to_csv

TARGETS = {"fid": 0.31, "held-out": 0.45, "pixels": 0.31, "random-cnn": 0.05}
"""Distances that a run must reach in one evaluation."""

SEEDS = tuple(range(30, 40))
MAX_PARAMETERS = 760_000
"""Maximum number of parameters and buffers of the module without its auxiliary loss."""

MAX_EVALUATIONS = 20
"""Maximum number of evaluations of the network for one sample."""

EVALUATE_EVERY = 50
"""Optimizer steps between evaluations, which are the same for all entries, because the interpolated
steps to the targets depend on them."""

FREE_SETTINGS = (
    *("model", "tuned_on", "trainer.max_steps"),
    *("trainer.gradient_clip_val", "trainer.gradient_clip_algorithm"),
)
"""Settings that an entry may change. An entry may also add, change and remove callbacks other than
FIDEvaluation."""

RECORDS = Path(__file__).with_name("speedrun.csv")


@dataclass(frozen=True)
class Entry:
    """Results of a recipe: the step at which each seed reached the targets.

    Attributes:
        name: name of the recipe.
        crossings: the step at which each seed reached all targets, in the order of `SEEDS`.
        seconds: mean training time of a run in seconds, without evaluations; None if unknown.
        machine: name of the processor.
        commit: commit of the library that trained the runs; "" if unknown.
    """

    name: str
    crossings: tuple[Crossing, ...]
    seconds: float | None
    machine: str = ""
    commit: str = ""

    @property
    def steps(self) -> Crossing:
        """Geometric mean over seeds of the steps to the targets."""
        return mean_crossing(self.crossings)

    @property
    def reached(self) -> int:
        """Number of seeds that reached the targets."""
        return sum(crossing.is_reached for crossing in self.crossings)

    @property
    def is_complete(self) -> bool:
        """Whether all seeds reached the targets, so that the entry can be a record."""
        return self.reached == len(self.crossings)


# Rules


def fixed_options() -> list[str]:
    """Options of every fit, which override the configs."""
    return [f"--trainer.val_check_interval={EVALUATE_EVERY}"]


def check_rules(entry: Mapping[str, Any], track: Mapping[str, Any]) -> None:
    """Raise ValueError if an entry changes a setting that all entries must have in common.

    The error is also raised if `trainer.max_steps` is not a multiple of `EVALUATE_EVERY`.

    Args:
        entry: all settings of a run with the entry's configs and `fixed_options`.
        track: all settings of a run with `configs/digits-ablation.yaml` and `fixed_options`.
    """
    from lit_diffusion.cli.changed_settings import differences

    fixed = {key: value for key, value in track.items() if key not in ("model", "trainer")}
    trainer = {key: value for key, value in track["trainer"].items() if key != "callbacks"}
    changes = differences(fixed, dict(entry), "")
    changes |= differences(trainer, entry["trainer"], "trainer")
    model, entry_model = (settings["model"]["init_args"] for settings in (track, entry))
    for key in ("image_shape", "num_classes"):
        changes |= differences(model.get(key), entry_model.get(key), f"model.{key}")
    broken = [name.lstrip(".") for name in changes]
    broken = [name for name in broken if name not in FREE_SETTINGS]
    if _fid_callbacks(entry) != _fid_callbacks(track):
        broken.append("trainer.callbacks.FIDEvaluation")
    if broken:
        raise ValueError(
            f"a speedrun must not change {', '.join(sorted(broken))}; it may change the model, "
            "max_steps, gradient clipping and other callbacks."
        )
    if (max_steps := entry["trainer"]["max_steps"]) % EVALUATE_EVERY:
        raise ValueError(
            f"a speedrun is evaluated every {EVALUATE_EVERY} steps, so trainer.max_steps must be a "
            f"multiple of {EVALUATE_EVERY}, got {max_steps}."
        )


def _fid_callbacks(settings: Mapping[str, Any]) -> list[Any]:
    callbacks = settings["trainer"]["callbacks"]
    return [each for each in callbacks if each["class_path"].endswith("FIDEvaluation")]


def check_network(model: Mapping[str, Any], trust: Sequence[str]) -> None:
    """Raise ValueError if the module is too large, or evaluates its network too often per sample.

    The function builds the module from its class path and arguments, and generates one sample. One
    evaluation is a forward pass of the network with one image. A step with classifier-free guidance
    needs two evaluations. The size of the module does not include the auxiliary loss, because
    sampling does not use it.
    """
    from lightning.pytorch import LightningModule

    from lit_diffusion.checkpoints.loading import instantiate

    module = instantiate([dict(model)], LightningModule, trust, "the config")
    tensors = chain(module.named_parameters(), module.named_buffers())
    size = sum(each.numel() for name, each in tensors if not name.startswith("auxiliary_loss."))
    if size > MAX_PARAMETERS:
        raise ValueError(
            f"a speedrun allows {MAX_PARAMETERS:,} parameters and buffers, got {size:,}; make the "
            "network smaller."
        )
    images: list[int] = []
    module.network.register_forward_hook(lambda _, inputs, output: images.append(len(inputs[0])))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # guidance has no effect on an untrained network
        module.generate([0])
    if sum(images) > MAX_EVALUATIONS:
        raise ValueError(
            f"a speedrun allows {MAX_EVALUATIONS} evaluations of the network per sample, got "
            f"{sum(images)}; use fewer steps of the solver. Classifier-free guidance evaluates the "
            "network twice per step."
        )


# Results


def score_curve(records: Sequence[Mapping[str, Any]], seed: int) -> Curve:
    """Return a run's score at each evaluation. A score <= 1 means that the run reaches all targets.

    Each distance, such as the FID, is divided by its target. The score is the largest ratio.
    `records` are the evaluations in evaluations.jsonl.
    """
    from lit_diffusion.metrics.evaluation_record import is_repeat

    steps, scores = [], []
    for record in records:
        if is_repeat(record):
            continue
        distances = {"fid": record["value"], **record["second_look"]}
        ratios = [(distances[name] or math.nan) / target for name, target in TARGETS.items()]
        steps.append(record["step"])
        scores.append(math.nan if any(map(math.isnan, ratios)) else max(ratios))
    return Curve(str(seed), tuple(steps), tuple(scores))


def measure(name: str, runs: Sequence[PlannedRun], commit: str = "") -> Entry:
    """Read the results of finished runs on this machine, one per seed.

    If a run was resumed, the training time is None, because the log of this run has only the time
    since the resume.
    """
    from lit_diffusion.cli.loggers import read_evaluations
    from lit_diffusion.cli.run_folder import latest_config

    crossings, seconds = [], []
    for run in runs:
        records = read_evaluations(run.folder / "evaluations.jsonl")
        crossings.append(score_curve(records, run.seed).crossing(1.0))
        log = check_regular(run.folder / LOG).read_text(errors="replace")
        ends = re.findall(r"^trained .* in (\d+):(\d+):(\d+)", log, re.M)
        if len(ends) == 1 and latest_config(run.folder) == run.folder / "config.yaml":
            hours, minutes, rest = map(int, ends[0])
            total = 3600 * hours + 60 * minutes + rest
            seconds.append(total - sum(record["seconds"]["total"] for record in records))
    mean = fmean(seconds) if len(seconds) == len(runs) else None
    return Entry(name, tuple(crossings), mean, processor(), commit)


def processor() -> str:
    """Name of this machine's processor and its number of cores. A speedrun does not use a GPU."""
    name, info = platform.processor() or platform.machine(), Path("/proc/cpuinfo")
    text = check_regular(info).read_text() if info.exists() else ""
    if model := re.search(r"^model name\s*: (.+)$", text, re.MULTILINE):
        name = model[1].strip()
    return f"{name}, {os.cpu_count()} cores"


def describe(entry: Entry, record: Entry) -> str:
    """Describe a result, and compare it with the record."""
    result = speedup(record.crossings, entry.crossings)
    is_record = entry.is_complete and result.low is not None and result.low > 1
    return "\n".join(
        [
            f"{entry.name}: {entry.reached} of {len(SEEDS)} seeds reached the targets, after "
            f"{entry.steps} steps (geometric mean).",
            f"{record.name} holds the record with {record.steps} steps.",
            f"Speed-up over the record, with its 95% interval: {format_speedup(result)}.",
            "This is a new record." if is_record else "This is not a new record.",
        ]
    )


# The table of records


def read_entries(path: Path) -> list[Entry]:
    """Read the entries of a table of records."""
    rows_by_name: dict[str, list[dict[str, str]]] = {}
    with check_regular(path).open(newline="") as file:
        for row in csv.DictReader(file):
            rows_by_name.setdefault(row["name"], []).append(row)
    bounds = {bound.value.strip(): bound for bound in Bound}
    entries = []
    for name, rows in rows_by_name.items():
        crossings = tuple(Crossing(float(row["step"]), bounds[row["bound"]]) for row in rows)
        seconds = float(rows[0]["seconds"]) if rows[0]["seconds"] else None
        entries.append(Entry(name, crossings, seconds, rows[0]["machine"], rows[0]["commit"]))
    return entries


def entry_csv(entry: Entry) -> str:
    """Format an entry as rows of the table of records, with their head."""
    rows: list[dict[str, Any]] = [
        {
            "name": entry.name,
            "seed": seed,
            "bound": crossing.bound.value.strip(),
            "step": round(crossing.step, 1),
            "seconds": "" if entry.seconds is None else round(entry.seconds, 1),
            "machine": entry.machine,
            "commit": entry.commit,
            "date": date.today().isoformat(),
        }
        for seed, crossing in zip(SEEDS, entry.crossings, strict=True)
    ]
    return to_csv(rows)


def record_holder(entries: Sequence[Entry]) -> Entry:
    """Return the fastest of the entries of which all seeds reached the targets."""
    complete = [entry for entry in entries if entry.is_complete]
    return min(complete, key=lambda entry: entry.steps.step)


def records_table(entries: Sequence[Entry]) -> Table:
    """Build the table of records: the fastest come first, and those that missed a target last."""
    record = record_holder(entries)
    fastest = sorted(entries, key=lambda entry: (not entry.is_complete, entry.steps.step))
    rows = [
        (
            entry.name,
            str(entry.steps),
            f"{entry.reached} of {len(entry.crossings)}",
            format_speedup(speedup(record.crossings, entry.crossings)),
            "" if entry.seconds is None else f"{entry.seconds:.0f}",
            entry.machine,
            entry.commit,
        )
        for entry in fastest
    ]
    scores = ("steps", "seeds that reached the targets", "speed-up", "seconds")
    columns = ("recipe", *scores, "machine", "commit")
    targets = ", ".join(f"{name} {target}" for name, target in TARGETS.items())
    caption = f"Steps to {targets}. Speed-ups are relative to the record."
    return Table(caption, columns, tuple(rows))
