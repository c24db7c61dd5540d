"""The CSV files of docs/results/stability.md, and its tables.

    stability_tables.py keep OUT --data digits|mnist    what was found in OUT, to docs/results
    stability_tables.py docs/results/stability-spectra.csv ...    printed as Markdown

`keep` replaces the rows of what OUT has, and leaves those of other groups as they are. A table of
consistency has the PSNR of Eq. 1 with an interval over models, one of structure a row a level.
"""

import argparse
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from csv_tables import Row, group_rows, print_table, read_rows, write_rows
from scipy.signal import find_peaks
from scipy.stats import t as student
from stability import GROUPS, GROUPS_OF_DATA, ROOT, slug

from lit_diffusion.checkpoints.loading import load
from lit_diffusion.lab.analysis.hessian import Spectrum
from lit_diffusion.lab.analysis.interpolation import barrier
from lit_diffusion.processes import CosineBetas, DiscreteVP

RESULTS = ROOT / "docs/results"


def rounded(rows: Iterable[Row]) -> Iterator[Row]:
    """Rows with six digits a number."""
    for row in rows:
        yield {k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()}


ALL_GROUPS = list(GROUPS | GROUPS_OF_DATA["digits"] | GROUPS_OF_DATA["mnist"])
MEASURES = ("paper", "all_pairs", "shuffled", "same_class", "nearest", "features")


def load_result(path: Path) -> Row:
    """Arrays of `path`.npz and numbers of `path`.json."""
    with np.load(path.with_suffix(".npz")) as arrays:
        return json.loads(path.with_suffix(".json").read_text()) | dict(arrays)


def consistencies(out: Path) -> Iterator[Row]:
    for group in ALL_GROUPS:
        file = out / "consistency" / slug(group) / "consistency.json"
        if file.is_file():
            result = json.loads(file.read_text())
            yield {"group": group} | {key: result[key] for key in MEASURES}


def spectra(out: Path) -> Iterator[Row]:
    for folder in (file.parent for file in sorted(out.glob("looks/spectrum-*/hessian-0.json"))):
        kind = folder.name.removeprefix("spectrum-")
        names = json.loads((folder / "plan.json").read_text())["levels"]
        module: Any = load(out / kind / "0", "raw")
        names = [f"u = {u:g}" for u in names] + ["all"]
        if hasattr(module, "generator"):
            names = ["discriminator", "generator"]
        for i, name in enumerate(names):
            spectrum = Spectrum(**load_result(folder / f"hessian-{i}"))
            network = getattr(module, name, module)
            length = torch.cat([p.flatten() for p in network.parameters()]).norm().item()
            yield {
                "model": kind,
                "loss": name,
                "weights": spectrum.num_parameters,
                "largest": spectrum.top[0],
                "second": spectrum.top[1],
                "smallest": np.nanmin(spectrum.nodes),
                "trace": spectrum.trace,
                "variance": spectrum.variance,
                "ritz_variance": spectrum.ritz_variance,
                "largest_by_length": spectrum.top[0] * length**2,
            }


def lines(out: Path) -> Iterator[Row]:
    for folder in sorted(out.glob("looks/line-*/")):
        for file in sorted(folder.glob("interpolation*.json")):
            line = load_result(file)
            name_of_line = folder.name.removeprefix("line-") + "-aligned" * ("aligned" in file.stem)
            for name, values in zip(line["names"], line["values"], strict=True):
                for alpha, value in zip(line["alphas"], values, strict=True):
                    yield {"line": name_of_line, "loss": name, "alpha": alpha, "value": value}


def self_consistencies(out: Path) -> Iterator[Row]:
    for file in sorted(out.glob("looks/own-*/consistency.json")):
        kind = file.parent.name.removeprefix("own-")
        result = load_result(file)
        for name, value in zip(result["names"][1:], result["pairs"][0, 1:], strict=True):
            step = int(name.split("=")[1].split(".")[0])
            yield {"model": kind, "step": step, "psnr": value}


def models(out: Path) -> Iterator[Row]:
    """Its first FID at the last step, and minutes of training beside one other, of each model."""
    for done in sorted(out.glob("*/*/done")):
        kind, seed = done.parts[-3:-1]
        evaluations = (done.parent / "evaluations.jsonl").read_text().splitlines()
        fids = {row["step"]: row["value"] for row in map(json.loads, reversed(evaluations))}
        step = max(fids)
        log = (out / f"{kind}-{seed}.log").read_text()
        hours, minutes, seconds = map(int, re.findall(r"seen, in (\d+):(\d+):(\d+)", log)[-1])
        took = hours * 60 + minutes + seconds / 60
        yield {"model": f"{kind}/{seed}", "step": step, "fid": fids[step], "minutes": took}


FILES: dict[str, tuple[str, Callable[[Path], Iterable[Row]]]] = {
    "models": ("model", models),
    "consistency": ("group", consistencies),
    "spectra": ("model", spectra),
    "lines": ("line", lines),
    "own": ("model", self_consistencies),
    "levels": ("seed", lambda out: read_rows(out / "levels.csv")),
    "decided": ("run", lambda out: read_rows(out / "decided.csv")),
    "early": ("arm", lambda out: read_rows(out / "early.csv")),
}
"""Of each file, what one piece of work is known by, and what finds it."""


def keep(out: Path, data: str) -> None:
    for name, (key, find) in FILES.items():
        path = RESULTS / f"stability-{name}.csv"
        rows = [{"data": data} | row for row in find(out)]
        ours = {(row["data"], row[key]) for row in rows}
        others = [row for row in read_rows(path) if (row["data"], row[key]) not in ours]

        def place(row: Row, key: str = key) -> tuple[str, int, str]:
            group = ALL_GROUPS.index(row[key]) if row[key] in ALL_GROUPS else 0
            return row["data"], group, row[key]

        if rows:
            write_rows(path, rounded(sorted(others + rows, key=place)))
            print(f"{path.name}: {len(rows)} rows")


def summarize_lines(rows: list[Row]) -> Iterator[Row]:
    """The barrier above the straight line between the ends, and how often the loss turns."""
    for (data, line, loss), points in group_rows(rows, "data", "line", "loss").items():
        alpha, value = (np.array([float(r[k]) for r in points]) for k in ("alpha", "value"))
        least = 0.01 * np.ptp(value)
        turns = sum(len(find_peaks(sign * value, prominence=least)[0]) for sign in (1, -1))
        ends = {"second": value[0], "highest": value.max(), "first": value[-1]}
        ends["barrier"] = barrier(alpha, value)
        yield {"data": data, "line": line, "loss": loss, **ends, "turns": turns}


def summarize_consistency(rows: list[Row]) -> Iterator[Row]:
    """The PSNR of Eq. 1 in whole dB, with a 95% interval over models, beside chance.

    With PSNR_ij = mu + a_i + a_j and models a of variance s^2, Eq. 1 for three models is
    mu + a_0 + (a_1 + a_2) / 2, of variance 1.5 s^2. The pair that it leaves out, (1, 2), differs
    from it by (a_1 + a_2) / 2 - a_0, of variance 1.5 s^2 as well. The squares of that difference
    are averaged over the groups of one kind of a data set, a degree of freedom each.
    """
    for (data,), groups in group_rows(rows, "data").items():
        contrasts = [
            3 * (float(row["all_pairs"]) - float(row["paper"]))
            for row in groups
            if "other seeds" in row["group"]
        ]
        error = math.sqrt(sum(each**2 for each in contrasts) / len(contrasts))
        half = student.ppf(0.975, len(contrasts)) * error
        for row in groups:
            psnr = float(row["paper"])
            interval = f"{psnr:.0f} [{psnr - half:.0f}, {psnr + half:.0f}]"
            chance = f"{float(row['same_class'] or row['shuffled']):.0f}"
            near = {"chance": chance, "nearest": f"{float(row['nearest']):.0f}"}
            features = f"{float(row['features']):.2f}"
            measures = {"PSNR": interval, **near, "features": features}
            yield {"data": data, "group": row["group"], **measures}


def summarize_structure(rows: list[Row]) -> Iterator[Row]:
    """What two samples from one x_t share, in features: mean and range over three models.

    The log SNR is that of a pixel, and that of a pixel of the image averaged to 8x8.
    """
    process = DiscreteVP(CosineBetas(1000))
    for (data, u), runs in group_rows(rows, "data", "u").items():
        alpha, sigma = process.alpha_sigma(process.from_unit(torch.tensor([float(u)]).double()))
        log_snr = round(2 * math.log(alpha / sigma), 1) + 0.0  # not -0
        values = [float(run["features"]) for run in runs]
        mean = f"{np.mean(values):.2f} [{min(values):.2f}, {max(values):.2f}]"
        at_8x8 = round(log_snr + 2 * math.log(28 / 8) * (data == "mnist"), 1)
        yield {"data": data, "u": u, "log SNR": log_snr, "at 8x8": at_8x8, "features": mean}


SUMMARIES = {
    "alpha": summarize_lines,
    "all_pairs": summarize_consistency,
    "psnr_to_image": summarize_structure,
}
"""How a table is condensed, by a column that only its file has."""


def cell(value: Any) -> str:
    try:
        return str(value) if str(value).isdigit() else f"{float(value):.3g}"
    except ValueError:
        return str(value) or "-"


if __name__ == "__main__":
    if sys.argv[1:2] == ["keep"]:
        parser = argparse.ArgumentParser()
        parser.add_argument("keep")
        parser.add_argument("out", type=Path)
        parser.add_argument("--data", required=True)
        args = parser.parse_args()
        keep(args.out, args.data)
    else:
        for name in sys.argv[1:]:
            rows = read_rows(name) or sys.exit(f"{name}: no such table; name CSV files, or keep.")
            for column, summarize in SUMMARIES.items():
                rows = list(summarize(rows)) if column in rows[0] else rows
            print_table(list(rows[0]), [[cell(value) for value in row.values()] for row in rows])
            print()
