import math
import re

from support.comparisons import diverged, ends_in_nan, told
from support.experiments import STEPS, arm

from lit_diffusion.lab.compare.comparison import Arm, Verdict, compare, mean_crossing
from lit_diffusion.lab.compare.curves import Curve
from lit_diffusion.lab.compare.report.headline import basis, doubts, headline, winners_text
from lit_diffusion.lab.compare.report.wording import (
    fid_text,
    p_text,
    ratio_text,
    verdict_text,
)


def explanation(comparison):
    """What stands below the headline."""
    return f"{basis(comparison)} {doubts(comparison)}".rstrip()


def test_a_winner_is_named_with_its_speedup_and_that_it_is_not_noise():
    comparison, (verdict,) = told(arm("clts", 2.0))
    assert headline(comparison).startswith("clts wins: 2.0")
    assert headline(comparison).endswith("x as fast as baseline. That is not noise.")
    assert verdict.startswith("faster than baseline: 2.0")
    steps = f"{mean_crossing(comparison.results[0].crossings)} steps by clts."
    assert f"FID {fid_text(comparison.target)} is reached after " in explanation(comparison)
    assert steps in explanation(comparison)
    assert "with its 95% interval; 5 seeds against 5." in explanation(comparison)


def test_fewer_than_five_seeds_make_a_claim_provisional():
    comparison, (verdict,) = told(arm("clts", 2.0, range(3)))
    assert headline(comparison).endswith("Hardly noise, but provisional: 3 seeds, not 5.")
    assert verdict.endswith("(provisional: 3 seeds)")


def test_one_seed_tells_nothing_and_the_headline_says_so():
    comparison, (verdict,) = told(arm("clts", 2.0, [0]))
    assert headline(comparison) == (
        "No arm is shown to beat baseline by more than noise; clts cannot be told from noise "
        "(one seed), but looks faster."
    )
    assert verdict.startswith("cannot be told from noise (one seed): ")
    assert "interval" not in explanation(comparison)
    comparison, _ = told(arm("clts", 0.5, [0]))
    assert headline(comparison).endswith("; clts cannot be told from noise (one seed).")


def test_a_headline_claims_only_what_was_tested():
    comparison, _ = told(arm("tried", 1.0), *(arm(f"new {k}", 1.5, [k]) for k in range(3)))
    best = comparison.results[0].arm.name
    assert headline(comparison) == (
        "No arm is shown to beat baseline by more than noise; 3 arms cannot be told from noise "
        f"(one seed), of which {best} looks best."
    )
    comparison, _ = told(arm("a", 1.0), arm("b", 1.0), arm("new", 1.5, [0]))
    assert headline(comparison) == (
        "No arm is shown to beat baseline by more than noise; new cannot be told from noise "
        "(one seed), but looks faster."
    )
    comparison, _ = told(arm("a", 1.0), arm("b", 1.0), arm("new", 0.7, [0]))
    assert headline(comparison).endswith("; new cannot be told from noise (one seed).")


def test_an_arm_that_was_not_tested_is_not_beaten_by_the_loss_of_another():
    comparison, _ = told(arm("slow", 0.5), arm("new", 2.75, [0]))
    assert headline(comparison) == (
        "No arm is shown to beat baseline by more than noise; new cannot be told from noise "
        "(one seed), but looks faster."
    )


def test_an_arm_that_was_not_tested_may_look_best_beside_one_that_never_gets_there():
    comparison, _ = told(diverged(), arm("new", 2.75, [0]))
    assert headline(comparison).endswith(
        "; new cannot be told from noise (one seed), but looks faster."
    )


def test_the_baseline_wins_over_arms_that_are_slower_or_never_get_there():
    comparison, _ = told(diverged(range(5)), arm("slow", 0.5))
    assert headline(comparison) == (
        "baseline wins: the other arms are slower or short of FID "
        f"{fid_text(comparison.target)}. That is not noise."
    )


def test_a_chance_after_correction_is_told_beside_what_was_not_tested():
    arms = [arm("weak", 1.15), *(arm(f"other {k}", 1.0) for k in range(12))]
    comparison, _ = told(*arms, arm("new", 3.0, [0]))
    assert headline(comparison) == (
        "weak may beat baseline, but 13 arms were tested: it can be chance; new cannot be told "
        "from noise (one seed), but looks faster."
    )


def test_an_arm_that_looks_faster_than_the_winner_is_told_though_it_was_not_tested():
    comparison, _ = told(arm("a", 1.5), arm("new", 3.0, [0]), arm("old", 2.9, [0]))
    assert headline(comparison).startswith("a wins: ")
    assert "2 arms cannot be told from noise (one seed), of which " in explanation(comparison)
    assert "cannot be told" not in explanation(told(arm("a", 1.5))[0])


def test_an_arm_that_ends_worse_than_most_seeds_of_the_baseline_does_not_win():
    good = [Curve(c.seed, STEPS, c.fids) for c in arm("baseline", 1.0, range(4)).curves]
    base = Arm("baseline", (*good, Curve("late", STEPS, (9.0,) * 18 + (6.0, 5.0))))
    stuck = [
        Curve(c.seed, STEPS, tuple(max(fid, 4.0 + 0.01 * k) for fid in c.fids))
        for k, c in enumerate(arm("early", 9.0).curves)
    ]
    comparison = compare([base, Arm("early", tuple(stuck))], "baseline")
    ends = f"but its lowest FID is 4.02, that of baseline {fid_text(base.typical)} (medians)"
    assert headline(comparison).startswith("No arm wins: early is ")
    assert f" as fast as baseline to FID 5.00, {ends}. " in headline(comparison)
    assert headline(comparison).endswith("The speed-up is not noise.")
    assert ends in verdict_text(comparison.results[0], comparison)
    lowest = fid_text(min(curve.best for curve in base.curves))
    assert (
        "Seeds of baseline differ: seed late sets the target, the median seed reaches FID "
        f"{fid_text(base.typical)}, the best {lowest}." in explanation(comparison)
    )


def test_an_arm_that_is_faster_than_the_winner_and_ends_worse_is_told_with_that():
    base = arm("baseline", 1.0)
    lost = Curve("late", STEPS, (9.0,) * 18 + (6.0, 5.0))
    early = [
        Curve(c.seed, STEPS, tuple(max(fid, 4.0 + 0.01 * k) for fid in c.fids))
        for k, c in enumerate(arm("early", 9.0).curves)
    ]
    arms = [Arm("baseline", (*base.curves[:4], lost)), Arm("early", tuple(early)), arm("a", 2.0)]
    told = explanation(compare(arms, "baseline"))
    assert "Next is early, " in told
    assert ", but its lowest FID is 4.02, that of baseline " in told
    assert "Its lead" not in told


def test_seeds_of_the_baseline_that_agree_and_a_given_target_need_no_remark():
    assert "sets the target" not in explanation(told(arm("a", 2.0))[0])
    assert "sets the target" not in explanation(told(arm("a", 2.0), target=4.0)[0])


def test_the_best_of_many_is_said_to_be_picked():
    comparison, _ = told(arm("a", 2.0), arm("b", 1.0), arm("c", 0.5))
    assert (
        "Picked as the best of 3 arms, which its interval does not allow for: expect less of a on "
        "fresh seeds." in explanation(comparison)
    )
    looks = told(*(arm(f"{k}", 1.5, [k]) for k in range(2)))[0]
    assert "Picked as the best of 2 arms: expect less of " in explanation(looks)
    assert "Picked" not in explanation(told(arm("a", 2.0))[0])
    assert "Picked" not in explanation(told(arm("a", 0.5), arm("b", 0.6))[0])


def looks_faster(comparison):
    """Whether the headline says so of an arm that has no test."""
    said = headline(comparison)
    assert said.startswith("No arm is shown to beat baseline by more than noise; ")
    return "looks" in said


def test_bounds_alone_make_nobody_look_best():
    base = Arm("baseline", (Curve("0", (100, 200), (3.0, 2.0)),))
    short = Arm("short", (Curve("0", (1, 2), (9.0, 8.0)),))
    assert looks_faster(compare([base, short], "baseline")) is False


def test_equal_runs_make_nobody_look_best():
    curves = (Curve("0", (100, 200), (3.0, 2.0)),)
    for target in (None, 5.0):
        comparison = compare([Arm("baseline", curves), Arm("same", curves)], "baseline", target)
        assert looks_faster(comparison) is False


def test_an_arm_that_may_be_any_faster_leaves_nobody_looking_best():
    base = Arm("baseline", (Curve("0", (100, 200), (3.0, 1.0)),))
    late = Arm("late", (Curve("0", (190, 200), (2.0, 1.5)),))
    comparison = compare([base, late], "baseline", target=2.5)
    assert comparison.results[0].speedup.is_lower_bound
    assert looks_faster(comparison) is False


def test_an_arm_that_never_gets_there_does_not_win_by_an_easier_fid():
    stuck = [
        Curve(c.seed, c.steps, tuple(max(fid, 3.0 + 0.01 * k) for fid in c.fids))
        for k, c in enumerate(arm("stuck", 9.0).curves)
    ]
    comparison, (verdict,) = told(Arm("stuck", tuple(stuck)))
    target = fid_text(comparison.target)
    assert headline(comparison).startswith("No arm wins: stuck is ")
    assert f" to FID 3.04, but 0 of 5 seeds reach FID {target}. " in headline(comparison)
    assert verdict.endswith(f" to FID 3.04, but 0 of 5 seeds reach FID {target}")


def still(name="still", seeds=3):
    """Fast at first, then at a level above the target, which is passed at steps far apart."""
    curves = [
        Curve(str(k), STEPS, (*(9.0,) * (6 * k + 1), *(3.0 + 0.01 * k,) * (19 - 6 * k)))
        for k in range(seeds)
    ]
    return Arm(name, tuple(curves))


def test_an_arm_that_ends_worse_is_told_by_its_last_fid():
    comparison, (verdict,) = told(still())
    end = fid_text(comparison.results[0].end.baseline)
    assert verdict.startswith(f"ends worse than baseline: FID 3.01 against {end} (p < 0.001); by ")
    assert "; by steps: " in verdict
    assert verdict.endswith(" to FID 3.02 (provisional: 3 seeds)")
    sure = "Hardly noise, but provisional: 3 seeds, not 5."
    assert headline(comparison) == f"baseline wins: still is worse at the end. {sure}"


def test_arms_that_end_worse_are_not_called_slower():
    sure = "Hardly noise, but provisional: 3 seeds, not 5."
    comparison, _ = told(still(), arm("slow", 0.5))
    others = "the other arms are slower or worse at the end"
    assert headline(comparison) == f"baseline wins: {others}. {sure}"
    comparison, _ = told(still(), diverged(range(3)))
    target = fid_text(comparison.target)
    others = f"the other arms are worse at the end or short of FID {target}"
    assert headline(comparison) == f"baseline wins: {others}. {sure}"
    assert "Picked" not in explanation(comparison)
    comparison, _ = told(still(), arm("new", 2.75, [0]))
    assert headline(comparison) == (
        "No arm is shown to beat baseline by more than noise; new cannot be told from noise "
        "(one seed), but looks faster."
    )


def test_an_arm_that_ends_worse_was_tested_though_its_steps_have_no_test():
    """At the FID where it stands still, all its seeds were at their first evaluation."""
    steps = (20, 40, *STEPS)
    curves = [
        Curve(str(k), steps, (60.0, 30.0 + k, *(24.0 + 0.3 * k,) * len(STEPS))) for k in range(3)
    ]
    stall = Arm("stall", tuple(curves))
    comparison, _ = told(stall, arm("slow", 0.5), arm("one", 3.0, [0]))
    result = next(r for r in comparison.results if r.arm is stall)
    assert (result.verdict, result.holm_p) == (Verdict.WORSE, None)
    assert headline(comparison).startswith("No arm is shown to beat baseline by more than noise; ")


def test_arms_that_were_cut_short_are_told_with_that_where_the_baseline_wins():
    short = Arm("short", tuple(Curve(str(k), STEPS[:1], (20.0 + k,)) for k in range(5)))
    comparison, _ = told(arm("slow", 0.5), short)
    target = fid_text(comparison.target)
    others = f"the other arms are slower or short of FID {target}"
    longer = "but not all others were trained as long"
    assert headline(comparison) == f"baseline wins: {others}, {longer}. That is not noise."
    assert "Picked" not in explanation(told(short, diverged())[0])


def test_seeds_without_a_last_fid_are_told_with_slower_arms_too():
    slow = [Curve(c.seed, STEPS, (*c.fids[:-4], *(math.nan,) * 4)) for c in arm("slow", 0.5).curves]
    _, (verdict,) = told(Arm("slow", tuple(slow)))
    assert verdict.startswith("slower than baseline: 0.")
    assert verdict.endswith(", but 5 of 5 seeds end without a finite FID")


def test_an_arm_without_a_last_fid_is_told_with_that_beside_what_its_steps_say():
    lost = [Curve(c.seed, STEPS, (*c.fids[:-1], math.nan)) for c in still().curves]
    _, (verdict,) = told(Arm("lost", tuple(lost)))
    assert verdict.startswith("no difference that 3 seeds can show: ")
    assert verdict.endswith(" to FID 3.02, but 3 of 3 seeds end without a finite FID")


def test_an_arm_that_diverged_is_told_by_what_it_missed():
    lost = Arm("lost", tuple(Curve(k, STEPS, (math.nan,) * len(STEPS)) for k in "ab"))
    comparison, (verdict,) = told(lost)
    target = fid_text(comparison.target)
    assert headline(comparison) == f"Only baseline reaches FID {target}."
    assert verdict == f"does not get there: 0 of 2 seeds reach FID {target}"


def test_a_claim_that_is_not_beyond_doubt_has_its_p_value():
    comparison, _ = told(arm("clts", 1.15))
    (result,) = comparison.results
    assert 0.001 < result.holm_p < 0.05
    assert headline(comparison).endswith(f" That is hardly noise (p = {p_text(result.holm_p)}).")


def test_what_is_noise_is_called_so_and_never_a_win():
    comparison, (verdict,) = told(arm("clts", 1.0))
    assert headline(comparison) == "No arm is shown to beat baseline by more than noise."
    assert verdict.startswith("no difference that 5 seeds can show: ")


def test_the_baseline_may_win():
    comparison, verdicts = told(arm("a", 0.5), arm("b", 0.6))
    assert headline(comparison) == ("baseline wins: the other arms are slower. That is not noise.")
    assert all(verdict.startswith("slower than baseline: 0.") for verdict in verdicts)
    assert headline(told(arm("a", 0.5))[0]).startswith("baseline wins: a is slower.")


def test_a_speedup_to_another_fid_than_the_target_says_so():
    comparison, (verdict,) = told(arm("slow", 0.5))
    assert verdict.endswith(f" to FID {fid_text(comparison.results[0].at)}")
    assert "with 0 of 5 seeds by slow." in explanation(comparison)


def test_what_does_not_survive_the_correction_is_no_win():
    comparison, verdicts = told(arm("weak", 1.15), *(arm(f"other {k}", 1.0) for k in range(12)))
    assert headline(comparison) == (
        "weak may beat baseline, but 13 arms were tested: it can be chance."
    )
    assert verdicts[0].startswith("unclear after correction for 13 tests: ")


def test_the_lead_over_the_next_is_called_noise_where_it_is():
    comparison, _ = told(arm("a", 2.0), arm("b", 2.02))
    assert "Its lead over " in explanation(comparison)
    assert explanation(comparison).endswith("is within noise.")
    comparison, _ = told(arm("a", 2.0), arm("b", 1.4))
    assert explanation(comparison).endswith("is more than noise.")


def test_arms_that_cannot_be_told_apart_win_together():
    comparison, _ = told(arm("a", 1.5), arm("b", 1.5), arm("slow", 0.5))
    first, second = comparison.winners
    low, high = (ratio_text(result.speedup.ratio) for result in (second, first))
    assert headline(comparison) == (
        f"{first.arm.name} and {second.arm.name} beat baseline: {low} to {high} as fast. "
        "That is not noise. Which is fastest cannot be told."
    )
    assert winners_text(told(arm("a", 2.5), arm("b", 1.5))[0]) == "a"
    alike, _ = told(*(arm(name, 1.5) for name in "abcdef"))
    assert len(alike.winners) == 6
    assert re.fullmatch("[a-f], [a-f] and 4 others", winners_text(alike))
    assert headline(alike).startswith(f"{winners_text(alike)} beat baseline: 1.")


def test_winners_whose_lead_has_no_interval_cannot_be_told_apart():
    arms = [
        Arm(name, tuple(Curve(c.seed, STEPS, (0.1,) * len(STEPS)) for c in arm(name, 1).curves))
        for name in "ab"
    ]
    comparison, _ = told(*arms)
    assert headline(comparison).startswith("a and b beat baseline: at least ")
    assert headline(comparison).endswith(" Which is fastest cannot be told.")


def test_an_arm_that_ends_without_a_finite_fid_is_not_faster_and_does_not_win():
    comparison, (verdict,) = told(ends_in_nan("nan", 2.5, seeds=5))
    assert comparison.results[0].verdict is Verdict.LOST
    assert headline(comparison).startswith("No arm wins: nan is 2.")
    assert ", but 5 of 5 seeds end without a finite FID. " in headline(comparison)
    assert winners_text(comparison) == ""
    assert verdict.startswith("not finite at the end: 2.")
    assert verdict.endswith("], but 5 of 5 seeds end without a finite FID")


def test_an_arm_that_lost_seeds_before_the_target_is_told_with_both():
    comparison, _ = told(ends_in_nan("nan", 1.5, seeds=5))
    target = fid_text(comparison.target)
    told_both = f"but 0 of 5 seeds reach FID {target} and 5 of 5 seeds end without a finite FID"
    assert told_both in headline(comparison)


def test_an_arm_that_lost_one_seed_stands_behind_a_slower_one_that_lost_none():
    comparison, _ = told(ends_in_nan("nan", 3.0, seeds=1), arm("sound", 1.5))
    assert headline(comparison).startswith("sound wins: 1.")
    assert "Next is nan, " in explanation(comparison)
    assert "but 1 of 5 seeds end without a finite FID." in explanation(comparison)


def test_a_lead_without_an_interval_is_not_called_noise():
    stuck = [
        Arm(name, tuple(
            Curve(c.seed, STEPS, tuple(max(fid, 3.0 + 0.01 * k) for fid in c.fids))
            for k, c in enumerate(arm(name, speed).curves)
        ))
        for name, speed in (("a", 9.0), ("b", 8.0))
    ]  # fmt: skip
    comparison, _ = told(*stuck)
    assert len(comparison.faster) == 2
    second = comparison.faster[1].arm.name
    assert f"Its lead over {second} cannot be told." in explanation(comparison)
    assert "within noise" not in explanation(comparison)


def test_a_target_that_the_baseline_misses_too_is_not_held_against_an_arm():
    comparison, (verdict,) = told(arm("fast", 2.0), target=0.01)
    told_of_both = "but 0 of 5 seeds reach FID 0.010 (baseline: 0 of 5)"
    assert told_of_both in headline(comparison)
    assert verdict.endswith(told_of_both)


def test_an_arm_that_was_trained_for_fewer_steps_is_said_to_be():
    half = [Curve(c.seed, STEPS[:10], c.fids[:10]) for c in arm("short", 1.4).curves]
    comparison, (verdict,) = told(Arm("short", tuple(half)))
    target = fid_text(comparison.target)
    told_length = f"but 0 of 5 seeds reach FID {target}, trained 50% as long as baseline"
    assert told_length in headline(comparison)
    assert verdict.endswith(told_length)


def test_an_arm_that_had_no_time_to_reach_the_target_is_not_blamed_alone():
    short = Arm("short", (Curve("0", (10, 20), (400.0, 500.0)),))
    comparison, (verdict,) = told(short)
    assert headline(comparison).endswith(", but not all others were trained as long.")
    assert verdict.endswith(", trained 1% as long as baseline")


def test_the_spread_of_fid_itself_is_told_beside_the_speedup_where_it_is_known():
    again = [
        Curve(c.seed, c.steps, c.fids, repeats=(c.fids[-1] * 1.02,)) for c in arm("a", 2.0).curves
    ]
    comparison, _ = told(Arm("a", tuple(again)))
    assert explanation(comparison).endswith(
        "varies by 1.4%; beside other runs on the same set, by 0.0%."
    )
    one = Arm("a", (again[0], *arm("a", 2.0).curves[1:]))
    assert explanation(told(one)[0]).endswith(
        "From one set of samples to another, FID itself varies by 1.4%."
    )
    assert "samples" not in explanation(told(arm("a", 2.0))[0])


def test_a_bound_is_told_as_one():
    comparison, (verdict,) = told(arm("fast", 2.5), target=1.6)
    assert "faster than baseline: at least " in verdict
    assert verdict.endswith(", -]")
    assert "at least" in headline(comparison)
