import csv
import io
import math

import pytest
from support.experiments import STEPS, arm

from lit_diffusion.lab.compare.comparison import compare
from lit_diffusion.lab.compare.curves import Arm, Curve
from lit_diffusion.lab.compare.statistics import holm, last_fid_by_seed, speedup_by_seed
from lit_diffusion.lab.compare.tables import (
    by_seed_table,
    common_steps,
    fid_table,
    format_p,
    speedup_records,
    to_csv,
)

NAN = math.nan
TWO = Arm("a", (Curve("0", (1, 2), (4.0, 2.0)), Curve("1", (1, 2), (6.0, NAN))))


@pytest.fixture(scope="module")
def comparison():
    arms = [arm("baseline", 1.0), arm("fast", 2.0), arm("slow", 0.5)]
    return compare(arms, "baseline")


def test_a_cell_is_mean_and_standard_deviation_over_seeds_at_steps_that_all_have():
    table = fid_table(compare([TWO, Arm("b", (Curve("0", (1, 2, 3), (NAN, 3.0, 1.0)),))], "a", 5.0))
    assert table.columns == ("arm", "1", "2")
    assert table.rows == (("a", "5.00 +- 1.41", "2.00 (1 of 2 seeds)"), ("b", "-", "3.00"))
    assert common_steps([TWO, Arm("b", (Curve("0", (7,), (4.0,)),))]) == [1, 2]


def test_the_table_by_seed_corrects_p_within_each_column():
    base, *arms = (arm(name, speed) for name, speed in zip("xabc", (1, 1.4, 1.2, 0.9), strict=True))
    lost = Arm("lost", tuple(Curve(c.seed, STEPS, (NAN,) * 20) for c in base.curves))
    comparison = compare([base, *arms, lost], "x")
    rows = by_seed_table(comparison).rows
    tests = [
        (speedup_by_seed(r.arm, base, r.at), last_fid_by_seed(r.arm, base))
        for r in comparison.results
    ]
    speeds, lasts = (
        holm([t.p if t else None for t in column]) for column in zip(*tests, strict=True)
    )
    assert [row[3] for row in rows] == [format_p(p) for p in speeds]
    assert [row[5] for row in rows] == [format_p(p) for p in lasts]
    assert ("lost", "5", "-", "-", "-", "-") in rows
    assert by_seed_table(compare([base, lost, arm("a", 2.0, range(5, 8))], "x")) is None


def rows_of(records):
    return list(csv.DictReader(io.StringIO(to_csv(records))))


def test_numbers_survive_the_csv(comparison):
    rows = rows_of(speedup_records(comparison))
    names = "arm seeds reached steps bound verdict target speedup low high is_lower_bound "
    assert [*rows[0]] == [*names.split(), "is_upper_bound", "at_fid", "p", "p_holm", "p_end"]
    assert [row["arm"] for row in rows] == ["baseline", "fast", "slow"]
    result = comparison.results[0]
    assert float(rows[1]["speedup"]) == result.speedup.ratio
    assert float(rows[1]["p_holm"]) == result.holm_p
    assert (rows[2]["reached"], rows[2]["bound"]) == ("0", ">")
    assert float(rows[2]["at_fid"]) > float(rows[2]["target"]) == comparison.target
