import math
import re
from html import escape
from html.parser import HTMLParser

import pytest
from support.experiments import arm

from lit_diffusion.lab.compare.comparison import Arm, compare
from lit_diffusion.lab.compare.curves import Curve
from lit_diffusion.lab.compare.report.headline import winners_text
from lit_diffusion.lab.compare.report.page import html
from lit_diffusion.lab.compare.report.report import Report, SamplePicture, markdown
from lit_diffusion.lab.compare.report.tables import Table

PICTURES = {f"{name}.png": f"data:{name}" for name in ("speedups", "curves", "samples")}
_VOID = {"meta", "img", "br"}


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


def page_of(report):
    return html(markdown(report), PICTURES)


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
        samples=[SamplePicture(name, 100, b"") for name in ("baseline", "slow")],
    )


@pytest.fixture(scope="module")
def page(report):
    return page_of(report)


def test_every_element_is_closed_where_it_was_opened(page):
    outline = Outline(page)
    assert outline.open == []
    assert {len(outline.all(tag)) for tag in ("html", "main", "h1", "title")} == {1}


def test_names_are_text_and_never_markup(page):
    assert "<b>" not in page.replace("<body", "")
    assert "runs/&lt;x&gt;" in page
    assert "<strong>&lt;b&gt;fast&lt;/b&gt; &amp; good</strong> wins: " in page
    assert "<title>&lt;b&gt;fast&lt;/b&gt; &amp; good wins: " in page


@pytest.mark.parametrize(
    "name",
    [
        "<script>alert(1)</script>",
        '"><img src=x onerror=alert(1)>',
        "[a](javascript:alert(1))",
        "![a](http://x/y.png)",
        "<http://x.y>",
        "**b** `c` ~~d~~ _e_",
        "&lt; &#60;b&#62;",
        "# 1",
        "a|b [c](d",
    ],
)
def test_whatever_an_arm_is_called_its_name_is_shown_and_does_nothing(name):
    arms = [arm("baseline", 1.0), arm(name, 2.0), arm(f"{name}2", 1.5)]
    page = page_of(Report(compare(arms, "baseline"), notes=[f"{name} is odd."]))
    outline = Outline(page)
    assert outline.open == []
    assert not {"script", "a", "em", "del"} & {tag for tag, _ in outline.elements}
    assert {image["src"] for image in outline.all("img")} == {"data:speedups", "data:curves"}
    shown = escape(name)
    assert f"<strong>{shown}</strong> wins: " in page
    assert f'<th scope="row">{shown}</th>' in page
    assert f"<li>{shown} is odd.</li>" in page


def test_all_arms_that_win_together_are_green():
    arms = [arm("baseline", 1.0), *(arm(name, 1.5) for name in ("a & a", "an", "and"))]
    comparison = compare(arms, "baseline")
    who = escape(winners_text(comparison))
    assert who.endswith(" and another")
    assert f"><strong>{who}</strong> beat baseline: " in page_of(Report(comparison))


def test_nothing_is_green_in_a_headline_where_no_arm_wins():
    lost = tuple(Curve(c.seed, c.steps, (*c.fids[:-1], math.nan)) for c in arm("lost", 2.0).curves)
    page = page_of(Report(compare([arm("baseline", 1.0), Arm("lost", lost)], "baseline")))
    assert ">No arm wins: lost is " in page.partition("<main>")[2]


def test_a_page_needs_nothing_from_elsewhere(page):
    addresses = re.findall(r"(?:src|href)=\"([^\"]+)\"", page)
    assert addresses
    assert all(address.startswith("data:") for address in addresses)
    assert "<script" not in page
    assert "url(" not in page
    assert "@import" not in page


def test_the_sentence_what_stands_beside_it_and_the_forest_plot_come_first(page):
    parts = ("<h1", "Samples of &lt;slow&gt; differ.", "take no part: 1", "data:speedups", "<h2")
    order = [page.index(part) for part in parts]
    assert order == sorted(order)
    assert page.partition("<img")[0].count("<blockquote>") == 2


def test_pictures_say_what_they_show_to_those_who_cannot_see_them(page):
    texts = [attrs["alt"] for attrs in Outline(page).all("img")]
    assert texts[0] == "Speed-ups; the table below has the numbers"
    assert all(texts)


def test_tables_have_captions_heads_for_rows_and_columns_and_numbers_on_the_right(page):
    outline = Outline(page)
    assert len(re.findall('</p>\n<div class="scroll"><table>', page)) == len(outline.all("table"))
    assert {attrs.get("scope") for attrs in outline.all("th")} == {"row", "col"}
    assert '<td style="text-align:right">0 \N{PLUS-MINUS SIGN} 1</td>' in page
    assert '<td class="faster">faster than baseline: ' in page
    assert '<td class="slower">slower than baseline: ' in page


def test_runs_left_out_are_named_with_the_reason_beside_the_notes(page):
    caveats = page.partition("<h2>To bear in mind")[2].partition("<h2>")[0]
    assert "it has no FID" in caveats
    assert "Mind 5 &lt; 6." in caveats


def test_a_report_without_caveats_has_no_such_section(report):
    plain = page_of(Report(report.comparison))
    assert "bear in mind" not in plain
    assert "<blockquote>" not in plain


def test_a_long_headline_has_smaller_type(report):
    assert '<h1 class="short">' in html("# Short", {})
    assert '<h1 class="long">' in html(f"# {'long ' * 30}", {})


def test_language_width_and_encoding_are_told_to_the_browser(page):
    outline = Outline(page)
    assert outline.all("html") == [{"lang": "en"}]
    assert {"charset": "utf-8"} in outline.all("meta")
    assert any(attrs.get("name") == "viewport" for attrs in outline.all("meta"))
