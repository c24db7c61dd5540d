import csv
import io
import math
from statistics import fmean, stdev

import pytest
from support.experiments import STEPS, arm

from lit_diffusion.lab.compare.comparison import Arm, compare
from lit_diffusion.lab.compare.curves import Curve
from lit_diffusion.lab.compare.report.tables import (
    Table,
    common_steps,
    curve_records,
    fid_records,
    fid_table,
    mean_fid,
    speedup_records,
    spread_out,
    steadiness_table,
    to_csv,
    verdict_table,
)

NAN = math.nan
TWO = Arm("a", (Curve("0", (1, 2), (4.0, 2.0)), Curve("1", (1, 2), (6.0, NAN))))


@pytest.fixture(scope="module")
def comparison():
    arms = [arm("baseline", 1.0), arm("fast", 2.0), arm("slow", 0.5)]
    return compare(arms, "baseline")


def test_a_cell_is_mean_and_standard_deviation_over_seeds():
    found = mean_fid(TWO, 1)
    assert (found.mean, found.sd) == pytest.approx((fmean([4, 6]), stdev([4, 6])))
    assert str(found) == "5.00 +- 1.41"


def test_seeds_that_are_not_finite_are_counted_and_not_averaged():
    assert str(mean_fid(TWO, 2)) == "2.00 (1 of 2 seeds)"
    assert mean_fid(Arm("a", (Curve("0", (1,), (NAN,)),)), 1) is None
    assert mean_fid(TWO, 3) is None


def test_the_fid_table_has_a_row_an_arm_and_ends_at_the_last_step(comparison):
    table = fid_table(comparison.arms)
    assert table.columns == ("arm", "400", "800", "1,200", "1,600", "2,000")
    assert [row[0] for row in table.rows] == ["baseline", "fast", "slow"]
    assert table.rows[1][-1] == str(mean_fid(comparison.arms[1], 2000))


def test_steps_of_the_table_are_those_that_all_runs_have():
    other = Arm("b", (Curve("0", (2, 3), (4.0, 2.0)),))
    assert common_steps([TWO, other]) == [2]
    assert common_steps([TWO, Arm("b", (Curve("0", (7,), (4.0,)),))]) == [1, 2]


@pytest.mark.parametrize("count", range(1, 40))
@pytest.mark.parametrize("limit", [1, 3, 6])
def test_steps_are_spread_out_up_to_the_last(count, limit):
    chosen = spread_out(range(count), limit)
    assert chosen[-1] == count - 1
    assert chosen == sorted(set(chosen))
    assert 1 <= len(chosen) <= limit


def test_the_verdict_table_tells_bounds_tests_and_verdicts(comparison):
    table = verdict_table(comparison)
    baseline, fast, slow = table.rows
    assert baseline[-1] == "baseline"
    assert fast[1] == "5 of 5"
    assert fast[-1].startswith("faster than baseline: ")
    assert slow[1:3] == ("0 of 5", "> 2,000")
    assert "number of tests, 2." in table.caption


def test_the_steadiness_table_sets_the_spread_of_samples_beside_that_of_seeds():
    again = Curve("0", (4, 5, 6), (2.0, 2.0, 2.0), repeats=(2.2, 2.0))
    table = steadiness_table([Arm("a", (again,)), TWO])
    assert table.rows[0] == ("a", "0.0%", "0.0%", "-", "5.5% (2 repeats)")
    assert table.rows[1] == ("a", "-", "-", "-", "-")


def test_the_steadiness_table_tells_what_part_of_the_spread_is_not_common_to_all_runs():
    shared = [
        Arm(name, (Curve("0", (1,), (fid,), repeats=(1.2 * fid, 0.9 * fid)),))
        for name, fid in (("a", 2.0), ("b", 3.0))
    ]
    caption = steadiness_table(shared).caption
    assert "the difference of two from different sets varies by 1.4 times that." in caption
    assert caption.endswith(
        "Less the mean of each set over all runs, 0.0% is left (2 degrees of freedom), and the "
        "difference of two runs on the same set varies by 1.4 times that."
    )
    assert "Less the mean" not in steadiness_table(shared[:1]).caption


def test_a_mean_that_is_unknown_has_no_number_in_the_csv():
    base = Arm("baseline", (Curve("0", (100, 200), (9.0, 4.0)),))
    split = [Curve("0", (100, 200), (3.0, 2.0)), Curve("1", (100, 200), (9.0, 8.0))]
    comparison = compare([base, Arm("split", tuple(split))], "baseline")
    found = rows(to_csv(speedup_records(comparison)))[1]
    assert (found["steps"], found["bound"]) == ("", "unknown")
    assert verdict_table(comparison).rows[1][2] == "unknown"


def test_every_table_has_as_many_cells_as_heads(comparison):
    for table in (
        verdict_table(comparison),
        fid_table(comparison.arms),
        steadiness_table(comparison.arms),
    ):
        assert {len(row) for row in table.rows} == {len(table.columns)}
        assert set(table.text_columns) <= set(table.columns)


def test_a_bar_in_a_cell_does_not_break_markdown():
    assert Table("", ("a",), (("x|y",),)).markdown().endswith("| x\\|y |")


def rows(text):
    return list(csv.DictReader(io.StringIO(text)))


def test_numbers_survive_the_csv(comparison):
    found = rows(to_csv(speedup_records(comparison)))
    assert [row["arm"] for row in found] == ["baseline", "fast", "slow"]
    result = comparison.results[0]
    assert float(found[1]["speedup"]) == result.speedup.ratio
    assert float(found[1]["p_holm"]) == result.holm_p
    assert (found[2]["reached"], found[2]["bound"]) == ("0", ">")
    assert float(found[2]["at_fid"]) > float(found[2]["target"]) == comparison.target


def test_every_evaluation_is_in_the_csv_of_curves(comparison):
    found = rows(to_csv(curve_records(comparison.arms)))
    assert len(found) == 3 * 5 * len(STEPS)
    assert float(found[-1]["fid"]) == comparison.arms[-1].curves[-1].fids[-1]


def test_means_are_in_the_csv_with_how_many_seeds_they_are_of():
    last = rows(to_csv(fid_records([TWO])))[-1]
    assert last == {
        "arm": "a", "step": "2", "seeds": "2", "finite": "1", "mean": "2", "sd": ""
    }  # fmt: skip
