"""Draw random paragraphs of documentation, for a reader who says which one needed a second reading.

    python tests/benchmarks/draw_paragraphs.py SEED [NUM]

Half are paragraphs and list items of README, CONTRIBUTING and docs/, half are of public docstrings
in lit_diffusion/ and callbacks/. Tables, code, headings, formulas and directives are left out. The
same commit and seed give the same paragraphs.
"""

import ast
import random
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
MIN_LENGTH = 80


def paragraphs(text: str) -> Iterator[str]:
    """Paragraphs and list items of a text without its code, tables and headings."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[*-]|\d+\.) )", text):
        is_prose = not re.match(r"\s*(\||#|!\[|    |>>>|<|---|:::|\$\$)", block)
        if is_prose and len(block) >= MIN_LENGTH:
            yield block.strip("\n")


def pages() -> Iterator[tuple[str, str]]:
    """(where, paragraph) of all pages."""
    for path in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]):
        if path.name != "CHANGELOG.md":
            for paragraph in paragraphs(path.read_text()):
                yield str(path.relative_to(ROOT)), paragraph


def docstrings() -> Iterator[tuple[str, str]]:
    """(where, paragraph) of all docstrings of public names, without their examples."""
    for path in sorted([*ROOT.glob("lit_diffusion/**/*.py"), *ROOT.glob("callbacks/*.py")]):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                continue
            name = getattr(node, "name", "")
            text = re.split(r"\n\s*Examples?:", ast.get_docstring(node) or "")[0]
            if not name.startswith("_"):
                for paragraph in paragraphs(text):
                    yield f"{path.relative_to(ROOT)}, {name or 'the file'}", paragraph


def main() -> None:
    """Print the drawn paragraphs."""
    seed, num = int(sys.argv[1]), int((sys.argv[2:] or ["10"])[0])
    generator = random.Random(seed)
    drawn = generator.sample([*pages()], num - num // 2)
    drawn += generator.sample([*docstrings()], num // 2)
    for number, (where, paragraph) in enumerate(drawn, 1):
        print(f"[{number}] {where}\n\n{textwrap.dedent(paragraph)}\n")


if __name__ == "__main__":
    main()
