import math
import random
from statistics import stdev

import numpy as np
import pytest

from lit_diffusion.lab.compare.curves import (
    Bound,
    Crossing,
    Curve,
    late_oscillation,
    late_wobble,
    paired_spread,
    sampling_spread,
)

NAN = math.nan


def falling(step):
    """Log FID is linear in the step."""
    return math.exp(3 - step / 1000)


# Crossings


def first_crossing(steps, fids, target):
    return Curve("0", tuple(steps), tuple(fids)).crossing(target)


@pytest.mark.parametrize("crossing", [150.0, 1000.0, 1234.5, 1999.0, 2000.0])
@pytest.mark.parametrize("spacing", [1, 7, 100, 950])
def test_a_curve_that_is_linear_in_log_fid_is_crossed_exactly_whatever_the_spacing(
    crossing, spacing
):
    steps = [100 + spacing * k for k in range(1 + math.ceil(1900 / spacing))]
    found = first_crossing(steps, [falling(s) for s in steps], falling(crossing))
    assert found.step == pytest.approx(crossing, rel=1e-9)
    assert found.bound is Bound.EXACT


def test_a_crossing_is_that_of_the_running_minimum():
    """A bad evaluation just before neither delays the crossing nor steepens the way to it."""
    smooth = first_crossing([1, 2, 3], [10.0, 10.0, 8.0], 9.0)
    assert first_crossing([1, 2, 3], [10.0, 30.0, 8.0], 9.0) == smooth


def test_the_first_of_several_crossings_counts():
    assert first_crossing([1, 2, 3, 4], [10.0, 5.0, 10.0, 5.0], 5.0).step == 2


def test_a_target_that_is_never_reached_is_censored_at_the_last_evaluation():
    found = first_crossing([100, 200], [9.0, 5.0], 4.999)
    assert found == Crossing(200, Bound.MORE_THAN)
    assert str(found) == "> 200"


def test_a_target_that_the_first_evaluation_has_is_only_bounded():
    found = first_crossing([100, 200], [9.0, 5.0], 9.0)
    assert found == Crossing(100, Bound.AT_MOST)
    assert str(found) == "<= 100"


def test_a_target_that_the_untrained_network_has_is_only_bounded():
    assert first_crossing([0, 100], [9.0, 5.0], 9.0) == Crossing(100, Bound.AT_MOST)


@pytest.mark.parametrize("steps", [(0,), (-100, 100), (100, math.inf), (math.nan,)])
def test_steps_without_a_logarithm_are_refused(steps):
    with pytest.raises(ValueError, match="seed 0: steps must be finite and >= 0, the last of them"):
        Curve("0", steps, (5.0,) * len(steps))


def test_evaluations_that_are_not_finite_are_neither_good_nor_bad():
    assert first_crossing([1, 2, 3], [10.0, NAN, 8.0], 9.0) == first_crossing(
        [1, 2, 3], [10.0, 10.0, 8.0], 9.0
    )
    assert first_crossing([1, 2, 3], [NAN, 8.0, 7.0], 8.0) == Crossing(2, Bound.AT_MOST)
    assert first_crossing([1, 2, 3], [5.0, NAN, NAN], 4.0) == Crossing(3, Bound.MORE_THAN)
    assert first_crossing([1, 2], [NAN, NAN], 4.0) == Crossing(2, Bound.MORE_THAN)


@pytest.mark.parametrize("unit", [1e-3, 64.0])
@pytest.mark.parametrize("scale", [0.01, 30.0])
def test_a_crossing_scales_with_the_unit_of_steps_and_not_with_that_of_fid(unit, scale):
    steps, fids = [1.0, 2.0, 5.0], [9.0, 6.0, 2.0]
    plain = first_crossing(steps, fids, 3.0).step
    scaled = first_crossing([unit * s for s in steps], [scale * f for f in fids], scale * 3.0)
    assert scaled.step == pytest.approx(unit * plain, rel=1e-12)


# Late oscillation


def test_late_oscillation_is_the_spread_of_log_fid_over_the_last_third():
    late = [2.0, 3.0, 2.5, 2.0]
    curve = Curve("0", tuple(range(1, 13)), (*[99.0, 1.0] * 3, 50.0, 7.0, *late))
    values = [math.log(fid) for fid in (7.0, *late)]  # step 8 of 12 begins the last third
    assert late_oscillation(curve) == pytest.approx(stdev(values))


def test_late_oscillation_needs_three_finite_evaluations():
    assert late_oscillation(Curve("0", (1, 2, 3), (3.0, 2.0, 1.0))) is None
    assert late_oscillation(Curve("0", (3, 4, 5, 6), (9.0, 3.0, NAN, 1.0))) is None
    assert late_oscillation(Curve("0", (3, 4, 5, 6), (9.0, 3.0, 3.0, 3.0))) == 0


def test_late_oscillation_is_relative():
    one = Curve("0", (1, 2, 3, 4, 5, 6), (9.0, 8.0, 7.0, 3.0, 2.0, 3.0))
    other = Curve("0", one.steps, tuple(100 * fid for fid in one.fids))
    assert late_oscillation(one) == pytest.approx(late_oscillation(other))


def test_an_even_descent_oscillates_and_does_not_wobble():
    steps = tuple(range(150, 1501, 150))
    even = Curve("0", steps, tuple(falling(step) for step in steps))
    assert late_oscillation(even) > 0.1
    assert late_wobble(even) == pytest.approx(0, abs=1e-9)
    power = Curve("0", steps, tuple(20 * (step / 150) ** -2.0 for step in steps))
    assert late_wobble(power) < 0.1 * late_oscillation(power)


def test_wobble_is_the_spread_about_the_line_of_least_squares():
    steps, noise = (6.0, 7.0, 8.0, 9.0), (0.3, -0.1, 0.2, -0.2)
    curve = Curve(
        "0", steps, tuple(math.exp(2 - s / 3 + e) for s, e in zip(steps, noise, strict=True))
    )
    fit = np.polyfit(steps, np.log(curve.fids), 1, full=True)
    assert late_wobble(curve) == pytest.approx(math.sqrt(fit[1][0] / 2))
    assert late_wobble(Curve("0", (1, 2, 3), (3.0, 2.0, 1.0))) is None


# Spread between sets of samples


def test_the_spread_between_samples_is_pooled_within_runs():
    """Runs that differ much, each of which repeats well, have a small spread."""
    runs = [Curve("0", (1,), (2.0,), repeats=(2.2,)), Curve("1", (1,), (20.0,), repeats=(22.0,))]
    assert sampling_spread(runs).sd == pytest.approx(stdev([math.log(2.0), math.log(2.2)]))
    assert sampling_spread(runs).degrees == 2


def test_runs_without_repeats_do_not_count_for_the_spread_between_samples():
    once = Curve("0", (1,), (2.0,))
    lost = Curve("1", (1,), (NAN,), repeats=(2.0,))
    again = Curve("2", (1,), (2.0,), repeats=(2.2, 1.8))
    assert sampling_spread([once, lost]) is None
    assert sampling_spread([once, lost, again]) == sampling_spread([again])


def drawn(sets, own, runs=40, seed=0):
    """Runs whose FIDs share what is due to each of three sets of samples.

    Args:
        sets: standard deviation of log FID over sets, the same for all runs.
        own: of what is left to each FID.
        runs: how many.
        seed: of the draw.
    """
    rng = random.Random(seed)
    shared = [rng.gauss(0, sets) for _ in range(3)]
    curves = []
    for k in range(runs):
        level = rng.gauss(0, 1)
        fids = [math.exp(level + common + rng.gauss(0, own)) for common in shared]
        curves.append(Curve(str(k), (1,), (fids[0],), repeats=tuple(fids[1:])))
    return curves


def test_what_all_runs_owe_to_a_set_of_samples_does_not_count_between_them():
    alike = drawn(sets=0.3, own=0.0)
    assert sampling_spread(alike).sd > 0.1
    assert paired_spread(alike).sd == pytest.approx(0, abs=1e-9)
    assert paired_spread(drawn(sets=0.3, own=0.04)).sd == pytest.approx(0.04, rel=0.25)  # 3 s.d.


def test_runs_that_share_no_samples_have_the_same_spread_between_them_as_alone():
    found = paired_spread(drawn(sets=0.0, own=0.1))
    assert found.sd == pytest.approx(0.1, rel=0.25)  # 3 s.d. of 78 degrees of freedom
    assert found.degrees == 39 * 2


def test_the_spread_between_runs_needs_two_with_equal_numbers_of_finite_repeats():
    two = Curve("0", (1,), (2.0,), repeats=(2.2,))
    three = Curve("1", (1,), (2.0,), repeats=(2.2, 1.8))
    lost = Curve("2", (1,), (2.0,), repeats=(NAN,))
    assert paired_spread([two, three, lost]) is None
    assert paired_spread([two, three, lost, two]).degrees == 1


# Mistakes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": (), "fids": ()}, "as many FIDs as steps, and one at least, got 0 for 0"),
        ({"steps": (1, 2), "fids": (1.0,)}, "got 1 for 2"),
        ({"steps": (1, 1), "fids": (2.0, 1.0)}, "steps must increase, got 1 after 1"),
        ({"steps": (1,), "fids": (0.0,)}, "FIDs must be > 0, got 0"),
        ({"steps": (1,), "fids": (1.0,), "repeats": (-0.5,)}, "FIDs must be > 0, got -0.5"),
    ],
)
def test_what_is_no_curve_is_refused_with_the_seed(options, message):
    with pytest.raises(ValueError, match=f"seed 7: .*{message}"):
        Curve("7", **options)
