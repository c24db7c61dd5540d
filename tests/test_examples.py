"""Most public names have an example in their docstring. `tests/test_docs.py` runs the examples.

    python tests/test_examples.py

prints the public names without an example: those in the API reference, and then all others.
"""

import ast
import re
from importlib import import_module
from pathlib import Path

import lit_diffusion

ROOT = Path(__file__).parent.parent
MOST = 1 / 5  # of the public names may lack an example


def documented_names() -> set[tuple[str, str]]:
    """(module, name) of the classes and functions that the API reference lists."""
    pattern = r"^::: (lit_diffusion\S*)\n    options:\n      members: \[(.*?)\]"
    texts = [page.read_text() for page in sorted((ROOT / "docs/reference").glob("*.md"))]
    lists = [pair for text in texts for pair in re.findall(pattern, text, re.M | re.DOTALL)]
    lists.append(("lit_diffusion", " ".join(lit_diffusion.__all__)))
    objects = [
        getattr(import_module(module), name)
        for module, names in lists
        for name in re.findall(r"\w+", names)
    ]
    return {(o.__module__, o.__qualname__) for o in objects if hasattr(o, "__qualname__")}


def examples_by_name() -> dict[tuple[str, str], bool]:
    """Whether the docstring of a public class or function, or of a method of it, has an example."""
    has_example = {}
    sources = [*ROOT.glob("lit_diffusion/**/*.py"), *ROOT.glob("callbacks/*.py")]
    for path in sorted(sources):
        parts = path.relative_to(ROOT).with_suffix("").parts
        module = ".".join(("lit_diffusion", *(p for p in parts if p != "lit_diffusion")))
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                nested = node.body if isinstance(node, ast.ClassDef) else []
                documented = [node, *(n for n in nested if isinstance(n, ast.FunctionDef))]
                texts = [ast.get_docstring(each) or "" for each in documented]
                has_example[module, node.name] = any(">>> " in text for text in texts)
    return has_example


def test_at_most_a_fifth_of_the_public_names_has_no_example():
    examples, documented = examples_by_name(), documented_names()
    documented &= examples.keys()  # aliases of types have no docstring
    lacking = sorted(name for name in documented if not examples[name])
    assert len(documented) > 100
    assert len(lacking) <= MOST * len(documented), lacking


def main() -> None:
    examples, documented = examples_by_name(), documented_names()
    for title, names in (
        ("names of the API reference", documented & examples.keys()),
        ("other names", examples.keys() - documented),
    ):
        lacking = sorted(name for name in names if not examples[name])
        print(f"{title}: {len(lacking)} of {len(names)} without an example")
        print(*(f"    {module}.{name}" for module, name in lacking), sep="\n")


if __name__ == "__main__":
    main()
