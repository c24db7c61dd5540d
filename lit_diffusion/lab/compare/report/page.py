"""The Markdown of a report as one HTML file that needs no network."""

from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from itertools import chain

from markdown_it import MarkdownIt
from markdown_it.token import Token

_LONG = 110  # characters of a headline that would push the figure off the first screen
_COLORED = ("faster", "slower", "unclear", "ends")  # first words of verdicts


def html(markdown: str, pictures: Mapping[str, str]) -> str:
    """The page of a report that begins with its title; `pictures`: an address for each image."""
    parser = MarkdownIt("commonmark", {"html": False, "xhtmlOut": False}).enable("table")
    tokens = parser.parse(markdown.replace("+-", "\N{PLUS-MINUS SIGN}"))
    title = "".join(child.content for child in tokens[1].children or ())
    tokens[0].attrSet("class", "long" if len(title) > _LONG else "short")
    for token in chain.from_iterable(token.children or () for token in tokens):
        if token.type == "image":
            token.attrSet("src", pictures[str(token.attrGet("src"))])
    _mark_cells(tokens)
    body = parser.renderer.render(tokens, parser.options, {})
    body = body.replace("<table>", '<div class="scroll"><table>')
    body = body.replace("</table>", "</table></div>")
    style = files("lit_diffusion.lab.compare.report").joinpath("report.css").read_text()
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n"
        f"<main>\n{body}</main>\n</html>\n"
    )


def _mark_cells(tokens: Sequence[Token]) -> None:
    for before, cell, text, end in zip(tokens, tokens[1:], tokens[2:], tokens[3:], strict=False):
        if cell.type == "td_open" and before.type == "tr_open":
            cell.tag = end.tag = "th"
            cell.attrSet("scope", "row")
        elif cell.type == "td_open" and (word := text.content.partition(" ")[0]) in _COLORED:
            cell.attrSet("class", word)
        elif cell.type == "th_open":
            cell.attrSet("scope", "col")
