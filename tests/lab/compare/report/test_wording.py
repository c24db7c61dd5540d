import math

import pytest
from support.comparisons import told
from support.experiments import STEPS, arm

from lit_diffusion.lab.compare.comparison import Arm, compare
from lit_diffusion.lab.compare.curves import Bound, Crossing, Curve
from lit_diffusion.lab.compare.report.wording import (
    by_images_text,
    fid_text,
    p_text,
    ratio_text,
    reached_text,
    verdict_text,
)


def test_fids_that_look_alike_are_told_with_the_digits_that_differ():
    base = arm("baseline", 1.0)
    target = base.reached
    short = [
        Curve(c.seed, STEPS, tuple(max(fid, target * 1.0001) for fid in c.fids))
        for c in arm("short", 2.0).curves
    ]
    comparison = compare([base, Arm("short", tuple(short))], "baseline")
    at = comparison.results[0].at
    assert fid_text(at) == fid_text(target)
    assert f" to FID {at:.4f}, not {target:.4f}, but" in verdict_text(
        comparison.results[0], comparison
    )


def test_an_arm_with_a_seed_that_diverged_is_told_with_that():
    lost = Curve("9", STEPS, (math.nan,) * len(STEPS))
    _, (verdict,) = told(Arm("a", (*arm("a", 2.0).curves, lost)))
    assert "a seed never had a finite FID" in verdict


def test_by_images_the_best_arm_is_told_anew():
    comparison, _ = told(arm("large", 1.5))
    again, _ = told(arm("large", 0.7))
    assert by_images_text(comparison, again).startswith(
        "By images seen, in place of steps, of large: slower than baseline: 0.7"
    )


@pytest.mark.parametrize(
    ("p", "text"),
    [(0.5, "0.50"), (0.0312, "0.031"), (0.0123, "0.012"), (1e-7, "< 0.001"), (None, "-")],
)
def test_p_values_have_two_digits_that_matter(p, text):
    assert p_text(p) == text


@pytest.mark.parametrize(("ratio", "text"), [(2.1132, "2.11x"), (12.345, "12.3x")])
def test_speedups_have_three_digits(ratio, text):
    assert ratio_text(ratio) == text


def test_seeds_that_reach_the_target_are_counted():
    assert reached_text([Crossing(1000), Crossing(4000, Bound.MORE_THAN)]) == "1 of 2"
