"""CSV files, and tables in Markdown."""

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def read_rows(path: Path | str) -> list[Row]:
    with Path(path).open() as file:
        return list(csv.DictReader(file))


def group_rows(rows: Iterable[Row], *keys: str) -> dict[tuple[str, ...], list[Row]]:
    """Rows by their values of `keys`, in order of appearance."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return groups


def print_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    for cells in (heads, ["---"] * len(heads), *rows):
        print(f"| {' | '.join(cells)} |")
