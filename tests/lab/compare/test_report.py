import csv
import io
import math
import re
from dataclasses import replace
from html import escape
from html.parser import HTMLParser

import pytest
from PIL import Image
from support.experiments import STEPS, arm, fids, write_run

from lit_diffusion.lab.compare.comparison import compare
from lit_diffusion.lab.compare.curves import Arm, Curve, read_arms
from lit_diffusion.lab.compare.plots import SamplePicture
from lit_diffusion.lab.compare.report import Report, build_report, html, markdown, write_report
from lit_diffusion.lab.compare.tables import Table, curve_records, format_speedup, to_csv

PNGS = {"speedups.png": b"1", "curves.png": b"2"}
COMPARISON = compare([arm("baseline", 1.0), arm("fast", 2.0), arm("slow", 0.5)], "baseline")


@pytest.fixture(scope="module")
def report():
    return Report(
        COMPARISON,
        notes=["Mind the <gap>."],
        protocol={"num_fake": "360"},
        tables={
            "Runs": Table("All.", ("arm", "seed"), (("R&D num_fake [1.50, -]", "0 +- 1"),)),
            "None": None,
        },
    )


def result_of(*arms, **others):
    report = Report(compare([arm("baseline", 1.0), *arms], "baseline"), **others)
    return f"{report.result} {report.evidence}"


def test_the_result_names_the_winner_with_its_interval_p_and_seeds():
    result = result_of(arm("fast", 2.0), arm("slow", 0.5))
    interval = format_speedup(COMPARISON.best.speedup)
    assert result.startswith("fast wins: it is 2.")
    for part in (interval, "p < 0.001", "2 tests", "5 against 5 training seeds"):
        assert part in result
    assert "provisional" not in result
    assert "3 against 5 training seeds; provisional" in result_of(arm("fast", 2.0, range(3)))


LOST = tuple(Curve(c.seed, STEPS, (*c.fids[:-1], math.nan)) for c in arm("lost", 2.0).curves)


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (arm("fast", 2.0, [0]), "not tested"),
        (arm("same", 1.0, range(10, 15)), "no difference shown"),
        (Arm("lost", LOST), "not finite at the end"),
    ],
)
def test_one_seed_noise_and_an_end_that_is_not_finite_win_nothing(other, why):
    result = result_of(other)
    assert result.startswith("No arm is shown to win")
    assert why in result


@pytest.mark.parametrize(("speed", "leads"), [(2.0, True), (1.0, False)])
def test_a_winner_is_named_with_the_metrics_by_which_it_does_not_lead(speed, leads):
    pixels = compare([arm("baseline", 1.0), arm("fast", speed)], "baseline")
    result = result_of(arm("fast", 2.0), others={"pixels": pixels})
    assert result.startswith("fast wins: ")
    assert ("does not lead by pixels." in result) is not leads


class Outline(HTMLParser):
    """Elements in order, and those that were left open."""

    def __init__(self, page):
        super().__init__()
        self.elements, self.open = [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in {"meta", "img", "br"}:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def all(self, tag):
        return [attrs for name, attrs in self.elements if name == tag]


def test_a_page_is_whole_and_needs_nothing_from_elsewhere(report):
    page = html(markdown(report), PNGS)
    outline = Outline(page)
    assert outline.open == []
    assert {len(outline.all(tag)) for tag in ("html", "main", "h1", "title")} == {1}
    assert page.count('<div class="scroll"><table>') == page.count("<table") > 1
    assert "<h2>Runs</h2>" in page
    assert "<h2>None</h2>" not in page
    assert "<li>Mind the &lt;gap&gt;.</li>" in page
    for cell in ("0 \N{PLUS-MINUS SIGN} 1", "&gt; 2,000", "R&amp;D num_fake [1.50, -]"):
        assert f"<td>{cell}</td>" in page
    addresses = [attrs["src"] for attrs in outline.all("img")]
    assert addresses == ["data:image/png;base64,MQ==", "data:image/png;base64,Mg=="]
    assert all(attrs["alt"] for attrs in outline.all("img"))
    assert not any(word in page for word in ("href=", "<script", "url(", "@import"))


@pytest.mark.parametrize(
    "name",
    [
        '"><img src=x onerror=alert(1)><script>alert(1)</script>',
        '<img src="curves.png">',
        "[a](javascript:alert(1)) ![a](http://x/y.png) <http://x.y>",
        "**b** `c` ~~d~~ _e_ &lt; &#60;b&#62; a|b [c](d",
        *("# 1", "> a", "- 1", r"a\_b"),
    ],
)
def test_whatever_an_arm_is_called_its_name_is_text(name):
    arms = [arm("baseline", 1.0), arm(name, 2.0), arm(f"{name}2", 1.5)]
    report = Report(compare(arms, "baseline"), notes=[f"{name} is odd."])
    page = html(markdown(report), PNGS)
    outline = Outline(page)
    assert outline.open == []
    assert not {"script", "a", "em", "del", "code"} & {tag for tag, _ in outline.elements}
    assert len(outline.all("img")) == page.count("data:image") == 2
    assert f"<li>{escape(name)} is odd.</li>" in page
    assert f"<td>{escape(name)}</td>" in page
    assert f"<title>{escape(name)} wins" in page


def test_a_report_is_a_page_and_its_figures_and_numbers(report, tmp_path):
    folder, file = tmp_path / "new" / "folder", io.BytesIO()
    Image.new("L", (4, 4)).save(file, "PNG")
    samples = [SamplePicture("fast", 100, file.getvalue())]
    whole = replace(report, by_images=COMPARISON, samples=samples)
    assert write_report(whole, folder) == folder / "report.html"
    assert {path.name for path in folder.iterdir()} == {
        *("report.html", "report.md", "speedups.png", "curves.png", "samples.png"),
        *("speedups.csv", "fid.csv", "curves.csv", "speedups-images.csv"),
    }
    text, page = ((folder / f"report.{kind}").read_text() for kind in ("md", "html"))
    for name in re.findall(r"!\[[^\]]*\]\((.*\.png)\)", text):
        with Image.open(folder / name) as image:
            assert min(image.size) > 100
    assert "Images to FID" in text.partition("## By images seen")[2]
    assert page.count('src="data:image/png;base64,') == 3
    with (folder / "speedups.csv").open() as rows:
        assert [row["arm"] for row in csv.DictReader(rows)] == ["baseline", "fast", "slow"]
    write_report(report, folder)  # leaves no file of the earlier report beside its own
    assert not {"samples.png", "speedups-images.csv"} & {path.name for path in folder.iterdir()}


def test_a_first_report_in_a_folder_deletes_nothing(report, tmp_path):
    (tmp_path / "samples.png").write_text("mine")
    write_report(report, tmp_path)
    assert (tmp_path / "samples.png").read_text() == "mine"


def test_csv_files_and_run_folders_give_the_same(tmp_path):
    for name, speed in {"baseline": 1.0, "fast": 2.0}.items():
        other = {"pixels": 0.2 / speed, "pixels floor": 0.1, "recall": 0.9, "held-out": None}
        for seed in range(3):
            folder = tmp_path / name / f"seed-{seed}"
            write_run(folder, fids(speed, seed), seed, second_look=other)
    report = build_report([str(tmp_path)])
    assert list(report.others) == ["pixels"]
    table = tmp_path / "table.csv"
    table.write_text(to_csv(curve_records(report.comparison.arms)))
    assert read_arms([str(table)]) == list(report.comparison.arms)
    assert build_report([str(table)]).result == report.result


def test_a_seed_of_the_baseline_that_makes_the_target_easy_is_noted(tmp_path):
    bad = Curve("9", STEPS, (9.0,) * 19 + (5.0,))
    table = tmp_path / "fids.csv"
    for more, num_notes in (((), 1), ((bad,), 2)):
        base = Arm("baseline", (*arm("baseline", 1.0).curves, *more))
        table.write_text(to_csv(curve_records([base, arm("fast", 2.0)])))
        notes = build_report([str(table)]).notes
        assert len(notes) == num_notes
    assert notes[0].startswith("Seed 9 of baseline")
