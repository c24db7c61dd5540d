"""Write and read metrics.csv and evaluations.jsonl. On resume, rows of later steps are deleted."""

import csv
import io
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only

from lit_diffusion.files import atomic_write_text, check_regular, checked_read

Row = dict[str, str]


class AppendingCSVLogger(Logger):
    """Writes `save_dir`/metrics.csv, or appends to an existing file.

    A row is in the file when `log_metrics` returns. New metrics become new columns at the right.

    When a run resumes at a step, `rewind` deletes the rows of later steps. If `rewind` was not
    called before, the first `log_metrics` calls it with the step of the new row. If metrics of the
    step at which the run resumes are logged again, the new row replaces the old one.

    Args:
        save_dir: folder of the run, created with the first row.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     AppendingCSVLogger(folder).log_metrics({"loss": 0.5}, step=1)
        ...     AppendingCSVLogger(folder).log_metrics({"loss": 0.25}, step=2)
        ...     print(AppendingCSVLogger(folder).path.read_text().split())
        ['step,loss', '1,0.5', '2,0.25']
    """

    save_dir = ""
    name = version = ""  # no subfolders for experiment and version

    def __init__(self, save_dir: str | Path) -> None:
        super().__init__()
        self.save_dir = str(save_dir)
        self.path = Path(save_dir) / "metrics.csv"
        self._columns: list[str] | None = None
        self._replaceable: list[Row] = []  # rows in the file that may be logged again
        self._last_row: Row | None = None

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing; the run folder has config.yaml."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Append a row. As in Lightning, `step` is the number of batches with an optimizer step."""
        row = _to_row(metrics, step)
        if self._columns is None:
            self.rewind(sys.maxsize if step is None else step)
        assert self._columns is not None
        if row in self._replaceable and self._last_row in (None, row):
            self._replaceable.remove(row)
            return
        self._last_row = row
        replaced = [old for old in self._replaceable if _logs_again(old, row)]
        if replaced or row.keys() - self._columns:
            rows = [old for old in read_rows(self.path) if old not in replaced]
            self._replaceable = [old for old in self._replaceable if old not in replaced]
            self._rewrite([*rows, row])
            return
        with self.path.open("a") as file:
            file.write(_to_csv(self._columns, [row]))

    @rank_zero_only
    def log_ahead(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Write a row to disk before Lightning logs it. Lightning then adds no second row."""
        self.log_metrics(metrics, step)
        self._replaceable.append(_to_row(metrics, step))
        with self.path.open("a") as file:
            os.fsync(file.fileno())

    def rewind(self, step: int) -> int:
        """Delete the rows of steps after `step`, where a run resumes; return how many."""
        old_rows = read_rows(self.path)
        rows = [row for row in old_rows if _row_step(row) <= step]
        self._replaceable = [row for row in rows if _row_step(row) == step]
        self._rewrite(rows)
        return len(old_rows) - len(rows)

    def _rewrite(self, rows: Sequence[Row]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Sorted within a row: Lightning's order depends on when this process first logged a metric.
        self._columns = list(dict.fromkeys(["step", *chain(*map(sorted, rows))]))
        header = dict(zip(self._columns, self._columns, strict=True))
        atomic_write_text(self.path, _to_csv(self._columns, [header, *rows]))


_FIX = "repair it, or delete it"


def _to_row(metrics: Mapping[str, float], step: int | None) -> Row:
    return {"step": "" if step is None else str(step)} | {k: str(v) for k, v in metrics.items()}


def _row_step(row: Row) -> int:
    return int(row["step"]) if row.get("step") else -1


def _logs_again(old: Row, new: Row) -> bool:
    """Whether two rows have a metric of the same step in common."""
    return old["step"] == new["step"] and bool((old.keys() & new.keys()) - {"step", "epoch"})


def _to_csv(columns: list[str], rows: Iterable[Row]) -> str:
    text = io.StringIO()
    csv.DictWriter(text, columns, lineterminator="\n").writerows(rows)
    return text.getvalue()


def read_rows(path: str | Path) -> list[Row]:
    """Read the rows of a metrics.csv; [] if there is no file.

    Empty cells and an incomplete last row are left out. A damaged file raises a ValueError.
    """
    if not os.path.lexists(path):
        return []
    with checked_read(path, "CSV file", _FIX) as file:
        rows = list(csv.DictReader(io.StringIO(_complete_lines(file))))
    rows = [{k: v for k, v in row.items() if v and isinstance(k, str)} for row in rows]
    for row in rows:
        if not re.fullmatch(r"-?\d{1,18}", row.get("step", "0")):
            raise ValueError(
                f"{path} is damaged: a step must be a number, got {row['step']!r:.50}; {_FIX}."
            )
    return rows


def read_evaluations(path: str | Path) -> list[dict[str, Any]]:
    """Read the records of an evaluations.jsonl; [] if there is no file.

    An incomplete last line is left out. A damaged file raises a ValueError.
    """
    if not os.path.lexists(path):
        return []
    with checked_read(path, "list of evaluations", _FIX) as file:
        lines = list(filter(None, _complete_lines(file).splitlines()))
        records: list[dict[str, Any]] = list(map(json.loads, lines))
    for line, record in zip(lines, records, strict=True):
        if not _is_evaluation(record):
            raise ValueError(f"{path} is damaged: {line[:50]!r} is not an evaluation; {_FIX}.")
    return records


def _is_evaluation(record: Any) -> bool:
    """Whether the values used in computations have the expected types."""
    if not isinstance(record, dict):
        return False
    match record.get("seeds", [0, 0]), record.get("step", 0), record.get("metric", ""):
        case [int(), int()], int() | None, str():
            return isinstance(record.get("value"), float | int | None)
    return False


def rewind_evaluations(path: str | Path, step: int) -> int:
    """Delete the records of steps after `step`, where a run resumes; return how many."""
    old_records = read_evaluations(path)
    records = [record for record in old_records if (record.get("step") or 0) <= step]
    if len(records) < len(old_records):
        atomic_write_text(path, "".join(json.dumps(record) + "\n" for record in records))
    return len(old_records) - len(records)


def _complete_lines(path: Path) -> str:
    """Text of a file without an incomplete last line."""
    text = check_regular(path).read_text()
    return text[: text.rfind("\n") + 1]
