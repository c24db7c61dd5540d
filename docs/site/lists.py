"""Lists as GitHub reads them, where Python-Markdown wants deeper indents or blank lines."""

import re

from markdown import Markdown
from markdown.blockprocessors import build_block_parser
from markdown.extensions import Extension
from markdown.preprocessors import Preprocessor

ITEM = re.compile(r"[ ]*([*+-]|1[.)])[ ]+\S")


class ListsAfterText(Preprocessor):
    """A list may follow its paragraph without a blank line."""

    def run(self, lines: list[str]) -> list[str]:
        """Add the blank line."""
        self.md.parser.blockprocessors["code"].tab_length = 4  # of pymdownx, which comes later
        spaced = list[str]()
        in_text = False
        for line in lines:
            if ITEM.match(line):
                if in_text:
                    spaced.append("")
                in_text = False
            elif not line.strip():
                in_text = False
            elif not spaced or not spaced[-1].strip():
                in_text = True
            spaced.append(line)
        return spaced


class Lists(Extension):
    """Must be the first extension, because it replaces the parser that the others add to."""

    def extendMarkdown(self, md: Markdown) -> None:
        """Build the parser of blocks again, with an indent of two, and add the blank lines."""
        md.tab_length = 2
        md.parser = build_block_parser(md)
        md.preprocessors.register(ListsAfterText(md), "lists-after-text", 23)  # after fenced code
