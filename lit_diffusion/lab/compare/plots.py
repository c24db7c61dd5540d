"""Draw figures of a comparison: speed-ups with intervals, FID over training, and samples."""

import math
from collections.abc import Sequence
from io import BytesIO
from statistics import fmean
from typing import Any, NamedTuple

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, NullFormatter

from lit_diffusion.lab.compare import tables
from lit_diffusion.lab.compare.comparison import HEADLINE_SEEDS, Comparison, Verdict
from lit_diffusion.lab.compare.curves import Arm

_INK, _GREY = "#1d2733", "#5c6773"
_NEGATIVE_VERDICTS = (Verdict.SLOWER, Verdict.WORSE, Verdict.LOST, Verdict.MISSED)
_VERDICT_COLORS = {Verdict.FASTER: "#00734c", **dict.fromkeys(_NEGATIVE_VERDICTS, "#b3400b")}

# The color-blind safe palette of Okabe and Ito, without yellow, which is too light on white.
_ARM_COLORS = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7"),
    *("#e69f00", "#56b4e9", "#7a4fa3", "#8c564b"),
)

_STYLE: Any = {"font.size": 10, "text.parse_math": False}  # names of arms may contain a dollar sign


class SamplePicture(NamedTuple):
    """A PNG file with samples of an arm."""

    arm: str
    step: int  # number of optimizer steps before the samples were generated
    png: bytes  # content of the file
    seed: str = "0"  # training seed of the run
    weights: str = "raw"  # name of the weights, "ema" or "raw"


def png_bytes(figure: Figure) -> bytes:
    """Render a figure as PNG. Equal figures give equal bytes."""
    file = BytesIO()
    with rc_context(_STYLE):
        figure.savefig(file, dpi=160, bbox_inches="tight", metadata={"Software": None})
    return file.getvalue()


def speedup_figure(comparison: Comparison) -> Figure:
    """Draw a forest plot: the speed-up of each arm with its interval, and a line at 1."""
    results, base = comparison.results, comparison.baseline
    ratios = [1.0, *(result.speedup.ratio for result in results)]
    left, right = min(ratios) / 2, max(ratios) * 2  # clips wide intervals
    with rc_context(_STYLE):
        figure = Figure(figsize=(9.6, 1.0 + 0.36 * len(results)), layout="constrained")
        axes = figure.add_subplot(xscale="log", xlim=(left, right), ylim=(len(results) - 0.5, -0.5))
        axes.axvline(1, color=_INK)
        for row, result in enumerate(results):
            speedup, color = result.speedup, _VERDICT_COLORS.get(result.verdict, _GREY)
            if speedup.low is not None and speedup.high is not None:
                is_headline = min(len(result.arm.curves), len(base.curves)) >= HEADLINE_SEEDS
                ends = max(speedup.low, left), min(speedup.high, right)
                axes.hlines(row, *ends, color=color, lw=5 if is_headline else 1.5, alpha=0.45)
            is_hollow = result.at != comparison.target or speedup.low is None
            axes.plot(speedup.ratio, row, "D", color=color, mfc="white" if is_hollow else color)
            label = tables.format_speedup(speedup) + tables.format_target(result, comparison)
            label += f"  {tables.format_verdict(result, comparison)}"
            transform = axes.get_yaxis_transform()
            axes.text(1.02, row, label, transform=transform, color=color, va="center")
        axes.set_yticks(range(len(results)), [_abbreviate(r.arm.name) for r in results])
        axes.xaxis.set_major_locator(LogLocator(10, (1, 2, 5) if right / left < 100 else (1,)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda ratio, _: f"{ratio:g}x"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        target = f"{comparison.metric} {tables.format_fid(comparison.target)}"
        axes.set_xlabel(f"speed-up over {_abbreviate(base.name)} to {target} (log axis)")
        axes.spines[["top", "right", "left"]].set_visible(False)
    return figure


def curves_figure(comparison: Comparison) -> Figure:
    """Draw FID over training: a thin line per seed, and a thick line for their geometric mean.

    If there are more arms than colors, the slowest arms are gray.
    """
    metric = comparison.metric
    with rc_context(_STYLE):
        figure = Figure(figsize=(9.6, 5.0), layout="constrained")
        axes = figure.add_subplot(
            yscale="log", xlabel="optimizer steps", ylabel=f"{metric} (log axis)"
        )
        for arm in comparison.arms[1 + len(_ARM_COLORS) :]:
            axes.plot(*_mean_curve(arm), color="#c9ced4", lw=1, zorder=1)
        for arm, color in zip(comparison.arms, (_INK, *_ARM_COLORS), strict=False):
            for curve in arm.curves:
                axes.plot(*curve.finite, lw=0.8, alpha=0.35, color=color)
            axes.plot(*_mean_curve(arm), lw=2.4, label=_abbreviate(arm.name), color=color)
        label = f"target: {metric} {tables.format_fid(comparison.target)}"
        axes.axhline(comparison.target, color=_GREY, ls="--", lw=1, zorder=0, label=label)
        axes.set_xlim(left=0)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.yaxis.set_major_locator(LogLocator(10, (1, 2, 3, 5, 7)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda fid, _: f"{fid:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.grid(color="#e6e9ec", lw=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False)
    return figure


def _mean_curve(arm: Arm) -> tuple[list[float], list[float]]:
    """Steps that all seeds have, and geometric means; NaN (a gap) if one FID is not finite."""
    steps = tables.common_steps([arm])
    logs = [[math.log(curve.at(step) or math.nan) for curve in arm.curves] for step in steps]
    return steps, [math.exp(fmean(values)) for values in logs]


def samples_figure(pictures: Sequence[SamplePicture]) -> Figure:
    """Draw a grid of samples: one row per arm, one column per step."""
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
            ax.set_title(f"step {step:,}")
        for ax, arm in zip(axes[:, 0], arms, strict=True):
            ax.set_ylabel(_abbreviate(arm), rotation=0, ha="right", va="center")
    return figure


def _abbreviate(name: str) -> str:
    """Abbreviate a long name. The tables have the full name."""
    return name if len(name) <= 40 else f"{name[:18]}...{name[-18:]}"
