"""Figures of the source code: python tests/benchmarks/code_figures.py [CHECKOUT].

Lines by room and the share of the core, files that one other file imports, private helpers that are
used once, names that the vocabulary excludes, and files to copy for each callback.
"""

import ast
import re
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[2]).resolve()
CORE = ("maths", "networks", "solvers", "modules")
TOOLS = ("distributed", "files", "signals")
EXCLUDED = {
    *("found", "told", "made", "kept", "seen", "said", "given", "own"),
    *("taken", "chosen", "shown", "meant", "begun", "looked"),
}


def module_name(file: Path) -> str:
    parts = list(file.relative_to(ROOT).with_suffix("").parts)
    parts = ["lit_diffusion", *parts] if parts[0] == "callbacks" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = sorted([*ROOT.glob("lit_diffusion/**/*.py"), *ROOT.glob("callbacks/**/*.py")])
TEXT = {module_name(file): file.read_text() for file in FILES}
TREE = {name: ast.parse(text) for name, text in TEXT.items()}


def room(name: str) -> str:
    """Folder below the package; for files beside them, the maths or what surrounds it."""
    first = name.split(".")[1] if "." in name else ""
    if any(other.startswith(f"lit_diffusion.{first}.") for other in TEXT):
        return first
    return "tools" if first in TOOLS else "maths"


def imports(name: str) -> set[str]:
    """Modules of ours that a module imports, at the top or late."""
    names = set()
    for node in ast.walk(TREE[name]):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = name.split(".")[: -node.level] if node.level else []  # of a relative import
            package = ".".join([*base, *filter(None, [node.module])])
            names |= {package, *(f"{package}.{alias.name}" for alias in node.names)}
    return names & TEXT.keys() - {name}


def closure(name: str) -> set[str]:
    """The module and all of ours that it imports; the two packages themselves are anybody's."""
    reached, waiting = {"lit_diffusion", "lit_diffusion.callbacks"}, [name]
    while waiting:
        if (module := waiting.pop()) not in reached:
            reached.add(module)
            waiting += imports(module)
    return reached


def lines_of(names) -> int:
    return sum(len(TEXT[name].splitlines()) for name in names)


def print_rooms() -> None:
    rooms = defaultdict(list)
    for name in TEXT:
        rooms[room(name)].append(name)
    total = lines_of(TEXT)
    for each in sorted(rooms):
        print(f"{lines_of(rooms[each]):>7,} lines {len(rooms[each]):>4} files  {each}")
    core = sum(lines_of(rooms[each]) for each in CORE)
    print(f"{total:>7,} lines {len(TEXT):>4} files  in all; core {core:,}, {core / total:.0%}")
    tests = [len(file.read_text().splitlines()) for file in ROOT.glob("tests/**/*.py")]
    print(f"{sum(tests):>7,} lines {len(tests):>4} files  tests")


def print_shards() -> None:
    importers = Counter(imported for name in TEXT for imported in imports(name))
    print(f"{sum(count == 1 for count in importers.values())} files with one importer")
    short = [n for n, text in TEXT.items() if 0 < len(text.splitlines()) <= 100]
    print(f"{len(short)} files of at most 100 lines")
    once, sizes = 0, []
    for name, tree in TREE.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                sizes.append(node.end_lineno - node.lineno + 1)
                is_helper = re.fullmatch(r"_[a-z]\w*", node.name)
                once += bool(is_helper) and len(re.findall(rf"\b{node.name}\b", TEXT[name])) == 2
    sizes.sort()
    print(f"{once} private helpers that are used once, of {len(sizes)} functions", end="")
    print(f" (median {sizes[len(sizes) // 2]} lines, largest {sizes[-1]})")


def print_names() -> None:
    names = Counter()
    for tree in TREE.values():
        for node in ast.walk(tree):
            stored = isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store)
            name = getattr(node, "id", None) or getattr(node, "attr", "") if stored else ""
            name = node.arg if isinstance(node, ast.arg) else name
            name = node.name if isinstance(node, ast.FunctionDef | ast.ClassDef) else name
            names.update(EXCLUDED & set(name.lower().split("_")))
    print(f"{names.total()} names with an excluded word: {dict(names.most_common())}")


def print_copies() -> None:
    for file in sorted((ROOT / "callbacks").glob("*.py")):
        name = module_name(file)
        if file.name != "__init__.py":
            needed = closure(name) - {"lit_diffusion", "lit_diffusion.callbacks"}
            needed = {n for n in needed if TEXT[n].strip()}
            print(f"{file.name:<26} {len(needed):>3} files, {lines_of(needed):>6,} lines to copy")


if __name__ == "__main__":
    print_rooms()
    print_shards()
    print_names()
    print_copies()
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    print(f"{len(tracked.stdout.splitlines())} tracked files")
