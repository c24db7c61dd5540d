import csv
import io
import re
from dataclasses import replace

import pytest
from PIL import Image
from support.browser import CHROMIUM, look
from support.comparisons import small_report
from support.experiments import arm

from lit_diffusion.lab.compare.comparison import FIRST_ROWS, compare
from lit_diffusion.lab.compare.report.report import Report, SamplePicture, markdown
from lit_diffusion.lab.compare.report.report_files import figures, write_report


@pytest.fixture(scope="module")
def report():
    return small_report()


@pytest.fixture(scope="module")
def folder(report, tmp_path_factory):
    folder = tmp_path_factory.mktemp("report") / "new" / "folder"
    assert write_report(report, folder) == folder / "report.html"
    return folder


def test_a_report_is_a_page_and_its_figures_and_numbers(folder):
    assert {path.name for path in folder.iterdir()} == {
        *("report.html", "report.md", "speedups.png", "curves.png"),
        *("speedups.csv", "fid.csv", "curves.csv"),
    }
    for path in folder.glob("*.png"):
        with Image.open(path) as image:
            assert min(image.size) > 200
    with (folder / "speedups.csv").open() as file:
        assert [row["arm"] for row in csv.DictReader(file)] == ["baseline", "fast", "slow"]


def test_writing_again_gives_the_same_bytes(report, folder):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    write_report(report, folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def pictures_in(text):
    return set(re.findall(r"!\[[^\]]*\]\((.*)\.png\)", text))


def test_every_picture_of_the_markdown_is_drawn_and_no_other(report):
    file = io.BytesIO()
    Image.new("L", (4, 4)).save(file, "PNG")
    samples = [SamplePicture("fast", 100, file.getvalue())]
    whole = replace(report, by_images=report.comparison, samples=samples)
    for full in (report, whole):
        assert pictures_in(markdown(full)) == set(figures(full))
    assert {"samples", "speedups-images"} < set(figures(whole))


def many(count):
    """A report on so many arms that cannot be told apart, of five seeds, of four and of one."""
    arms = [arm(f"arm-{k}+lr-x3+momentum", 1.5, range((5, 4, 1)[k % 3])) for k in range(count)]
    return Report(compare([arm("baseline", 1.0), *arms], "baseline"))


def test_of_many_arms_the_first_figure_has_some_and_another_has_all():
    report = many(FIRST_ROWS + 1)
    drawn = figures(report)
    assert len(drawn["speedups"].axes[0].get_yticklabels()) == FIRST_ROWS
    assert len(drawn["speedups-all"].axes[0].get_yticklabels()) == FIRST_ROWS + 1
    assert pictures_in(markdown(report)) == set(drawn)
    assert "; 1 more are in the figure of all arms below." in markdown(report)
    assert "speedups-all" not in figures(many(FIRST_ROWS))


@pytest.mark.system
@pytest.mark.parametrize("count", [11, 39])
def test_the_first_figure_of_many_arms_ends_above_the_fold(tmp_path, count):
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed")
    found = look(write_report(many(count), tmp_path))
    assert found["figureBox"][1] < found["fold"] < 900
    assert found["width"] <= found["window"]
