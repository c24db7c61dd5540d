import io
import itertools
import math

import numpy as np
import pytest
from PIL import Image
from support.experiments import STEPS, arm

from lit_diffusion.lab.compare.comparison import Verdict, compare
from lit_diffusion.lab.compare.curves import Arm, Bound, Curve, mean_crossing
from lit_diffusion.lab.compare.plots import (
    COLORS,
    MAX_COLORED,
    MAX_ROWS,
    SamplePicture,
    curves_figure,
    figure_bytes,
    first_rows,
    ratio_ticks,
    samples_figure,
    speedup_figure,
)


@pytest.fixture(scope="module")
def comparison():
    arms = [arm("baseline", 1.0), arm("fast", 2.0), arm("same", 1.0), arm("slow", 0.5)]
    return compare(arms, "baseline")


def texts(axes):
    return [text.get_text() for text in axes.texts]


def marks(axes, row):
    """x of the diamond in a row."""
    diamonds = (line for line in axes.lines if line.get_marker() == "D")
    return next(line.get_xdata()[0] for line in diamonds if line.get_ydata()[0] == row)


def contrast(color):
    """Of text in this colour on white, as WCAG 2 defines it."""
    parts = [int(color[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    light = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return 1.05 / (light + 0.05)


# Speed-ups


def test_the_forest_plot_has_a_row_an_arm_from_the_fastest_down(comparison):
    (axes,) = speedup_figure(comparison).axes
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names == [result.arm.name for result in comparison.results]
    assert axes.get_ylim()[0] > axes.get_ylim()[1]
    for row, result in enumerate(comparison.results):
        assert marks(axes, row) == result.speedup.ratio


def test_every_interval_is_inside_the_axis_and_one_too(comparison):
    (axes,) = speedup_figure(comparison).axes
    low, high = axes.get_xlim()
    assert low < 1 < high
    for result in comparison.results:
        assert low < result.speedup.low < result.speedup.high < high
    assert not {"<", ">"} & {line.get_marker() for line in axes.lines}


@pytest.mark.parametrize("ratios", [(0.3,), (0.9, 1.4), (1.05,), (0.8, 3.0)])
def test_the_numbers_of_the_axis_do_not_touch(ratios):
    others = [
        arm(f"a-very-long-name-of-an-arm-joined+to-another{ratio}", ratio, range(3))
        for ratio in ratios
    ]
    arms = [arm("baseline", 1.0), *others]
    figure = speedup_figure(compare(arms, "baseline"))
    figure.draw_without_rendering()
    (axes,) = figure.axes
    boxes = [label.get_window_extent() for label in axes.get_xticklabels()]
    assert "1x" in [label.get_text() for label in axes.get_xticklabels()]
    assert all(left.x1 < right.x0 for left, right in itertools.pairwise(boxes))


@pytest.mark.parametrize("room", [1.5, 3.0, 6.0, 12.0])
@pytest.mark.parametrize("low", [1e-4, 0.02, 0.13, 0.6, 0.97])
@pytest.mark.parametrize("high", [1.04, 1.7, 5.0, 60.0, 9e3])
def test_an_axis_has_numbers_all_along_it_as_far_as_there_is_room(low, high, room):
    ticks, gap = ratio_ticks(low, high, room), (high / low) ** (1 / room)
    assert 1 in ticks
    assert all(low <= tick <= high for tick in ticks)
    assert all(right / left > gap for left, right in itertools.pairwise(ticks))
    if high / low > 4:
        steps = [right / left for left, right in itertools.pairwise([low, *ticks, high])]
        assert max(steps) < 1.3 * max(gap**2, 2)


def test_verdicts_stand_beside_their_rows_in_words(comparison):
    (axes,) = speedup_figure(comparison).axes
    assert any(text.endswith("faster") and "2.0" in text for text in texts(axes))
    assert any("no difference shown" in text for text in texts(axes))
    assert any("slower (to " in text for text in texts(axes))


def test_an_open_interval_ends_in_an_arrow():
    arms = [arm("baseline", 1.0), arm("fast", 2.5)]
    (axes,) = speedup_figure(compare(arms, "baseline", target=1.6)).axes
    assert ">" in [line.get_marker() for line in axes.lines]


def test_an_interval_of_two_seeds_does_not_squeeze_the_others():
    arms = [arm("baseline", 1.0), arm("fast", 2.0), arm("wild", 1.0, [0, 1], spread=2.0)]
    comparison = compare(arms, "baseline")
    wide = next(r.speedup for r in comparison.results if r.arm.name == "wild")
    assert wide.high / wide.low > 1e3
    (axes,) = speedup_figure(comparison).axes
    low, high = axes.get_xlim()
    assert high / low < 200
    assert {"<", ">"} <= {line.get_marker() for line in axes.lines}


def test_names_are_drawn_as_they_are():
    arms = [arm("baseline", 1.0), arm("$x_{$", 2.0)]
    comparison = compare(arms, "baseline")
    speedups, curves = speedup_figure(comparison), curves_figure(comparison)
    figure_bytes(speedups, "png")
    figure_bytes(curves, "png")
    assert [label.get_text() for label in speedups.axes[0].get_yticklabels()] == ["$x_{$"]
    legend = curves.axes[0].get_legend().get_texts()
    assert {text.get_text() for text in legend} == {"baseline", "$x_{$"}


def test_one_seed_has_a_hollow_mark_and_no_bar():
    arms = [arm("baseline", 1.0, [0]), arm("fast", 2.0, [0])]
    (axes,) = speedup_figure(compare(arms, "baseline")).axes
    (mark,) = [line for line in axes.lines if line.get_marker() == "D"]
    assert mark.get_markerfacecolor() == "white"
    assert not any(line.get_marker() == "|" for line in axes.lines)


def test_fewer_than_five_seeds_have_a_thin_bar_and_their_number_beside_it():
    arms = [arm("baseline", 1.0), arm("few", 2.0, range(4)), arm("many", 1.5)]
    (axes,) = speedup_figure(compare(arms, "baseline")).axes
    widths = {
        line.get_ydata()[0]: line.get_linewidth() for line in axes.lines if line.get_alpha() == 0.45
    }
    assert widths[0] < 2 < 4 < widths[1]
    assert any(text.endswith("faster (4 seeds)") for text in texts(axes))
    assert any(text.endswith("faster") for text in texts(axes))


@pytest.mark.parametrize("verdict", list(Verdict))
def test_colours_of_verdicts_can_be_read_on_white(verdict):
    assert contrast(COLORS[verdict]) >= 4.5


def test_the_first_figure_has_the_fastest_arms_with_a_test():
    tested = [arm(f"tested {k}", 1 + k / 10, range(2)) for k in range(MAX_ROWS + 3)]
    single = [arm(f"single {k}", 5.0, [k]) for k in range(3)]
    rows = first_rows(compare([arm("baseline", 1.0), *tested, *single], "baseline"))
    assert {row.arm.name for row in rows} == {f"tested {k}" for k in range(3, MAX_ROWS + 3)}
    ratios = [row.speedup.ratio for row in rows]
    assert ratios == sorted(ratios, reverse=True)
    few = compare([arm("baseline", 1.0), *tested[:2], *single], "baseline")
    assert first_rows(few) == list(few.results)


# Curves


def test_there_is_a_thin_line_a_seed_and_a_thick_one_for_their_geometric_mean(comparison):
    (axes,) = curves_figure(comparison).axes
    thin = [line for line in axes.lines if line.get_linewidth() == 0.8]
    (mean,) = [line for line in axes.lines if line.get_label() == "fast"]
    assert len(thin) == sum(len(a.curves) for a in comparison.arms)
    expected = np.exp(np.mean([np.log(c.fids) for c in comparison.arms[1].curves], axis=0))
    assert mean.get_ydata() == pytest.approx(expected)
    assert axes.get_yscale() == "log"


def test_the_target_is_marked_where_each_arm_that_reaches_it_does(comparison):
    (axes,) = curves_figure(comparison).axes
    dots = [line.get_xdata()[0] for line in axes.lines if line.get_marker() == "o"]
    means = [mean_crossing(arm.crossings(comparison.target)) for arm in comparison.arms]
    assert dots == pytest.approx([mean.step for mean in means if mean.bound is Bound.EXACT])
    assert len(dots) >= 2
    assert any("target: FID" in text for text in texts(axes))


def test_of_many_arms_the_fastest_have_colours_and_all_are_drawn():
    arms = [arm("baseline", 1.0, range(2)), *(arm(f"{k}", 1 + k / 20, range(2)) for k in range(20))]
    comparison = compare(arms, "baseline")
    (axes,) = curves_figure(comparison).axes
    legend = axes.get_legend()
    assert len(legend.get_texts()) == MAX_COLORED
    assert legend.get_title().get_text() == f"grey: {21 - MAX_COLORED} other arms"
    (axes,) = curves_figure(compare(arms[: MAX_COLORED + 1], "baseline")).axes
    assert axes.get_legend().get_title().get_text() == "grey: 1 other arm"
    (axes,) = curves_figure(comparison).axes
    grey = [line for line in axes.lines if line.get_color() == "#c9ced4"]
    assert len(grey) == 21 - MAX_COLORED


def test_evaluations_that_are_not_finite_leave_a_gap():
    values = [*arm("x", 2.0, [0]).curves[0].fids]
    values[4] = math.nan
    arms = [arm("baseline", 1.0), Arm("x", (Curve("0", STEPS, tuple(values)),))]
    (axes,) = curves_figure(compare(arms, "baseline")).axes
    (mean,) = [line for line in axes.lines if line.get_label() == "x"]
    assert np.isnan(mean.get_ydata()).tolist() == [k == 4 for k in range(len(STEPS))]


# Samples and files


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


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_the_same_comparison_gives_the_same_file(comparison, kind):
    one, two = (figure_bytes(speedup_figure(comparison), kind) for _ in range(2))
    assert one == two
