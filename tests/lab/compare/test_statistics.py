import math
import random
from dataclasses import astuple
from statistics import fmean, stdev, variance

import numpy as np
import pytest
from scipy import stats
from support.experiments import STEPS

from lit_diffusion.lab.compare.comparison import compare
from lit_diffusion.lab.compare.curves import Arm, Bound, Crossing, Curve
from lit_diffusion.lab.compare.statistics import (
    holm,
    last_fid_by_seed,
    paired,
    speedup,
    speedup_by_seed,
    welch,
)

NOT, EARLY = Bound.MORE_THAN, Bound.AT_MOST


def drawn(seed, counts=(5, 5), spreads=(1.0, 1.0), shift=0.0):
    rng = np.random.default_rng(seed)
    first = rng.normal(shift, spreads[0], counts[0]).tolist()
    return first, rng.normal(0, spreads[1], counts[1]).tolist()


def crossings(logs):
    return [Crossing(math.exp(log)) for log in logs]


def interval(difference, error, degrees):
    """The difference, ends of its 95% interval, and p."""
    reach = stats.t.ppf(0.975, degrees) * error
    p = 2 * stats.t.sf(abs(difference) / error, degrees)
    return difference, difference - reach, difference + reach, p


# t tests


@pytest.mark.parametrize(("counts", "spreads"), [((2, 2), (0.01, 3.0)), ((3, 9), (0.0, 1.0))])
def test_welch_is_the_formula(counts, spreads):
    first, second = drawn(1, counts, spreads, shift=0.7)
    v1, v2 = variance(first) / counts[0], variance(second) / counts[1]
    degrees = (v1 + v2) ** 2 / (v1**2 / (counts[0] - 1) + v2**2 / (counts[1] - 1))
    expected = interval(fmean(first) - fmean(second), math.sqrt(v1 + v2), degrees)
    assert astuple(welch(first, second)) == pytest.approx(expected, rel=1e-9)


def test_paired_is_the_formula():
    first, second = drawn(2, (7, 7), shift=0.3)
    differences = [a - b for a, b in zip(first, second, strict=True)]
    expected = interval(fmean(differences), stdev(differences) / math.sqrt(7), 6)
    assert astuple(paired(first, second)) == pytest.approx(expected, rel=1e-9)


def test_one_value_or_no_spread_at_all_leaves_no_test():
    assert welch([1.0], [1.0, 2.0]) is None
    assert welch([1.0, 1.0], [2.0, 2.0]) is None
    assert paired([2.0], [1.0]) is None
    assert paired([], []) is None
    assert paired([1.0, math.nan, 2.0], [0.5, 0.7, 0.9]) is None  # a run that diverged
    assert paired([0.3, 2.1, 3.3], [0.1, 1.9, 3.1]) is None  # equal but for rounding


def test_a_speedup_is_the_ratio_of_geometric_means_with_welchs_interval():
    slow, fast = drawn(2, (5, 4), (0.1, 0.2), shift=0.5)
    gain, test = speedup(crossings(slow), crossings(fast)), welch(slow, fast)
    expected = [math.exp(end) for end in (test.difference, test.low, test.high)]
    assert [gain.ratio, gain.low, gain.high] == pytest.approx(expected)
    assert gain.p == pytest.approx(test.p)
    one_seed = speedup([Crossing(4000)], [Crossing(2000)])
    assert (one_seed.ratio, one_seed.low, one_seed.high, one_seed.p) == (2, None, None, None)


SOON, LATE = [Crossing(2000), Crossing(1900)], [Crossing(3500), Crossing(4000, NOT)]


@pytest.mark.parametrize(
    ("baseline", "arm"), [(LATE, SOON), (SOON, [Crossing(100, EARLY), Crossing(110)])]
)
def test_an_arm_or_a_baseline_that_never_gets_there_or_an_arm_from_the_start_leaves_a_bound(
    baseline, arm
):
    gain, inverse = speedup(baseline, arm), speedup(arm, baseline)
    assert (gain.is_lower_bound, gain.is_upper_bound) == (True, False)
    assert 1 < gain.low < gain.ratio < gain.high == math.inf
    assert (inverse.is_lower_bound, inverse.is_upper_bound) == (False, True)
    assert 0 == inverse.low < inverse.ratio < inverse.high < 1


@pytest.mark.parametrize(
    ("baseline", "arm"),
    [
        ([Crossing(4000, NOT), Crossing(3900)], [Crossing(4000, NOT), Crossing(3000)]),
        # That of a longer run: whether the baseline takes longer still is unknown.
        ([Crossing(1000, NOT), Crossing(990)], [Crossing(1900), Crossing(1950)]),
        ([Crossing(1900), Crossing(1950)], [Crossing(1000, NOT), Crossing(990)]),
    ],
)
def test_there_is_no_interval_where_bounds_leave_open_who_is_faster(baseline, arm):
    gain = speedup(baseline, arm)
    assert (gain.low, gain.high, gain.p) == (None, None, None)


def test_holm_multiplies_the_smallest_by_the_number_of_tests_and_the_next_by_one_less():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    # a test that the data did not allow counts as one of p = 1
    assert holm([0.03, 0.01, None, 0.5]) == pytest.approx([0.09, 0.04, None, 1.0])
    assert holm([None, None, 0.03]) == pytest.approx([None, None, 0.09])


def related(speed, name="arm", seeds=range(5)):
    """An arm whose seeds are fast or slow (20%) as those of every other arm are, up to 2%."""
    curves = []
    for seed in seeds:
        luck = math.exp(random.Random(seed).gauss(0, 0.2))
        luck *= math.exp(random.Random(f"{name} {seed}").gauss(0, 0.02))
        fids = [0.3 + 20 * (step * speed * luck / 100) ** -0.8 for step in STEPS]
        curves.append(Curve(str(seed), STEPS, tuple(fids)))
    return Arm(name, tuple(curves))


BASE = related(1.0, "baseline")


def test_what_seeds_share_cancels():
    """An arm that is 10% faster, with seeds that differ by 20%: only seed by seed it is seen."""
    arm = related(1.1)
    (result,) = compare([BASE, arm], "baseline").results
    test = speedup_by_seed(arm, BASE, result.at)
    assert result.speedup.p > 0.1
    assert test.p < 0.01
    assert test.low < math.log(1.1) < test.high
    assert math.exp(test.difference) == pytest.approx(result.speedup.ratio)


def test_seeds_that_one_arm_lacks_take_no_part():
    arm, fewer = related(1.5, seeds=(9, 4, 1, 3)), related(1.5, seeds=(1, 3, 4))
    fid = max(arm.reached_by_all, BASE.reached_by_all)
    assert speedup_by_seed(arm, BASE, fid) == speedup_by_seed(fewer, BASE, fid)
    assert last_fid_by_seed(arm, BASE) == last_fid_by_seed(fewer, BASE)
    assert last_fid_by_seed(related(1.5, seeds=(8, 9)), BASE) is None


def test_last_fids_are_geometric_means_over_the_sets_of_samples_that_all_have():
    one = Arm("one", tuple(Curve(s, (1,), (2.0,), repeats=(8.0, 99.0)) for s in "abc"))
    fids = zip("abc", (1, 2, 4), strict=True)
    other = Arm("other", tuple(Curve(s, (1,), (f,), repeats=(1.0,)) for s, f in fids))
    assert math.exp(last_fid_by_seed(one, other).difference) == pytest.approx(4 / 2**0.5)


def test_last_fids_after_unequal_numbers_of_steps_have_no_ratio():
    short = [Curve(c.seed, c.steps[:-1], c.fids[:-1]) for c in related(2.0).curves]
    assert last_fid_by_seed(Arm("short", tuple(short)), BASE) is None
    almost = [Curve(c.seed, (*STEPS[:-1], 1990), c.fids) for c in related(2.0).curves]
    assert last_fid_by_seed(Arm("almost", tuple(almost)), BASE) is not None
