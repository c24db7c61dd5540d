"""Figures of a comparison: how sure each speed-up is, and the curves behind it."""

import math
from collections.abc import Sequence
from io import BytesIO
from itertools import chain, cycle
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from lit_diffusion.analysis.comparison import (
    HEADLINE_SEEDS,
    Arm,
    Comparison,
    Result,
    Verdict,
    mean_crossing,
)
from lit_diffusion.analysis.curves import Bound
from lit_diffusion.analysis.tables import common_steps
from lit_diffusion.analysis.wording import (
    at_text,
    fewest_seeds,
    fid_text,
    seeds_text,
    speedup_text,
)

INK, FAINT = "#1d2733", "#8a94a0"
COLORS = {
    Verdict.FASTER: "#00734c",
    Verdict.SLOWER: "#b3400b",
    Verdict.WORSE: "#b3400b",
    Verdict.UNCLEAR: "#8a6d00",
    Verdict.NO_DIFFERENCE: "#5c6773",
    Verdict.UNKNOWN: "#5c6773",
    Verdict.LOST: "#b3400b",
    Verdict.MISSED: "#b3400b",
}
"""Of a verdict. Dark enough for text on white; the words stand beside them everywhere."""

# Okabe and Ito's, which colour-blind people tell apart, without the yellow that white drowns.
_ARM_COLORS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#7a4fa3",
    "#8c564b",
)
_DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)))
FEW_ROWS = 8
"""Arms that are drawn at larger distances."""

COLORED = 9
"""Arms with colours among the curves; more cannot be told apart."""

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


def short_name(name: str) -> str:
    """A name that leaves room for the figure; the tables have it in full.

    Example:
        >>> short_name("mdlrc+clts"), short_name("a" * 30 + "b" * 30)
        ('mdlrc+clts', 'aaaaaaaaaaaaaaaaaa...bbbbbbbbbbbbbbbbbb')
    """
    return name if len(name) <= 40 else f"{name[:18]}...{name[-18:]}"


def save(figure: Figure, path: Path) -> None:
    """Write a figure as PNG or SVG, as the path ends; the same bytes for the same figure."""
    metadata = {"Date": None} if path.suffix == ".svg" else {"Software": None}
    with rc_context(_STYLE):
        figure.savefig(path, dpi=160, bbox_inches="tight", pad_inches=0.08, metadata=metadata)


def speedup_figure(
    comparison: Comparison, unit: str = "steps", results: Sequence[Result] | None = None
) -> Figure:
    """Forest plot: each arm's speed-up with its interval, against the line at 1.

    Args:
        comparison: whose arms.
        unit: in which the way to the target is measured.
        results: the arms to show; None is all.
    """
    results = comparison.results if results is None else results
    with rc_context(_STYLE):
        height = 1.15 + len(results) * (0.4 if len(results) <= FEW_ROWS else 0.27)
        figure = Figure(figsize=(9.6, height), layout="constrained")
        axes = figure.add_subplot()
        low, high = _range(results)
        axes.set_xscale("log")
        axes.set_xlim(low, high)
        axes.set_ylim(len(results) - 0.4, -0.6)
        axes.axvspan(1, high, color=COLORS[Verdict.FASTER], alpha=0.06, lw=0)
        axes.axvspan(low, 1, color=COLORS[Verdict.SLOWER], alpha=0.06, lw=0)
        axes.axvline(1, color=INK, lw=1.4)
        for row, result in enumerate(results):
            _interval(axes, row, result, comparison)
        axes.set_yticks(
            range(len(results)), [short_name(r.arm.name) for r in results], fontsize=11.5
        )
        axes.tick_params(axis="y", length=0)
        _ratio_axis(axes, low, high)
        name = short_name(comparison.baseline.name)
        target = fid_text(comparison.target)
        axes.set_xlabel(f"speed-up: times fewer {unit} than {name} to FID {target} (log axis)")
        _side(axes, 0.0, "left", "slower", COLORS[Verdict.SLOWER])
        _side(axes, 1.0, "right", "faster", COLORS[Verdict.FASTER])
        axes.spines[["top", "right", "left"]].set_visible(False)
    return figure


def _range(results: Sequence[Result]) -> tuple[float, float]:
    """Ends of the axis: 1, every ratio, and intervals as far as they leave those readable."""
    ratios = [1.0, *(result.speedup.ratio for result in results)]
    lowest, highest = min(ratios) / 4, max(ratios) * 4
    ends = [end for r in results for end in (r.speedup.low, r.speedup.high) if end is not None]
    low = min([*ratios, *(max(end, lowest) for end in ends if end > 0)])
    high = max([*ratios, *(min(end, highest) for end in ends if math.isfinite(end))])
    room = max((high / low) ** 0.08, 1.08)
    return low / room, high * room


def _interval(axes: Axes, row: int, result: Result, comparison: Comparison) -> None:
    found, color = result.speedup, COLORS[result.verdict]
    left, right = axes.get_xlim()
    is_provisional = fewest_seeds(result, comparison.baseline) < HEADLINE_SEEDS
    if found.low is not None and found.high is not None:
        low, high = max(found.low, left), min(found.high, right)
        width = 1.5 if is_provisional else 5
        axes.plot([low, high], [row, row], color=color, lw=width, solid_capstyle="butt", alpha=0.45)
        ends = [(low, "<", found.low < left), (high, ">", found.high > right)]
        for end, marker, is_open in ends:
            axes.plot(
                end, row, marker if is_open else "|", color=color, ms=11, mew=2, clip_on=False
            )
    is_elsewhere = result.at != comparison.target
    axes.plot(
        found.ratio,
        row,
        "D",
        ms=8.5,
        color=color,
        mfc="white" if is_elsewhere or found.low is None else color,
        mew=1.8,
        clip_on=False,
    )
    label = _label(result, comparison)
    axes.text(
        1.02,
        row,
        label,
        transform=axes.get_yaxis_transform(),
        color=color,
        va="center",
        fontsize=11,
    )


def _label(result: Result, comparison: Comparison) -> str:
    """The numbers and the verdict, and in brackets what to hold against them."""
    count, remarks = fewest_seeds(result, comparison.baseline), []
    if count < HEADLINE_SEEDS:
        remarks.append(seeds_text(count))
    if result.at != comparison.target:
        remarks.append(f"to FID {at_text(result, comparison)}")
    elif result.verdict is Verdict.FASTER and comparison.falls_short(result):
        remarks.append("higher lowest FID")
    text = f"{speedup_text(result.speedup)}  {result.verdict.value}"
    return text + f" ({', '.join(remarks)})" * bool(remarks)


def _ratio_axis(axes: Axes, low: float, high: float) -> None:
    figure = axes.get_figure(root=True)
    assert figure is not None
    figure.draw_without_rendering()  # names of arms decide how wide the axis is
    room = axes.get_window_extent().width / figure.dpi / 0.45  # inches of a label and a gap
    ticks = ratio_ticks(low, high, room)
    axes.set_xticks(ticks, [f"{tick:g}x" for tick in ticks])
    axes.xaxis.set_minor_locator(NullLocator())


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


def _side(axes: Axes, x: float, align: str, text: str, color: str) -> None:
    place: Any = {"xycoords": "axes fraction", "textcoords": "offset points"}
    axes.annotate(text, (x, 1), (0, 5), ha=align, color=color, fontsize=9.5, **place)


def curves_figure(comparison: Comparison, unit: str = "optimizer steps") -> Figure:
    """FID over training: a thin line a seed, a thick one for their geometric mean.

    Of many arms, the baseline and the first of a first look have colours; the others are grey.

    Args:
        comparison: whose arms and target.
        unit: of the steps.
    """
    colored = [comparison.baseline, *(result.arm for result in comparison.first(COLORED - 1))]
    others = [arm for arm in comparison.arms if arm not in colored]
    styles = arm_styles(colored)
    with rc_context(_STYLE):
        figure = Figure(figsize=(9.6, 5.0), layout="constrained")
        axes = figure.add_subplot(yscale="log", xlabel=unit, ylabel="FID (log axis)")
        for arm in others:
            axes.plot(*_mean_curve(arm), color="#c9ced4", lw=1, zorder=1)
        for arm in reversed(colored):  # the baseline on top
            _curves(axes, arm, styles[arm.name])
        _target_line(axes, comparison, styles)
        axes.set_xlim(left=0)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: short_number(step)))
        axes.yaxis.set_major_locator(LogLocator(10, (1, 2, 3, 5, 7)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda fid, _: f"{fid:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.grid(color="#e6e9ec", lw=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        _legend(axes, comparison)
    return figure


def arm_styles(arms: Sequence[Arm]) -> dict[str, dict[str, Any]]:
    """Colour and dashes of each arm; the first, the baseline, is black.

    Example:
        >>> arm_styles([Arm("baseline", ()), Arm("a", ())])["baseline"]["color"]
        '#1d2733'
    """
    pairs = chain([(INK, "-")], cycle((color, dash) for dash in _DASHES for color in _ARM_COLORS))
    return {
        arm.name: {"color": color, "linestyle": dash}
        for arm, (color, dash) in zip(arms, pairs, strict=False)
    }


def short_number(value: float) -> str:
    """A number of steps or images on an axis.

    Example:
        >>> short_number(1500), short_number(400_000), short_number(1.5e6)
        ('1,500', '400k', '1.5M')
    """
    if value >= 1e6:
        return f"{value / 1e6:g}M"
    return f"{value / 1e3:g}k" if value >= 1e4 else f"{value:,g}"


def _curves(axes: Axes, arm: Arm, style: dict[str, Any]) -> None:
    for curve in arm.curves:
        steps, fids = curve.finite
        axes.plot(steps, fids, lw=0.8, alpha=0.35, **style)
    axes.plot(*_mean_curve(arm), lw=2.4, label=arm.name, **style)


def _mean_curve(arm: Arm) -> tuple[list[float], list[float]]:
    """Steps that all seeds share, and geometric means; NaN, a gap, where one is not finite."""
    steps = common_steps([arm])
    logs = [[math.log(curve.at(step) or math.nan) for curve in arm.curves] for step in steps]
    return steps, [math.exp(fmean(values)) for values in logs]


def _target_line(axes: Axes, comparison: Comparison, styles: dict[str, dict[str, Any]]) -> None:
    """The target, with a mark where each arm that reaches it does."""
    target = comparison.target
    axes.axhline(target, color=FAINT, lw=1.2, ls=(0, (4, 3)), zorder=0)
    label = f"target: FID {fid_text(target)}"
    axes.annotate(label, (0, target), (4, -5), textcoords="offset points", va="top", fontsize=9)
    means = [(comparison.baseline, mean_crossing(comparison.crossings))]
    means += [(result.arm, result.steps) for result in comparison.results]
    for arm, mean in means:
        if mean.bound is Bound.EXACT and arm.name in styles:
            color = styles[arm.name]["color"]
            axes.plot(mean.step, target, "o", ms=8, color=color, mec="white", mew=1.3, zorder=5)


def _legend(axes: Axes, comparison: Comparison) -> None:
    """Beside the axes, in the order of the last FIDs, so that names stand near their lines."""
    handles, names = axes.get_legend_handles_labels()
    last = {arm.name: fmean(c.best for c in arm.curves) for arm in comparison.arms}
    ordered = sorted(zip(names, handles, strict=True), key=lambda pair: -last[pair[0]])
    others = len(comparison.arms) - COLORED
    axes.legend(
        [handle for _, handle in ordered],
        [short_name(name) for name, _ in ordered],
        title=f"grey: {others} other arm{'s' * (others > 1)}" if others > 0 else None,
        loc="center left",
        bbox_to_anchor=(1.01, 0.5),
        frameon=False,
    )


def samples_figure(grids: Sequence[tuple[str, int, bytes]]) -> Figure:
    """Pictures of samples: a row an arm, a column a step.

    Args:
        grids: (arm, step, PNG file's content) of each.
    """
    arms = list(dict.fromkeys(arm for arm, _, _ in grids))
    steps = list(dict.fromkeys(step for _, step, _ in grids))
    with rc_context(_STYLE):
        side = 2.6 if len(arms) <= FEW_ROWS else 1.3
        figure = Figure(figsize=(side * len(steps) + 2, side * len(arms)), layout="constrained")
        axes = figure.subplots(len(arms), len(steps), squeeze=False)
        for ax in axes.flat:
            ax.set(xticks=[], yticks=[])
            ax.spines[:].set_visible(False)
        for arm, step, png in grids:
            place = axes[arms.index(arm), steps.index(step)]
            place.imshow(imread(BytesIO(png)), cmap="gray", vmin=0, vmax=1, interpolation="nearest")
        for ax, step in zip(axes[0], steps, strict=True):
            ax.set_title(f"step {step:,}", fontsize=10)
        for ax, arm in zip(axes[:, 0], arms, strict=True):
            ax.set_ylabel(short_name(arm), rotation=0, ha="right", va="center", fontsize=11)
    return figure
