"""Tables of docs/results/{stability,backbones,guidance}.md: study_tables.py FILE.csv ...

Printed as Markdown; a column of the file says which study it is of.
"""

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, mean, stdev
from typing import Any

import numpy as np
import torch
from csv_tables import Row, group_rows, print_table, read_rows
from scipy.signal import find_peaks
from scipy.stats import spearmanr
from scipy.stats import t as student

from lit_diffusion.lab.analysis.interpolation import barrier
from lit_diffusion.lab.compare.comparison import compare
from lit_diffusion.lab.compare.curves import read_arms
from lit_diffusion.processes import CosineBetas, DiscreteVP

RECIPES = Path(__file__).parents[2] / "docs/results/recipes.csv"


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


def summarize_early(rows: list[Row]) -> Iterator[Row]:
    """Spearman's correlation of each measure, mean over seeds, with how fast the recipe was."""
    comparison = compare(read_arms([str(RECIPES)]), "baseline")
    speed = {each.arm.name: each.speedup.ratio for each in comparison.results} | {"baseline": 1.0}
    arms = {arm: [row for row in rows if row["arm"] == arm] for arm in speed}
    for name in list(rows[0])[3:]:
        means = [mean(float(row[name]) for row in runs) for runs in arms.values()]
        rho, p = spearmanr(means, list(speed.values()))
        yield {"after 100 steps": name, "rho": f"{rho:.2f}", "p": f"{p:.2f}"}


def means(rows: list[Row], *names: str) -> list[float]:
    return [fmean(float(row[name]) for row in rows) for name in names]


def summarize_backbones(rows: list[Row]) -> Iterator[Row]:
    """Means over seeds of each network, and its FID beside the U-Net's that predicts the same."""
    kinds = group_rows(rows, "predicts", "arm")
    for (predicts, arm), runs in kinds.items():
        fids = [float(run["fid"]) for run in runs]
        spread = f" +- {stdev(fids):.3g}" if len(fids) > 1 else ""
        (usual,) = means(kinds[predicts, "baseline"], "fid")
        fid, pixels, recognised = means(runs, "fid", "pixels", "recognised")
        sizes = means(runs, "parameters", "steps", "images_per_second")
        parameters, steps, per_second = (f"{size:,.0f}" for size in sizes)
        yield {
            **{"network": arm, "predicts": predicts, "lr": runs[0]["lr"]},
            **{"parameters": parameters, "steps": steps, "FID": f"{fid:.3g}{spread}"},
            **{"beside the U-Net's": f"{fid / usual:.2f}", "pixels": f"{pixels:.3g}"},
            **{"recognised": f"{recognised:.1%}", "images/s": per_second},
        }


def summarize_guidance(rows: list[Row]) -> Iterator[Row]:
    """Means over sets of samples, with the standard deviation of FID."""
    names = ("FID", "held-out", "precision", "recall", "recognised")
    for (guidance,), sets in group_rows(rows, "guidance").items():
        row = {name: f"{mean:.3f}" for name, mean in zip(names, means(sets, *names), strict=True)}
        row["FID"] += f" +- {stdev(float(each['FID']) for each in sets):.3f}"
        yield {"guidance": guidance, **row}


SUMMARIES = {
    "alpha": summarize_lines,
    "all_pairs": summarize_consistency,
    "psnr_to_image": summarize_structure,
    "self_consistency": summarize_early,
    "images_per_second": summarize_backbones,
    "guidance": summarize_guidance,
}
"""How a table is condensed, by a column that only its file has."""


def cell(value: Any) -> str:
    """Three digits of numbers."""
    try:
        return str(value) if str(value).isdigit() else f"{float(value):.3g}"
    except ValueError:
        return str(value) or "-"


if __name__ == "__main__":
    for name in sys.argv[1:]:
        rows = read_rows(name)
        (summarize,) = [SUMMARIES[key] for key in rows[0] if key in SUMMARIES] or [iter]
        text = str if summarize in (summarize_backbones, summarize_guidance) else cell
        rows = list(summarize(rows))
        print_table(list(rows[0]), [[text(value) for value in row.values()] for row in rows])
        print()
