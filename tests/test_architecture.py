"""The rules of the house that a machine can check (docs/architecture.md)."""

import ast
import configparser
import re
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

import lit_diffusion
from lit_diffusion import callbacks

ROOT = Path(__file__).parent.parent
SOURCES = [*(ROOT / "lit_diffusion").rglob("*.py"), *(ROOT / "callbacks").rglob("*.py")]
OURS = "lit_diffusion"

MATHS = {
    *("codecs", "conditioning", "couplings", "ema_profiles", "gaussian", "grids", "guidance"),
    *(
        "likelihood",
        "losses",
        "lr_schedules",
        "optimizers",
        "parameterizations",
        "processes",
        "protocols",
        "seeding",
    ),
    *("solvers", "timesteps"),
}
TOOLS = {"distributed", "files", "pretrained", "signals"}
TRAINER = "callbacks.trainer_state"
LIGHTNING = {"lightning"}
FRAMEWORK = LIGHTNING | {"torchvision", "torchmetrics", "torch_fidelity", "PIL", "numpy"}
LAB_EXTRA = {"markdown_it", "matplotlib"}
ANY = {"packaging", "yaml", "jsonargparse", "pytorch_lightning", "scipy"} | LAB_EXTRA
LIBRARY = MATHS | TOOLS | {"callbacks", "checkpoints", "config", "data", "interchange", "metrics"}
LIBRARY |= {"auxiliary_losses", "modules", "networks"}

PORTABLE = (
    *("callbacks.curriculum", "callbacks.ema", "callbacks.finite_updates"),
    *("callbacks.loss_resampler", "callbacks.momentum_decay", "callbacks.step_seed"),
)
"""Files of callbacks/ that can be copied, with trainer_state.py, into another package. The file
loss_resampler.py also needs curriculum.py."""

# room or file, the most particular first -> (of ours it may import, third parties besides torch)
MAY_IMPORT = {
    **{name: (MATHS, set()) for name in MATHS},
    **{name: (TOOLS, set()) for name in TOOLS},
    "files": (set(), {"PIL"}),
    "couplings": (MATHS, {"scipy"}),
    "auxiliary_losses": (MATHS | {"auxiliary_losses"}, set()),
    "auxiliary_losses.pretrained_encoder": ({"files", "protocols"}, {"transformers"}),
    "auxiliary_losses.self_teacher": (
        MATHS | {"auxiliary_losses", "callbacks.ema", TRAINER},
        set(),
    ),
    "networks": ({"networks", "protocols"}, set()),
    "networks.fused_norm_triton": ({"networks"}, {"triton"}),
    "modules.vae": ({"files"}, {"diffusers"}),
    "modules": (MATHS | TOOLS | {"modules", TRAINER}, {"lightning", "torchmetrics"}),
    "config": ({"config"} | TOOLS, {"yaml", "jsonargparse"}),
    "checkpoints": (
        {"checkpoints", "config", "ema_profiles", "callbacks.ema", "interchange.exported", TRAINER}
        | TOOLS,
        LIGHTNING | {"yaml", "jsonargparse", "safetensors"},
    ),
    # reads what it wrote without Lightning: a test runs it so
    "interchange.exported": ({"config.renamed", "networks"} | TOOLS, {"safetensors"}),
    "interchange.model_card": (TOOLS, {"yaml"}),
    "interchange.diffusers_folder": (
        {"interchange"} | MATHS | TOOLS,
        {"diffusers", "safetensors"},
    ),
    "interchange": ({"interchange", "networks"} | MATHS | TOOLS, {"safetensors"}),
    "data.latents": ({"data", "seeding"} | TOOLS, FRAMEWORK | {"safetensors"}),
    "data.streaming": ({"data"} | TOOLS, FRAMEWORK | {"litdata"}),
    "data": ({"conditioning", "data", "seeding", TRAINER} | TOOLS, FRAMEWORK | {"sklearn"}),
    "metrics": ({"metrics", "seeding"} | TOOLS, FRAMEWORK | {"safetensors"}),
    TRAINER: (set(), LIGHTNING | {"lightning_fabric", "pytorch_lightning"}),
    **dict.fromkeys(PORTABLE, ({TRAINER}, LIGHTNING | {"pytorch_lightning", "numpy"})),
    "callbacks.loss_resampler": (
        {TRAINER, "callbacks.curriculum"},
        LIGHTNING | {"pytorch_lightning"},
    ),
    "callbacks": (
        {"callbacks", "checkpoints.averages", "ema_profiles"}
        | {"losses", "metrics", "protocols", "seeding"}
        | TOOLS,
        FRAMEWORK | {"tqdm"},
    ),
    "cli": (LIBRARY | {"cli"}, FRAMEWORK | ANY),
    "lab": (LIBRARY | {"cli", "lab"}, FRAMEWORK | ANY),
    "": (LIBRARY, set()),  # lit_diffusion/__init__.py, which imports late
}
KNOWN_PRIVATE = {
    # torch's, used by every optimizer
    *("_foreach_lerp_", "_foreach_copy_", "_foreach_norm", "_fused_sgd_"),
    *("_version", "_current_frames", "_exit", "_replace", "_asdict", "_dynamo"),  # documented
    "_get_sequence_number_for_group",  # torch says it nowhere else; rank_watch.py
    *("_C", "_are_functorch_transforms_active"),  # torch says it nowhere else; fused_norm.py
    "_functorch",  # torch has its setting `backward_pass_autocast` nowhere else; compiled.py
    "_negative_number_matcher",  # of argparse, which has no other way; cli/options.py
}
PRIVATE_ALLOWED = {TRAINER, "cli.exact_resume", "cli.fitting"}
PRIVATE_ALLOWED |= {"config.class_change", "config.trust"}
"""Files that may use private names of Lightning and jsonargparse; a test names each."""


def name_of(file: Path) -> str:
    """Dotted name inside the package, the folder callbacks/ mapped into it."""
    parts = list(file.relative_to(ROOT).with_suffix("").parts)
    parts = parts if parts[0] == "callbacks" else parts[1:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def rule_of(name: str) -> str | None:
    """The most particular rule of a file; None without."""
    rules = [r for r in MAY_IMPORT if name == r or (r and name.startswith(f"{r}."))]
    return max(rules, key=len, default=None)


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


@cache
def nodes_of(file: Path) -> list[ast.AST]:
    return list(ast.walk(parsed(file)))


def imports_among(nodes: Iterable[ast.AST], file: Path) -> set[str]:
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = node.module
            if node.level:  # in callbacks/ alone, by ruff
                assert node.level == 1, f"an import from above its folder in {file}"
                module = ".".join([OURS, *file.relative_to(ROOT).parent.parts, module])
            inside = {f"{module}.{alias.name}" for alias in node.names}
            names |= inside if module.split(".")[0] == OURS else {module}
    return names


def is_allowed(imported: str, ours: set[str], others: set[str]) -> bool:
    top, _, rest = imported.partition(".")
    if top == OURS:
        return any(f"{rest}.".startswith(f"{name}.") for name in ours | {"__version__"})
    return top in others | {"torch"} or top in sys.stdlib_module_names


def test_files_import_only_what_their_place_allows():
    for file in SOURCES:
        rule = rule_of(name_of(file))
        assert rule is not None, f"{file} is without a rule: add its room to MAY_IMPORT"
        imports = imports_among(nodes_of(file), file)
        assert {i for i in imports if not is_allowed(i, *MAY_IMPORT[rule])} == set(), file


def setup_cfg() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def test_what_the_lab_alone_needs_is_its_extra_and_imported_nowhere_else_at_import_time():
    setup = setup_cfg()
    lists = [
        *setup["options.extras_require"].items(),
        ("core", setup["options"]["install_requires"]),
    ]
    packages = {name: set(re.findall(r"^[a-z-]+", text, re.MULTILINE)) for name, text in lists}
    assert packages["lab"] == {"markdown-it-py", "matplotlib"}
    assert "lit-diffusion[lab]" in setup["options.extras_require"]["test"].split()
    assert "lit-diffusion[test]" in setup["options.extras_require"]["dev"].split()
    assert not packages["lab"] & packages["core"]
    for file in SOURCES:
        if not name_of(file).startswith("lab."):
            imports = imports_among(parsed(file).body, file)
            assert not {name.split(".")[0] for name in imports} & LAB_EXTRA, file


def test_the_top_level_holds_only_what_a_researcher_comes_for():
    files = {f.stem for f in (ROOT / "lit_diffusion").glob("*.py")}
    assert files - {"__init__"} == MATHS - {"solvers"} | TOOLS - {"pretrained"}


def test_no_class_of_ours_is_found_by_a_string():
    for file in SOURCES:
        late = "import_module" in file.read_text()
        assert not late or name_of(file) in ("cli.main", "callbacks", ""), file


UNCHECKED_READS = {
    "callbacks.rank_watch",  # files of /proc
    "config.trust",  # sources of this package
    "lab.compare.report",  # its style sheet
}


def test_only_regular_files_are_read():
    """Opening a pipe waits for another process: each function that opens a file checks its kind.

    The rows of a run (mode "a") are not looked at: they were read before. Other files are written
    by `atomic_write`, which opens none that is there.
    """
    functions = [
        (f"{name_of(file)}.{node.name}", node)
        for file in SOURCES
        if name_of(file) not in {"files", *UNCHECKED_READS}
        for node in nodes_of(file)
        if isinstance(node, ast.FunctionDef)
    ]
    reading = [(n, node) for n, node in functions if any(map(reads_a_file, ast.walk(node)))]
    assert len(reading) > 30
    check = re.compile(r"\bcheck(ed_read|_regular)\(")
    assert [name for name, node in reading if not check.search(ast.unparse(node))] == []


def reads_a_file(node: ast.AST) -> bool:
    """Whether a node is a call that opens a file for reading, of others than this package's."""
    if not isinstance(node, ast.Call):
        return False
    function = ast.unparse(node.func)
    name = function.rpartition(".")[2]
    modes = [a.value for a in node.args if isinstance(a, ast.Constant)]
    reads = (
        name in ("read_text", "read_bytes", "safe_open", "load_file", "from_pretrained")
        or function in ("np.load", "torch.load", "Image.open", "open", "shutil.copyfile")
        or (name == "open" and (not node.args or modes in (["r"], ["rb"], ["w"], ["ab"])))
    )
    return reads and "__file__" not in ast.unparse(node)


def test_private_names_of_others_are_used_in_their_file_alone():
    files = [file for file in SOURCES if name_of(file) not in PRIVATE_ALLOWED]
    assert {str(file): names for file in files if (names := foreign_private(file))} == {}


def test_callbacks_ask_for_classes_of_lightnings_by_isinstance_lightning():
    """`isinstance` would miss those of pytorch_lightning."""
    for file in (ROOT / "callbacks").rglob("*.py"):
        imports = [n for n in nodes_of(file) if isinstance(n, ast.ImportFrom)]
        lightnings = {a.name for n in imports if n.module.startswith("lightning") for a in n.names}
        calls = [n for n in nodes_of(file) if isinstance(n, ast.Call) and len(n.args) == 2]
        asked = [n.args[1] for n in calls if ast.unparse(n.func) in ("isinstance", "issubclass")]
        names = {n.id for kinds in asked for n in ast.walk(kinds) if isinstance(n, ast.Name)}
        assert names & lightnings == set(), file


def foreign_private(file: Path) -> list[str]:
    """Lines with a private attribute that the file does not define, or a private import."""
    nodes = nodes_of(file)
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    defined = {node.attr for node in attributes if isinstance(node.ctx, ast.Store)}
    defined |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    defined |= {node.id for node in nodes if isinstance(node, ast.Name)}
    lines = [
        f"{a.lineno} {a.attr}" for a in attributes if is_private(a.attr, defined | KNOWN_PRIVATE)
    ]
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            names = [*node.module.split("."), *(alias.name for alias in node.names)]
            foreign = not node.level and node.module.split(".")[0] != OURS
            lines += [f"{node.lineno} {n}" for n in names if foreign and is_private(n, set())]
    return lines


def is_private(name: str, known: set[str]) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in known


def test_every_package_is_installed():
    listed = set(setup_cfg()["options"]["packages"].split())
    folders = {file.parent.relative_to(ROOT).parts for file in SOURCES}
    names = {".".join(folder).replace("callbacks", f"{OURS}.callbacks") for folder in folders}
    assert listed == names | {f"{OURS}.configs"}  # YAML alone


def test_importing_the_package_its_callbacks_or_its_command_line_imports_no_heavy_library():
    code = (
        "import sys, lit_diffusion, lit_diffusion.callbacks, lit_diffusion.cli.main;"
        "print({'torch', 'lightning', 'torchvision', 'jsonargparse'} & set(sys.modules))"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert printed.stdout.strip() == "set()"


@pytest.mark.parametrize("package", [lit_diffusion, callbacks])
def test_type_checkers_see_the_names_that_are_imported_late(package):
    for_type_checkers = {
        alias.asname: f"{node.module}".rpartition(".")[2]
        for node in nodes_of(Path(package.__file__))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname
    }
    assert sorted(for_type_checkers) == sorted(package.__all__)
    for name, module in for_type_checkers.items():
        assert package._FILES[name].rpartition(".")[2] == module
        assert getattr(package, name).__name__ == name
