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
    by_metric,
    by_other_metrics,
    compare,
    leads,
)
from lit_diffusion.lab.compare.curves import Arm, Bound, Crossing, Curve, mean_crossing, read_arms
from lit_diffusion.lab.compare.tables import format_verdict

NAN = math.nan


def by_name(comparison):
    return {result.arm.name: result for result in comparison.results}


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
    comparison = compare(read_arms([str(FOLDER / table)]), baseline)
    ratios = {name: round(r.speedup.ratio, 2) for name, r in by_name(comparison).items()}
    assert ratios == expected
    assert {r.verdict for r in comparison.results} == {Verdict.UNKNOWN}  # one seed each


# Against a truth that is known


@pytest.mark.parametrize("speed", [0.5, 1.0, 3.0])
def test_arms_without_noise_have_their_true_speedup(speed):
    """Up to what is lost by drawing a power law as straight lines between evaluations."""
    curves = [
        Arm(n, (Curve("0", STEPS, tuple(fid_at(s, v) for s in STEPS)),))
        for n, v in (("baseline", 1.0), ("other", speed))
    ]
    assert compare(curves, "baseline").results[0].speedup.ratio == pytest.approx(speed, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(("speed", "spread"), [(0.6, 0.15), (1.0, 0.05), (2.0, 0.15)])
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
    arms = [arm("baseline", 1.0), arm("a", 1.5), arm("b", 2.0), arm("c", 1.0), arm("slow", 0.6)]
    comparison = compare(arms, "baseline")
    verdicts = [Verdict.FASTER, Verdict.FASTER, Verdict.NO_DIFFERENCE, Verdict.SLOWER]
    assert [result.verdict for result in comparison.results] == verdicts
    assert [result.arm.name for result in comparison.winners] == ["b", "a"]
    assert comparison.best.arm.name == "b"
    assert compare([arms[0], *arms[3:]], "baseline").winners == []


# Laws


def test_speedups_do_not_depend_on_units_nor_on_the_order_of_arms_and_seeds():
    arms = [arm("baseline", 1.0), arm("b", 1.1), arm("c", 0.7), arm("a", 1.4)]
    others = [
        Arm(
            a.name,
            tuple(
                Curve(c.seed, tuple(0.5 * s for s in c.steps), tuple(30 * f for f in c.fids))
                for c in reversed(a.curves)
            ),
        )
        for a in reversed(arms)
    ]
    plain, other = compare(arms, "baseline"), compare(others, "baseline")
    names = [arm.name for arm in plain.arms]
    assert names == [arm.name for arm in other.arms] == ["baseline", "a", "b", "c"]
    for one, two in zip(plain.results, other.results, strict=True):
        assert (two.speedup.ratio, two.speedup.p) == pytest.approx(
            (one.speedup.ratio, one.speedup.p), rel=1e-9
        )


def test_an_arm_beside_a_copy_of_itself_makes_no_difference():
    copy = Arm("copy", arm("baseline", 1.0).curves)
    (result,) = compare([arm("baseline", 1.0), copy], "baseline").results
    assert (result.speedup.ratio, result.speedup.p) == pytest.approx((1, 1))


def test_a_ratio_that_may_be_any_smaller_stands_last():
    base = Arm("baseline", (Curve("0", (100, 200), (3.0, 2.0)),))
    fast = Arm("fast", (Curve("0", (10, 100, 200), (3.0, 2.0, 1.0)),))
    short = Arm("short", (Curve("0", (1, 2), (9.0, 8.0)),))
    results = compare([base, short, fast], "baseline").results
    assert [r.arm.name for r in results] == ["fast", "short"]
    assert results[1].speedup.ratio > results[0].speedup.ratio
    assert results[1].speedup.is_upper_bound


# The target


def test_the_target_is_the_lowest_fid_that_every_seed_of_the_baseline_reached():
    base = arm("baseline", 1.0)
    comparison = compare([base, arm("a", 1.2)], "baseline")
    assert comparison.target == max(min(curve.fids) for curve in base.curves)
    assert all(c.bound is Bound.EXACT for c in base.crossings(comparison.target))


def test_a_given_target_that_the_baseline_misses_leaves_a_lower_bound():
    arms = [arm("baseline", 1.0), arm("fast", 2.5)]
    result = compare(arms, "baseline", target=1.6).results[0]
    assert result.speedup.is_lower_bound
    assert 1 < result.speedup.low < 2.5
    assert result.verdict is Verdict.FASTER


def test_an_arm_that_misses_the_target_is_measured_at_the_fid_that_all_its_seeds_reached():
    arms = [arm("baseline", 1.0), arm("slow", 0.5)]
    comparison = compare(arms, "baseline")
    (result,) = comparison.results
    assert all(c.bound is Bound.MORE_THAN for c in result.crossings)
    assert str(mean_crossing(result.crossings)) == "> 2,000"
    assert result.at == max(min(curve.fids) for curve in arms[1].curves) > comparison.target
    assert result.speedup.low < 0.5 < result.speedup.high
    assert not result.speedup.is_upper_bound


def test_a_seed_that_was_never_finite_takes_the_verdict_with_it():
    """It is not left out, which would flatter an arm that diverges."""
    good = arm("fast", 2.0).curves
    lost = Curve("9", STEPS, (NAN,) * len(STEPS))
    result = compare([arm("baseline", 1.0), Arm("fast", (*good, lost))], "baseline").results[0]
    assert result.verdict is Verdict.UNKNOWN
    assert result.crossings[-1] == Crossing(2000, Bound.MORE_THAN)


@pytest.mark.parametrize("seeds", [1, 5])
@pytest.mark.parametrize("fids", [(NAN,) * 20, tuple(range(50, 250, 10))], ids=["nan", "rising"])
def test_an_arm_that_diverged_is_never_called_noise(fids, seeds):
    """There is no FID at which its speed could be measured, and it missed the target."""
    lost = Arm("lost", tuple(Curve(str(k), STEPS, fids) for k in range(seeds)))
    comparison = compare([arm("baseline", 1.0), lost], "baseline")
    (result,) = comparison.results
    assert result.verdict is Verdict.MISSED
    assert (result.at, result.speedup.p, result.holm_p) == (comparison.target, None, None)
    assert result.speedup.is_upper_bound


def test_an_arm_does_not_miss_what_the_baseline_misses_too():
    lost = Arm("lost", (Curve("0", STEPS, (NAN,) * len(STEPS)),))
    (result,) = compare([arm("baseline", 1.0), lost], "baseline", target=0.1).results
    assert result.verdict is Verdict.UNKNOWN


def test_an_fid_that_untrained_networks_have_does_not_stop_a_comparison():
    base = Arm("baseline", (Curve("0", (0, 100, 200), (300.0, 20.0, 10.0)),))
    lost = Arm("lost", (Curve("0", (0, 100, 200), (300.0, 400.0, 500.0)),))
    assert compare([base, lost], "baseline").results[0].verdict is Verdict.MISSED


# Arms that stand still


def still(level, name="still", seeds=range(3)):
    """Fast at first, then at a level for good: when it is passed there is chance."""
    rng = random.Random(name)
    passed = [rng.choice([300, 1000, 1900]) for _ in seeds]
    curves = []
    for curve, first in zip(arm(name, 9.0, seeds).curves, passed, strict=True):
        levels = (
            level * math.exp(rng.gauss(0, 0.01)) * (1 - 0.05 * (step >= first)) for step in STEPS
        )
        fids = tuple(max(pair) for pair in zip(curve.fids, levels, strict=True))
        curves.append(Curve(curve.seed, STEPS, fids))
    return Arm(name, tuple(curves))


def test_an_arm_that_stands_still_above_the_target_ends_worse():
    base = arm("baseline", 1.0)
    comparison = compare([base, still(level=4.0)], "baseline")
    result = comparison.results[0]
    assert result.verdict is Verdict.WORSE
    assert re.fullmatch(r"ends worse \(p [<=] 0\.\d+\)", format_verdict(result, comparison))
    assert result.speedup.p > 0.05  # its speed alone would be called noise
    assert result.end_p < 0.05


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
        for c in still(level=4.0).curves
    ]
    first, *rest = arm("baseline", 1.0).curves
    base = Arm("baseline", (replace(first, steps=STEPS[:19], fids=first.fids[:19]), *rest))
    (result,) = compare([base, Arm("still", tuple(curves))], "baseline", target).results
    assert result.verdict is verdict
    assert (result.end_p is not None) == (verdict is Verdict.WORSE)


@pytest.mark.parametrize("last", [NAN, math.inf])
def test_an_arm_whose_last_fid_is_not_finite_has_no_end_to_compare(last):
    curves = [Curve(c.seed, STEPS, (*c.fids[:-1], last)) for c in still(level=4.0).curves]
    result = compare([arm("baseline", 1.0), Arm("still", tuple(curves))], "baseline").results[0]
    assert result.end_p is None


def test_the_number_of_arms_counts_against_one_that_ends_worse():
    base, worse = arm("baseline", 1.0), still(level=4.0)
    others = [arm(f"other {k}", 1.0) for k in range(4)]
    alone = compare([base, worse], "baseline").results[0]
    among = by_name(compare([base, worse, *others], "baseline"))["still"]
    assert among.end_p == pytest.approx(5 * alone.end_p)


@pytest.mark.slow
def test_arms_that_train_like_the_baseline_rarely_end_worse():
    """Fewer than the one in forty that a p-value of 0.05 allows for, as few miss the target too."""
    verdicts = []
    for k in range(400):
        base, other = (arm(n, 1.0, [f"{n}{k}{i}" for i in range(3)], 0.2) for n in "ab")
        verdicts.append(compare([base, other], "a").results[0].verdict)
    assert verdicts.count(Verdict.WORSE) <= 10
    assert verdicts.count(Verdict.NO_DIFFERENCE) > 340


# Many arms


def test_what_is_significant_alone_may_not_be_among_many():
    base, weak = arm("baseline", 1.0), arm("weak", 1.15)
    alone = compare([base, weak], "baseline").results[0]
    others = [arm(f"other {k}", 1.0) for k in range(12)]
    among = by_name(compare([base, weak, *others], "baseline"))["weak"]
    assert alone.speedup.p == alone.holm_p == among.speedup.p < 0.05 < among.holm_p
    assert (alone.verdict, among.verdict) == (Verdict.FASTER, Verdict.UNCLEAR)


def test_arms_without_a_test_count_as_tests_that_show_nothing():
    """Otherwise an arm that diverges would lower the p of the others."""
    base, arms = arm("baseline", 1.0), [arm("a", 1.4), arm("one seed", 1.4, [7])]
    alone = compare([base, arms[0]], "baseline").results[0]
    results = by_name(compare([base, *arms], "baseline"))
    assert results["one seed"].holm_p is None
    assert results["a"].holm_p == pytest.approx(2 * alone.speedup.p)


def test_arms_without_another_metric_count_in_its_tests():
    def with_pixels(arm, factor=1.0):
        curves = [
            replace(c, other_metrics=tuple({"pixels": factor * fid} for fid in c.fids))
            for c in arm.curves
        ]
        return Arm(arm.name, tuple(curves))

    base, a = with_pixels(arm("baseline", 1.0)), with_pixels(arm("a", 1.15))
    lost = with_pixels(arm("b", 1.0), NAN)
    two, three = (
        by_other_metrics(compare(arms, "baseline"))["pixels"]
        for arms in ([base, a], [base, a, lost])
    )
    assert (two.num_tests, three.num_tests, len(three.results)) == (1, 2, 1)
    assert three.results[0].holm_p == min(2 * two.results[0].holm_p, 1)


def early(level, name="early"):
    """Fast down to a level, and no further."""
    return Arm(
        name,
        tuple(
            Curve(c.seed, c.steps, tuple(max(fid, level + 0.01 * k) for fid in c.fids))
            for k, c in enumerate(arm(name, 9.0).curves)
        ),
    )


def stuck_baseline():
    """Four seeds come to an FID of 2.1; the last one stays at 5."""
    fids = [[2.1 + 0.01 * k + 1500 / step for step in STEPS] for k in range(4)]
    fids.append([max(5.0, fid_at(step, 0.9)) for step in STEPS])
    return Arm("baseline", tuple(Curve(str(k), STEPS, tuple(v)) for k, v in enumerate(fids)))


def test_an_arm_that_missed_the_target_does_not_win_before_one_that_reached_it():
    """It may be many times faster to a FID that is easy."""
    comparison = compare([arm("baseline", 1.0), arm("true", 1.5), early(3.0, "stuck")], "baseline")
    assert [r.arm.name for r in comparison.results] == ["stuck", "true"]
    assert {r.verdict for r in comparison.results} == {Verdict.FASTER}
    assert [r.arm.name for r in comparison.winners] == ["true"]


@pytest.mark.parametrize("other", [early(1.5, "true"), arm("true", 2.5)])
def test_an_arm_that_ends_worse_than_most_seeds_of_the_baseline_falls_short(other):
    comparison = compare([stuck_baseline(), early(4.0), other], "baseline")
    result = by_name(comparison)["early"]
    assert (comparison.target, result.at, result.verdict) == (5.0, 5.0, Verdict.FASTER)
    assert comparison.falls_short(result)
    assert format_verdict(result, comparison) == "faster, but ends higher"
    assert not comparison.falls_short(by_name(comparison)["true"])
    assert comparison.best.arm.name == "true"


def test_without_a_winner_the_best_is_one_that_gets_there_if_there_is_one():
    stuck = Arm("stuck", early(4.0).curves[:1])
    comparison = compare([arm("baseline", 1.0), stuck, arm("good", 1.5, [0])], "baseline")
    assert [r.arm.name for r in comparison.results] == ["stuck", "good"]
    assert comparison.best.arm.name == "good"


# Means and images


def with_images(name, speed, images_a_step):
    plain = arm(name, speed)
    images = tuple(float(images_a_step * step) for step in STEPS)
    return Arm(name, tuple(Curve(c.seed, c.steps, c.fids, images) for c in plain.curves))


def test_by_images_an_arm_pays_for_its_larger_batch():
    arms = [with_images("baseline", 1.0, 64), with_images("large", 1.5, 128)]
    steps = compare(arms, "baseline").results[0].speedup
    images = compare(by_images(arms), "baseline").results[0].speedup
    assert images.ratio == pytest.approx(steps.ratio / 2)


def test_images_are_left_aside_where_they_are_in_proportion_or_not_recorded():
    assert by_images([with_images("baseline", 1.0, 64), with_images("a", 1.5, 64)]) is None
    assert by_images([with_images("baseline", 1.0, 64), arm("a", 1.5)]) is None


# Mistakes


@pytest.mark.parametrize(
    ("arms", "options", "message"),
    [
        ([arm("a", 1.0)] * 2, {"baseline": "a"}, r"each once, got \['a', 'a'\]"),
        ([arm("a", 1.0), arm("b", 1.0)], {"baseline": "c"}, "no arm 'c' for the baseline"),
        (
            [arm("a", 1.0), arm("b", 1.0)],
            {"baseline": "a", "target": -1.0},
            "target must be a positive FID, got -1",
        ),
        (
            [Arm("a", (Curve("3", (1, 2), (NAN, NAN)),)), arm("b", 1.0)],
            {"baseline": "a"},
            "baseline a has no finite FID for seed 3.*give a target",
        ),
    ],
)
def test_what_cannot_be_compared_is_refused(arms, options, message):
    with pytest.raises(ValueError, match=message):
        compare(arms, **options)


# Other metrics of the same samples


def with_pixels(base_arm, speed, ends=0.0):
    """An arm with another speed by pixels, which fall to `ends` at most."""
    curves = []
    for curve, other in zip(
        base_arm.curves, arm(f"{base_arm.name} pixels", speed).curves, strict=True
    ):
        metrics = tuple({"pixels": max(fid, ends)} for fid in other.fids)
        curves.append(replace(curve, other_metrics=metrics))
    return Arm(base_arm.name, tuple(curves))


BASE = with_pixels(arm("baseline", 1.0), 1.0)


@pytest.mark.parametrize(
    ("speed", "ends", "expected"),
    [(2.0, 0.0, True), (1.0, 0.0, False), (2.0, 2.4, False)],
)
def test_an_arm_leads_by_another_metric_where_it_is_faster_and_ends_no_higher(
    speed, ends, expected
):
    fast = with_pixels(arm("fast", 2.0), speed, ends)
    comparison = compare([BASE, fast], "baseline")
    (other,) = by_other_metrics(comparison).values()
    assert other.metric == "pixels"
    assert other.target == max(min(p["pixels"] for p in c.other_metrics) for c in BASE.curves)
    assert leads("fast", other) is expected


def test_further_arms_do_not_count_against_a_lead():
    rest = [with_pixels(arm(f"arm{i}", 1.0), 1.0) for i in range(12)]
    arms = [BASE, with_pixels(arm("fast", 2.0), 1.15), *rest]
    (among,) = by_other_metrics(compare(arms, "baseline")).values()
    assert by_name(among)["fast"].verdict is Verdict.UNCLEAR
    assert leads("fast", among)


def test_arms_without_another_metric_are_left_out_of_its_comparison():
    comparison = compare([BASE, arm("fast", 2.0), with_pixels(arm("slow", 0.5), 2.0)], "baseline")
    (other,) = by_other_metrics(comparison).values()
    assert [a.name for a in other.arms] == ["baseline", "slow"]
    assert not leads("fast", other)
    bare = compare([arm("baseline", 1.0), with_pixels(arm("fast", 2.0), 2.0)], "baseline")
    assert by_other_metrics(bare) == {}


def test_another_metric_has_nan_where_it_is_not_positive_or_not_recorded():
    curve = Curve("0", (1, 2, 3), (3.0, 2.0, 1.0), repeats=(2.0,))
    metrics = ({"pixels": 0.5}, {}, {"pixels": 0.0})
    (other,) = by_metric([Arm("a", (replace(curve, other_metrics=metrics),))], "pixels")
    assert other.curves[0].fids == pytest.approx((0.5, NAN, NAN), nan_ok=True)
    assert other.curves[0].repeats == ()
    assert by_metric([Arm("a", (curve,))], "pixels") == []
