import math
import random
import re
from dataclasses import replace

import pytest
from support.experiments import STEPS, arm, fid_at
from support.golden import FOLDER

from lit_diffusion.lab.compare.comparison import (
    Verdict,
    by_images,
    by_other_metrics,
    compare,
    leads,
)
from lit_diffusion.lab.compare.curves import Arm, Bound, Crossing, Curve, mean_crossing, read_arms
from lit_diffusion.lab.compare.tables import format_verdict

NAN = math.nan
BASE = arm("baseline", 1.0)


def compare_with_base(*arms, **options):
    """Comparison with BASE, and its results by name."""
    comparison = compare([BASE, *arms], "baseline", **options)
    return comparison, {result.arm.name: result for result in comparison.results}


# The paper's own tables


@pytest.mark.parametrize(
    ("table", "baseline", "expected"),
    [
        ("paper_table2.csv", "GD", {"GD+Ours": 2.11, "Min-SNR": 1.24}),
        ("paper_table3.csv", "ID", {"ID+Ours": 1.94, "FDM": 1.69}),
    ],
)
def test_the_papers_own_tables_give_what_they_hold_and_not_what_its_text_says(
    table, baseline, expected
):
    results = compare(read_arms([str(FOLDER / table)]), baseline).results
    assert {r.arm.name: round(r.speedup.ratio, 2) for r in results} == expected
    assert {r.verdict for r in results} == {Verdict.UNKNOWN}  # one seed each


@pytest.mark.parametrize("speed", [0.5, 3.0])
def test_arms_without_noise_have_their_true_speedup(speed):
    """Up to what is lost by drawing a power law as straight lines between evaluations."""
    curves = [
        Arm(n, (Curve("0", STEPS, tuple(fid_at(s, v) for s in STEPS)),))
        for n, v in (("baseline", 1.0), ("other", speed))
    ]
    assert compare(curves, "baseline").results[0].speedup.ratio == pytest.approx(speed, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(("speed", "spread"), [(0.6, 0.15), (1.0, 0.05)])
def test_intervals_hold_the_true_speedup_in_95_of_100_experiments(speed, spread):
    """Also where seeds of one arm or the other never reach the baseline's FID."""
    covered, logs = [], []
    for k in range(800):
        seeds = [f"{k} {seed}" for seed in range(5)]
        arms = [arm("baseline", 1.0, seeds, spread), arm("other", speed, seeds, spread)]
        gain = compare(arms, "baseline").results[0].speedup
        covered.append(gain.low <= speed <= gain.high)
        logs.append(math.log(gain.ratio))
    assert sum(covered) / len(covered) == pytest.approx(0.95, abs=0.025)  # 3 s.d.
    assert sum(logs) / len(logs) == pytest.approx(math.log(speed), abs=0.02)


def test_verdicts_and_winners_are_those_of_the_truth_where_the_effect_is_large():
    same, slow = arm("c", 1.0), arm("slow", 0.6)
    comparison, _ = compare_with_base(arm("a", 1.5), arm("b", 2.0), same, slow)
    verdicts = [Verdict.FASTER, Verdict.FASTER, Verdict.NO_DIFFERENCE, Verdict.SLOWER]
    assert [result.verdict for result in comparison.results] == verdicts
    assert [result.arm.name for result in comparison.winners] == ["b", "a"]
    assert comparison.best.arm.name == "b"
    assert compare_with_base(same, slow)[0].winners == []


def test_speedups_do_not_depend_on_units_nor_on_the_order_of_arms_and_seeds():
    def rescale(arm):
        curves = [
            Curve(c.seed, tuple(0.5 * s for s in c.steps), tuple(30 * f for f in c.fids))
            for c in reversed(arm.curves)
        ]
        return Arm(arm.name, tuple(curves))

    arms = [BASE, arm("b", 1.1), arm("c", 0.7), arm("a", 1.4)]
    plain = compare(arms, "baseline")
    other = compare([rescale(each) for each in reversed(arms)], "baseline")
    assert [each.name for each in plain.arms] == ["baseline", "a", "b", "c"]
    assert [each.name for each in other.arms] == ["baseline", "a", "b", "c"]
    for one, two in zip(plain.results, other.results, strict=True):
        expected = pytest.approx((one.speedup.ratio, one.speedup.p), rel=1e-9)
        assert (two.speedup.ratio, two.speedup.p) == expected


def test_a_given_target_that_the_baseline_misses_leaves_a_lower_bound():
    result = compare_with_base(arm("fast", 2.5), target=1.6)[1]["fast"]
    assert result.speedup.is_lower_bound
    assert 1 < result.speedup.low < 2.5
    assert result.verdict is Verdict.FASTER


def test_an_arm_that_misses_the_target_is_measured_at_the_fid_that_all_its_seeds_reached():
    comparison, results = compare_with_base(slow := arm("slow", 0.5))
    result = results["slow"]
    assert comparison.target == max(min(curve.fids) for curve in BASE.curves)
    assert all(c.bound is Bound.MORE_THAN for c in result.crossings)
    assert str(mean_crossing(result.crossings)) == "> 2,000"
    assert result.at == max(min(curve.fids) for curve in slow.curves) > comparison.target
    assert result.speedup.low < 0.5 < result.speedup.high
    assert not result.speedup.is_upper_bound


def test_a_seed_that_was_never_finite_takes_the_verdict_with_it():
    """It is not left out, which would flatter an arm that diverges."""
    lost = Curve("9", STEPS, (NAN,) * len(STEPS))
    result = compare_with_base(Arm("fast", (*arm("fast", 2.0).curves, lost)))[1]["fast"]
    assert result.verdict is Verdict.UNKNOWN
    assert result.crossings[-1] == Crossing(2000, Bound.MORE_THAN)


@pytest.mark.parametrize("fids", [(NAN,) * 20, tuple(range(50, 250, 10))], ids=["nan", "rising"])
def test_an_arm_that_diverged_is_never_called_noise(fids):
    """There is no FID at which its speed could be measured, and it missed the target."""
    lost = Arm("lost", tuple(Curve(str(k), STEPS, fids) for k in range(5)))
    comparison, results = compare_with_base(lost)
    result = results["lost"]
    assert result.verdict is Verdict.MISSED
    assert (result.at, result.speedup.p, result.holm_p) == (comparison.target, None, None)
    assert result.speedup.is_upper_bound
    missed_by_both = compare_with_base(lost, target=0.1)[1]["lost"]
    assert missed_by_both.verdict is Verdict.UNKNOWN


# Arms that stand still


def still(name="still", seeds=range(3)):
    """Fast at first, then at an FID of 4 for good: when it is passed there is chance."""
    rng = random.Random(name)
    passed = [rng.choice([300, 1000, 1900]) for _ in seeds]
    curves = []
    for curve, first in zip(arm(name, 9.0, seeds).curves, passed, strict=True):
        levels = (
            4.0 * math.exp(rng.gauss(0, 0.01)) * (1 - 0.05 * (step >= first)) for step in STEPS
        )
        fids = tuple(max(pair) for pair in zip(curve.fids, levels, strict=True))
        curves.append(Curve(curve.seed, STEPS, fids))
    return Arm(name, tuple(curves))


def test_an_arm_that_stands_still_above_the_target_ends_worse():
    comparison, results = compare_with_base(still())
    result = results["still"]
    assert result.verdict is Verdict.WORSE
    assert re.fullmatch(r"ends worse \(p [<=] 0\.\d+\)", format_verdict(result, comparison))
    assert result.speedup.p > 0.05  # its speed alone would be called noise
    assert result.end_p < 0.05
    others = [arm(f"other {k}", 1.0) for k in range(4)]
    among = compare_with_base(still(), *others)[1]["still"]
    assert among.end_p == pytest.approx(5 * result.end_p)


@pytest.mark.parametrize(
    ("last_steps", "target", "verdict"),
    [
        ((1900,), None, Verdict.NO_DIFFERENCE),  # trained for less than one seed of the baseline
        ((1900, 2000, 4000), None, Verdict.WORSE),  # for more, as by images seen
        ((1900, 2000), 0.01, Verdict.NO_DIFFERENCE),  # the baseline misses the target, too
    ],
)
def test_an_arm_ends_worse_only_after_as_many_steps_and_where_the_baseline_got_there(
    last_steps, target, verdict
):
    curves = [
        Curve(c.seed, (*STEPS[:18], *last_steps), (*c.fids, c.fids[-1])[: 18 + len(last_steps)])
        for c in still().curves
    ]
    first, *rest = BASE.curves
    base = Arm("baseline", (replace(first, steps=STEPS[:19], fids=first.fids[:19]), *rest))
    (result,) = compare([base, Arm("still", tuple(curves))], "baseline", target).results
    assert result.verdict is verdict
    assert (result.end_p is not None) == (verdict is Verdict.WORSE)


def test_an_arm_whose_last_fid_is_not_finite_has_no_end_to_compare():
    curves = [Curve(c.seed, STEPS, (*c.fids[:-1], math.inf)) for c in still().curves]
    assert compare_with_base(Arm("still", tuple(curves)))[1]["still"].end_p is None


@pytest.mark.slow
def test_arms_that_train_like_the_baseline_rarely_end_worse():
    """Fewer than the one in forty that a p-value of 0.05 allows for, as few miss the target too."""
    verdicts = []
    for k in range(400):
        base, other = (arm(n, 1.0, [f"{n}{k}{i}" for i in range(3)], 0.2) for n in "ab")
        verdicts.append(compare([base, other], "a").results[0].verdict)
    assert verdicts.count(Verdict.WORSE) <= 10
    assert verdicts.count(Verdict.NO_DIFFERENCE) > 340


def test_what_is_significant_alone_may_not_be_among_many():
    weak = arm("weak", 1.15)
    alone = compare_with_base(weak)[1]["weak"]
    others = [arm(f"other {k}", 1.0) for k in range(12)]
    among = compare_with_base(weak, *others)[1]["weak"]
    assert alone.speedup.p == alone.holm_p == among.speedup.p < 0.05 < among.holm_p
    assert (alone.verdict, among.verdict) == (Verdict.FASTER, Verdict.UNCLEAR)


def test_arms_without_a_test_count_as_tests_that_show_nothing():
    """Otherwise an arm that diverges would lower the p of the others."""
    alone = compare_with_base(arm("a", 1.4))[1]["a"]
    results = compare_with_base(arm("a", 1.4), arm("one seed", 1.4, [7]))[1]
    assert results["one seed"].holm_p is None
    assert results["a"].holm_p == pytest.approx(2 * alone.speedup.p)


def early(level, name):
    """Fast down to a level, and no further."""
    curves = (
        Curve(c.seed, c.steps, tuple(max(fid, level + 0.01 * k) for fid in c.fids))
        for k, c in enumerate(arm(name, 9.0).curves)
    )
    return Arm(name, tuple(curves))


def test_an_arm_that_missed_the_target_does_not_win_before_one_that_reached_it():
    """It may be many times faster to a FID that is easy."""
    comparison, _ = compare_with_base(arm("true", 1.5), early(3.0, "stuck"))
    assert [r.arm.name for r in comparison.results] == ["stuck", "true"]
    assert {r.verdict for r in comparison.results} == {Verdict.FASTER}
    assert [r.arm.name for r in comparison.winners] == ["true"]


def test_an_arm_that_ends_worse_than_most_seeds_of_the_baseline_falls_short():
    """Four seeds of the baseline come to an FID of 2.1; the last one stays at 5."""
    fids = [[2.1 + 0.01 * k + 1500 / step for step in STEPS] for k in range(4)]
    fids.append([max(5.0, fid_at(step, 0.9)) for step in STEPS])
    base = Arm("baseline", tuple(Curve(str(k), STEPS, tuple(v)) for k, v in enumerate(fids)))
    comparison = compare([base, early(4.0, "early"), arm("true", 2.5)], "baseline")
    result, true = sorted(comparison.results, key=lambda each: each.arm.name)
    assert (comparison.target, result.at, result.verdict) == (5.0, 5.0, Verdict.FASTER)
    assert comparison.falls_short(result)
    assert format_verdict(result, comparison) == "faster, but ends higher"
    assert not comparison.falls_short(true)
    assert comparison.best is true


def with_images(name, speed, images_a_step):
    images = tuple(float(images_a_step * step) for step in STEPS)
    return Arm(name, tuple(replace(c, images=images) for c in arm(name, speed).curves))


def test_by_images_an_arm_pays_for_its_larger_batch():
    arms = [with_images("baseline", 1.0, 64), with_images("large", 1.5, 128)]
    steps = compare(arms, "baseline").results[0].speedup
    images = compare(by_images(arms), "baseline").results[0].speedup
    assert images.ratio == pytest.approx(steps.ratio / 2)
    assert by_images([arms[0], with_images("in proportion", 1.5, 64)]) is None
    assert by_images([arms[0], arm("not recorded", 1.5)]) is None


@pytest.mark.parametrize(
    ("arms", "options", "message"),
    [
        ([BASE, arm("b", 1.0)], {"baseline": "c"}, "no arm 'c' for the baseline"),
        ([BASE, arm("b", 1.0)], {"target": -1.0}, "target must be a positive FID, got -1"),
        (
            [Arm("baseline", (Curve("3", (1, 2), (NAN, NAN)),)), arm("b", 1.0)],
            {},
            "baseline baseline has no finite FID for seed 3.*pass a target",
        ),
    ],
)
def test_what_cannot_be_compared_is_refused(arms, options, message):
    with pytest.raises(ValueError, match=message):
        compare(arms, **{"baseline": "baseline"} | options)


# Other metrics of the same samples


def with_pixels(base_arm, speed, ends=0.0):
    """An arm with another speed by pixels, which fall to `ends` at most."""
    curves = []
    others = arm(f"{base_arm.name} pixels", speed).curves
    for curve, other in zip(base_arm.curves, others, strict=True):
        metrics = tuple({"pixels": max(fid, ends)} for fid in other.fids)
        curves.append(replace(curve, other_metrics=metrics))
    return Arm(base_arm.name, tuple(curves))


PIXELS_BASE = with_pixels(BASE, 1.0)


def by_pixels(*arms):
    return by_other_metrics(compare([PIXELS_BASE, *arms], "baseline"))["pixels"]


@pytest.mark.parametrize(
    ("speed", "ends", "expected"), [(2.0, 0.0, True), (1.0, 0.0, False), (2.0, 2.4, False)]
)
def test_an_arm_leads_by_another_metric_where_it_is_faster_and_ends_no_higher(
    speed, ends, expected
):
    other = by_pixels(with_pixels(arm("fast", 2.0), speed, ends))
    assert other.metric == "pixels"
    assert other.target == max(
        min(p["pixels"] for p in c.other_metrics) for c in PIXELS_BASE.curves
    )
    assert leads("fast", other) is expected


def test_further_arms_do_not_count_against_a_lead():
    rest = [with_pixels(arm(f"arm{i}", 1.0), 1.0) for i in range(12)]
    among = by_pixels(with_pixels(arm("fast", 2.0), 1.15), *rest)
    (fast,) = (result for result in among.results if result.arm.name == "fast")
    assert fast.verdict is Verdict.UNCLEAR
    assert leads("fast", among)


def test_arms_without_another_metric_are_left_out_of_its_comparison_and_count_in_its_tests():
    fast = with_pixels(arm("fast", 1.0), 1.15)
    two, three = by_pixels(fast), by_pixels(fast, arm("bare", 2.0))
    assert [a.name for a in three.arms] == ["baseline", "fast"]
    assert (two.num_tests, three.num_tests) == (1, 2)
    assert three.results[0].holm_p == min(2 * two.results[0].holm_p, 1)
    assert not leads("bare", three)
    assert by_other_metrics(compare_with_base(fast)[0]) == {}
