"""Figures of docs/results/stability.md from its CSVs: stability_figures.py FOLDER.

Reads stability-{consistency,levels,decided,lines,own}.csv in FOLDER, and writes
stability-{consistency,levels,lines}.png beside them.
"""

import sys
from pathlib import Path
from statistics import mean
from typing import Any

from csv_tables import Row, group_rows, read_rows
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter


def by_data(folder: Path, name: str) -> dict[str, list[Row]]:
    rows = read_rows(folder / f"stability-{name}.csv")
    return {data: rows for (data,), rows in group_rows(rows, "data").items()}


def add_legend(figure: Figure, axes: Any, columns: int) -> None:
    """One legend below all panels."""
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=columns)


def draw_consistency(folder: Path) -> None:
    tables = by_data(folder, "consistency")
    figure = Figure(figsize=(5.6 * len(tables), 5.4), layout="constrained")
    panels = figure.subplots(1, len(tables), squeeze=False)[0]
    marks = {
        "all_pairs": ("o", "C0", "same seeds"),
        "same_class": ("|", "C1", "other seeds of the class"),
        "shuffled": ("|", "C3", "other seeds"),
        "nearest": ("x", "0.6", "to nearest training image"),
    }
    for axes, (data, rows) in zip(panels, tables.items(), strict=True):
        at = range(len(rows))[::-1]
        for name, (mark, color, label) in marks.items():
            points = [(float(row[name]), y) for row, y in zip(rows, at, strict=True) if row[name]]
            axes.plot(*zip(*points, strict=True), mark, color=color, label=label, markersize=8)
        axes.set_yticks(list(at), [row["group"] for row in rows])
        axes.set(title=data, xlabel="PSNR (dB)")
        axes.grid(alpha=0.3)
    add_legend(figure, panels[0], columns=2)
    figure.savefig(folder / "stability-consistency.png", dpi=110)


def draw_levels(folder: Path) -> None:
    levels, decided = by_data(folder, "levels"), by_data(folder, "decided")
    figure = Figure(figsize=(12, 3.6 * len(levels)), layout="constrained")
    panels = figure.subplots(len(levels), 3, squeeze=False)
    for row, data in zip(panels, levels, strict=True):
        _draw_shares(row[0], levels[data])
        _draw_distances(row[1], levels[data])
        _draw_decided(row[2], decided[data])
        row[0].set_ylabel(f"{data}: excess loss left")
    figure.savefig(folder / "stability-levels.png", dpi=110)


def by_step(rows: list[Row], u: str, name: str) -> tuple[list[int], list[float]]:
    steps = sorted({int(row["step"]) for row in rows})
    values = [[float(r[name]) for r in rows if r["u"] == u and int(r["step"]) == s] for s in steps]
    return steps, [mean(each) for each in values]


def _draw_shares(axes: Any, rows: list[Row]) -> None:
    """Loss above the last, by that of a network that says 0: step 0."""
    for i, u in enumerate(sorted({row["u"] for row in rows}, key=float)):
        steps, losses = by_step(rows, u, "loss")
        left = [(loss - losses[-1]) / (losses[0] - losses[-1]) for loss in losses[1:-1]]
        axes.plot(steps[1:-1], left, color=_color(i), label=f"u = {u}")
    axes.set(xlabel="step", xscale="log", yscale="log", ylim=(1e-4, 1))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.legend(fontsize=6)


def _draw_distances(axes: Any, rows: list[Row]) -> None:
    us = sorted({row["u"] for row in rows}, key=float)
    steps = sorted({int(row["step"]) for row in rows} - {0})
    for i, step in enumerate([steps[0], steps[len(steps) // 8], steps[len(steps) // 2], steps[-1]]):
        distances = [dict(zip(*by_step(rows, u, "from_x_t"), strict=True))[step] for u in us]
        axes.plot([float(u) for u in us], distances, color=_color(3 * i), label=f"step {step}")
    noise = [by_step(rows, u, "noise_from_x_t")[1][0] for u in us]
    axes.plot([float(u) for u in us], noise, "k:", label="the noise itself")
    axes.set(xlabel="noise level u", title="|eps - x_t| / |x_t|", yscale="log")
    axes.legend(fontsize=6)


def _draw_decided(axes: Any, rows: list[Row]) -> None:
    us = sorted({row["u"] for row in rows}, key=float)
    for name, label in (
        ("psnr", "two ways from one x_t"),
        ("psnr_to_image", "one way, and the image"),
        ("psnr_of_others", "other images of the class"),
    ):
        values = [mean(float(row[name]) for row in rows if row["u"] == u) for u in us]
        axes.plot([float(u) for u in us], values, ".-", label=label)
    axes.set(xlabel="noise level u of x_t", title="PSNR (dB)")
    axes.legend(fontsize=6)


def _color(i: int) -> tuple[float, float, float]:
    share = i / 9
    return (share, 0.2, 1 - share)


LINES = {"times": "early and late", "seeds": "two seeds", "seeds-aligned": "two seeds, aligned"}


def draw_lines(folder: Path) -> None:
    """Fig. 3 of the paper: each loss between two checkpoints, on the scale of its own ends."""
    tables = by_data(folder, "lines")
    figure = Figure(figsize=(3 * 5, 3 * len(tables)), layout="constrained")
    panels = figure.subplots(len(tables), 5, squeeze=False)
    for row, (data, rows) in zip(panels, tables.items(), strict=True):
        losses = [("unet", "u = 0.1"), ("unet", "u = 0.5"), ("unet", "u = 0.9")]
        losses += [("dcgan", "generator"), ("biggan", "generator")]
        for axes, (kind, loss) in zip(row, losses, strict=True):
            for i, (name, label) in enumerate(LINES.items()):
                points = [r for r in rows if (r["line"], r["loss"]) == (f"{kind}-{name}", loss)]
                xy = [(float(r["alpha"]), float(r["value"])) for r in points]
                if xy:
                    axes.plot(*zip(*xy, strict=True), color=f"C{i}", label=label)
            scale = "log" if kind == "unet" else "linear"
            axes.set(title=f"{data}, {kind}, {loss}", yscale=scale, xlabel="alpha")
            axes.grid(alpha=0.3)
        row[0].set_ylabel("loss")
    add_legend(figure, panels[0][0], columns=3)
    figure.savefig(folder / "stability-lines.png", dpi=100)


if __name__ == "__main__":
    for draw in (draw_consistency, draw_levels, draw_lines):
        draw(Path(sys.argv[1]))
