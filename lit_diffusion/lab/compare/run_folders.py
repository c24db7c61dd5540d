"""Read the runs of an experiment, group them by arm, and select the runs that are comparable.

An arm is one way to train, with several seeds. The name of a run's folder determines its arm. If a
run folder is called seed-<n>, its parent folder has the name of the arm, as in
sweeps/digits/clts/seed-0. Otherwise, the arm is the name of the run folder without a trailing seed,
as in runs/clts-seed0.
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
from lit_diffusion.metrics.evaluation_record import EMA_CURVE, is_fid, is_repeat

PROTOCOL = (
    *("metric", "num_fake", "num_real", "data", "protocol", "extractor_sha256"),
    *("resize", "weights", "labels"),
)
"""Fields of an evaluation record that must be equal for FIDs to be comparable. The field "sampling"
is not one of them, because arms may differ in their process or solver."""

Record = dict[str, Any]
_SEED_PATTERN = re.compile(r"(?:(?P<arm>.+)[-_])?seed[-_]?(?P<seed>\d+)", re.IGNORECASE)
# Settings that may differ between seeds of one arm.
_IGNORED_SETTINGS = {
    *("seed_everything", "ckpt_path", "default_root_dir", "cache_dir", "save_dir", "num_workers"),
    *("accelerator", "enable_progress_bar", "enable_model_summary", "tuned_on"),
}
_MAX_LISTED = 6  # maximal number of differences or reasons in a message


@dataclass(frozen=True, eq=False)
class Run:
    """A run folder and the content of its files.

    Attributes:
        arm: name of the arm to which the run belongs.
        seed: seed in the config or, if it has none, in the name of the folder.
        config: config of the last start or resume; {} if there is no config file.
        first_config: config of the first start.
        rows: rows of metrics.csv.
        records: evaluations in evaluations.jsonl, the oldest first.
        width_records: evaluations with several widths of the EMA, from `evaluate --ema`.
        grids: PNG files with samples, by step and name of the weights.
        fault: reason why the files cannot be read; None if they can.
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
        """Steps and values of train/loss in metrics.csv. A non-finite loss ends a run."""
        rows = [row for row in self.rows if "train/loss" in row]
        return [int(row["step"]) for row in rows], [float(row["train/loss"]) for row in rows]

    @property
    def diverged(self) -> bool:
        """Whether a non-finite training loss ended the run."""
        losses = self.train_losses[1]
        return bool(losses) and not math.isfinite(losses[-1])

    @property
    def max_steps(self) -> int | None:
        """`trainer.max_steps` in the config; None if the config does not set it."""
        steps = flatten_config(self.config).get("trainer.max_steps")
        return steps if isinstance(steps, int) and steps > 0 else None

    @property
    def max_batches(self) -> int | None:
        """Return `max_steps` in batches, because the steps in metrics.csv count batches.

        A GAN has fewer batches than optimizer steps, because two optimizers step in some batches.
        """
        steps, n = self.max_steps, flatten_config(self.config).get("model.discriminator_steps")
        if steps and isinstance(n, int) and n > 0:  # the generator steps in each n-th batch
            return steps * n // (n + 1)
        return steps

    @property
    def fid_metrics(self) -> list[str]:
        """Names of the FIDs in its evaluations."""
        names = dict.fromkeys(str(record.get("metric")) for record in self.records)
        return [name for name in names if is_fid(name)]

    def points(self, metric: str) -> list[Record]:
        """List one record of a metric per step, all measured with the same settings.

        FIDs are read from evaluations.jsonl, which also contains the settings of the measurement.
        Other metrics are read from the rows of metrics.csv that have a step. Only records with the
        most common settings are kept. If a step still has several records, the last one is used.
        """
        if is_fid(metric):
            points = [r for r in self.records if r.get("metric") == metric and not is_repeat(r)]
        else:
            points = [
                {"metric": metric, "step": int(row["step"]) + 1, "value": float(row[metric])}
                for row in self.rows
                if metric in row and "step" in row
            ]
        counts = Counter(map(_measurement_key, points)).most_common(1)
        comparable = [point for point in points if _measurement_key(point) == counts[0][0]]
        by_step = {point["step"]: point for point in comparable}
        return [by_step[step] for step in sorted(by_step)]

    def repeats(self, point: Record) -> list[Record]:
        """Records with the same weights and settings as `point`, but with other samples."""
        key = (point["step"], point["metric"], _measurement_key(point))
        repeats = (record for record in self.records if is_repeat(record))
        return [r for r in repeats if (r["step"], r["metric"], _measurement_key(r)) == key]

    def curve(self, metric: str, due: Sequence[int] = ()) -> Curve:
        """Return the curve of a metric.

        If training diverged, the run stopped early. The curve then has NaN at each step in `due`
        after the last evaluation.

        Raises:
            ValueError: if the numbers are invalid (see `Curve`).
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
                tuple(map(_fid_value, points)),
                None if None in counts else tuple(map(float, counts)),
                tuple(map(_fid_value, repeats)),
                tuple(others) if any(others) else (),
            )
        except (TypeError, OverflowError) as error:
            raise ValueError(f"seed {self.seed}: {error}.") from error


def read_run(path: Path) -> Run:
    """Read the files of a run folder. Errors are stored as its `fault`."""
    name, parent = path.resolve().name, path.resolve().parent.name
    match = _SEED_PATTERN.fullmatch(name)
    arm, seed = (match["arm"] or parent, match["seed"]) if match else (name, path.name)
    try:
        config = _read_mapping(latest_config(path))
        number = config.get("seed_everything")
        grids = {
            file: re.fullmatch(r"step-(\d+)-(.+)", file.stem)
            for file in (path / "samples").glob("step-*.png")
        }
        run = Run(
            path,
            arm,
            str(number) if type(number) is int else seed,
            config,
            first_config=_read_mapping(path / "config.yaml") or config,
            rows=read_rows(path / "metrics.csv"),
            records=_checked_evaluations(path / "evaluations.jsonl"),
            width_records=_checked_evaluations(path / EMA_CURVE),
            grids={(int(match[1]), match[2]): file for file, match in grids.items() if match},
        )
        try:
            _ = run.train_losses
        except (KeyError, ValueError) as error:
            file = path / "metrics.csv"
            raise ValueError(f"{file} is damaged: no step or loss in a row: {error}.") from error
    except (ValueError, OSError) as error:
        return Run(path, arm, seed, fault=str(error).rstrip("."))
    return run


def collect_runs(folders: Sequence[str]) -> list[Run]:
    """Read all run folders among and below `folders`, each once.

    Raises:
        FileNotFoundError: if a folder does not exist.
        ValueError: if a folder has no runs.
    """
    run_paths: dict[Path, Path] = {}
    for name in folders:
        if not Path(name).is_dir():
            raise FileNotFoundError(f"there is no run folder {name}.")
        paths = list(_run_folders(Path(name), set()))
        if not paths:
            raise ValueError(
                f"{name} contains no run: no folder in it has an evaluations.jsonl, metrics.csv or "
                "config.yaml."
            )
        for path in paths:
            run_paths.setdefault(path.resolve(), path)
    return [read_run(path) for path in run_paths.values()]


def _run_folders(folder: Path, visited: set[Path]) -> Iterator[Path]:
    if folder.resolve() in visited:  # a symbolic link may lead to a parent folder
        return
    visited.add(folder.resolve())
    if (folder / "evaluations.jsonl").exists() or (folder / "metrics.csv").exists():
        yield folder
        return
    subfolders = [subfolder for subfolder in sorted(folder.iterdir()) if subfolder.is_dir()]
    runs_below = [run for subfolder in subfolders for run in _run_folders(subfolder, visited)]
    yield from runs_below
    if not runs_below and (folder / "config.yaml").exists():
        yield folder


def _read_mapping(file: Path | None) -> dict[str, Any]:
    content = read_yaml(file) if file is not None and file.exists() else {}
    return content if isinstance(content, dict) else {}


def _checked_evaluations(file: Path) -> list[Record]:
    records = read_evaluations(file)
    for record in records:
        is_complete = "value" in record and record.get("step") is not None
        if "metric" in record and not is_complete:
            raise ValueError(f"{file} is damaged: {reprlib.repr(record)} is not an evaluation.")
    return records


def _fid_value(record: Record) -> float:
    return math.nan if record["value"] is None else float(record["value"])


def _measurement_key(record: Record) -> str:
    """Key of how a value was measured: protocol, sampling and averaging of the weights."""
    return repr([record.get(name) for name in (*PROTOCOL, "sampling", "ema_decay")])


def sampling_of(record: Record) -> Record:
    """From an FID record, return the sampler settings and the EMA decay of the weights.

    Records of earlier versions have no `ema_decay`.
    """
    decay = {name: record[name] for name in ("ema_decay",) if name in record}
    return dict(record.get("sampling") or {}) | decay


def differing_settings(
    one: Mapping[str, Any], other: Mapping[str, Any]
) -> dict[str, tuple[Any, Any]]:
    """Find settings that differ between two configs.

    The settings in `_IGNORED_SETTINGS`, such as seeds and paths, are not compared.
    """
    first, second = flatten_config(one), flatten_config(other)
    return {
        name: (first.get(name), second.get(name))
        for name in sorted(first.keys() | second.keys())
        if first.get(name) != second.get(name)
        and name.rpartition(".")[2] not in _IGNORED_SETTINGS
        and not name.startswith("trainer.logger")
    }


def flatten_config(config: Any, name: str = "") -> dict[str, Any]:
    """Convert a nested config to a dictionary with dotted names, such as `optimizer.lr`.

    In the dotted name of a setting, an object in a list is represented by its class name. If the
    list has several objects of a class `Class`, the second one is represented by `Class#2`.

    Example:
        >>> flatten_config({"optimizer": {"class_path": "torch.Adam", "init_args": {"lr": 0.1}}})
        {'optimizer': 'Adam', 'optimizer.lr': 0.1}
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


# Selection of comparable runs


@dataclass(frozen=True)
class Selection:
    """Runs whose values of one metric are comparable.

    Attributes:
        arms: the runs of each arm, by name of the arm.
        left_out: for each run that is left out, its path and the reason why it is left out.
    """

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
    """Group runs by arm, and leave out runs whose FIDs are not comparable.

    A run is left out if it was cut short, if one of its files is broken, or if it lacks the metric.
    It is also left out if its FID settings differ from those of most baseline runs, or if its
    sampling settings differ from those of most runs of its arm.

    The default baseline is the arm with the name "baseline" or, if there is none, the first arm.
    The default metric is the FID metric that most runs recorded, such as `val/fid_50k`.

    Raises:
        ValueError: if fewer than two arms remain, if the baseline is not among them, if two runs of
            an arm have the same seed, or if configs differ between seeds of an arm.
    """
    left_out: dict[Run, str] = {}

    def filter_runs(runs: Sequence[Run], reason_against: Callable[[Run], str | None]) -> list[Run]:
        reasons = {run: reason_against(run) for run in runs}
        left_out.update({run: reason for run, reason in reasons.items() if reason})
        if all(reasons.values()):
            raise ValueError(f"none of these runs can be compared. The first: {reasons[runs[0]]}.")
        return [run for run, reason in reasons.items() if not reason]

    rest = filter_runs(runs, lambda run: run.fault)
    fid = metric or most_frequent_metric(rest)
    rest = filter_runs(rest, lambda run: _missing_reason(run, fid))
    names = list(by_arm(rest))
    base = baseline or (BASELINE if BASELINE in names else names[0])
    usual = _typical_run([run for run in rest if run.arm == base] or rest, _protocol_change, fid)
    rest = filter_runs(rest, lambda run: _protocol_change(run, usual, fid))
    typical = {arm: _typical_run(each, _sampling_change, fid) for arm, each in by_arm(rest).items()}
    rest = filter_runs(rest, lambda run: _sampling_change(run, typical[run.arm], fid))
    members = by_arm(rest)
    arms = by_arm(filter_runs(rest, lambda run: _cut_short_reason(run, members[run.arm], fid)))
    reasons = [(str(run.path), reason) for run, reason in left_out.items()]
    if len(arms) < 2 or base not in arms:
        listed = "".join(f"\n  {run}: {reason}" for run, reason in reasons[:_MAX_LISTED])
        raise ValueError(
            f"a comparison needs the baseline {base} and another arm; there are "
            f"{', '.join(arms)}.{listed}"
        )
    for arm, each in arms.items():
        _require_equal_settings(arm, each)
    return Selection(fid, base, arms, reasons)


def most_frequent_metric(runs: Iterable[Run]) -> str:
    """Find the name of the FID metric that most runs recorded, such as `val/fid_50k`.

    If there are names that begin with `val/`, only these are considered.

    Raises:
        ValueError: if no run has an FID, or if several names are equally frequent.
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
    """Group runs by arm."""
    arms: dict[str, list[Run]] = {}
    for run in runs:
        arms.setdefault(run.arm, []).append(run)
    return arms


def _missing_reason(run: Run, metric: str) -> str | None:
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
        return "its training diverged before its first FID, so its arm looks too good"
    step, what = last_row.get("step"), "FID" if is_fid(metric) else metric
    return f"it has no {what}" + (f"; metrics.csv ends at step {step}" if step else "")


def _typical_run(
    runs: Sequence[Run], difference: Callable[[Run, Run, str], str | None], metric: str
) -> Run:
    """The first run from which the fewest runs differ."""
    return min(runs, key=lambda one: sum(difference(run, one, metric) is not None for run in runs))


def _protocol_change(run: Run, typical: Run, metric: str) -> str | None:
    records = [each.points(metric)[-1] for each in (run, typical)]
    changes = _list_changes(*({name: record.get(name) for name in PROTOCOL} for record in records))
    return changes and f"its FID was measured differently from that of {typical.path}: {changes}"


def _sampling_change(run: Run, typical: Run, metric: str) -> str | None:
    changes = _list_changes(*(sampling_of(each.points(metric)[-1]) for each in (run, typical)))
    return changes and f"its samples were drawn differently from those of {typical.path}: {changes}"


def _list_changes(one: Record, typical: Record) -> str | None:
    names = [name for name in one if name in typical and one[name] != typical[name]]
    return "; ".join(f"{name} {one[name]!r}, not {typical[name]!r}" for name in names) or None


def _cut_short_reason(run: Run, members: Iterable[Run], metric: str) -> str | None:
    """Reason if a run was cut short; None otherwise.

    A run was cut short if another FID was due before its `max_steps`. If its config has no
    `max_steps`, it was cut short if other runs of its arm have later FIDs. A run that diverged does
    not count as cut short, because its arm would look better without it.
    """
    if run.diverged:
        return None
    steps = [point["step"] for point in run.points(metric)]
    ends = f"cut short: its FIDs end at step {steps[-1]:,}"
    end = run.max_steps if is_fid(metric) else run.max_batches
    if end is None:
        last = max(member.points(metric)[-1]["step"] for member in members)
        return f"{ends}, other seeds' at step {last:,}" if steps[-1] < last else None
    due = steps[-1] + (steps[-1] - steps[-2] if len(steps) > 1 else steps[-1])
    return f"{ends} of {end:,}" if due <= end else None


def _require_equal_settings(arm: str, members: Sequence[Run]) -> None:
    for run, other in combinations(members, 2):
        if run.seed == other.seed:
            raise ValueError(
                f"arm {arm} has seed {run.seed} twice: {run.path} and {other.path}. Leave one out, "
                "or rename its folder if it belongs to another arm."
            )
        if not (run.config and other.config):
            continue
        if changes := differing_settings(run.config, other.config):
            listed = [f"{name} {old!r} and {new!r}" for name, (old, new) in changes.items()]
            more = f" and {len(listed) - _MAX_LISTED} more" * (len(listed) > _MAX_LISTED)
            raise ValueError(
                f"{run.path} and {other.path} both belong to arm {arm} and differ in "
                f"{'; '.join(listed[:_MAX_LISTED])}{more}. Runs of one arm must have the same "
                "settings; if these are different arms, give their folders different names."
            )
