"""FIDs from elsewhere, as CSV: a row an evaluation, with the columns arm, step and fid.

There may be columns seed and images. What `compare` writes as curves.csv is such a file.
"""

import csv
import math
from collections.abc import Mapping, Sequence

from lit_diffusion.analysis.comparison import Arm
from lit_diffusion.analysis.curves import Curve

_NEEDED = ("arm", "step", "fid")
Point = tuple[float, float, float | None]


def read_arms(paths: Sequence[str]) -> list[Arm]:
    """Arms of CSV files.

    Args:
        paths: of the files. An FID that is empty or nan was not finite.

    Raises:
        OSError: for a file that cannot be read.
        ValueError: for columns that are not there, numbers that are none, and no rows at all.
    """
    points: dict[str, dict[str, list[Point]]] = {}
    for path in paths:
        for place, row in _rows(path):
            if not row["arm"]:
                raise ValueError(f"{place}: the arm has no name.")
            seeds = points.setdefault(row["arm"], {})
            seeds.setdefault(row.get("seed") or "0", []).append(_point(row, place))
    if not points:
        raise ValueError(f"there are no rows in {', '.join(paths)}.")
    return [
        Arm(arm, tuple(_curve(arm, seed, found) for seed, found in seeds.items()))
        for arm, seeds in points.items()
    ]


def _rows(path: str) -> list[tuple[str, dict[str, str]]]:
    """Rows, each with its place in the file."""
    try:
        return _rows_of_utf8(path)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error.reason}; save it as that.") from error
    except csv.Error as error:
        raise ValueError(f"{path} is no CSV file: {error}.") from error


def _rows_of_utf8(path: str) -> list[tuple[str, dict[str, str]]]:
    with open(path, newline="", encoding="utf-8-sig") as file:  # spreadsheets write its mark
        reader = csv.DictReader(file, skipinitialspace=True)
        lacking = [name for name in _NEEDED if name not in (reader.fieldnames or ())]
        if lacking:
            raise ValueError(
                f"{path} needs the columns arm, step and fid, and has no {', '.join(lacking)}."
            )
        return [(f"{path}, line {reader.line_num}", row) for row in reader]


def _point(row: Mapping[str, str], place: str) -> Point:
    step = _number(row["step"], "step", place)
    fid = math.nan if row["fid"] == "" else _number(row["fid"], "fid", place)
    return step, fid, _number(row["images"], "images", place) if row.get("images") else None


def _number(text: str | None, name: str, place: str) -> float:
    try:
        return float(text or "")
    except ValueError:
        raise ValueError(f"{place}: {name} must be a number, got {text!r}.") from None


def _curve(arm: str, seed: str, points: list[Point]) -> Curve:
    points = sorted(points, key=lambda point: point[0])
    steps, fids = tuple(p[0] for p in points), tuple(p[1] for p in points)
    images = tuple(seen for _, _, seen in points if seen is not None)
    fids = tuple(fid if math.isfinite(fid) else math.nan for fid in fids)
    try:
        return Curve(seed, steps, fids, images if len(images) == len(points) else None)
    except ValueError as error:
        raise ValueError(f"arm {arm}, {error}") from error
