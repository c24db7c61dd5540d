import math

import numpy as np
import pytest
from scipy import stats

from lit_diffusion.lab.compare.curves import Bound, Crossing
from lit_diffusion.lab.compare.speedup import holm, speedup, welch

NOT, EARLY = Bound.MORE_THAN, Bound.AT_MOST


def drawn(seed, counts=(5, 5), spreads=(1.0, 1.0), shift=0.0):
    rng = np.random.default_rng(seed)
    first = rng.normal(shift, spreads[0], counts[0]).tolist()
    return first, rng.normal(0, spreads[1], counts[1]).tolist()


def crossings(logs):
    return [Crossing(math.exp(log)) for log in logs]


# Welch


@pytest.mark.parametrize("counts", [(5, 5), (2, 2), (3, 9), (50, 2)])
@pytest.mark.parametrize("spreads", [(1.0, 1.0), (0.01, 3.0)])
def test_welch_is_scipys(counts, spreads):
    first, second = drawn(1, counts, spreads, shift=0.7)
    expected = stats.ttest_ind(first, second, equal_var=False)
    found = welch(first, second)
    assert (found.p, found.degrees) == pytest.approx((expected.pvalue, expected.df), rel=1e-9)
    interval = expected.confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high), rel=1e-9)


def test_one_value_or_no_spread_at_all_leaves_no_test():
    assert welch([1.0], [1.0, 2.0]) is None
    assert welch([1.0, 1.0], [2.0, 2.0]) is None
    assert welch([1.0, 1.0], [2.0, 3.0]).degrees == 1  # one of them suffices


# Speed-ups


def test_a_speedup_is_the_ratio_of_geometric_means_with_welchs_interval():
    slow, fast = drawn(2, (5, 4), (0.1, 0.2), shift=0.5)
    found, test = speedup(crossings(slow), crossings(fast)), welch(slow, fast)
    expected = [math.exp(end) for end in (test.difference, test.low, test.high)]
    assert [found.ratio, found.low, found.high] == pytest.approx(expected)
    assert found.p == pytest.approx(test.p)


def test_an_interval_holds_one_exactly_where_p_is_above_one_in_twenty():
    found = [speedup(*map(crossings, drawn(seed, shift=1.0))) for seed in range(200)]
    assert [f.low <= 1 <= f.high for f in found] == [f.p >= 0.05 for f in found]
    assert len({f.p >= 0.05 for f in found}) == 2


def test_exchanging_the_arms_inverts_the_ratio():
    slow, fast = map(crossings, drawn(3, shift=1.0))
    one, other = speedup(slow, fast), speedup(fast, slow)
    assert (other.ratio, other.low, other.high) == pytest.approx(
        (1 / one.ratio, 1 / one.high, 1 / one.low)
    )
    assert other.p == pytest.approx(one.p)


@pytest.mark.parametrize("unit", [1e-3, 64.0])
def test_a_speedup_has_no_unit(unit):
    slow, fast = map(crossings, drawn(4, shift=1.0))
    scaled = [[Crossing(unit * c.step) for c in arm] for arm in (slow, fast)]
    one, other = speedup(slow, fast), speedup(*scaled)
    assert (other.ratio, other.low, other.high, other.p) == pytest.approx(
        (one.ratio, one.low, one.high, one.p)
    )


def test_one_seed_has_a_ratio_and_no_interval():
    found = speedup([Crossing(4000)], [Crossing(2000)])
    assert (found.ratio, found.low, found.high, found.p) == (2, None, None, None)


@pytest.mark.parametrize("shift", [-0.5, 0.0, 0.5])
@pytest.mark.parametrize("counts", [(5, 5), (3, 8)])
def test_the_interval_holds_the_true_ratio_in_95_of_100_experiments(shift, counts):
    found = [
        speedup(*map(crossings, drawn(seed, counts, (0.1, 0.3), shift))) for seed in range(2000)
    ]
    covered = sum(f.low <= math.exp(shift) <= f.high for f in found) / len(found)
    assert covered == pytest.approx(0.95, abs=0.015)  # 3 standard deviations


# Seeds that never reach the target


def censored(logs, limit):
    end = math.exp(limit)
    return [Crossing(math.exp(x)) if x < limit else Crossing(end, NOT) for x in logs]


def test_a_baseline_that_never_gets_there_leaves_a_lower_bound():
    found = speedup([Crossing(3500), Crossing(4000, NOT)], [Crossing(2000), Crossing(1900)])
    assert found.is_lower_bound
    assert not found.is_upper_bound
    assert 1 < found.low < found.ratio < found.high == math.inf


def test_an_arm_that_never_gets_there_leaves_an_upper_bound():
    found = speedup([Crossing(2000), Crossing(1900)], [Crossing(3500), Crossing(4000, NOT)])
    assert found.is_upper_bound
    assert not found.is_lower_bound
    assert 0 == found.low < found.ratio < found.high < 1


def test_an_arm_that_is_there_before_the_first_evaluation_leaves_a_lower_bound():
    found = speedup([Crossing(2000), Crossing(1900)], [Crossing(100, EARLY), Crossing(110)])
    assert found.is_lower_bound
    assert found.high == math.inf


@pytest.mark.parametrize(
    ("baseline", "arm"),
    [
        ([Crossing(4000, NOT), Crossing(3900)], [Crossing(4000, NOT), Crossing(3000)]),
        # That of a longer run: whether the baseline takes longer still is not known.
        ([Crossing(1000, NOT), Crossing(990)], [Crossing(1900), Crossing(1950)]),
        ([Crossing(1900), Crossing(1950)], [Crossing(1000, NOT), Crossing(990)]),
    ],
)
def test_there_is_no_interval_where_bounds_leave_open_who_is_faster(baseline, arm):
    found = speedup(baseline, arm)
    assert (found.low, found.high, found.p) == (None, None, None)


@pytest.mark.parametrize("limit", [0.3, 0.5, 0.8])
def test_the_lower_end_of_a_bound_stays_below_the_truth(limit):
    """In 97.5 of 100 experiments, as that of a whole interval does."""
    held = []
    for seed in range(2000):
        slow, fast = drawn(seed, (5, 5), (0.2, 0.2), shift=0.5)
        found = speedup(censored(slow, limit), crossings(fast))
        held.append(found.low is None or found.low <= math.exp(0.5))
    assert sum(held) / len(held) > 0.965


# Holm


def test_holm_multiplies_the_smallest_by_the_number_of_tests_and_the_next_by_one_less():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])


def test_holm_lies_between_no_correction_and_bonferronis_and_keeps_the_order():
    rng = np.random.default_rng(0)
    for count in (1, 2, 7, 30):
        ps = rng.uniform(size=count).tolist()
        adjusted = holm(ps)
        assert all(p <= a <= min(count * p, 1) for p, a in zip(ps, adjusted, strict=True))
        order = sorted(range(count), key=lambda k: ps[k])
        assert [adjusted[k] for k in order] == sorted(adjusted)


def test_of_families_without_effect_one_in_twenty_rejects_after_holm():
    rng = np.random.default_rng(1)
    wrong = [min(holm(rng.uniform(size=6).tolist())) < 0.05 for _ in range(4000)]
    assert sum(wrong) / len(wrong) == pytest.approx(0.05, abs=0.011)


def test_without_tests_there_is_nothing_to_correct():
    assert holm([]) == []
    assert holm([0.03, 0.01, None, 0.5]) == [0.06, 0.03, None, 0.5]
