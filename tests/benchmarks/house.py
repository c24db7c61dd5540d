"""Lines by room, sizes of functions and tracked files: house.py [CHECKOUT].

Files without an import rule and private names of others are counted by tests/test_architecture.py.
"""

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[2])


def main() -> None:
    lines, files, sizes = Counter(), Counter(), []
    for file in [*ROOT.glob("lit_diffusion/**/*.py"), *ROOT.glob("callbacks/**/*.py")]:
        text, room = file.read_text(), str(file.parent.relative_to(ROOT))
        lines[room] += len(text.splitlines())
        files[room] += 1
        functions = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef)]
        sizes += [n.end_lineno - n.lineno + 1 for n in functions]
    for room in sorted(lines):
        print(f"{lines[room]:>7} lines {files[room]:>4} files  {room}")
    sizes.sort()
    print(f"{sum(lines.values()):>7} lines {sum(files.values()):>4} files  in all")
    middle, ninth = sizes[len(sizes) // 2], sizes[int(0.9 * len(sizes))]
    print(f"{len(sizes)} functions: median {middle}, p90 {ninth}, max {sizes[-1]}")
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    print(f"{len(listed.stdout.splitlines())} tracked files")


if __name__ == "__main__":
    main()
