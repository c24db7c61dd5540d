import pytest

from lit_diffusion.lab.compare.report.markdown import code, escaped


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("<script>alert(1)</script>", r"\<script>alert(1)\</script>"),
        ("**bold** `code`", r"\*\*bold\*\* \`code\`"),
        ("_it_ num_fake", r"\_it\_ num_fake"),
        ("a|b", r"a\|b"),
        ("[l](http:x) [l][x]", r"[l]\(http:x) [l]\[x]"),
        ("&lt; R&D", r"\&lt; R&D"),
        ("new\nline\r\n# title", "new line # title"),
        ("# a", r"\# a"),
        ("> a", r"\> a"),
        ("- a", r"\- a"),
        ("-", "-"),
        ("> 2,000", "> 2,000"),
        (r"a\_b", r"a\\\_b"),
        ("~~gone~~", r"\~\~gone\~\~"),
        (
            "1.80x [1.50, 2.20], p < 0.001, > 2,000 +- 3",
            "1.80x [1.50, 2.20], p < 0.001, > 2,000 +- 3",
        ),
    ],
)
def test_names_are_text_and_numbers_stay_as_they_are(text, shown):
    assert escaped(text) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("runs/md", "`runs/md`"),
        ("a|*b", "`a|*b`"),
        ("a`b", "``a`b``"),
        ("`a", "`` `a ``"),
        ("a\nb", "`a b`"),
    ],
)
def test_code_is_fenced_by_more_ticks_than_it_holds(text, shown):
    assert code(text) == shown
