import math
from dataclasses import replace

import pytest
from support.experiments import STEPS, arm, fids, write_run

from lit_diffusion.lab.compare.comparison import Arm, by_measure, compare
from lit_diffusion.lab.compare.curve_tables import read_arms
from lit_diffusion.lab.compare.report.report import Report, markdown
from lit_diffusion.lab.compare.report.second_look import (
    caveat,
    last_table,
    look_again,
    speed_table,
)
from lit_diffusion.lab.compare.report.tables import curve_records, to_csv
from lit_diffusion.lab.compare.reporting import report_on_runs, report_on_tables


def looked(name, speed, recall=0.9, memorized=0.5, spread=0.002, **speeds):
    """An arm with a speed by FID and others by other distances; its shares are those at the end."""
    made = arm(name, speed)
    curves = []
    for curve in made.curves:
        others = {m: fids(v, f"{name}{curve.seed}{m}") for m, v in speeds.items()}
        shift = int(curve.seed) * spread
        looks = tuple(
            {m: values[k] for m, values in others.items()} | {"pixels floor": 0.1}
            for k in range(len(STEPS))
        )
        early = {"pixel recall": 0.5, "memorized": 0.5}
        shares = {"pixel recall": recall + shift, "memorized": memorized + shift}
        looks = (*(look | early for look in looks[:-1]), looks[-1] | shares)
        curves.append(replace(curve, looks=looks))
    return Arm(name, tuple(curves))


def told(*arms):
    base = looked("baseline", 1.0, pixels=1.0, **{"held-out": 1.0})
    comparison = compare([base, *arms], "baseline")
    others = look_again(comparison)
    return caveat(comparison, others), comparison, others


BOTH = {"pixels": 2.0, "held-out": 2.0}


def test_a_winner_that_leads_by_all_measures_is_said_to():
    said, *_ = told(looked("fast", 2.0, **BOTH))
    assert said == "fast is faster by held-out and pixels as well."


@pytest.mark.parametrize(
    ("speed", "standing"), [(1.0, "is not shown to be faster"), (0.5, "is slower")]
)
def test_a_winner_by_fid_alone_is_found_out(speed, standing):
    said, _, others = told(looked("fast", 2.0, **BOTH | {"pixels": speed}))
    assert said == f"fast {standing} by pixels."
    ((name, held_out, pixels),) = speed_table(others).rows
    assert name == "fast"
    assert "faster" in held_out
    assert "faster" not in pixels


def test_each_of_two_winners_is_told_of():
    first, second = looked("a", 2.0, **BOTH), looked("b", 2.01, **BOTH | {"pixels": 0.5})
    said, comparison, _ = told(first, second)
    assert len(comparison.winners) == 2
    assert "a is faster by held-out and pixels as well." in said
    assert "b is slower by pixels." in said


def test_what_is_shown_of_a_winner_is_not_less_for_further_arms():
    """Nine of them, beside which Holm's correction asks for much more."""
    fast = looked("fast", 2.0, **BOTH | {"pixels": 1.1})
    alone = told(fast)[0]
    rest = [looked(f"arm{i}", 1.0, **BOTH | {"pixels": 1.0}) for i in range(9)]
    assert told(fast, *rest)[0] == alone


def test_each_measure_has_a_target_of_its_own():
    _, _, others = told(looked("fast", 2.0, **BOTH))
    assert by_measure([looked("x", 1.0, pixels=1.0)], "random-cnn") == []
    for name, other in others.items():
        lowest = [min(curve.fids) for curve in other.baseline.curves]
        assert other.target == max(lowest)
        assert all(curve.repeats == () for arm in other.arms for curve in arm.curves), name


def test_shares_that_are_worse_are_named_and_better_ones_are_not():
    assert told(looked("fast", 2.0, recall=0.8, **BOTH))[0] == "fast ends with worse pixel recall."
    said = told(looked("fast", 2.0, recall=0.95, memorized=0.7, **BOTH))[0]
    assert said == "fast ends with worse memorized."
    for fine in (0.1, 0.3, 0.49):
        assert "worse" not in told(looked("fast", 2.0, recall=0.95, memorized=fine, **BOTH))[0]


def test_the_same_worse_share_in_all_seeds_is_named():
    base = looked("baseline", 1.0, spread=0.0, pixels=1.0)
    fast = looked("fast", 2.0, recall=0.0, memorized=1.0, spread=0.0, pixels=2.0)
    comparison = compare([base, fast], "baseline")
    assert caveat(comparison, look_again(comparison)) == (
        "fast ends with worse pixel recall and memorized."
    )
    same = compare([base, looked("fast", 2.0, spread=0.0, pixels=2.0)], "baseline")
    assert "worse" not in caveat(same, look_again(same))


def test_an_arm_that_is_fast_and_then_ends_higher_does_not_lead():
    fast = looked("fast", 2.0, pixels=2.0)
    stops = replace(
        fast,
        curves=tuple(
            replace(c, looks=tuple(look | {"pixels": max(look["pixels"], 2.4)} for look in c.looks))
            for c in fast.curves
        ),
    )
    comparison = compare([looked("baseline", 1.0, pixels=1.0), stops], "baseline")
    assert caveat(comparison, look_again(comparison)) == "fast ends higher by pixels."


def test_a_seed_that_falls_short_is_not_said_to_be_an_end_that_is_higher():
    fast = looked("fast", 2.0, pixels=2.0)
    first, *rest = fast.curves
    looks = tuple(look | {"pixels": max(look["pixels"], 2.4)} for look in first.looks)
    comparison = compare(
        [
            looked("baseline", 1.0, pixels=1.0),
            replace(fast, curves=(replace(first, looks=looks), *rest)),
        ],
        "baseline",
    )
    others = look_again(comparison)
    assert caveat(comparison, others) == "fast has seeds that fall short by pixels."
    ((_, cell),) = speed_table(others).rows
    assert f"faster, {len(rest)} of {len(rest) + 1} seeds reach " in cell


def lacking(made, places):
    """Without a second look at these evaluations of its first seed."""
    first, *rest = made.curves
    looks = tuple({} if k in places else look for k, look in enumerate(first.looks))
    return replace(made, curves=(replace(first, looks=looks), *rest))


def test_a_look_that_another_arm_lacks_takes_nothing_from_the_winner():
    last = len(STEPS) - 1
    for places in ({0}, {last}, set(range(last + 1))):
        broken = lacking(looked("broken", 1.0, **BOTH | {"pixels": 1.0}), places)
        fast = looked("fast", 2.0, recall=0.8, **BOTH | {"pixels": 0.5})
        said, comparison, others = told(fast, broken)
        assert said == "fast is slower by pixels and ends with worse pixel recall."
        assert len(speed_table(others).rows) == (1 if len(places) > 1 else 2)
        assert len(last_table(comparison.arms).rows) == 3


def test_a_winner_without_looks_is_said_to_have_none():
    said, *_ = told(arm("fast", 2.0), looked("other", 1.0, **BOTH))
    assert said == "fast is not measured by held-out and pixels."


def test_a_distance_of_zero_is_none():
    fast = looked("fast", 2.0, pixels=2.0)
    zero = {"pixels": 0.0}
    curves = tuple(replace(c, looks=(*c.looks[:-1], zero)) for c in fast.curves)
    (found,) = by_measure([replace(fast, curves=curves)], "pixels")
    assert all(math.isnan(curve.fids[-1]) for curve in found.curves)


def test_without_a_second_look_of_the_baseline_nothing_is_said():
    comparison = compare([arm("baseline", 1.0), looked("fast", 2.0, pixels=2.0)], "baseline")
    assert look_again(comparison) == {}
    assert caveat(comparison, {}) == ""
    assert speed_table({}) is None
    assert last_table([arm("baseline", 1.0)]) is None


def test_a_baseline_without_a_finite_distance_is_not_compared_by_it():
    base = looked("baseline", 1.0, pixels=1.0)
    nowhere = tuple({"pixels": math.nan} for _ in STEPS)
    curves = (replace(base.curves[0], looks=nowhere), *base.curves[1:])
    comparison = compare([replace(base, curves=curves), looked("fast", 2.0, **BOTH)], "baseline")
    assert look_again(comparison) == {}


def test_without_a_winner_nothing_is_said():
    base = looked("baseline", 1.0, pixels=1.0)
    comparison = compare([base, looked("slow", 0.5, pixels=2.0)], "baseline")
    assert caveat(comparison, look_again(comparison)) == ""


def test_the_report_says_it_in_its_headline_and_has_the_tables():
    _, comparison, others = told(looked("fast", 2.0, recall=0.8, pixels=1.0, **{"held-out": 2.0}))
    text = markdown(Report(comparison, others=others))
    title = text.splitlines()[0]
    assert title.startswith("# **fast** wins: ")
    assert title.endswith(
        "fast is not shown to be faster by pixels and ends with worse pixel recall."
    )
    assert "## By other measures" in text
    assert "Real images in place of samples, or as many as there are: pixels 0.100." in text
    row = next(
        line for line in text.splitlines() if line.startswith("| fast | ") and "0.804" in line
    )
    assert row.endswith("0.804 +- 0.003 | 0.504 +- 0.003 |")


def test_csv_files_and_run_folders_tell_the_same(tmp_path):
    for name, speed in {"baseline": 1.0, "fast": 2.0}.items():
        for seed in range(3):
            look = {
                "pixels": 0.2 / speed,
                "pixels floor": 0.1,
                "pixel recall": 0.9,
                "held-out": None,
            }
            folder = tmp_path / name / f"seed-{seed}"
            write_run(folder, fids(speed, seed), seed, second_look=look)
    report = report_on_runs([str(tmp_path)], None, None, None)
    assert list(report.others) == ["pixels"]
    table = tmp_path / "table.csv"
    table.write_text(to_csv(curve_records(report.comparison.arms)))
    assert read_arms([str(table)]) == list(report.comparison.arms)
    assert report_on_tables([str(table)], None, None).headline == report.headline
