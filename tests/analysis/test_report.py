from support.experiments import arm

from lit_diffusion.analysis.comparison import compare
from lit_diffusion.analysis.report import METHOD, Grid, Report, sections
from lit_diffusion.analysis.tables import Table, verdict_table

COMPARISON = compare([arm("baseline", 1.0), arm("fast", 2.0)], "baseline")


def titles(**parts):
    return [section.title for section in sections(Report(COMPARISON, **parts))]


def test_the_forest_plot_and_the_verdicts_come_first_and_without_a_title():
    first = sections(Report(COMPARISON))[0]
    assert (first.title, first.figure) == ("", "speedups")
    assert first.tables == (verdict_table(COMPARISON),)


def test_a_section_is_there_for_what_there_is_to_tell():
    table = Table("All.", ("arm",), (("a",),))
    assert "Samples" not in titles()
    assert "Samples" in titles(grids=[Grid("a", 1, b"")])
    assert "By images seen" not in titles()
    assert "By images seen" in titles(by_images=COMPARISON)
    assert titles(tables={"Runs": table})[-1] == "Runs"
    assert "Seed by seed" in titles()
    others = compare([arm("baseline", 1.0), arm("fast", 2.0, "abc")], "baseline")
    assert "Seed by seed" not in [section.title for section in sections(Report(others))]


def test_every_picture_has_a_caption():
    whole = Report(COMPARISON, by_images=COMPARISON, grids=[Grid("a", 1, b"")])
    assert all(section.caption for section in sections(whole) if section.figure)


def test_the_caption_of_samples_names_their_weights():
    grids = [Grid("a", 1, b"", "3", "ema")]
    (section,) = [s for s in sections(Report(COMPARISON, grids=grids)) if s.figure == "samples"]
    assert section.caption.endswith("by its ema weights.")


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
