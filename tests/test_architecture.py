"""The rules of the house that a machine can check (README, "Architecture")."""

import ast
import configparser
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = [*(ROOT / "lit_diffusion").rglob("*.py"), *(ROOT / "callbacks").rglob("*.py")]
OURS = "lit_diffusion"

SYSTEM = {"files", "signals", "slurm"}  # the machine, by the standard library alone
SEAMS = {"protocols", "gaussian", "seeding"}
MATHS = {
    "timesteps",
    "processes",
    "parameterizations",
    "losses",
    "solvers",
    "guidance",
    "codecs",
    "likelihood",
    "lr_schedules",
}
FRAMEWORK = {"lightning", "torchvision", "torchmetrics", "torch_fidelity", "PIL", "numpy"}

# group of files -> (of ours they may import, third parties besides torch)
MAY_IMPORT = {
    "system": (SYSTEM, set()),
    "protocols": (set(), set()),
    "seeding": (set(), set()),
    "sharding": (set(), set()),
    "gaussian": ({"protocols"}, set()),
    # solvers know the default grids; likelihood and losses share gaussian
    "maths": (SEAMS | {"timesteps"}, set()),
    "networks": ({"networks.layers"}, set()),
    "image_files": (set(), {"PIL"}),
    "data": (SYSTEM | {"data", "image_files", "seeding"}, FRAMEWORK | {"sklearn"}),
    "metrics": (SYSTEM | {"image_files", "metrics", "seeding"}, FRAMEWORK | {"safetensors"}),
    "modules": (SEAMS | MATHS | {"networks", "data", "metrics", "modules"}, FRAMEWORK),
    "analysis": ({"analysis", "protocols", "seeding"}, {"scipy", "matplotlib"}),
    "callbacks": (
        SYSTEM
        | {"averages_state", "batch_end", "callbacks", "metrics", "protocols", "seeding"}
        | {"sharding"},
        FRAMEWORK,
    ),
}


def name_of(file: Path) -> str:
    """Dotted name inside the package, the folder callbacks/ mapped into it."""
    parts = list(file.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts if parts[0] == "callbacks" else parts[1:])


def group_of(name: str) -> str | None:
    top = name.split(".")[0]
    named = {"maths": MATHS, "system": SYSTEM}
    return next((group for group, names in named.items() if top in names), None) or (
        top if top in MAY_IMPORT else None
    )


def imports_of(file: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in {file}"
            found.add(node.module)
    return found


def is_allowed(imported: str, ours: set[str], others: set[str]) -> bool:
    top, _, rest = imported.partition(".")
    if top == OURS:
        return any(rest == name or rest.startswith(f"{name}.") for name in ours)
    return top in others | {"torch"} or top in sys.stdlib_module_names


@pytest.mark.parametrize("file", SOURCES, ids=name_of)
def test_files_import_only_what_their_place_allows(file):
    group = group_of(name_of(file))
    if group is not None:
        wrong = {i for i in imports_of(file) if not is_allowed(i, *MAY_IMPORT[group])}
        assert wrong == set()


def test_nothing_in_the_library_imports_callbacks():
    library = [f for f in SOURCES if not name_of(f).startswith("callbacks")]
    importers = [f for f in library if any("lit_diffusion.callbacks" in i for i in imports_of(f))]
    assert importers == []


def test_every_package_is_installed():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    listed = set(setup["options"]["packages"].split())
    folders = {f.parent.relative_to(ROOT) for f in SOURCES}
    expected = {
        OURS + ".callbacks" if folder.parts[0] == "callbacks" else ".".join(folder.parts)
        for folder in folders
    }
    assert listed == expected


def test_every_source_file_has_its_tests():
    tests = {f.relative_to(ROOT / "tests") for f in (ROOT / "tests").rglob("test_*.py")}
    lacking = []
    for file in SOURCES:
        parts = name_of(file).split(".")
        mirrored = Path(*parts[:-1], f"test_{parts[-1]}.py")
        if parts[-1] not in ("__init__", "protocols") and mirrored not in tests:
            lacking.append(str(mirrored))
    assert lacking == []


def test_functions_stay_small():
    """Median 10 lines, 90th percentile 30, at most 60 but for a network's __init__."""
    sizes = {}
    for file in SOURCES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef):
                sizes[f"{name_of(file)}:{node.name}"] = node.end_lineno - node.lineno + 1
    ordered = sorted(sizes.values())
    assert ordered[len(ordered) // 2] <= 10
    assert ordered[int(0.9 * len(ordered))] <= 30
    large = {k for k, n in sizes.items() if n > 60 and not k.startswith("networks.")}
    assert large == set()


def test_importing_the_package_or_its_command_line_imports_no_heavy_library():
    code = (
        "import sys, lit_diffusion, lit_diffusion.cli;"
        "print({'torch', 'lightning', 'torchvision', 'jsonargparse'} & set(sys.modules))"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert printed.stdout.strip() == "set()"
