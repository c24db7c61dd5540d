"""What a run leaves behind as text: metrics.csv and evaluations.jsonl.

Both only grow. A resumed run goes on in the same files, and what its predecessor logged after the
checkpoint that it starts from is taken out first, so that they end up as those of an undisturbed
run.
"""

import csv
import io
import json
import os
import re
from argparse import Namespace
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only

from lit_diffusion.files import replace_text

Row = dict[str, str]


class AppendingCSVLogger(Logger):
    """Writes `save_dir`/metrics.csv, and appends to the one that is there.

    A row is on disk when `log_metrics` returns. New metrics become new columns at the right. A
    resumed run says by `rewind`, or else by its first row, how far its checkpoint had come: rows of
    later steps are those of the run that died, and are dropped; rows of that very step give way to
    those that log their metrics anew. (Lightning's CSVLogger deletes the file instead.)

    Args:
        save_dir: folder of the run; made when the first row comes.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     AppendingCSVLogger(folder).log_metrics({"loss": 0.5}, step=1)
        ...     AppendingCSVLogger(folder).log_metrics({"loss": 0.25}, step=2)
        ...     print(AppendingCSVLogger(folder).path.read_text().split())
        ['step,loss', '1,0.5', '2,0.25']
    """

    def __init__(self, save_dir: str | Path) -> None:
        super().__init__()
        self._save_dir = Path(save_dir)
        self._columns: list[str] | None = None
        self._doubtful: list[Row] = []

    @property
    def path(self) -> Path:
        """The file."""
        return self._save_dir / "metrics.csv"

    @property
    def save_dir(self) -> str:
        """Folder of the file."""
        return str(self._save_dir)

    @property
    def name(self) -> str:
        """Empty: no folder per experiment below `save_dir`."""
        return ""

    @property
    def version(self) -> str:
        """Empty: no folder per version below `save_dir`."""
        return ""

    @rank_zero_only
    def log_hyperparams(
        self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any
    ) -> None:
        """Nothing: the run folder holds config.yaml."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Append one row.

        Args:
            metrics: numbers by name.
            step: as the Trainer counts: batches that stepped the optimizer.
        """
        row = _row(metrics, step)
        if self._columns is None:
            self.rewind(_step(row))
        assert self._columns is not None
        if row in self._doubtful:
            self._doubtful.remove(row)
            return
        new = [name for name in row if name not in self._columns]
        double = [old for old in self._doubtful if _is_same(old, row)]
        if new or double:
            rows = [old for old in read_rows(self.path) if old not in double]
            self._rewrite(self._columns + new, rows)
            self._doubtful = [old for old in self._doubtful if old not in double]
        self._append(row)

    @rank_zero_only
    def log_ahead(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Have a row on the disk, synced, that will be logged in a moment; it is written once.

        Args:
            metrics: as for `log_metrics`.
            step: likewise.
        """
        self.log_metrics(metrics, step)
        self._doubtful.append(_row(metrics, step))
        with self.path.open("a") as file:
            os.fsync(file.fileno())

    def rewind(self, step: int) -> None:
        """Drop the rows of steps after `step`, from which a run goes on."""
        rows = [row for row in read_rows(self.path) if _step(row) <= step]
        self._doubtful = [row for row in rows if _step(row) == step]
        self._rewrite(_columns(rows), rows)

    def _rewrite(self, columns: list[str], rows: Iterable[Row]) -> None:
        self._save_dir.mkdir(parents=True, exist_ok=True)
        self._columns = columns
        header = dict(zip(columns, columns, strict=True))
        replace_text(self.path, _csv(columns, [header, *rows]))

    def _append(self, row: Row) -> None:
        assert self._columns is not None
        with self.path.open("a") as file:
            file.write(_csv(self._columns, [row]))


def read_rows(path: str | Path) -> list[Row]:
    """Rows of a metrics.csv, without empty cells; none without a file.

    A half-written last row is left out.
    """
    text = _text_of(path)
    complete = text[: text.rfind("\n") + 1]
    try:
        rows = list(csv.DictReader(io.StringIO(complete)))
    except csv.Error as error:
        raise ValueError(f"{path} is broken: {error}.") from error
    found = [{k: v for k, v in row.items() if v and isinstance(k, str)} for row in rows]
    for row in found:
        if not re.fullmatch(r"-?\d{1,18}", row.get("step", "0")):
            raise ValueError(f"{path} is broken: a step must be a number, got {row['step']!r:.50}.")
    return found


def read_evaluations(path: str | Path) -> list[dict[str, Any]]:
    """Records of evaluations.jsonl, oldest first; none without a file.

    A half-written last line is left out.
    """
    text = _text_of(path)
    found: list[dict[str, Any]] = []
    for line in text[: text.rfind("\n") + 1].splitlines():
        try:
            record: Any = json.loads(line) if line else None
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is broken: {str(error)[:200]}.") from error
        if line and not _is_record(record):
            raise ValueError(f"{path} is broken: {line[:50]!r} is no evaluation.")
        if line:
            found.append(record)
    return found


def _is_record(record: Any) -> bool:
    if not isinstance(record, dict):
        return False
    step, metric, seeds = record.get("step"), record.get("metric", ""), record.get("seeds", [0, 0])
    value = record.get("value")
    return (
        (step is None or (type(step) is int and 0 <= step < 2**63))
        and isinstance(metric, str)
        and isinstance(seeds, list)
        and len(seeds) == 2
        and all(type(seed) is int for seed in seeds)
        and (value is None or type(value) is float or _is_long(value))
    )


def _is_long(value: Any) -> bool:
    return type(value) is int and -(2**63) <= value < 2**63


def _text_of(path: str | Path) -> str:
    """Text of a file; none without one."""
    path = Path(path)
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is no regular file.")
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is broken: it is not UTF-8: {error.reason}.") from error


def rewind_evaluations(path: str | Path, step: int) -> None:
    """Drop the records of steps after `step`: a run goes on from there."""
    records = read_evaluations(path)
    kept = [record for record in records if (record.get("step") or 0) <= step]
    if len(kept) < len(records):
        replace_text(path, "".join(json.dumps(record) + "\n" for record in kept))


def _row(metrics: Mapping[str, float], step: int | None) -> Row:
    return {"step": "" if step is None else str(step)} | {k: str(v) for k, v in metrics.items()}


def _step(row: Row) -> int:
    return int(row["step"]) if row.get("step") else -1


def _is_same(old: Row, new: Row) -> bool:
    """Whether two rows hold a metric of the same step."""
    return old["step"] == new["step"] and bool((old.keys() & new.keys()) - {"step", "epoch"})


def _columns(rows: Iterable[Row]) -> list[str]:
    """Names in order of appearance, step first."""
    return list(dict.fromkeys(["step", *(name for row in rows for name in row)]))


def _csv(columns: list[str], rows: Iterable[Row]) -> str:
    text = io.StringIO()
    csv.DictWriter(text, columns, lineterminator="\n").writerows(rows)
    return text.getvalue()
