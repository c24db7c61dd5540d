"""Figures of a comparison: the speed-ups with their intervals, the curves, and samples."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from statistics import fmean
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, NullFormatter, NullLocator

from lit_diffusion.lab.compare.comparison import HEADLINE_SEEDS, Comparison, Result, Verdict
from lit_diffusion.lab.compare.curves import Arm, Bound, mean_crossing
from lit_diffusion.lab.compare.tables import (
    common_steps,
    format_fid,
    format_speedup,
    format_target,
)

INK, FAINT, GREY = "#1d2733", "#8a94a0", "#c9ced4"
_BAD = (Verdict.SLOWER, Verdict.WORSE, Verdict.LOST, Verdict.MISSED)
COLORS = {
    **dict.fromkeys(Verdict, "#5c6773"),
    **dict.fromkeys(_BAD, "#b3400b"),
    Verdict.FASTER: "#00734c",
    Verdict.UNCLEAR: "#8a6d00",
}
"""Color of a verdict, dark enough for text on white; the words stand beside it everywhere."""

# Okabe and Ito's, which color-blind people tell apart, without the yellow that white drowns.
_ARM_COLORS = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7"),
    *("#e69f00", "#56b4e9", "#7a4fa3", "#8c564b"),
)
MAX_COLORED = 1 + len(_ARM_COLORS)
"""Arms with colors among the curves, the baseline in black; more cannot be told apart."""

MAX_ROWS = 12
"""Arms in the first figure, which fits on a screen of usual height."""

_STYLE: Any = {
    "font.size": 10,
    "text.color": INK,
    "text.parse_math": False,  # a dollar in the name of an arm is one
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "svg.hashsalt": "lit-diffusion",  # the same figure, the same file
}


@dataclass(frozen=True)
class SamplePicture:
    """A PNG file with samples of one arm: of which step, training seed and weights (ema, raw)."""

    arm: str
    step: int
    png: bytes
    seed: str = "0"
    weights: str = "raw"


def shorten_name(name: str) -> str:
    """A name that leaves room for the figure; the tables have it in full.

    Example:
        >>> shorten_name("mdlrc+clts"), shorten_name("a" * 30 + "b" * 30)
        ('mdlrc+clts', 'aaaaaaaaaaaaaaaaaa...bbbbbbbbbbbbbbbbbb')
    """
    return name if len(name) <= 40 else f"{name[:18]}...{name[-18:]}"


def figure_bytes(figure: Figure, kind: str) -> bytes:
    """A figure as a file of kind png or svg; the same bytes for the same figure."""
    file, metadata = BytesIO(), {"Date" if kind == "svg" else "Software": None}
    with rc_context(_STYLE):
        figure.savefig(
            file, format=kind, dpi=160, bbox_inches="tight", pad_inches=0.08, metadata=metadata
        )
    return file.getvalue()


def first_rows(comparison: Comparison, limit: int = MAX_ROWS) -> list[Result]:
    """The fastest arms for a first figure; those with a test come before others."""
    order = sorted(comparison.results, key=lambda result: result.holm_p is None)[:limit]
    return [result for result in comparison.results if result in order]


def speedup_figure(
    comparison: Comparison, unit: str = "steps", results: Sequence[Result] | None = None
) -> Figure:
    """Forest plot: each arm's speed-up with its interval, against the line at 1."""
    results = comparison.results if results is None else results
    with rc_context(_STYLE):
        height = 1.15 + len(results) * (0.4 if len(results) <= 8 else 0.27)
        figure = Figure(figsize=(9.6, height), layout="constrained")
        low, high = _limits(results)
        axes = figure.add_subplot(xscale="log", xlim=(low, high), ylim=(len(results) - 0.4, -0.6))
        axes.axvspan(1, high, color=COLORS[Verdict.FASTER], alpha=0.06, lw=0)
        axes.axvspan(low, 1, color=COLORS[Verdict.SLOWER], alpha=0.06, lw=0)
        axes.axvline(1, color=INK, lw=1.4)
        for row, result in enumerate(results):
            _draw_interval(axes, row, result, comparison)
        names = [shorten_name(result.arm.name) for result in results]
        axes.set_yticks(range(len(results)), names, fontsize=11.5)
        axes.tick_params(axis="y", length=0)
        figure.draw_without_rendering()  # names of arms decide how wide the axis is
        room = axes.get_window_extent().width / figure.dpi / 0.45  # inches of a label and a gap
        ticks = ratio_ticks(low, high, room)
        axes.set_xticks(ticks, [f"{tick:g}x" for tick in ticks])
        axes.xaxis.set_minor_locator(NullLocator())
        target = f"{comparison.metric} {format_fid(comparison.target)}"
        base = shorten_name(comparison.baseline.name)
        axes.set_xlabel(f"speed-up: times fewer {unit} than {base} to {target} (log axis)")
        for x, side, verdict in ((0, "left", Verdict.SLOWER), (1, "right", Verdict.FASTER)):
            axes.annotate(
                verdict.value, (x, 1), (0, 5), "axes fraction", "offset points", ha=side,
                color=COLORS[verdict], fontsize=9.5,
            )  # fmt: skip
        axes.spines[["top", "right", "left"]].set_visible(False)
    return figure


def _limits(results: Sequence[Result]) -> tuple[float, float]:
    """Ends of the axis: 1, every ratio, and intervals as far as they leave those readable."""
    ratios = [1.0, *(result.speedup.ratio for result in results)]
    lowest, highest = min(ratios) / 4, max(ratios) * 4
    ends = [end for r in results for end in (r.speedup.low, r.speedup.high) if end is not None]
    low = min([*ratios, *(max(end, lowest) for end in ends if end > 0)])
    high = max([*ratios, *(min(end, highest) for end in ends if math.isfinite(end))])
    room = max((high / low) ** 0.08, 1.08)
    return low / room, high * room


def _draw_interval(axes: Axes, row: int, result: Result, comparison: Comparison) -> None:
    speed, color = result.speedup, COLORS[result.verdict]
    left, right = axes.get_xlim()
    seeds = min(len(result.arm.curves), len(comparison.baseline.curves))
    if speed.low is not None and speed.high is not None:
        low, high = max(speed.low, left), min(speed.high, right)
        width = 1.5 if seeds < HEADLINE_SEEDS else 5
        axes.plot([low, high], [row, row], color=color, lw=width, solid_capstyle="butt", alpha=0.45)
        markers = "<" if speed.low < left else "|", ">" if speed.high > right else "|"
        for end, marker in zip((low, high), markers, strict=True):
            axes.plot(end, row, marker, color=color, ms=11, mew=2, clip_on=False)
    is_hollow = result.at != comparison.target or speed.low is None
    face = "white" if is_hollow else color
    axes.plot(speed.ratio, row, "D", ms=8.5, color=color, mfc=face, mew=1.8, clip_on=False)
    remarks = [f"{seeds} seeds"] if seeds < HEADLINE_SEEDS else []
    if target := format_target(result, comparison):
        remarks.append(target.strip())
    elif result.verdict is Verdict.FASTER and comparison.ends_higher(result):
        remarks.append("ends higher")
    label = f"{format_speedup(speed)}  {result.verdict.value}"
    label += f" ({', '.join(remarks)})" * bool(remarks)
    beside = axes.get_yaxis_transform()
    axes.text(1.02, row, label, transform=beside, color=color, va="center", fontsize=11)


def ratio_ticks(low: float, high: float, room: float) -> list[float]:
    """Round ratios from `low` to `high`: 1, then as many of `room` as fit, the roundest first."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    outwards = sorted(decades, key=abs)
    in_steps = [(1,), (2, 5), (3, 1.5, 7), (8, 1.2, 9, 1.1, 2.5, 4)]
    steps = [float(f"{k}e{n}") for group in in_steps for n in outwards for k in group]
    gap, ticks = (high / low) ** (1 / max(room, 1)), [1.0]
    for step in steps:
        if low <= step <= high and all(max(step / t, t / step) > gap for t in ticks):
            ticks.append(step)
    return sorted(ticks)


def curves_figure(comparison: Comparison) -> Figure:
    """FID over training: a thin line per seed, a thick one for their geometric mean.

    Of many arms, the baseline and the first have colors; the others are grey.
    """
    rows = first_rows(comparison, MAX_COLORED - 1)
    first = [comparison.baseline, *(result.arm for result in rows)]
    colors = dict(zip((arm.name for arm in first), (INK, *_ARM_COLORS), strict=False))
    target, metric = comparison.target, comparison.metric
    with rc_context(_STYLE):
        figure = Figure(figsize=(9.6, 5.0), layout="constrained")
        axes = figure.add_subplot(
            yscale="log", xlabel="optimizer steps", ylabel=f"{metric} (log axis)"
        )
        for arm in comparison.arms:
            if arm not in first:
                axes.plot(*_mean_curve(arm), color=GREY, lw=1, zorder=1)
        for arm in reversed(first):  # the baseline on top
            color = colors[arm.name]
            for curve in arm.curves:
                axes.plot(*curve.finite, lw=0.8, alpha=0.35, color=color)
            axes.plot(*_mean_curve(arm), lw=2.4, label=arm.name, color=color)
        axes.axhline(target, color=FAINT, lw=1.2, ls=(0, (4, 3)), zorder=0)
        label = f"target: {metric} {format_fid(target)}"
        axes.annotate(label, (0, target), (4, -5), textcoords="offset points", va="top", fontsize=9)
        for arm in first:
            mean = mean_crossing(arm.crossings(target))
            if mean.bound is Bound.EXACT:
                axes.plot(
                    mean.step, target, "o", ms=8, color=colors[arm.name], mec="white", mew=1.3,
                    zorder=5,
                )  # fmt: skip
        axes.set_xlim(left=0)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.yaxis.set_major_locator(LogLocator(10, (1, 2, 3, 5, 7)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda fid, _: f"{fid:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.grid(color="#e6e9ec", lw=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        _add_legend(axes, comparison)
    return figure


def _mean_curve(arm: Arm) -> tuple[list[float], list[float]]:
    """Steps that all seeds share, and geometric means; NaN, a gap, where one is not finite."""
    steps = common_steps([arm])
    logs = [[math.log(curve.at(step) or math.nan) for curve in arm.curves] for step in steps]
    return steps, [math.exp(fmean(values)) for values in logs]


def _add_legend(axes: Axes, comparison: Comparison) -> None:
    """Beside the axes, in the order of the lowest FIDs, so that names stand near their lines."""
    handles, names = axes.get_legend_handles_labels()
    best = {arm.name: fmean(c.best for c in arm.curves) for arm in comparison.arms}
    ordered = sorted(zip(names, handles, strict=True), key=lambda pair: -best[pair[0]])
    others = len(comparison.arms) - MAX_COLORED
    axes.legend(
        [handle for _, handle in ordered],
        [shorten_name(name) for name, _ in ordered],
        title=f"grey: {others} other arm{'s' * (others > 1)}" if others > 0 else None,
        loc="center left",
        bbox_to_anchor=(1.01, 0.5),
        frameon=False,
    )


def samples_figure(pictures: Sequence[SamplePicture]) -> Figure:
    """Pictures of samples: one row per arm, one column per step."""
    arms = list(dict.fromkeys(picture.arm for picture in pictures))
    steps = list(dict.fromkeys(picture.step for picture in pictures))
    with rc_context(_STYLE):
        side = 2.6 if len(arms) <= 8 else 1.3
        figure = Figure(figsize=(side * len(steps) + 2, side * len(arms)), layout="constrained")
        axes = figure.subplots(len(arms), len(steps), squeeze=False)
        for ax in axes.flat:
            ax.set(xticks=[], yticks=[])
            ax.spines[:].set_visible(False)
        for picture in pictures:
            ax = axes[arms.index(picture.arm), steps.index(picture.step)]
            image = imread(BytesIO(picture.png))
            ax.imshow(image, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
        for ax, step in zip(axes[0], steps, strict=True):
            ax.set_title(f"step {step:,}", fontsize=10)
        for ax, arm in zip(axes[:, 0], arms, strict=True):
            ax.set_ylabel(shorten_name(arm), rotation=0, ha="right", va="center", fontsize=11)
    return figure
