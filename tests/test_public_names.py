"""What docs/public-api.md promises: names, parameters and options of this version stay.

tests/golden/public_names.txt lists them. Where a change is meant, follow the deprecation rule of
CONTRIBUTING.md, then run `PYTHONPATH=tests python tests/test_public_names.py`.
"""

import contextlib
import inspect
import io
import re
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import lit_diffusion
from lit_diffusion.cli.fit import OPTIONS
from lit_diffusion.cli.main import COMMANDS, main

ROOT = Path(__file__).parent.parent
GOLDEN = ROOT / "tests" / "golden" / "public_names.txt"
METHODS = {
    "lit_diffusion.callbacks": {"density_at", "names", "steps", "weights"},
    "lit_diffusion.data": {"class_names", "encode", "image_shape", "load", "num_classes"},
    "lit_diffusion.lab": set(),
}
"""The methods of these packages that users call; this package and the Trainer call the others."""


def documented_names() -> list[tuple[str, str]]:
    """(module, name) of all frozen names: those in the API reference, but for analyses."""
    pattern = r"^::: (lit_diffusion\S*)\n    options:\n      members: \[(.*?)\]"
    pages = sorted(ROOT.glob("docs/reference/*.md"))
    lists = [
        pair for page in pages for pair in re.findall(pattern, page.read_text(), re.M | re.DOTALL)
    ]
    lists.append(("lit_diffusion", " ".join(lit_diffusion.__all__)))
    return [
        (module, name)
        for module, names in lists
        if not module.startswith("lit_diffusion.lab.analysis")
        for name in re.findall(r"\w+", names)
    ]


def describe_parameters(function: Any) -> list[str]:
    """Parameters by name; `name=` has a default, `/0` has no name for callers, `*name` no place."""
    try:
        parameters = [*inspect.signature(function).parameters.values()]
    except (TypeError, ValueError):  # a type, such as an alias
        return []
    marks = {
        inspect.Parameter.VAR_POSITIONAL: "*args",
        inspect.Parameter.VAR_KEYWORD: "**kwargs",
    }
    words = []
    for place, parameter in enumerate(parameters):
        word = marks.get(parameter.kind, parameter.name)
        word = f"/{place}" if parameter.kind is inspect.Parameter.POSITIONAL_ONLY else word
        is_keyword = parameter.kind is inspect.Parameter.KEYWORD_ONLY
        has_default = parameter.default is not inspect.Parameter.empty
        words.append(f"{'*' if is_keyword else ''}{word}{'=' if has_default else ''}")
    return words


def public_methods(cls: type) -> dict[str, Any]:
    """Methods and properties of a class, but for those that override classes of others."""
    ours = [c for c in cls.__mro__ if c.__module__.startswith("lit_diffusion")]
    others = [c for c in cls.__mro__ if c not in ours]
    names = {name for c in ours for name in vars(c) if not name.startswith("_")}
    for package, called in METHODS.items():
        if cls.__module__.startswith(package):
            names &= called
    methods = {name: inspect.getattr_static(cls, name) for name in sorted(names)}
    kinds = (property, cached_property, classmethod, staticmethod)
    return {
        name: value
        for name, value in methods.items()
        if isinstance(value, kinds) or callable(value)
        if not any(hasattr(c, name) for c in others)
    }


def describe(name: str, value: Any) -> dict[str, list[str]]:
    """Dotted name -> parameters, of a function or of a class and its methods."""
    lines = {name: describe_parameters(value)}
    if not inspect.isclass(value):
        return lines
    for method, found in public_methods(value).items():
        function = getattr(found, "__func__", found)
        is_function = inspect.isfunction(function)
        parameters = describe_parameters(function) if is_function else []
        is_bound = is_function and not isinstance(found, staticmethod)
        lines[f"{name}.{method}"] = parameters[is_bound:]
    return lines


SUBCOMMANDS = {
    "analyze": ("consistency", "interpolate", "landscape", "hessian"),
    "convert": ("export", "import"),
}


def options_of(command: str) -> set[str]:
    """Options of a command: of fit and the like all but those of model, data and Trainer."""
    if command in ("fit", "validate", "test", "predict"):
        return {f"lit-diffusion {command} --{option}" for option in OPTIONS}
    options = set()
    for word in SUBCOMMANDS.get(command, ("",)):
        words = [command, *word.split()]
        with contextlib.redirect_stdout(io.StringIO()) as stdout:
            main([*words, "--help", "all"])
        names = re.findall(r"^ +(?:-\w, )?(--\w[\w-]*)", stdout.getvalue(), re.MULTILINE)
        options |= {" ".join(["lit-diffusion", *words, name]) for name in names}
    return options


def current_names() -> dict[str, list[str]]:
    lines: dict[str, list[str]] = {}
    for module, name in documented_names():
        described = describe(f"{module}.{name}", getattr(import_module(module), name))
        lines |= dict([*described.items()][:1]) if module == "lit_diffusion" else described
    return lines


def golden_names() -> dict[str, list[str]]:
    lines = [line for line in GOLDEN.read_text().splitlines() if line.startswith("lit_diffusion")]
    pairs = [line.rstrip(")").split("(") for line in lines]
    return {name: [p for p in parameters.split(", ") if p] for name, parameters in pairs}


def lost_parameters(before: list[str], now: list[str]) -> list[str]:
    """What a caller of `before` misses: names, the order of positions, or optional values."""
    names = {p.strip("*=") for p in now}
    needed = {p.strip("*") for p in now if not p.endswith("=")}
    by_place = [[p.strip("=") for p in each if not p.startswith("*")] for each in (before, now)]
    lost = [p for p in before if p.strip("*=") not in names]
    lost += [f"the place of {p}" for p, q in zip(*by_place, strict=False) if p != q]
    lost += [f"the default of {p}" for p in before if p.strip("*=") in needed and p[-1] == "="]
    new = needed - {p.strip("*=") for p in before} - {"args", "kwargs"}
    return lost + [f"{p} is new and needed" for p in sorted(new)]


def test_no_public_name_or_parameter_has_vanished():
    now = current_names()
    lost = {}
    for name, parameters in golden_names().items():
        if name not in now:
            lost[name] = "is missing"
        elif missing := lost_parameters(parameters, now[name]):
            lost[name] = missing
    assert lost == {}, "see the deprecation rule of CONTRIBUTING.md"


def test_every_name_of_the_reference_is_frozen():
    new = current_names().keys() - golden_names().keys()
    assert new == set(), "run: PYTHONPATH=tests python tests/test_public_names.py"


@pytest.mark.parametrize("command", COMMANDS)
def test_no_option_has_vanished(command):
    lines = GOLDEN.read_text().splitlines()
    frozen = {line for line in lines if line.startswith(f"lit-diffusion {command} ")}
    assert frozen or command in ("doctor", "completion")  # doctor has the options of fit
    assert frozen - options_of(command) == set()


@pytest.mark.parametrize(
    ("before", "now", "lost"),
    [
        ("a, b=, *c=", "a, b=, d=, *c=, *e=", []),
        ("a, b=", "a", ["b="]),
        ("a, b=", "b=, a", ["the place of a", "the place of b"]),
        ("a", "a, b", ["b is new and needed"]),
        ("a, b=", "a, b", ["the default of b="]),
        ("/0, a", "/0, c", ["a", "the place of a", "c is new and needed"]),
    ],
)
def test_what_a_caller_loses(before, now, lost):
    assert lost_parameters(before.split(", "), now.split(", ")) == lost


if __name__ == "__main__":
    lines = [f"{name}({', '.join(p)})" for name, p in sorted(current_names().items())]
    options = [option for command in COMMANDS for option in sorted(options_of(command))]
    header = "# Public names of 0.2: docs/public-api.md, tests/test_public_names.py\n"
    GOLDEN.write_text(header + "\n".join([*lines, *options]) + "\n")
