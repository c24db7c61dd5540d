import math
import random
from statistics import stdev

import numpy as np
import pytest
from support.experiments import arm

from lit_diffusion.lab.compare.curves import (
    Arm,
    Bound,
    Crossing,
    Curve,
    Stability,
    late_spreads,
    loss_stability,
    mean_crossing,
    paired_spread,
    read_arms,
    sampling_spread,
)
from lit_diffusion.lab.compare.tables import curve_records, to_csv

NAN = math.nan


def falling_fid(step):
    """Log FID is linear in the step."""
    return math.exp(3 - step / 1000)


# Crossings


def first_crossing(steps, fids, target):
    return Curve("0", tuple(steps), tuple(fids)).crossing(target)


@pytest.mark.parametrize("crossing", [150.0, 1234.5, 2000.0])
@pytest.mark.parametrize("spacing", [7, 950])
def test_a_curve_that_is_linear_in_log_fid_is_crossed_exactly_whatever_the_spacing(
    crossing, spacing
):
    steps = [100 + spacing * k for k in range(1 + math.ceil(1900 / spacing))]
    result = first_crossing(steps, [falling_fid(s) for s in steps], falling_fid(crossing))
    assert result.step == pytest.approx(crossing, rel=1e-9)
    assert result.bound is Bound.EXACT


def test_a_crossing_is_that_of_the_running_minimum():
    """A bad evaluation just before neither delays the crossing nor steepens the way to it."""
    smooth = first_crossing([1, 2, 3], [10.0, 10.0, 8.0], 9.0)
    assert first_crossing([1, 2, 3], [10.0, 30.0, 8.0], 9.0) == smooth


def test_the_first_of_several_crossings_counts():
    assert first_crossing([1, 2, 3, 4], [10.0, 5.0, 10.0, 5.0], 5.0).step == 2


@pytest.mark.parametrize(
    ("steps", "target", "expected", "text"),
    [
        ((100, 200), 4.999, Crossing(200, Bound.MORE_THAN), "> 200"),
        ((100, 200), 9.0, Crossing(100, Bound.AT_MOST), "<= 100"),
        ((0, 1000), 9.0, Crossing(1000, Bound.AT_MOST), "<= 1,000"),  # 0 has no logarithm
    ],
)
def test_a_target_that_is_never_reached_or_had_from_the_start_is_only_bounded(
    steps, target, expected, text
):
    crossing = first_crossing(steps, [9.0, 5.0], target)
    assert (crossing, str(crossing)) == (expected, text)


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


def test_a_mean_over_seeds_is_a_bound_where_one_of_them_is_and_unknown_where_bounds_disagree():
    early, late = Crossing(10, Bound.AT_MOST), Crossing(1000, Bound.MORE_THAN)
    assert mean_crossing([Crossing(10), Crossing(1000)]) == Crossing(pytest.approx(100))
    assert mean_crossing([Crossing(10), late]) == Crossing(pytest.approx(100), Bound.MORE_THAN)
    assert mean_crossing([Crossing(10), early]).bound is Bound.AT_MOST
    assert mean_crossing([early, late]).bound is Bound.UNKNOWN
    assert math.isnan(mean_crossing([early, late]).step)
    assert str(mean_crossing([early, late])) == "unknown"


# Late oscillation


def test_late_oscillation_is_the_spread_of_log_fid_over_the_last_third_and_has_no_unit():
    late = [2.0, 3.0, 2.5, 2.0]
    curve = Curve("0", tuple(range(1, 13)), (*[99.0, 1.0] * 3, 50.0, 7.0, *late))
    values = [math.log(fid) for fid in (7.0, *late)]  # step 8 of 12 begins the last third
    assert late_spreads(curve)[0] == pytest.approx(stdev(values))
    scaled = Curve("0", curve.steps, tuple(100 * fid for fid in curve.fids))
    assert late_spreads(scaled) == pytest.approx(late_spreads(curve))


def test_late_spreads_need_three_finite_evaluations():
    assert late_spreads(Curve("0", (1, 2, 3), (3.0, 2.0, 1.0))) is None
    assert late_spreads(Curve("0", (3, 4, 5, 6), (9.0, 3.0, NAN, 1.0))) is None
    assert late_spreads(Curve("0", (3, 4, 5, 6), (9.0, 3.0, 3.0, 3.0))) == (0, 0)


def test_the_second_spread_is_about_the_line_of_least_squares():
    steps, noise = (6.0, 7.0, 8.0, 9.0), (0.3, -0.1, 0.2, -0.2)
    fids = (math.exp(2 - s / 3 + e) for s, e in zip(steps, noise, strict=True))
    curve = Curve("0", steps, tuple(fids))
    fit = np.polyfit(steps, np.log(curve.fids), 1, full=True)
    assert late_spreads(curve)[1] == pytest.approx(math.sqrt(fit[1][0] / 2))


# Spread between sets of samples


def test_the_spread_between_samples_is_pooled_within_runs_that_repeat():
    """Runs that differ much, each of which repeats well, have a small spread."""
    runs = [Curve("0", (1,), (2.0,), repeats=(2.2,)), Curve("1", (1,), (20.0,), repeats=(22.0,))]
    assert sampling_spread(runs).sd == pytest.approx(stdev([math.log(2.0), math.log(2.2)]))
    assert sampling_spread(runs).degrees == 2
    others = [Curve("2", (1,), (2.0,)), Curve("3", (1,), (NAN,), repeats=(2.0,))]
    assert sampling_spread(others) is None
    assert sampling_spread([*runs, *others]) == sampling_spread(runs)


def test_what_all_runs_owe_to_a_set_of_samples_does_not_count_between_them():
    logs = np.random.default_rng(0).normal(size=(4, 3))  # runs and sets
    runs = [
        Curve(str(k), (1,), (fid,), repeats=more) for k, (fid, *more) in enumerate(np.exp(logs))
    ]
    residuals = logs - logs.mean(0) - logs.mean(1, keepdims=True) + logs.mean()
    assert paired_spread(runs) == (pytest.approx(math.sqrt((residuals**2).sum() / 6)), 6)


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


def test_an_arm_has_each_seed_once():
    curve = Curve("0", (1,), (2.0,))
    with pytest.raises(ValueError, match="twice has a seed twice: 0, 0"):
        Arm("twice", (curve, curve))


# Training losses


def falling_loss(n):
    """A loss that falls from 1 to 0.1, with the scatter of single batches."""
    noise = random.Random(0)
    return [(0.1 + 0.9 * math.exp(-k / 100)) * math.exp(noise.gauss(0, 0.15)) for k in range(n)]


def with_jumps(losses, *spans):
    for start, length in spans:
        losses[start : start + length] = [5.0] * length
    return losses


@pytest.mark.parametrize(
    ("losses", "spikes", "diverged"),
    [
        (falling_loss(1500), 0, False),
        # A jump counts once, however long it lasts.
        (with_jumps(falling_loss(600), (3, 12), (200, 1), (300, 15), (400, 40)), 4, False),
        (falling_loss(300) + [1.0] * 50, 1, True),
        # A long one does not become the new normal.
        ([1.0] * 20 + [3.0] * 500, 1, True),
        # 12 is more than twice the median of the 20 losses before it, 5, but not of 21, 9.
        ([9.0] * 11 + [1.0] * 10 + [12.0, 1.0], 1, False),
        # However early it blew up: no calm step came before.
        ([1.0] + [50.0] * 200, 1, True),
        ([*falling_loss(300), math.nan, 0.1], 0, True),
        ([*falling_loss(300), math.inf], 0, True),
    ],
)
def test_spikes_are_counted_and_a_loss_that_does_not_come_back_diverged(losses, spikes, diverged):
    assert loss_stability(losses) == Stability(spikes, diverged)
    assert loss_stability([1000 * loss for loss in losses]) == Stability(spikes, diverged)


def test_a_loss_that_ends_above_where_it_began_diverged():
    assert loss_stability([1.0 + k / 100 for k in range(200)]) == Stability(0, True)


# CSV files


@pytest.fixture
def table(tmp_path):
    def write(text, name="numbers.csv"):
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


def test_what_a_report_writes_is_read_back(table):
    arms = [arm("baseline", 1.0), arm("fast", 2.0)]
    assert read_arms([table(to_csv(curve_records(arms)))]) == arms


def test_repeats_of_the_last_step_are_read_and_those_of_earlier_steps_do_not_count(table):
    curve = Curve("0", (100, 200), (5.0, 4.0), (6400, 12800), repeats=(3.5, 4.5))
    assert read_arms([table(to_csv(curve_records([Arm("a", (curve,))])))]) == [Arm("a", (curve,))]
    rows = "arm,step,fid,repeat\na,200,3,\na,200,4,2\na,200,5,1\na,100,6,0\na,100,7,1\n"
    (only,) = read_arms([table(rows)])
    assert (only.curves[0].fids, only.curves[0].repeats) == ((6, 3), (5, 4))


def test_rows_may_be_in_any_order_and_in_several_files(table):
    one = table("arm,seed,step,fid\na,0,200,3\na,1,100,4\n")
    two = table("fid,arm,step,seed,comment\n5,a,100,0,x\n7,b,100,0,y\n", "two.csv")
    first, second = read_arms([one, two])
    assert [curve.seed for curve in first.curves] == ["0", "1"]
    assert (first.curves[0].steps, first.curves[0].fids) == ((100, 200), (5, 3))
    assert second.name == "b"


def test_what_spreadsheets_and_people_write_is_read(table):
    (only,) = read_arms([table("\ufeffarm, step, fid\na, 100, 5\na, 200, 3\n")])
    assert (only.name, only.curves[0].steps, len(only.curves)) == ("a", (100, 200), 1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("arm,step,fid\n\u00e4,1,2\n".encode("latin-1"), "'utf-8'"),
        (b"arm,step,fid\n" + b"x" * 200_000 + b",1,2\n", "field larger"),
    ],
)
def test_a_file_in_another_encoding_or_format_is_refused(tmp_path, content, message):
    (tmp_path / "old.csv").write_bytes(content)
    with pytest.raises(ValueError, match=rf"old\.csv is damaged or no CSV file .*{message}"):
        read_arms([str(tmp_path / "old.csv")])


@pytest.mark.parametrize("text", ["", "nan", "inf"])
def test_an_fid_that_is_none_was_not_finite(table, text):
    (only,) = read_arms([table(f"arm,step,fid\na,100,{text}\na,200,3\n")])
    assert math.isnan(only.curves[0].fids[0])
    assert only.curves[0].best == 3


def test_images_count_where_all_rows_of_a_run_have_them(table):
    (only,) = read_arms([table("arm,seed,step,fid,images\na,0,1,5,64\na,1,1,5,\n")])
    assert [curve.images for curve in only.curves] == [(64,), None]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("arm,steps,fid\n", "needs the columns arm, step and fid, and has no step"),
        ("arm,step,fid\n", "there are no rows in"),
        ("arm,step,fid\na,ten,5\n", "numbers.csv, line 2: step must be a number, got 'ten'"),
        ("arm,step,fid\na,1,5\na,2\n", "line 3: fid must be a number"),
        ("arm,step,fid\na,1,5\na,1,4\n", "arm a, seed 0: steps must increase, got 1 after 1"),
        ("arm,step,fid\na,1,5\n,2,4\n", "line 3: the arm has no name"),
        ("arm,step,fid,repeat\na,1,5,1\n", "arm a, seed 0: a curve needs as many FIDs as steps"),
    ],
)
def test_mistakes_are_refused_with_their_place(table, text, message):
    with pytest.raises(ValueError, match=message):
        read_arms([table(text)])
