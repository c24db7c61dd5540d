import re
from dataclasses import replace

import pytest
from support.comparisons import small_report
from support.experiments import arm

from lit_diffusion.lab.compare.comparison import compare
from lit_diffusion.lab.compare.report.headline import headline
from lit_diffusion.lab.compare.report.report import METHOD, Report, SamplePicture, markdown
from lit_diffusion.lab.compare.report.tables import Table, verdict_table

COMPARISON = compare([arm("baseline", 1.0), arm("fast", 2.0)], "baseline")


def titles(**parts):
    return re.findall("^## (.*)$", markdown(Report(COMPARISON, **parts)), re.MULTILINE)


@pytest.fixture(scope="module")
def report():
    return small_report()


def test_the_headline_the_forest_plot_and_the_verdicts_come_first(report):
    text = markdown(report)
    plain = text.replace("**fast**", "fast")
    assert plain.startswith(f"# {headline(report.comparison)}\n")
    table = verdict_table(report.comparison).markdown()
    order = [text.index(part) for part in ("# ", "![Speed-ups", table, "\n## ")]
    assert order == sorted(order)


def test_markdown_says_all_that_is_known(report):
    text = markdown(report)
    for told in (
        "Left out: `runs/x`: it has no FID.",
        "- Mind the gap.",
        "Every run.",
        "- num_fake: 360",
        METHOD,
    ):
        assert told in text


def test_a_section_is_there_for_what_there_is_to_say():
    table = Table("All.", ("arm",), (("a",),))
    assert "Samples" not in titles()
    assert "Samples" in titles(samples=[SamplePicture("a", 1, b"")])
    assert "By images seen" not in titles()
    assert "By images seen" in titles(by_images=COMPARISON)
    assert titles(tables={"Runs": table, "None": None})[-2:] == ["Runs", "How this was computed"]
    assert "Seed by seed" in titles()
    others = compare([arm("baseline", 1.0), arm("fast", 2.0, "abc")], "baseline")
    assert "## Seed by seed" not in markdown(Report(others))


def test_the_caption_of_samples_names_their_weights():
    samples = [SamplePicture("a", 1, b"", "3", "ema")]
    assert "by its ema weights." in markdown(Report(COMPARISON, samples=samples))


def test_images_seen_have_their_own_section_and_are_told_at_the_top(report):
    slow = compare([arm("baseline", 1.0), arm("fast", 0.6), arm("slow", 0.5)], "baseline")
    text = markdown(replace(report, by_images=slow))
    assert "## By images seen" in text
    assert "in place of steps, of fast: slower" in text.partition("![")[0]
    assert "By images seen" not in markdown(report)


def test_alerts_and_the_number_of_runs_left_out_are_told_before_the_first_figure(report):
    first = markdown(report).partition("![")[0]
    assert "\n\n> Samples \\<differ>.\n\n" in first
    assert "\n\n> Runs that take no part: 1; see To bear in mind.\n\n" in first


def test_names_of_arms_are_text_in_markdown():
    names = ("<script>a</script>", "a|b **c**", "new\nline")
    speeds = {name: 2.0 - k / 2 for k, name in enumerate(names)}
    arms = [arm("baseline", 1.0), *(arm(name, speed) for name, speed in speeds.items())]
    text = markdown(Report(compare(arms, "baseline"), left_out=[("a`b", "x")], notes=["<b>"]))
    assert text.startswith(r"# **\<script>a\</script>** wins: ")
    assert not re.search(r"(?<!\\)(<[a-z/]|\*)", text.replace("**", "", 2))
    assert "| new line |" in text
    assert r"| a\|b \*\*c\*\* |" in text
    assert "- Left out: ``a`b``: x." in text


def test_the_method_tells_the_choices_that_a_reader_would_doubt():
    for choice in (
        "running minimum",
        "Welch",
        "Holm",
        "every seed of the baseline",
        "(>)",
        "wins if",
        "ends worse",
    ):
        assert choice in METHOD
