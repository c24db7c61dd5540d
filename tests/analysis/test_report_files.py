import csv
import re
from dataclasses import replace

import pytest
from PIL import Image
from support.browser import CHROMIUM, look
from support.experiments import arm

from lit_diffusion.analysis.comparison import FIRST_ROWS, compare
from lit_diffusion.analysis.headline import headline
from lit_diffusion.analysis.report import Grid, Report, sections
from lit_diffusion.analysis.report_files import figures, markdown, write_report
from lit_diffusion.analysis.tables import Table


@pytest.fixture(scope="module")
def report():
    arms = [arm("baseline", 1.0), arm("fast", 2.0), arm("slow", 0.5)]
    return Report(
        compare(arms, "baseline"),
        alerts=["Samples <differ>."],
        left_out=[("runs/x", "it has no FID")],
        notes=["Mind the gap."],
        protocol={"num_fake": "360"},
        tables={"Runs": Table("Every run.", ("arm", "seed"), (("fast", "0"),))},
    )


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


def test_markdown_tells_all_that_the_page_does_and_its_pictures_are_there(report, folder):
    text = markdown(report)
    assert text.startswith(f"# {headline(report.comparison)}\n")
    for told in ("Left out: `runs/x`: it has no FID.", "Mind the gap.", "Every run.", "Welch"):
        assert told in text
    assert (
        text.count("\n## ") == len(sections(report)) - 1 + 2
    )  # caveats and method; no title first
    for line in text.splitlines():
        if line.startswith("!["):
            assert (folder / line.partition("](")[2].rstrip(")")).is_file()


def test_images_seen_have_their_own_section_and_are_told_at_the_top(report):
    slow = compare([arm("baseline", 1.0), arm("fast", 0.6), arm("slow", 0.5)], "baseline")
    both = replace(report, by_images=slow)
    assert "By images seen" in [section.title for section in sections(both)]
    assert "speedups-images" in figures(both)
    assert "in place of steps, of fast: slower" in markdown(both).partition("![")[0]
    assert "By images seen" not in [section.title for section in sections(report)]


def test_every_figure_of_a_section_is_drawn(report):
    grid = Grid("fast", 100, b"")
    for full in (report, replace(report, by_images=report.comparison)):
        named = {section.figure for section in sections(full) if section.figure}
        assert named == set(figures(full))
    assert "samples" in {section.figure for section in sections(replace(report, grids=[grid]))}


def many(count):
    """A report on so many arms that cannot be told apart, of five seeds, of four and of one."""
    arms = [arm(f"arm-{k}+lr-x3+momentum", 1.5, range((5, 4, 1)[k % 3])) for k in range(count)]
    return Report(compare([arm("baseline", 1.0), *arms], "baseline"))


def test_of_many_arms_the_first_figure_has_some_and_another_has_all():
    report = many(FIRST_ROWS + 1)
    drawn = figures(report)
    assert len(drawn["speedups"].axes[0].get_yticklabels()) == FIRST_ROWS
    assert len(drawn["speedups-all"].axes[0].get_yticklabels()) == FIRST_ROWS + 1
    assert {section.figure for section in sections(report) if section.figure} == set(drawn)
    assert "1 other arm is in the figure of all arms" in markdown(report)
    assert "speedups-all" not in figures(many(FIRST_ROWS))


@pytest.mark.system
@pytest.mark.parametrize("count", [11, 39])
def test_the_first_figure_of_many_arms_ends_above_the_fold(tmp_path, count):
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed")
    found = look(write_report(many(count), tmp_path))
    assert found["figureBox"][1] < found["fold"] < 900
    assert found["width"] <= found["window"]


def test_alerts_are_told_before_the_first_figure_in_markdown(report):
    assert "\n\nSamples \\<differ>.\n\n" in markdown(report).partition("![")[0]


def test_names_of_arms_are_text_in_markdown():
    names = ("<script>a</script>", "a|b **c**", "new\nline")
    speeds = {name: 2.0 - k / 2 for k, name in enumerate(names)}
    arms = [arm("baseline", 1.0), *(arm(name, speed) for name, speed in speeds.items())]
    text = markdown(Report(compare(arms, "baseline"), left_out=[("a`b", "x")], notes=["<b>"]))
    assert text.startswith(r"# \<script>a\</script> wins: ")
    assert not re.search(r"(?<!\\)(<[a-z/]|\*)", text)
    assert "| new line |" in text
    assert r"| a\|b \*\*c\*\* |" in text
    assert "- Left out: ``a`b``: x." in text
