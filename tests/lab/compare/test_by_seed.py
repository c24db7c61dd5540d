import math
import random

import pytest
from scipy import stats
from support.experiments import STEPS, arm

from lit_diffusion.lab.compare.by_seed import by_seed_table, last_by_seed, paired, speed_by_seed
from lit_diffusion.lab.compare.comparison import Arm, compare
from lit_diffusion.lab.compare.curves import Curve
from lit_diffusion.lab.compare.report.wording import fid_text, p_text
from lit_diffusion.lab.compare.speedup import holm

NAN = math.nan


def related(speed, name="arm", seeds=range(5), spread=0.2):
    """An arm whose seeds are fast or slow as those of every other arm are, up to 2%."""
    curves = []
    for seed in seeds:
        luck = math.exp(random.Random(seed).gauss(0, spread))
        luck *= math.exp(random.Random(f"{name} {seed}").gauss(0, 0.02))
        fids = [0.3 + 20 * (step * speed * luck / 100) ** -0.8 for step in STEPS]
        curves.append(Curve(str(seed), STEPS, tuple(fids)))
    return Arm(name, tuple(curves))


def compared(other, base=None):
    base = base or related(1.0, "baseline")
    return compare([base, other], base.name), base


def test_pairs_are_tested_as_scipy_tests_them():
    rng = random.Random(0)
    first = [math.exp(rng.gauss(0.3, 0.5)) for _ in range(7)]
    second = [math.exp(rng.gauss(0.0, 0.5)) for _ in range(7)]
    found = paired(zip(first, second, strict=True))
    told = stats.ttest_rel([math.log(v) for v in first], [math.log(v) for v in second])
    interval = told.confidence_interval(0.95)
    assert found.p == pytest.approx(told.pvalue)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))


@pytest.mark.parametrize(
    "numbers",
    [
        ([2.0], [1.0]),
        ([], []),
        ([2.0, 4.0], [1.0, 2.0]),
        ([0.3, 0.7 * 3, 1.1 * 3], [0.1, 0.7, 1.1]),
    ],
)
def test_too_few_pairs_or_equal_ratios_have_no_test(numbers):
    assert paired(zip(*numbers, strict=True)) is None


def test_what_seeds_share_drops_out():
    """An arm that is 10% faster, with seeds that differ by 20%: only seed by seed it is seen."""
    comparison, base = compared(related(1.1))
    (result,) = comparison.results
    found = speed_by_seed(result, base)
    assert result.speedup.p > 0.1
    assert found.p < 0.01
    assert found.low < math.log(1.1) < found.high
    assert math.exp(found.difference) == pytest.approx(result.speedup.ratio)


def test_by_seed_five_in_a_hundred_equal_arms_differ():
    ps = []
    for k in range(300):
        seeds = [f"{k} {i}" for i in range(4)]
        base = related(1.0, f"a{k}", seeds)
        comparison, _ = compared(related(1.0, f"b{k}", seeds), base)
        ps.append(speed_by_seed(comparison.results[0], base).p)
    assert stats.binomtest(sum(p < 0.05 for p in ps), len(ps), 0.05).pvalue > 0.001
    assert stats.kstest(ps, "uniform").pvalue > 0.001


def test_seeds_that_one_arm_lacks_take_no_part():
    comparison, base = compared(related(1.5, seeds=(1, 3, 4, 9)))
    assert speed_by_seed(comparison.results[0], base).degrees == 2
    assert last_by_seed(comparison.results[0].arm, base).degrees == 2
    assert by_seed_table(comparison).rows[0][:2] == ("arm", "3")


def test_an_fid_that_a_seed_had_from_the_start_or_never_has_no_speed():
    comparison, base = compared(related(1.5), related(1.0, "baseline"))
    early = compare([base, comparison.results[0].arm], "baseline", target=19.0).results[0]
    assert speed_by_seed(early, base) is None
    lost = Arm("arm", tuple(Curve(c.seed, STEPS, (NAN,) * 20) for c in base.curves))
    assert speed_by_seed(compared(lost)[0].results[0], base) is None


def test_last_fids_are_of_all_sets_of_samples_that_all_have():
    one = Arm("one", tuple(Curve(s, (1,), (2.0,), repeats=(8.0, 99.0)) for s in "abc"))
    other = Arm(
        "other",
        tuple(Curve(s, (1,), (f,), repeats=(1.0,)) for s, f in zip("abc", (1, 2, 4), strict=True)),
    )
    found = last_by_seed(one, other)
    assert math.exp(found.difference) == pytest.approx(4 / 2**0.5)


@pytest.mark.parametrize("last", [NAN, math.inf])
def test_last_fids_that_are_not_finite_have_no_ratio(last):
    base = related(1.0, "baseline")
    lost = [Curve(c.seed, STEPS, (*c.fids[:-1], last)) for c in related(2.0).curves]
    assert last_by_seed(Arm("lost", tuple(lost)), base) is None


def test_a_set_of_samples_without_a_finite_fid_has_no_ratio():
    one, other = (
        Arm(n, tuple(Curve(s, (1,), (f,), repeats=(r,)) for s, f in zip("abc", fids, strict=True)))
        for n, fids, r in (("one", (2.0, 3.0, 5.0), math.inf), ("other", (1.0, 2.0, 2.0), 1.0))
    )
    assert last_by_seed(one, other) is None


def cut(arm, count):
    return Arm(
        arm.name, tuple(Curve(c.seed, c.steps[:-count], c.fids[:-count]) for c in arm.curves)
    )


def test_last_fids_after_unequal_numbers_of_steps_have_no_ratio():
    base = related(1.0, "baseline")
    comparison, _ = compared(cut(related(2.0), 1), base)
    assert last_by_seed(comparison.results[0].arm, base) is None
    assert by_seed_table(comparison).rows[0][-2:] == ("-", "-")
    almost = Arm("a", tuple(Curve(c.seed, (*STEPS[:-1], 1990), c.fids) for c in base.curves[:2]))
    assert last_by_seed(related(2.0), almost) is not None


def test_the_table_has_p_values_corrected_within_each_column():
    base = related(1.0, "baseline")
    arms = [related(1.03, "a"), related(1.04, "b"), related(1.0, "c"), cut(related(1.02, "d"), 1)]
    comparison = compare([base, *arms], "baseline")
    table = by_seed_table(comparison)
    results = comparison.results
    speeds = [speed_by_seed(result, base).p for result in results]
    lasts = [test.p for result in results if (test := last_by_seed(result.arm, base))]
    assert [row[3] for row in table.rows] == [p_text(p) for p in holm(speeds)]
    assert [row[5] for row in table.rows if row[5] != "-"] == [p_text(p) for p in holm(lasts)]
    assert len({*speeds, *holm(speeds)}) > len(speeds)  # the correction changes them
    assert len(lasts) == 3


def test_the_table_says_to_which_fid_a_speed_is_if_not_to_the_target():
    comparison, _ = compared(related(0.5, "slow"))
    ((_, _, speed, *_),) = by_seed_table(comparison).rows
    assert speed.startswith("0.5")
    assert speed.endswith(f" to FID {fid_text(comparison.results[0].at)}")


def test_an_arm_without_any_test_stands_there_too():
    base = related(1.0, "baseline")
    lost = Arm("lost", tuple(Curve(c.seed, STEPS, (NAN,) * 20) for c in base.curves))
    rows = by_seed_table(compare([base, related(2.0), lost], "baseline")).rows
    assert ("lost", "5", "-", "-", "-", "-") in rows
    assert by_seed_table(compare([base, lost], "baseline")) is None


def test_arms_that_share_no_seeds_have_no_table():
    base = arm("baseline", 1.0, range(3))
    assert by_seed_table(compare([base, arm("a", 2.0, range(5, 8))], "baseline")) is None
