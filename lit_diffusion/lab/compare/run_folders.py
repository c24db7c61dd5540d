"""The runs of an experiment: their folders, their arms, and which of them may be compared.

An arm is the name of the folder around seed-0, seed-1, ..., as in sweeps/digits/clts/seed-0; or
the name of a run folder without a trailing seed, as in runs/clts-seed0.
"""

import math
import re
import reprlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

from lit_diffusion.cli.loggers import Row, read_evaluations, read_rows
from lit_diffusion.cli.run_folder import latest_config
from lit_diffusion.config.yaml_file import read_yaml
from lit_diffusion.lab.compare.curves import Curve
from lit_diffusion.lab.compare.sweep import BASELINE
from lit_diffusion.metrics.evaluation_record import EMA_CURVE, is_repeat

PROTOCOL = (
    *("metric", "num_fake", "num_real", "data", "protocol", "extractor_sha256"),
    *("resize", "weights", "labels"),
)
"""What two FIDs must share to be compared. How the samples were drawn from the model ("sampling")
is part of an arm, which may have another process or solver."""

Record = dict[str, Any]
_SEED = re.compile(r"(?:(?P<arm>.+)[-_])?seed[-_]?(?P<seed>\d+)", re.IGNORECASE)
# Settings that seeds of one arm may differ in.
_FREE = {
    *("seed_everything", "ckpt_path", "default_root_dir", "cache_dir", "save_dir", "num_workers"),
    *("accelerator", "enable_progress_bar", "enable_model_summary", "tuned_on"),
}
_MAX_LISTED = 6  # differences or reasons in one message


@dataclass(frozen=True, eq=False)
class Run:
    """A run folder and the content of its files.

    Attributes:
        arm: name of its arm.
        seed: its seed by its config, else by its name.
        config: the config that it was last started or resumed with; {} if it has none.
        first_config: the config that it was first started with.
        rows: of metrics.csv.
        records: its evaluations, oldest first.
        width_records: its FIDs by width of the average, from `evaluate --ema`.
        grids: pictures of samples by step and weights.
        fault: why its files cannot be read; None if they can.
    """

    path: Path
    arm: str
    seed: str
    config: dict[str, Any] = field(default_factory=dict)
    first_config: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    width_records: list[Record] = field(default_factory=list)
    grids: dict[tuple[int, str], Path] = field(default_factory=dict)
    fault: str | None = None

    @property
    def train_losses(self) -> tuple[list[int], list[float]]:
        """Steps and values of train/loss in metrics.csv; nan at last where it stopped the run."""
        rows = [row for row in self.rows if "train/loss" in row]
        return [int(row["step"]) for row in rows], [float(row["train/loss"]) for row in rows]

    @property
    def diverged(self) -> bool:
        """Whether a training loss that is not finite ended it."""
        losses = self.train_losses[1]
        return bool(losses) and not math.isfinite(losses[-1])

    @property
    def max_steps(self) -> int | None:
        """Optimizer steps that it is configured to take; None if its config does not say."""
        trainer = self.config.get("trainer")
        steps = trainer.get("max_steps") if isinstance(trainer, dict) else None
        return steps if isinstance(steps, int) and steps > 0 else None

    @property
    def fid_metrics(self) -> list[str]:
        """Names of the FIDs in its evaluations."""
        names = dict.fromkeys(str(record.get("metric")) for record in self.records)
        return [name for name in names if "fid" in name]

    def points(self, metric: str) -> list[Record]:
        """The curve of a metric: one record per step, in order, measured as most of them were.

        FIDs are of evaluations.jsonl, which has their protocol; other metrics of metrics.csv. Of
        several records of one step the last one counts.
        """
        if is_fid(metric):
            points = [r for r in self.records if r.get("metric") == metric and not is_repeat(r)]
        else:
            points = [
                {"metric": metric, "step": int(row["step"]) + 1, "value": float(row[metric])}
                for row in self.rows
                if metric in row
            ]
        counts = Counter(map(_measurement, points)).most_common(1)
        alike = [point for point in points if _measurement(point) == counts[0][0]]
        by_step = {point["step"]: point for point in alike}
        return [by_step[step] for step in sorted(by_step)]

    def repeats(self, point: Record) -> list[Record]:
        """Measurements of the same weights with other samples."""
        key = (point["step"], point["metric"], _measurement(point))
        repeats = (record for record in self.records if is_repeat(record))
        return [r for r in repeats if (r["step"], r["metric"], _measurement(r)) == key]

    def curve(self, metric: str, due: Sequence[int] = ()) -> Curve:
        """The FIDs; NaN at steps that were `due` after the training diverged.

        Raises:
            ValueError: for numbers that no training gives: see `Curve`.
        """
        points = self.points(metric)
        last, repeats = points[-1], self.repeats(points[-1])
        if self.diverged:
            images, end = last.get("images"), last["step"]
            points += [
                {"step": step, "value": None, "images": images / end * step if images else None}
                for step in due
                if step > end
            ]
        counts: list[Any] = [point.get("images") for point in points]
        others = [
            {name: float(value) for name, value in metrics.items() if value is not None}
            for metrics in (point.get("second_look") or {} for point in points)
        ]
        try:
            return Curve(
                self.seed,
                tuple(float(point["step"]) for point in points),
                tuple(map(_fid, points)),
                None if None in counts else tuple(map(float, counts)),
                tuple(map(_fid, repeats)),
                tuple(others) if any(others) else (),
            )
        except (TypeError, OverflowError) as error:
            raise ValueError(f"seed {self.seed}: {error}.") from error


def read_run(path: Path) -> Run:
    """Read the files of a run folder; what is broken is its `fault`."""
    name, parent = path.resolve().name, path.resolve().parent.name
    match = _SEED.fullmatch(name)
    arm, seed = (match["arm"] or parent, match["seed"]) if match else (name, path.name)
    try:
        config = _read_mapping(latest_config(path))
        number = config.get("seed_everything")
        is_number = isinstance(number, int) and not isinstance(number, bool)
        grids = {
            file: re.fullmatch(r"step-(\d+)-(.+)", file.stem)
            for file in (path / "samples").glob("step-*.png")
        }
        run = Run(
            path,
            arm,
            str(number) if is_number else seed,
            config,
            first_config=_read_mapping(path / "config.yaml") or config,
            rows=read_rows(path / "metrics.csv"),
            records=_evaluations(path / "evaluations.jsonl"),
            width_records=_evaluations(path / EMA_CURVE),
            grids={(int(match[1]), match[2]): file for file, match in grids.items() if match},
        )
        try:
            _ = run.train_losses
        except (KeyError, ValueError) as error:
            file = path / "metrics.csv"
            raise ValueError(f"{file} is broken: no step or loss in a row: {error}.") from error
    except (ValueError, OSError) as error:
        return Run(path, arm, seed, fault=str(error).rstrip("."))
    return run


def is_fid(metric: str) -> bool:
    """Whether a metric is an FID, by its name."""
    return "fid_" in metric.rpartition("/")[2]


def collect_runs(folders: Sequence[str]) -> list[Run]:
    """Read the run folders among and below the given folders, each once.

    Raises:
        FileNotFoundError: for a folder that is not there.
        ValueError: for one without runs.
    """
    runs: dict[Path, Run] = {}
    for name in folders:
        if not Path(name).is_dir():
            raise FileNotFoundError(f"there is no run folder {name}.")
        paths = list(_run_folders(Path(name), set()))
        if not paths:
            raise ValueError(
                f"{name} holds no run: no folder in it has an evaluations.jsonl, metrics.csv or "
                "config.yaml."
            )
        for path in paths:
            if path.resolve() not in runs:
                runs[path.resolve()] = read_run(path)
    return list(runs.values())


def _run_folders(folder: Path, visited: set[Path]) -> Iterator[Path]:
    if folder.resolve() in visited:  # by a link, which may lead to a folder around it
        return
    visited.add(folder.resolve())
    if (folder / "evaluations.jsonl").exists() or (folder / "metrics.csv").exists():
        yield folder
        return
    parts = [part for part in sorted(folder.iterdir()) if part.is_dir()]
    below = [run for part in parts for run in _run_folders(part, visited)]
    yield from below
    if not below and (folder / "config.yaml").exists():
        yield folder


def _read_mapping(file: Path | None) -> dict[str, Any]:
    content = read_yaml(file) if file is not None and file.exists() else {}
    return content if isinstance(content, dict) else {}


def _evaluations(file: Path) -> list[Record]:
    records = read_evaluations(file)
    for record in records:
        if "metric" in record and not record.keys() >= {"step", "value"}:
            raise ValueError(f"{file} is broken: {reprlib.repr(record)} is no evaluation.")
    return records


def _fid(record: Record) -> float:
    return math.nan if record["value"] is None else float(record["value"])


def _measurement(record: Record) -> str:
    """How an FID was measured, of which average, and how the samples were drawn."""
    return repr([record.get(name) for name in (*PROTOCOL, "sampling", "ema_decay")])


def sampling_of(record: Record) -> Record:
    """How the samples of an FID were drawn, and from which average of the weights.

    Records of earlier versions have no `ema_decay`.
    """
    decay = {name: record[name] for name in ("ema_decay",) if name in record}
    return dict(record.get("sampling") or {}) | decay


def differing_settings(
    one: Mapping[str, Any], other: Mapping[str, Any]
) -> dict[str, tuple[Any, Any]]:
    """Settings of two configs that differ, but for the seed, paths and what changes no result."""
    first, second = flatten_config(one), flatten_config(other)
    return {
        name: (first.get(name), second.get(name))
        for name in sorted(first.keys() | second.keys())
        if first.get(name) != second.get(name)
        and name.rpartition(".")[2] not in _FREE
        and not name.startswith("trainer.logger")
    }


def flatten_config(config: Any, name: str = "") -> dict[str, Any]:
    """Settings by dotted name: `optimizer` is Adam, `optimizer.lr` is 0.1.

    An object in a list is named by its class; the second of one class is `Class#2`.
    """
    if isinstance(config, list) and any(isinstance(item, dict) for item in config):
        counts, items = Counter[str](), config
        config = {}
        for k, item in enumerate(items):
            key = _class_name(item) or str(k)
            counts[key] += 1
            config[key if counts[key] == 1 else f"{key}#{counts[key]}"] = item
    if not isinstance(config, dict):
        return {name: config}
    settings = {name: kind} if name and (kind := _class_name(config)) else {}
    for key, value in config.items():
        if key != "class_path":
            settings |= flatten_config(
                value, name if key == "init_args" else f"{name}.{key}".lstrip(".")
            )
    return settings


def _class_name(value: Any) -> str | None:
    path = value.get("class_path") if isinstance(value, dict) else None
    return None if path is None else str(path).rpartition(".")[2]


# Which runs may be compared


@dataclass(frozen=True)
class Selection:
    """Runs of equal protocol by arm, with an FID of this name; run and reason of all others."""

    metric: str
    baseline: str
    arms: Mapping[str, Sequence[Run]]
    left_out: Sequence[tuple[str, str]]

    def last_record(self, arm: str) -> Record:
        """The last evaluation of the first run of an arm."""
        return self.arms[arm][0].points(self.metric)[-1]


def select(
    runs: Sequence[Run], baseline: str | None = None, metric: str | None = None
) -> Selection:
    """Sort runs into arms; leave out those whose FIDs cannot stand beside the others.

    Left out are FIDs of another protocol than most of the baseline's, runs that draw samples in
    another way than most of their arm, and runs that were cut short or have a broken file.

    Args:
        runs: of an experiment.
        baseline: None is the arm called baseline, else the first.
        metric: None is the FID that most runs have.

    Raises:
        ValueError: where less than two arms are left, the baseline is not among them, seeds of an
            arm were configured differently, or one seed is there twice.
    """
    left_out: dict[Run, str] = {}

    def keep(runs: Sequence[Run], why_not: Callable[[Run], str | None]) -> list[Run]:
        reasons = {run: why_not(run) for run in runs}
        left_out.update({run: why for run, why in reasons.items() if why})
        if all(reasons.values()):
            raise ValueError(f"none of these runs can be compared. The first: {reasons[runs[0]]}.")
        return [run for run, why in reasons.items() if not why]

    left = keep(runs, lambda run: run.fault)
    fid = metric or most_frequent_metric(left)
    left = keep(left, lambda run: _lacks(run, fid))
    names = list(by_arm(left))
    base = baseline or (BASELINE if BASELINE in names else names[0])
    usual = _typical([run for run in left if run.arm == base] or left, _other_protocol, fid)
    left = keep(left, lambda run: _other_protocol(run, usual, fid))
    typical = {arm: _typical(each, _other_sampling, fid) for arm, each in by_arm(left).items()}
    left = keep(left, lambda run: _other_sampling(run, typical[run.arm], fid))
    members = by_arm(left)
    arms = by_arm(keep(left, lambda run: _cut_short(run, members[run.arm], fid)))
    reasons = [(str(run.path), why) for run, why in left_out.items()]
    if len(arms) < 2 or base not in arms:
        listed = "".join(f"\n  {run}: {why}" for run, why in reasons[:_MAX_LISTED])
        raise ValueError(
            f"a comparison needs the baseline {base} and another arm; there are "
            f"{', '.join(arms)}.{listed}"
        )
    for arm, each in arms.items():
        _refuse_unequal(arm, each)
    return Selection(fid, base, arms, reasons)


def most_frequent_metric(runs: Iterable[Run]) -> str:
    """The FID that most runs have; one on validation data, if there is one.

    Raises:
        ValueError: where no run has one, or several are as frequent.
    """
    all_counts = Counter(metric for run in runs for metric in run.fid_metrics)
    validation = {name: n for name, n in all_counts.items() if name.startswith("val/")}
    counts = validation or all_counts
    most = [metric for metric, count in counts.items() if count == max(counts.values())]
    if not most:
        raise ValueError(
            "none of these runs has an FID in its evaluations.jsonl: add "
            "lit_diffusion.callbacks.FIDEvaluation to trainer.callbacks."
        )
    if len(most) > 1:
        raise ValueError(f"the runs have several FIDs: choose --metric {' or '.join(most)}.")
    return most[0]


def by_arm(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """Sort runs into their arms."""
    arms: dict[str, list[Run]] = {}
    for run in runs:
        arms.setdefault(run.arm, []).append(run)
    return arms


def _lacks(run: Run, metric: str) -> str | None:
    try:
        if run.points(metric):
            run.curve(metric)
            return None
    except ValueError as error:
        return str(error).rstrip(".")
    last_row = {name: value for row in run.rows for name, value in row.items()}
    logged = [] if is_fid(metric) else [name for name in last_row if "loss" in name]
    if others := run.fid_metrics + logged:
        return f"it has no {metric}, but {', '.join(others)}"
    if run.diverged:
        return "its training diverged before its first FID, which flatters its arm"
    step, what = last_row.get("step"), "FID" if is_fid(metric) else metric
    return f"it has no {what}" + (f"; metrics.csv ends at step {step}" if step else "")


def _typical(
    runs: Sequence[Run], difference: Callable[[Run, Run, str], str | None], metric: str
) -> Run:
    """The first run from which the fewest differ."""
    return min(runs, key=lambda one: sum(difference(run, one, metric) is not None for run in runs))


def _other_protocol(run: Run, usual: Run, metric: str) -> str | None:
    records = [each.points(metric)[-1] for each in (run, usual)]
    changes = _changes(*({name: record.get(name) for name in PROTOCOL} for record in records))
    return changes and f"its FID is of another protocol than {usual.path}'s: {changes}"


def _other_sampling(run: Run, usual: Run, metric: str) -> str | None:
    changes = _changes(*(sampling_of(each.points(metric)[-1]) for each in (run, usual)))
    return changes and f"its samples are drawn otherwise than those of {usual.path}: {changes}"


def _changes(one: Record, usual: Record) -> str | None:
    names = [name for name in one if name in usual and one[name] != usual[name]]
    return "; ".join(f"{name} {one[name]!r}, not {usual[name]!r}" for name in names) or None


def _cut_short(run: Run, members: Iterable[Run], metric: str) -> str | None:
    """Why a run takes no part: an FID was still due, or, if that is unknown, others have more.

    One that diverged stays: without it, an arm that diverges would look better than it is.
    """
    if run.diverged:
        return None
    steps = [point["step"] for point in run.points(metric)]
    ends = f"cut short: its FIDs end at step {steps[-1]:,}"
    if run.max_steps is None:
        last = max(member.points(metric)[-1]["step"] for member in members)
        return f"{ends}, its arm's at {last:,}" if steps[-1] < last else None
    due = steps[-1] + (steps[-1] - steps[-2] if len(steps) > 1 else steps[-1])
    return f"{ends} of {run.max_steps:,}" if due <= run.max_steps else None


def _refuse_unequal(arm: str, members: Sequence[Run]) -> None:
    for run, other in combinations(members, 2):
        if run.seed == other.seed:
            raise ValueError(
                f"arm {arm} holds seed {run.seed} twice: {run.path} and {other.path}. They would "
                "count as two; leave one out, or rename the folder of what is another arm."
            )
        if not (run.config and other.config):
            continue
        if changes := differing_settings(run.config, other.config):
            listed = [f"{name} {old!r} and {new!r}" for name, (old, new) in changes.items()]
            more = f" and {len(listed) - _MAX_LISTED} more" * (len(listed) > _MAX_LISTED)
            raise ValueError(
                f"{run.path} and {other.path} are both of arm {arm} and differ in "
                f"{'; '.join(listed[:_MAX_LISTED])}{more}. Seeds of one arm must be configured "
                "alike; put them into folders named after arms of their own."
            )
