"""The runs of an experiment: which folders, which arms, which of them may be compared.

An arm is the name of the folder around seed-0, seed-1, ..., as in sweeps/digits/clts/seed-0; or
the name of a run folder without a trailing seed, as in runs/clts-seed0.
"""

import math
import re
import reprlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from lit_diffusion.cli.loggers import Row, read_evaluations, read_rows
from lit_diffusion.cli.run_folder import latest_config
from lit_diffusion.config.yaml_file import read_yaml
from lit_diffusion.lab.compare.curves import Curve
from lit_diffusion.metrics.evaluation_record import EMA_CURVE, is_repeat

Record = dict[str, Any]

# What two FIDs must share to be compared. How samples were drawn from the model ("sampling") is
# part of an arm, which may have another process or solver.
PROTOCOL = (
    *("metric", "num_fake", "num_real", "data", "protocol", "extractor_sha256"),
    *("resize", "weights", "labels"),
)
_SEED = re.compile(r"(?:(?P<arm>.+)[-_])?seed[-_]?(?P<seed>\d+)", re.IGNORECASE)
# Settings that seeds of one arm may differ in.
_FREE = {
    *("seed_everything", "ckpt_path", "default_root_dir", "cache_dir", "save_dir", "num_workers"),
    *("accelerator", "enable_progress_bar", "enable_model_summary", "tuned_on"),
}


@dataclass(frozen=True)
class Run:
    """A run folder."""

    path: Path

    @cached_property
    def config(self) -> dict[str, Any]:
        """What it was last started or resumed with; {} where it does not tell."""
        return _read(latest_config(self.path))

    @cached_property
    def first_config(self) -> dict[str, Any]:
        """What it was first started with; that of the resume where it does not tell."""
        return _read(self.path / "config.yaml") or self.config

    @cached_property
    def records(self) -> list[Record]:
        """Its evaluations, oldest first."""
        return _evaluations(self.path / "evaluations.jsonl")

    @cached_property
    def width_records(self) -> list[Record]:
        """Its FIDs by width of averaging, of `evaluate --ema`."""
        return _evaluations(self.path / EMA_CURVE)

    @cached_property
    def fault(self) -> str | None:
        """Why its files cannot be read; None where they can."""
        return error_of(
            lambda: (
                *(self.config, self.first_config, self.records, self.train_losses),
                self.width_records,
            )
        )

    @property
    def arm(self) -> str:
        """Name of its arm."""
        path = self.path.resolve()
        match = _SEED.fullmatch(path.name)
        return path.name if match is None else match["arm"] or path.parent.name

    @property
    def seed(self) -> str:
        """What its randomness came from, by its config, else by its name."""
        told = self.config.get("seed_everything")
        match = _SEED.fullmatch(self.path.resolve().name)
        if isinstance(told, int) and not isinstance(told, bool):
            return str(told)
        return match["seed"] if match else self.path.name

    @cached_property
    def last_logged(self) -> Mapping[str, str]:
        """The last value of everything in metrics.csv."""
        return {name: value for row in self._rows for name, value in row.items()}

    @property
    def train_losses(self) -> tuple[list[int], list[float]]:
        """Steps and values of train/loss in metrics.csv; nan at last where it stopped the run."""
        rows = [row for row in self._rows if "train/loss" in row]
        try:
            return [int(row["step"]) for row in rows], [float(row["train/loss"]) for row in rows]
        except (KeyError, ValueError) as error:
            file = self.path / "metrics.csv"
            raise ValueError(f"{file} is broken: no step or loss in a row: {error}.") from error

    @property
    def diverged(self) -> bool:
        """Whether a training loss that is not finite ended it."""
        losses = self.train_losses[1]
        return bool(losses) and not math.isfinite(losses[-1])

    @cached_property
    def _rows(self) -> list[Row]:
        return read_rows(self.path / "metrics.csv")

    @property
    def max_steps(self) -> int | None:
        """Optimizer steps that it was to have; None where that is open."""
        trainer = self.config.get("trainer")
        steps = trainer.get("max_steps") if isinstance(trainer, dict) else None
        return steps if isinstance(steps, int) and steps > 0 else None

    @cached_property
    def grids(self) -> dict[tuple[int, str], Path]:
        """Pictures of samples by step and weights."""
        found = {}
        for path in (self.path / "samples").glob("step-*.png"):
            if match := re.fullmatch(r"step-(\d+)-(.+)", path.stem):
                found[int(match[1]), match[2]] = path
        return found

    def points(self, metric: str) -> list[Record]:
        """The curve of a metric: a record a step, in order, measured as most of them were."""
        usual = {record["step"]: record for record in self._usual(metric)}
        return [usual[step] for step in sorted(usual)]

    def curve(self, metric: str, due: Sequence[int] = ()) -> Curve:
        """The FIDs; NaN at steps that were `due` after the training diverged.

        Raises:
            ValueError: for numbers that no training gives: see `Curve`.
        """
        points = self.points(metric)
        last, again = points[-1], self.repeats(points[-1])
        if self.diverged:
            seen, end = last.get("images"), last["step"]
            points += [
                {"step": step, "value": None, "images": seen / end * step if seen else None}
                for step in due
                if step > end
            ]
        images: list[Any] = [point.get("images") for point in points]
        looks = [point.get("second_look") or {} for point in points]
        try:
            return Curve(
                self.seed,
                tuple(float(point["step"]) for point in points),
                tuple(_fid(point) for point in points),
                None if None in images else tuple(map(float, images)),
                tuple(map(_fid, again)),
                tuple(map(_numbers, looks)) if any(looks) else (),
            )
        except (TypeError, OverflowError) as error:
            raise ValueError(f"seed {self.seed}: {error}.") from error

    def ignored(self, metric: str) -> int:
        """Number of evaluations of a metric that were not made as most of them were."""
        return len(self._all(metric)) - len(self._usual(metric))

    def measured_twice(self, metric: str) -> list[int]:
        """Steps with evaluations made alike that differ, as a resume that went otherwise leaves."""
        values = {(record["step"], repr(record["value"])) for record in self._usual(metric)}
        counts = Counter(step for step, _ in values)
        return sorted(step for step, count in counts.items() if count > 1)

    def repeats(self, point: Record) -> list[Record]:
        """Measurements of the same weights with other samples."""
        key = (point["step"], point["metric"], _way(point))
        same = (r for r in self.records if is_repeat(r))
        return [r for r in same if (r["step"], r["metric"], _way(r)) == key]

    def _all(self, metric: str) -> list[Record]:
        """FIDs of evaluations.jsonl, which tells how they were measured; others of metrics.csv."""
        if is_fid(metric):
            return [r for r in self.records if r.get("metric") == metric and not is_repeat(r)]
        logged = [(int(r["step"]) + 1, float(r[metric])) for r in self._rows if metric in r]
        return [{"metric": metric, "step": step, "value": value} for step, value in logged]

    def _usual(self, metric: str) -> list[Record]:
        found = self._all(metric)
        ways = Counter(_way(record) for record in found)
        return [record for record in found if _way(record) == ways.most_common(1)[0][0]]


def is_fid(metric: str) -> bool:
    """Whether a metric is an FID, by its name."""
    return "fid_" in metric.rpartition("/")[2]


def find_runs(given: Sequence[str]) -> list[Run]:
    """Run folders that are given or lie below what is given.

    Raises:
        FileNotFoundError: for a folder that is not there.
        ValueError: for one without runs.
    """
    found: dict[Path, Run] = {}
    for name in given:
        path = Path(name)
        if not path.is_dir():
            raise FileNotFoundError(f"there is no run folder {name}.")
        runs = list(_runs_in(path, set()))
        if not runs:
            raise ValueError(
                f"{name} holds no run: no folder in it has an evaluations.jsonl, metrics.csv or "
                "config.yaml."
            )
        found |= {run.resolve(): Run(run) for run in runs if run.resolve() not in found}
    return list(found.values())


def _runs_in(folder: Path, seen: set[Path]) -> Iterator[Path]:
    if (real := folder.resolve()) in seen:  # by a link, which may be to a folder around it
        return
    seen.add(real)
    if (folder / "evaluations.jsonl").exists() or (folder / "metrics.csv").exists():
        yield folder
        return
    parts = [part for part in sorted(folder.iterdir()) if part.is_dir()]
    below = [run for part in parts for run in _runs_in(part, seen)]
    yield from below
    if not below and (folder / "config.yaml").exists():
        yield folder


def error_of(read: Callable[[], object]) -> str | None:
    """Why something cannot be read or computed; None where it can."""
    try:
        read()
    except (ValueError, OSError) as error:
        return str(error).rstrip(".")
    return None


def _fid(record: Record) -> float:
    return math.nan if record["value"] is None else float(record["value"])


def _evaluations(file: Path) -> list[Record]:
    found = read_evaluations(file)
    for line in found:
        if "metric" in line and not line.keys() >= {"step", "value"}:
            raise ValueError(f"{file} is broken: {reprlib.repr(line)} is no evaluation.")
    return found


def _numbers(look: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in look.items() if value is not None}


def _read(file: Path | None) -> dict[str, Any]:
    if file is None or not file.exists():
        return {}
    found = read_yaml(file)
    return found if isinstance(found, dict) else {}


def _way(record: Record) -> str:
    """How an FID was measured, of which average, and how the samples were drawn."""
    return repr([record.get(name) for name in (*PROTOCOL, "sampling", "ema_decay")])


def protocol_of(record: Record) -> Record:
    """What an FID must share with another to be compared with it."""
    return {name: record.get(name) for name in PROTOCOL}


def sampling_of(record: Record) -> Record:
    """How the samples of an FID were drawn, and from which average of the weights.

    Records of earlier versions do not tell `ema_decay`.
    """
    decay = {name: record[name] for name in ("ema_decay",) if name in record}
    return dict(record.get("sampling") or {}) | decay


def flat(config: Any, name: str = "") -> dict[str, Any]:
    """Settings by dotted name: `optimizer` is Adam, `optimizer.lr` is 0.1.

    An object in a list is named by its class.
    """
    if isinstance(config, list) and any(isinstance(item, dict) for item in config):
        config = _named(config)
    if not isinstance(config, dict):
        return {name: config}
    found = {name: kind} if name and (kind := _class(config)) else {}
    for key, value in config.items():
        if key != "class_path":
            inner = name if key == "init_args" else f"{name}.{key}".lstrip(".")
            found |= flat(value, inner)
    return found


def _named(items: Sequence[Any]) -> dict[str, Any]:
    """Items by their class; the second of one class is `Class#2`."""
    found: dict[str, Any] = {}
    for k, item in enumerate(items):
        name = _class(item) or str(k)
        same = sum(known.partition("#")[0] == name for known in found)
        found[f"{name}#{same + 1}" if same else name] = item
    return found


def _class(value: Any) -> str | None:
    path = value.get("class_path") if isinstance(value, dict) else None
    return None if path is None else str(path).rpartition(".")[2]


def settings_that_differ(
    one: Mapping[str, Any], other: Mapping[str, Any]
) -> dict[str, tuple[Any, Any]]:
    """Settings of two configs that differ, but for the seed, paths and what changes no result."""
    first, second = flat(one), flat(other)
    return {
        name: (first.get(name), second.get(name))
        for name in sorted(first.keys() | second.keys())
        if first.get(name) != second.get(name)
        and name.rpartition(".")[2] not in _FREE
        and not name.startswith("trainer.logger")
    }
