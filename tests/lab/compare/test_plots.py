from support.experiments import arm

from lit_diffusion.lab.compare.comparison import compare
from lit_diffusion.lab.compare.plots import (
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
