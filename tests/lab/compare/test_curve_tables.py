import math

import pytest
from support.experiments import arm

from lit_diffusion.lab.compare.comparison import Arm
from lit_diffusion.lab.compare.curve_tables import read_arms
from lit_diffusion.lab.compare.curves import Curve
from lit_diffusion.lab.compare.report.tables import curve_records, to_csv


@pytest.fixture
def table(tmp_path):
    def write(text, name="numbers.csv"):
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


def test_what_a_report_writes_is_read_back(table):
    arms = [arm("baseline", 1.0), arm("fast", 2.0)]
    assert read_arms([table(to_csv(curve_records(arms)))]) == arms


def test_further_sets_of_samples_are_read_back(table):
    curve = Curve("0", (100, 200), (5.0, math.nan), (6400, 12800), repeats=(3.5, 4.5))
    (found,) = read_arms([table(to_csv(curve_records([Arm("a", (curve,))])))])
    assert found.curves[0].repeats == (3.5, 4.5)
    assert found.curves[0].steps == (100, 200)
    assert found.curves[0].images == (6400, 12800)


def test_repeats_of_earlier_steps_do_not_count(table):
    rows = "arm,step,fid,repeat\na,200,3,\na,200,4,2\na,200,5,1\na,100,6,0\na,100,7,1\n"
    (found,) = read_arms([table(rows)])
    assert found.curves[0].fids == (6, 3)
    assert found.curves[0].repeats == (5, 4)


def test_rows_may_be_in_any_order_and_in_several_files(table):
    one = table("arm,seed,step,fid\na,0,200,3\na,1,100,4\n")
    two = table("fid,arm,step,seed,comment\n5,a,100,0,x\n7,b,100,0,y\n", "two.csv")
    first, second = read_arms([one, two])
    assert [curve.seed for curve in first.curves] == ["0", "1"]
    assert first.curves[0].steps == (100, 200)
    assert first.curves[0].fids == (5, 3)
    assert second.name == "b"


def test_without_seeds_an_arm_is_one_run(table):
    (found,) = read_arms([table("arm,step,fid\na,100,5\na,200,3\n")])
    assert len(found.curves) == 1


def test_what_spreadsheets_and_people_write_is_read(table):
    (found,) = read_arms([table("\ufeffarm, step, fid\na, 100, 5\na, 200, 3\n")])
    assert (found.name, found.curves[0].steps) == ("a", (100, 200))


def test_a_table_in_another_encoding_is_refused(tmp_path):
    (tmp_path / "old.csv").write_bytes("arm,step,fid\n\u00e4,1,2\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"old\.csv is not UTF-8: .*; save it as that"):
        read_arms([str(tmp_path / "old.csv")])


@pytest.mark.parametrize("text", ["", "nan", "inf"])
def test_an_fid_that_is_none_was_not_finite(table, text):
    (found,) = read_arms([table(f"arm,step,fid\na,100,{text}\na,200,3\n")])
    assert math.isnan(found.curves[0].fids[0])
    assert found.curves[0].best == 3


def test_images_count_where_all_rows_of_a_run_have_them(table):
    (found,) = read_arms([table("arm,seed,step,fid,images\na,0,1,5,64\na,1,1,5,\n")])
    assert [curve.images for curve in found.curves] == [(64,), None]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("arm,steps,fid\n", "needs the columns arm, step and fid, and has no step"),
        ("arm,step,fid\n", "there are no rows in"),
        ("arm,step,fid\na,ten,5\n", "numbers.csv, line 2: step must be a number, got 'ten'"),
        ("arm,step,fid\na,1,5\na,2\n", "line 3: fid must be a number"),
        ("arm,step,fid\na,1,5\nb,2,x\n", "line 3: fid must be a number, got 'x'"),
        ("arm,step,fid\na,1,5\na,1,4\n", "arm a, seed 0: steps must increase, got 1 after 1"),
        ("arm,step,fid\na,1,5\n,2,4\n", "line 3: the arm has no name"),
        ("arm,step,fid\na,1,5\na,inf,4\n", "arm a, seed 0: steps must be finite"),
        ("arm,step,fid\na,-1,5\na,1,4\n", "arm a, seed 0: steps must be finite and >= 0"),
        ("arm,step,fid,repeat\na,1,5,1\n", "arm a, seed 0: a curve needs as many FIDs as steps"),
        ("arm,step,fid,repeat\na,1,5,x\n", "line 2: repeat must be a number, got 'x'"),
        ("arm,step,fid\na,1,-5\n", "arm a, seed 0: FIDs must be > 0, got -5"),
    ],
)
def test_mistakes_are_told_with_their_place(table, text, message):
    with pytest.raises(ValueError, match=message):
        read_arms([table(text)])


def test_a_cell_without_end_is_refused_with_its_file(tmp_path):
    (tmp_path / "a.csv").write_text("arm,step,fid\n" + "x" * 200_000 + ",1,2\n")
    with pytest.raises(ValueError, match=r"a\.csv is no CSV file: field larger"):
        read_arms([str(tmp_path / "a.csv")])
