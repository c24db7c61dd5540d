from dataclasses import replace

import pytest
from support.experiments import STEPS, arm, fids, write_run

from lit_diffusion.experiments.comparison import Arm, compare
from lit_diffusion.experiments.curve_tables import read_arms
from lit_diffusion.experiments.report.report import Report, markdown
from lit_diffusion.experiments.report.second_look import (
    caveat,
    last_table,
    look_again,
    speed_table,
)
from lit_diffusion.experiments.report.tables import curve_records, to_csv
from lit_diffusion.experiments.reporting import report_on_runs, report_on_tables


def looked(name, speed, recall=0.9, memorized=0.5, **speeds):
    """An arm with a speed by FID and others by other distances."""
    made = arm(name, speed)
    curves = []
    for curve in made.curves:
        others = {m: fids(v, f"{name}{curve.seed}{m}") for m, v in speeds.items()}
        shift = int(curve.seed) / 500
        shares = {"pixel recall": recall + shift, "memorized": memorized + shift}
        looks = tuple(
            {m: values[k] for m, values in others.items()} | {"pixels floor": 0.1} | shares
            for k in range(len(STEPS))
        )
        curves.append(replace(curve, looks=looks))
    return Arm(name, tuple(curves))


def told(fast):
    comparison = compare(
        [looked("baseline", 1.0, pixels=1.0, **{"held-out": 1.0}), fast], "baseline"
    )
    others = look_again(comparison)
    return caveat(comparison, others), comparison, others


def test_a_winner_that_leads_by_all_measures_is_said_to():
    said, *_ = told(looked("fast", 2.0, pixels=2.0, **{"held-out": 2.0}))
    assert said == "fast leads by held-out and pixels as well."


@pytest.mark.parametrize("speed", [1.0, 0.5])
def test_a_winner_by_fid_alone_is_found_out(speed):
    said, _, others = told(looked("fast", 2.0, pixels=speed, **{"held-out": 2.0}))
    assert said == "fast does not lead by pixels."
    ((name, held_out, pixels),) = speed_table(others).rows
    assert name == "fast"
    assert "faster" in held_out
    assert "faster" not in pixels


def test_shares_that_are_worse_are_named_and_better_ones_are_not():
    measures = {"pixels": 2.0, "held-out": 2.0}
    assert told(looked("fast", 2.0, recall=0.8, **measures))[0] == "fast is worse in pixel recall."
    said = told(looked("fast", 2.0, recall=0.95, memorized=0.7, **measures))[0]
    assert said == "fast is worse in memorized."
    assert "worse" not in told(looked("fast", 2.0, recall=0.95, memorized=0.3, **measures))[0]


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
    assert caveat(comparison, look_again(comparison)) == "fast does not lead by pixels."


def test_without_a_second_look_of_every_run_nothing_is_said():
    comparison = compare([arm("baseline", 1.0), looked("fast", 2.0, pixels=2.0)], "baseline")
    assert look_again(comparison) == {}
    assert caveat(comparison, {}) == ""
    assert speed_table({}) is None
    assert last_table(comparison.arms) is None


def test_without_a_winner_nothing_is_said():
    base = looked("baseline", 1.0, pixels=1.0)
    comparison = compare([base, looked("slow", 0.5, pixels=2.0)], "baseline")
    assert caveat(comparison, look_again(comparison)) == ""


def test_the_report_says_it_in_its_headline_and_has_the_tables():
    _, comparison, others = told(looked("fast", 2.0, recall=0.8, pixels=1.0, **{"held-out": 2.0}))
    text = markdown(Report(comparison, others=others))
    title = text.splitlines()[0]
    assert title.startswith("# **fast** wins: ")
    assert title.endswith("fast does not lead by pixels and is worse in pixel recall.")
    assert "## By other measures" in text
    assert "Real images in place of samples: pixels 0.100." in text
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
