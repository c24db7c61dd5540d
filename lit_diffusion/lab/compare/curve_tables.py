"""FIDs as CSV: a row an evaluation, with the columns arm, step and fid.

There may be columns seed, images and repeat, and what a second look found, such as pixels. Rows
with a repeat of 1, 2, ... hold FIDs of the last step from other samples. What `compare` writes as
curves.csv is such a file.
"""

import csv
import math
from collections.abc import Iterator, Mapping, Sequence

from lit_diffusion.lab.compare.comparison import Arm
from lit_diffusion.lab.compare.curves import Curve
from lit_diffusion.metrics.auxiliary_metrics import DISTANCES, FRACTIONS

LOOKED_AT = (*DISTANCES, *(f"{name} floor" for name in DISTANCES), *FRACTIONS)


def read_arms(paths: Sequence[str]) -> list[Arm]:
    """Arms of CSV files. An FID that is empty or nan was not finite.

    Raises:
        OSError: for a file that cannot be read.
        ValueError: for columns that are not there, numbers that are none, and no rows at all.
    """
    points: dict[str, dict[str, list[dict[str, float]]]] = {}
    for path in paths:
        try:
            for place, row in _rows(path):
                seeds = points.setdefault(row["arm"], {})
                seeds.setdefault(row.get("seed") or "0", []).append(_evaluation(row, place))
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8: {error.reason}; save it as that.") from error
        except csv.Error as error:
            raise ValueError(f"{path} is no CSV file: {error}.") from error
    if not points:
        raise ValueError(f"there are no rows in {', '.join(paths)}.")
    return [
        Arm(arm, tuple(_curve(arm, seed, found) for seed, found in seeds.items()))
        for arm, seeds in points.items()
    ]


def _rows(path: str) -> Iterator[tuple[str, dict[str, str]]]:
    with open(path, newline="", encoding="utf-8-sig") as file:  # spreadsheets write its mark
        reader = csv.DictReader(file, skipinitialspace=True)
        heads = reader.fieldnames or ()
        if lacking := [name for name in ("arm", "step", "fid") if name not in heads]:
            raise ValueError(
                f"{path} needs the columns arm, step and fid, and has no {', '.join(lacking)}."
            )
        for row in reader:
            yield f"{path}, line {reader.line_num}", row


def _evaluation(row: Mapping[str, str], place: str) -> dict[str, float]:
    if not row["arm"]:
        raise ValueError(f"{place}: the arm has no name.")
    numbers = {}
    told = (("step", ""), ("repeat", "0"), ("fid", "nan"), ("images", "nan"))
    for name, empty in (*told, *((name, "nan") for name in LOOKED_AT if row.get(name))):
        try:
            numbers[name] = float(row.get(name, "") if row.get(name, "") != "" else empty)
        except (TypeError, ValueError):  # None, where a row is short
            raise ValueError(f"{place}: {name} must be a number, got {row[name]!r}.") from None
    if math.isinf(numbers["fid"]):
        numbers["fid"] = math.nan
    return numbers


def _curve(arm: str, seed: str, found: list[dict[str, float]]) -> Curve:
    found = sorted(found, key=lambda one: (one["step"], one["repeat"]))
    points = [one for one in found if not one["repeat"]]
    steps, fids, images = (tuple(one[k] for one in points) for k in ("step", "fid", "images"))
    repeats = tuple(one["fid"] for one in found if one["repeat"] and one["step"] in steps[-1:])
    looks = tuple({k: v for k, v in one.items() if k in LOOKED_AT} for one in points)
    seen = None if any(map(math.isnan, images)) else images
    try:
        return Curve(seed, steps, fids, seen, repeats, looks if any(looks) else ())
    except ValueError as error:
        raise ValueError(f"arm {arm}, {error}") from error
