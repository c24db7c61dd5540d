import math

import pytest
from support.experiments import STEPS, arm

from lit_diffusion.analysis.comparison import Arm, compare
from lit_diffusion.analysis.curves import Curve
from lit_diffusion.analysis.wording import (
    by_images_text,
    explanation,
    fid_text,
    headline,
    p_text,
    verdict_text,
)


def told(*arms, **options):
    comparison = compare([arm("baseline", 1.0), *arms], "baseline", **options)
    return comparison, [verdict_text(result, comparison) for result in comparison.results]


def test_a_winner_is_named_with_its_speedup_and_that_it_is_not_noise():
    comparison, (verdict,) = told(arm("clts", 2.0))
    assert headline(comparison).startswith("clts wins: 2.0")
    assert headline(comparison).endswith("x as fast as baseline. That is not noise.")
    assert verdict.startswith("faster than baseline: 2.0")
    steps = f"{comparison.results[0].steps} steps by clts."
    assert f"FID {fid_text(comparison.target)} is reached after " in explanation(comparison)
    assert steps in explanation(comparison)
    assert "with its 95% interval; 5 seeds against 5." in explanation(comparison)


def test_fewer_than_five_seeds_make_a_claim_provisional():
    comparison, (verdict,) = told(arm("clts", 2.0, range(3)))
    assert headline(comparison).endswith("Hardly noise, but provisional: 3 seeds, not 5.")
    assert verdict.endswith("(provisional: 3 seeds)")


def test_one_seed_tells_nothing_and_the_headline_says_so():
    comparison, (verdict,) = told(arm("clts", 2.0, [0]))
    assert headline(comparison) == "clts looks best, but these runs cannot tell that from noise."
    assert verdict.startswith("cannot be told from noise (one seed): ")
    assert "interval" not in explanation(comparison)
    comparison, _ = told(arm("clts", 0.5, [0]))
    assert headline(comparison).startswith("baseline looks best, but")


def test_bounds_alone_make_nobody_look_best():
    base = Arm("baseline", (Curve("0", (100, 200), (3.0, 2.0)),))
    short = Arm("short", (Curve("0", (1, 2), (9.0, 8.0)),))
    assert headline(compare([base, short], "baseline")) == (
        "These runs cannot tell which arm is best."
    )


def test_equal_runs_make_nobody_look_best():
    curves = (Curve("0", (100, 200), (3.0, 2.0)),)
    for target in (None, 5.0):
        comparison = compare([Arm("baseline", curves), Arm("same", curves)], "baseline", target)
        assert headline(comparison) == "These runs cannot tell which arm is best."


def test_an_arm_that_may_be_any_faster_leaves_nobody_looking_best():
    base = Arm("baseline", (Curve("0", (100, 200), (3.0, 1.0)),))
    late = Arm("late", (Curve("0", (190, 200), (2.0, 1.5)),))
    comparison = compare([base, late], "baseline", target=2.5)
    assert comparison.results[0].speedup.is_lower_bound
    assert headline(comparison) == "These runs cannot tell which arm is best."


def test_an_arm_that_never_gets_there_does_not_win_by_an_easier_fid():
    stuck = [
        Curve(c.seed, c.steps, tuple(max(fid, 3.0 + 0.01 * k) for fid in c.fids))
        for k, c in enumerate(arm("stuck", 9.0).curves)
    ]
    comparison, (verdict,) = told(Arm("stuck", tuple(stuck)))
    target = fid_text(comparison.target)
    assert "wins" not in headline(comparison)
    assert f" to FID 3.04, but 0 of 5 seeds reach FID {target}. " in headline(comparison)
    assert verdict.endswith(f" to FID 3.04, but 0 of 5 seeds reach FID {target}")


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
    assert headline(comparison) == "No arm beats baseline by more than noise."
    assert verdict.startswith("no difference that 5 seeds can show: ")


def test_the_baseline_may_win():
    comparison, verdicts = told(arm("a", 0.5), arm("b", 0.6))
    assert headline(comparison) == ("baseline wins: both other arms are slower. That is not noise.")
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


def test_an_arm_with_a_seed_that_diverged_is_told_with_that():
    lost = Curve("9", STEPS, (math.nan,) * len(STEPS))
    _, (verdict,) = told(Arm("a", (*arm("a", 2.0).curves, lost)))
    assert "a seed never had a finite FID" in verdict


def test_the_spread_of_fid_itself_is_told_beside_the_speedup_where_it_is_known():
    again = [
        Curve(c.seed, c.steps, c.fids, repeats=(c.fids[-1] * 1.02,)) for c in arm("a", 2.0).curves
    ]
    comparison, _ = told(Arm("a", tuple(again)))
    assert explanation(comparison).endswith(
        "From one set of samples to another, FID itself varies by 1.4%."
    )
    assert "samples" not in explanation(told(arm("a", 2.0))[0])


def test_a_bound_is_told_as_one():
    comparison, (verdict,) = told(arm("fast", 2.5), target=1.6)
    assert "faster than baseline: at least " in verdict
    assert verdict.endswith(", -]")
    assert "at least" in headline(comparison)


def test_by_images_the_best_arm_is_told_anew():
    comparison, _ = told(arm("large", 1.5))
    again, _ = told(arm("large", 0.7))
    assert by_images_text(comparison, again).startswith(
        "By images seen, in place of steps, of large: slower than baseline: 0.7"
    )


@pytest.mark.parametrize(
    ("p", "text"), [(0.5, "0.50"), (0.0312, "0.031"), (1e-7, "< 0.001"), (None, "-")]
)
def test_p_values_have_two_digits_that_matter(p, text):
    assert p_text(p) == text
