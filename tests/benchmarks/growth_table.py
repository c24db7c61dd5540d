"""The rows of growth.py as tables in Markdown: growth_table.py FILE"""

import json
import math
import sys
from pathlib import Path
from statistics import linear_regression
from typing import Any

COLUMNS = {
    "gflop": "GFLOP",
    "attention": "attention's share of GFLOP",
    "ms": "ms of CPU time",
    "wall_ms": "ms of wall-clock time",
    "kernels": "kernels",
    "mib": "peak MiB",
    "state_mib": "MiB per rank between steps",
    "collectives": "collectives",
    "collective_mib": "MiB in collectives",
    "list_s": "s to list",
    "check_s": "s to check (once)",
    "split_s": "s to split",
    "first_batch_s": "s to the first batch",
    "us_per_file": "us per file to list",
    "index_bytes": "index bytes per file",
    "growth_mib": "peak MiB",
    "state_gib": "GiB of weights, gradients, moments, EMA",
    "arithmetic_ms": "ms of arithmetic",
    "communication_ms": "ms of communication",
    "alone_ms": "ms of communication without sharing within nodes",
    "hidden_images_per_s": "images/s, communication hidden",
    "none_images_per_s": "images/s, communication not hidden",
    "efficiency": "fraction of linear growth, communication not hidden",
}
LAWS: dict[str, dict[str, str]] = {
    "batch": {"gflop": "1", "ms": "1, plus a constant", "mib": "1, plus a constant"},
    "width": {"gflop": "2", "ms": "2", "mib": "1 (activations) to 2 (weights)"},
    "resolution": {"gflop": "2 (attention 4)", "ms": "2 (attention 4)", "mib": "2"},
    "averages": {"ms": "1", "mib": "1, plus a constant"},
    "sampling": {"gflop": "1", "ms": "1", "mib": "0"},
    "ranks": {"ms": "0, plus communication", "state_mib": "0 (DDP), -1 (FSDP2)"},
    "files": {"list_s": "1", "check_s": "1", "split_s": "1", "first_batch_s": "0"},
}
"""Exponents of the value in the first column that each column should have."""
TITLES = {
    "batch": "images in a batch",
    "width": "width",
    "resolution": "pixels on a side",
    "averages": "EMA copies",
    "sampling": "steps of DDIM",
    "ranks": "ranks",
    "files": "files",
    "paper": "GPUs (calculated)",
}


def exponents(points: list[tuple[float, float]]) -> str:
    """Slopes of log y over log x: by least squares, and between the last two points."""
    if len(points) < 2 or min(y for _, y in points) <= 0:
        return "-"
    x, y = zip(*((math.log(x), math.log(y)) for x, y in points), strict=True)
    slope = linear_regression(x, y).slope
    return f"{slope:.2f}; {(y[-1] - y[-2]) / (x[-1] - x[-2]):.2f}"


def cell(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def print_tables(path: Path) -> None:
    """A table for each section and kind; of several rows of a variant the last counts."""
    rows = {(r["section"], r["variant"]): r for r in map(json.loads, path.read_text().splitlines())}
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows.values():
        groups.setdefault((row["section"], row["kind"]), []).append(row)
    for (section, kind), group in groups.items():
        columns = [name for name in COLUMNS if any(row.get(name) for row in group)]
        on_gpu = any("kernels" in row for row in group)
        heads = COLUMNS | {"ms": "ms on the device" if on_gpu else "ms of CPU time"}
        print(f"| {TITLES[section]}: {kind} | {' | '.join(heads[name] for name in columns)} |")
        print("|---" * (len(columns) + 1) + "|")
        for row in group:
            print(f"| {row['x']:,} | {' | '.join(cell(row.get(name)) for name in columns)} |")
        laws = LAWS.get(section, {})
        if laws:
            slopes = [
                exponents([(r["x"], r[name]) for r in group if name in r]) if name in laws else "-"
                for name in columns
            ]
            print(f"| **exponent**: all rows; last two rows | {' | '.join(slopes)} |")
            print(f"| expected | {' | '.join(laws.get(name, '-') for name in columns)} |")
        print()


if __name__ == "__main__":
    print_tables(Path(sys.argv[1]))
