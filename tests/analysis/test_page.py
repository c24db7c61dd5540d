import io
import math
import re
from html import escape
from html.parser import HTMLParser

import pytest
from PIL import Image
from support.experiments import arm

from lit_diffusion.analysis.comparison import Arm, compare
from lit_diffusion.analysis.curves import Curve
from lit_diffusion.analysis.headline import winners_text
from lit_diffusion.analysis.page import html
from lit_diffusion.analysis.report import Grid, Report
from lit_diffusion.analysis.tables import Table

PICTURES = {"speedups": "data:speedups", "curves": "data:curves", "samples": "data:samples"}
_VOID = {"meta", "img", "br"}


def png():
    file = io.BytesIO()
    Image.new("L", (4, 4)).save(file, "PNG")
    return file.getvalue()


class Outline(HTMLParser):
    """Elements in order, and those that were left open."""

    def __init__(self, page):
        super().__init__()
        self.elements, self.open = [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def all(self, tag):
        return [attrs for name, attrs in self.elements if name == tag]


@pytest.fixture(scope="module")
def report():
    arms = [arm("baseline", 1.0), arm("<b>fast</b> & good", 2.0), arm("slow", 0.5)]
    return Report(
        compare(arms, "baseline"),
        alerts=["Samples of <slow> differ."],
        left_out=[("runs/<x>", "it has no FID")],
        notes=["Mind 5 < 6."],
        protocol={"num_fake": "360"},
        tables={"Runs": Table("All.", ("arm", "seed"), (("a", "0 +- 1"),))},
        grids=[Grid(name, step, png()) for name in ("baseline", "slow") for step in (100, 200)],
    )


@pytest.fixture(scope="module")
def page(report):
    return html(report, PICTURES)


def test_every_element_is_closed_where_it_was_opened(page):
    outline = Outline(page)
    assert outline.open == []
    assert {len(outline.all(tag)) for tag in ("html", "main", "h1", "title")} == {1}


def test_names_are_text_and_never_markup(page):
    assert "<b>" not in page.replace("<body", "")
    assert "runs/&lt;x&gt;" in page
    assert '<em class="faster">&lt;b&gt;fast&lt;/b&gt; &amp; good</em> wins: ' in page


def test_all_arms_that_win_together_are_green():
    arms = [arm("baseline", 1.0), *(arm(name, 1.5) for name in ("a & a", "an", "and"))]
    comparison = compare(arms, "baseline")
    who = escape(winners_text(comparison))
    assert who.endswith(" and another")
    page = html(Report(comparison), PICTURES)
    assert f'><em class="faster">{who}</em> beat baseline: ' in page


def test_nothing_is_green_in_a_headline_where_no_arm_wins():
    lost = tuple(Curve(c.seed, c.steps, (*c.fids[:-1], math.nan)) for c in arm("lost", 2.0).curves)
    page = html(Report(compare([arm("baseline", 1.0), Arm("lost", lost)], "baseline")), PICTURES)
    assert ">No arm wins: lost is " in page.partition("<main>")[2]


def test_a_page_needs_nothing_from_elsewhere(page):
    addresses = re.findall(r"(?:src|href)=\"([^\"]+)\"", page)
    assert addresses
    assert all(address.startswith(("data:", "#")) for address in addresses)
    assert "<script" not in page
    assert "url(" not in page
    assert "@import" not in page


def test_links_lead_somewhere(page):
    outline = Outline(page)
    names = {attrs["id"] for _, attrs in outline.elements if "id" in attrs}
    assert {attrs["href"][1:] for attrs in outline.all("a")} <= names


def test_the_sentence_the_forest_plot_and_what_is_left_out_come_first(page):
    order = [page.index(part) for part in ("<h1>", "1 run takes no part", "data:speedups", "<h2")]
    assert order == sorted(order)


def test_pictures_tell_what_they_show_to_those_who_cannot_see_them(page):
    texts = [attrs["alt"] for attrs in Outline(page).all("img")]
    assert "faster than baseline: 2.0" in texts[0]
    assert "slow: slower than baseline: 0." in texts[0]
    assert "Samples of slow at step 200" in texts
    assert all(texts)


def test_tables_have_captions_and_heads_for_rows_and_columns(page):
    outline = Outline(page)
    assert len(outline.all("caption")) == len(outline.all("table"))
    assert {attrs.get("scope") for attrs in outline.all("th")} == {"row", "col"}


def test_runs_left_out_are_named_with_the_reason_beside_the_notes(page):
    caveats = page.partition('id="caveats"')[2].partition("<h2>")[0]
    assert "it has no FID" in caveats
    assert "Mind 5 &lt; 6." in caveats


def test_alerts_are_told_before_the_first_figure(page):
    assert '<p class="alert">Samples of &lt;slow&gt; differ.</p>' in page.partition("<figure>")[0]


def test_a_report_without_caveats_has_no_such_section(report):
    plain = html(Report(report.comparison), PICTURES)
    assert "caveats" not in plain
    assert 'class="alert"' not in plain


def test_language_width_and_encoding_are_told_to_the_browser(page):
    outline = Outline(page)
    assert outline.all("html") == [{"lang": "en"}]
    assert {"charset": "utf-8"} in outline.all("meta")
    assert any(attrs.get("name") == "viewport" for attrs in outline.all("meta"))
