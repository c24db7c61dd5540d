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


def test_an_even_descent_oscillates_but_not_about_its_line():
    steps = tuple(range(150, 1501, 150))
    even = Curve("0", steps, tuple(falling_fid(step) for step in steps))
    oscillation, about_line = late_spreads(even)
    assert oscillation > 0.1
    assert about_line == pytest.approx(0, abs=1e-9)


def test_the_second_spread_is_about_the_line_of_least_squares():
    steps, noise = (6.0, 7.0, 8.0, 9.0), (0.3, -0.1, 0.2, -0.2)
    fids = (math.exp(2 - s / 3 + e) for s, e in zip(steps, noise, strict=True))
    curve = Curve("0", steps, tuple(fids))
    fit = np.polyfit(steps, np.log(curve.fids), 1, full=True)
    assert late_spreads(curve)[1] == pytest.approx(math.sqrt(fit[1][0] / 2))


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


def drawn(sets, noise_sd, runs=40, seed=0):
    """Runs whose FIDs share what is due to each of three sets of samples.

    Args:
        sets: standard deviation of log FID over sets, the same for all runs.
        noise_sd: of what is left to each FID.
        runs: how many.
        seed: of the draw.
    """
    rng = random.Random(seed)
    shared = [rng.gauss(0, sets) for _ in range(3)]
    curves = []
    for k in range(runs):
        level = rng.gauss(0, 1)
        fids = [math.exp(level + common + rng.gauss(0, noise_sd)) for common in shared]
        curves.append(Curve(str(k), (1,), (fids[0],), repeats=tuple(fids[1:])))
    return curves


def test_what_all_runs_owe_to_a_set_of_samples_does_not_count_between_them():
    alike = drawn(sets=0.3, noise_sd=0.0)
    assert sampling_spread(alike).sd > 0.1
    assert paired_spread(alike).sd == pytest.approx(0, abs=1e-9)
    assert paired_spread(drawn(sets=0.3, noise_sd=0.04)).sd == pytest.approx(
        0.04, rel=0.25
    )  # 3 s.d.


def test_runs_that_share_no_samples_have_the_same_spread_between_them_as_alone():
    spread = paired_spread(drawn(sets=0.0, noise_sd=0.1))
    assert spread.sd == pytest.approx(0.1, rel=0.25)  # 3 s.d. of 78 degrees of freedom
    assert spread.degrees == 39 * 2


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


def falling_loss(n, seed=0, scatter=0.15):
    """A loss that falls from 1 to 0.1, with the scatter of single batches."""
    noise = random.Random(seed)
    return [(0.1 + 0.9 * math.exp(-k / 100)) * math.exp(noise.gauss(0, scatter)) for k in range(n)]


@pytest.mark.parametrize("seed", range(3))
def test_a_loss_that_falls_with_scatter_is_stable(seed):
    assert loss_stability(falling_loss(1500, seed)).stable


def test_each_jump_counts_once_however_long_it_lasts():
    losses = falling_loss(600)
    for start, length in ((200, 1), (300, 15), (400, 40)):
        losses[start : start + length] = [5.0] * length
    assert loss_stability(losses) == Stability(spikes=3, diverged=False)


def test_a_loss_that_never_comes_back_diverged():
    assert loss_stability(falling_loss(300) + [1.0] * 50) == Stability(spikes=1, diverged=True)


@pytest.mark.parametrize("at", [1, 30])
def test_a_loss_that_ends_above_where_it_began_diverged(at):
    """However early it blew up: no calm step came before."""
    assert loss_stability([1.0] * at + [50.0] * 200).diverged


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_diverged(bad):
    assert loss_stability([*falling_loss(300), bad, 0.1]).diverged


def test_a_long_jump_does_not_become_the_new_normal():
    """The window holds calm losses only, or a run that stays high would seem to have recovered."""
    assert loss_stability([1.0] * 20 + [3.0] * 500).diverged


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


def test_further_sets_of_samples_are_read_back(table):
    curve = Curve("0", (100, 200), (5.0, math.nan), (6400, 12800), repeats=(3.5, 4.5))
    (only,) = read_arms([table(to_csv(curve_records([Arm("a", (curve,))])))])
    assert only.curves[0].repeats == (3.5, 4.5)
    assert only.curves[0].steps == (100, 200)
    assert only.curves[0].images == (6400, 12800)


def test_repeats_of_earlier_steps_do_not_count(table):
    rows = "arm,step,fid,repeat\na,200,3,\na,200,4,2\na,200,5,1\na,100,6,0\na,100,7,1\n"
    (only,) = read_arms([table(rows)])
    assert only.curves[0].fids == (6, 3)
    assert only.curves[0].repeats == (5, 4)


def test_rows_may_be_in_any_order_and_in_several_files(table):
    one = table("arm,seed,step,fid\na,0,200,3\na,1,100,4\n")
    two = table("fid,arm,step,seed,comment\n5,a,100,0,x\n7,b,100,0,y\n", "two.csv")
    first, second = read_arms([one, two])
    assert [curve.seed for curve in first.curves] == ["0", "1"]
    assert first.curves[0].steps == (100, 200)
    assert first.curves[0].fids == (5, 3)
    assert second.name == "b"


def test_what_spreadsheets_and_people_write_is_read(table):
    (only,) = read_arms([table("\ufeffarm, step, fid\na, 100, 5\na, 200, 3\n")])
    assert (only.name, only.curves[0].steps, len(only.curves)) == ("a", (100, 200), 1)


def test_a_table_in_another_encoding_is_refused(tmp_path):
    (tmp_path / "old.csv").write_bytes("arm,step,fid\n\u00e4,1,2\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"old\.csv is not UTF-8: .*; save it as that"):
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
        ("arm,step,fid\na,1,5\na,inf,4\n", "arm a, seed 0: steps must be finite"),
        ("arm,step,fid,repeat\na,1,5,1\n", "arm a, seed 0: a curve needs as many FIDs as steps"),
        ("arm,step,fid\na,1,-5\n", "arm a, seed 0: FIDs must be > 0, got -5"),
    ],
)
def test_mistakes_are_refused_with_their_place(table, text, message):
    with pytest.raises(ValueError, match=message):
        read_arms([table(text)])


def test_a_cell_without_end_is_refused_with_its_file(tmp_path):
    (tmp_path / "a.csv").write_text("arm,step,fid\n" + "x" * 200_000 + ",1,2\n")
    with pytest.raises(ValueError, match=r"a\.csv is no CSV file: field larger"):
        read_arms([str(tmp_path / "a.csv")])
