import io
import math

import numpy as np
import pytest
from PIL import Image
from support.experiments import STEPS, arm

from lit_diffusion.lab.compare.comparison import compare
from lit_diffusion.lab.compare.curves import Arm, Curve
from lit_diffusion.lab.compare.plots import (
    SamplePicture,
    curves_figure,
    png_bytes,
    samples_figure,
    speedup_figure,
)


def diamonds(axes):
    """Marks of the ratios by row."""
    return {line.get_ydata()[0]: line for line in axes.lines if line.get_marker() == "D"}


def bars(axes):
    """Ends and width of the intervals by row."""
    segments = [(bar.get_segments()[0], bar.get_linewidth()[0]) for bar in axes.collections]
    return {ends[0][1]: ((ends[0][0], ends[1][0]), width) for ends, width in segments}


def test_the_forest_plot_has_a_row_an_arm_from_the_fastest_down():
    arms = [arm("baseline", 1.0), arm("fast", 2.0), arm("same", 1.0), arm("slow", 0.5)]
    comparison = compare(arms, "baseline")
    (axes,) = speedup_figure(comparison).axes
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names == [result.arm.name for result in comparison.results]
    assert axes.get_ylim()[0] > axes.get_ylim()[1]
    for row, result in enumerate(comparison.results):
        assert diamonds(axes)[row].get_xdata()[0] == result.speedup.ratio
        assert bars(axes)[row][0] == (result.speedup.low, result.speedup.high)
        assert result.verdict.value in axes.texts[row].get_text()
    assert axes.get_xlim()[0] < 1 < axes.get_xlim()[1]


def test_one_seed_has_a_hollow_mark_and_no_bar_and_few_have_a_thin_one():
    arms = [arm("baseline", 1.0), arm("one", 2.5, [0]), arm("few", 2.0, range(4)), arm("many", 1.5)]
    (axes,) = speedup_figure(compare(arms, "baseline")).axes
    assert diamonds(axes)[0].get_markerfacecolor() == "white"
    assert diamonds(axes)[1].get_markerfacecolor() != "white"
    assert list(bars(axes)) == [1, 2]
    assert bars(axes)[1][1] < 2 < 4 < bars(axes)[2][1]


def test_names_are_drawn_as_they_are():
    comparison = compare([arm("baseline", 1.0, [0]), arm("$x_{$", 2.0, [0])], "baseline")
    figure = speedup_figure(comparison)
    assert png_bytes(figure) == png_bytes(speedup_figure(comparison))
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["$x_{$"]


def test_there_is_a_thin_line_a_seed_and_a_thick_one_for_their_geometric_mean_with_gaps():
    *arms, fastest = (arm(name, 1 + k / 20, range(2)) for k, name in enumerate("abcdefghijklm"))
    first, second = fastest.curves
    gap = Curve("1", STEPS, (*second.fids[:4], math.nan, *second.fids[5:]))
    comparison = compare([*arms, Arm("m", (first, gap))], "a")
    (axes,) = curves_figure(comparison).axes
    thin = [line for line in axes.lines if line.get_linewidth() == 0.8]
    thick = {line.get_label(): line for line in axes.lines if line.get_linewidth() == 2.4}
    grey = [line for line in axes.lines if line.get_color() == "#c9ced4"]
    assert [*thick] == [arm.name for arm in comparison.arms[:9]]
    assert (len(thin), len(grey)) == (18, 4)
    for name, curves in (("a", arms[0].curves), ("m", (first, gap))):
        expected = np.exp(np.mean([np.log(curve.fids) for curve in curves], axis=0))
        assert thick[name].get_ydata() == pytest.approx(expected, nan_ok=True)
    assert axes.get_yscale() == "log"


def png(shade):
    file = io.BytesIO()
    Image.new("L", (4, 4), shade).save(file, "PNG")
    return file.getvalue()


def test_samples_are_in_a_row_an_arm_and_a_column_a_step():
    grids = [
        SamplePicture(a, s, png(s % 256)) for a in ("baseline", "fast") for s in (100, 200, 2000)
    ]
    figure = samples_figure(grids)
    assert [ax.get_title() for ax in figure.axes[:3]] == ["step 100", "step 200", "step 2,000"]
    assert [ax.get_ylabel() for ax in figure.axes[::3]] == ["baseline", "fast"]
    pixels = figure.axes[4].images[0].get_array()
    assert pixels.max() == pytest.approx(200 / 255, abs=1e-6)
    assert figure.axes[4].images[0].get_clim() == (0, 1)  # black is black in every picture
