import pytest

from lit_diffusion.cli.doctor.report import (
    Level,
    count,
    duration,
    has_problem,
    note,
    ok,
    problem,
    report,
    verdict,
    warning,
)


def test_the_gravest_comes_first_and_equals_keep_their_order():
    found = [ok("a", "1"), note("b", "2"), problem("c", "3"), ok("d", "4"), warning("e", "5")]
    words = [line.split() for line in report(found).splitlines()[:5]]
    assert [w[0] for w in words] == ["problem", "warning", "note", "OK", "OK"]
    assert [w[1] for w in words] == ["c", "e", "b", "a", "d"]


def test_a_finding_is_one_line_whatever_an_error_says():
    assert len(report([problem("data", "first\n  second\n")]).splitlines()) == 3


def test_texts_are_aligned():
    lines = report([ok("a", "here"), ok("longer", "here")]).splitlines()[:2]
    assert lines[0].index("here") == lines[1].index("here")


@pytest.mark.parametrize(
    ("levels", "told"),
    [
        ([], "No problem and no warning."),
        ([Level.NOTE], "No problem and no warning."),
        ([Level.WARNING], "1 warning: look at it"),
        ([Level.WARNING] * 2, "2 warnings: look at them"),
        ([Level.PROBLEM], "1 problem: a run would fail"),
        ([Level.PROBLEM, Level.WARNING], "1 problem and 1 warning: a run would fail"),
    ],
)
def test_the_verdict_counts_what_matters(levels, told):
    from lit_diffusion.cli.doctor.report import Finding

    assert told in verdict([Finding(level, "t", "x") for level in levels])


def test_only_problems_are_problems():
    assert has_problem([ok("a", ""), problem("a", "")])
    assert not has_problem([warning("a", ""), note("a", ""), ok("a", "")])


def test_units_are_those_that_people_read():
    assert [duration(s) for s in (0.9996, 119, 120, 7200, 3e9)] == [
        "1,000 ms",
        "119 s",
        "2 min",
        "2 h",
        "95 years",
    ]
    assert count(2, "process") == "2 processes"
