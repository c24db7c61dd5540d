r"""Formulas of a page, `$...$` and `$$...$$` as GitHub reads them, become MathML at build time."""

import logging
import re
from re import Match
from xml.etree.ElementTree import Element

from latex2mathml.converter import convert
from markdown import Markdown
from markdown.extensions import Extension
from markdown.inlinepatterns import InlineProcessor
from markdown.preprocessors import Preprocessor

BLOCK = re.compile(r"^([ ]*)\$\$(.+?)\$\$[ ]*$", re.MULTILINE | re.DOTALL)
INLINE = r"(?<![\\$\w])\$(?![\s$])((?:\\.|[^$\\`])+?)(?<!\s)\$(?![\w$])"
INLINE_IN_BACKTICKS = r"\$`([^`]+)`\$"

log = logging.getLogger("mkdocs.hooks")


def to_mathml(formula: str, display: str) -> str:
    """MathML of a TeX formula; what latex2mathml does not know is warned about."""
    mathml = convert(formula.strip(), display=display)
    if unknown := re.findall(r"\\\w+|<mi>&</mi>", mathml):
        log.warning("formula with %s, which latex2mathml does not know: %s", unknown, formula)
    return str(mathml).replace("&#x0005E;", "&#x002C6;")  # the hat that is as wide as a letter


class BlockFormulas(Preprocessor):
    """$$...$$ on lines of their own. Runs after fenced code is taken out."""

    def run(self, lines: list[str]) -> list[str]:
        """Put the MathML of each formula out of Markdown's reach."""

        def store(match: Match[str]) -> str:
            mathml = to_mathml(match[2], "block")
            stored = self.md.htmlStash.store(f'<div class="formula">{mathml}</div>')
            return f"\n{match[1]}{stored}\n"

        return BLOCK.sub(store, "\n".join(lines)).split("\n")


class InlineFormulas(InlineProcessor):
    """$...$ within a line."""

    def handleMatch(self, m: Match[str], data: str) -> tuple[Element | str, int, int]:
        """Put the MathML of the formula out of Markdown's reach."""
        return self.md.htmlStash.store(to_mathml(m[1], "inline")), m.start(0), m.end(0)


class Formulas(Extension):
    """Both kinds."""

    def extendMarkdown(self, md: Markdown) -> None:
        """Register the processors before escapes (180). Code in backticks (190) is no formula."""
        md.preprocessors.register(BlockFormulas(md), "block-formulas", 24)
        md.inlinePatterns.register(
            InlineFormulas(INLINE_IN_BACKTICKS, md), "backtick-formulas", 195
        )
        md.inlinePatterns.register(InlineFormulas(INLINE, md), "formulas", 185)
