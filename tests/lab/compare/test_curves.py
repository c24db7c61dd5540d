import math
import random

import numpy as np
import pytest
from support.experiments import arm

from lit_diffusion.lab.compare.curves import (
    Arm,
    Bound,
    Crossing,
    Curve,
    Stability,
    loss_stability,
    mean_crossing,
    paired_spread,
    read_arms,
)
from lit_diffusion.lab.compare.tables import curve_records, to_csv

NAN = math.nan


def falling_fid(step):
    """Log FID is linear in the step."""
    return math.exp(3 - step / 1000)


def first_crossing(steps, fids, target):
    return Curve("0", tuple(steps), tuple(fids)).crossing(target)


@pytest.mark.parametrize(("crossing", "spacing"), [(150.0, 950), (1234.5, 7), (2000.0, 950)])
def test_a_curve_that_is_linear_in_log_fid_is_crossed_exactly_whatever_the_spacing(
    crossing, spacing
):
    steps = [100 + spacing * k for k in range(1 + math.ceil(1900 / spacing))]
    result = first_crossing(steps, [falling_fid(s) for s in steps], falling_fid(crossing))
    assert result.step == pytest.approx(crossing, rel=1e-9)
    assert result.bound is Bound.EXACT


def test_the_first_crossing_of_the_running_minimum_of_finite_values_counts():
    """A bad evaluation just before neither delays the crossing nor steepens the way to it."""
    smooth = first_crossing([1, 2, 3], [10.0, 10.0, 8.0], 9.0)
    assert first_crossing([1, 2, 3], [10.0, 30.0, 8.0], 9.0) == smooth
    assert first_crossing([1, 2, 3], [10.0, NAN, 8.0], 9.0) == smooth
    assert first_crossing([1, 2, 3, 4], [10.0, 5.0, 10.0, 5.0], 5.0).step == 2


@pytest.mark.parametrize(
    ("steps", "fids", "target", "expected", "text"),
    [
        ((100, 200), (9.0, 5.0), 4.999, Crossing(200, Bound.MORE_THAN), "> 200"),
        ((100, 200), (5.0, NAN), 4.0, Crossing(200, Bound.MORE_THAN), "> 200"),
        ((100, 200), (9.0, 5.0), 9.0, Crossing(100, Bound.AT_MOST), "<= 100"),
        ((100, 200), (NAN, 8.0), 8.0, Crossing(200, Bound.AT_MOST), "<= 200"),
        # 0 has no logarithm
        ((0, 1000), (9.0, 5.0), 9.0, Crossing(1000, Bound.AT_MOST), "<= 1,000"),
    ],
)
def test_a_target_that_is_never_reached_or_had_from_the_start_is_only_bounded(
    steps, fids, target, expected, text
):
    crossing = first_crossing(steps, fids, target)
    assert (crossing, str(crossing)) == (expected, text)


def test_a_mean_over_seeds_is_a_bound_where_one_of_them_is_and_unknown_where_bounds_disagree():
    early, late = Crossing(10, Bound.AT_MOST), Crossing(1000, Bound.MORE_THAN)
    assert mean_crossing([Crossing(10), Crossing(1000)]) == Crossing(pytest.approx(100))
    assert mean_crossing([Crossing(10), late]) == Crossing(pytest.approx(100), Bound.MORE_THAN)
    assert mean_crossing([Crossing(10), early]).bound is Bound.AT_MOST
    assert str(mean_crossing([early, late])) == "unknown"


def test_what_all_runs_owe_to_a_set_of_samples_does_not_count_between_them():
    logs = np.random.default_rng(0).normal(size=(4, 3))  # runs and sets
    runs = [
        Curve(str(k), (1,), (fid,), repeats=more) for k, (fid, *more) in enumerate(np.exp(logs))
    ]
    residuals = logs - logs.mean(0) - logs.mean(1, keepdims=True) + logs.mean()
    assert paired_spread(runs) == (pytest.approx(math.sqrt((residuals**2).sum() / 6)), 6)
    assert paired_spread([runs[0], Curve("one set", (1,), (2.0,))]) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": (), "fids": ()}, "as many FIDs as steps, and one at least, got 0 for 0"),
        ({"steps": (1, 1), "fids": (2.0, 1.0)}, "steps must increase, got 1 after 1"),
        ({"steps": (1,), "fids": (0.0,)}, "FIDs must be > 0, got 0"),
        ({"steps": (1,), "fids": (1.0,), "repeats": (-0.5,)}, "FIDs must be > 0, got -0.5"),
        *(
            ({"steps": steps, "fids": (5.0,) * len(steps)}, "steps must be finite and >= 0, the l")
            for steps in ((0,), (-100, 100), (100, math.inf), (math.nan,))
        ),
    ],
)
def test_what_is_no_curve_is_refused_with_the_seed(options, message):
    with pytest.raises(ValueError, match=f"seed 7: .*{message}"):
        Curve("7", **options)


NOISE = random.Random(0)
FALLING = [
    (0.1 + 0.9 * math.exp(-k / 100)) * math.exp(NOISE.gauss(0, 0.15)) for k in range(1500)
]  # from 1 to 0.1, with the scatter of single batches


@pytest.mark.parametrize(
    ("losses", "spikes", "diverged"),
    [
        (FALLING, 0, False),
        # A jump counts once, however long it lasts.
        ([*FALLING[:3], *[5.0] * 12, *FALLING[15:300], *[5.0] * 40, *FALLING[340:]], 2, False),
        # A long one does not become the new normal.
        ([1.0] * 20 + [3.0] * 500, 1, True),
        # 12 is more than twice the median of the 20 losses before it, 5, but not of 21, 9.
        ([9.0] * 11 + [1.0] * 10 + [12.0, 1.0], 1, False),
        # However early it blew up: no calm step came before.
        ([1.0] + [50.0] * 200, 1, True),
        ([*FALLING, math.nan, 0.1], 0, True),
        ([*FALLING, math.inf], 0, True),
        # It ends above where it began.
        ([1.0 + k / 100 for k in range(200)], 0, True),
    ],
)
def test_spikes_are_counted_and_a_loss_that_does_not_come_back_diverged(losses, spikes, diverged):
    assert loss_stability(losses) == Stability(spikes, diverged)
    assert loss_stability([1000 * loss for loss in losses]) == Stability(spikes, diverged)


@pytest.fixture
def table(tmp_path):
    def write(text, name="numbers.csv"):
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


def test_what_a_report_writes_is_read_back(table):
    arms = [arm("baseline", 1.0), arm("fast", 2.0)]
    repeated = Curve("0", (100, 200), (5.0, 4.0), (6400, 12800), repeats=(3.5, 4.5))
    arms.append(Arm("repeated", (repeated,)))
    assert read_arms([table(to_csv(curve_records(arms)))]) == arms


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # as spreadsheets and people write
        ("\ufeffarm, step, fid\na, 100, 5\na, 200, 3\n", {"fids": (5, 3)}),
        ("arm,step,fid\na,100,\na,200,3\n", {"best": 3}),
        ("arm,step,fid,images\na,100,5,64\na,200,3,\n", {"images": None}),
        # repeats of earlier steps do not count
        ("arm,step,fid,repeat\na,2,3,\na,2,4,2\na,2,5,1\na,1,6,0\na,1,7,1\n", {"repeats": (5, 4)}),
    ],
)
def test_a_file_may_hold_odd_spaces_no_fid_images_and_repeats(table, text, expected):
    ((curve,),) = (arm.curves for arm in read_arms([table(text)]))
    assert {name: getattr(curve, name) for name in expected} == expected
    assert len(curve.steps) == 2
    assert all(math.isnan(fid) or fid < 7 for fid in curve.fids)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("arm,steps,fid\n", "needs the columns arm, step and fid, and has no step"),
        ("arm,step,fid\na,ten,5\n", "numbers.csv, line 2: step must be a number, got 'ten'"),
        ("arm,step,fid\na,1,5\na,1,4\n", "arm a, seed 0: steps must increase, got 1 after 1"),
    ],
)
def test_mistakes_are_refused_with_their_place(table, text, message):
    with pytest.raises(ValueError, match=message):
        read_arms([table(text)])
