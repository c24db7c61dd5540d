"""Restrict the classes that a config or checkpoint may name, and resolve short class names.

jsonargparse imports and calls whatever a class path names, so an untrusted file could run any code.
Therefore, a class path is imported only if it is in a package of `TRUSTED` or in a package that the
user trusts. Any other class path raises an error.

From packages of `TRUSTED`, only classes are allowed, not functions. jsonargparse alone would also
accept functions with a suitable return type, and some functions in these packages execute their
argument as code.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import _typehints, _util, get_loader, set_loader, set_parsing_settings
from jsonargparse._common import ImportDenied, parsing_settings

from lit_diffusion.config.class_change import drop_arguments_of_other_class
from lit_diffusion.config.renamed import rename_config
from lit_diffusion.signals import print_error

TRUSTED = (
    "lit_diffusion",
    "torch.nn",
    "torch.optim",
    "torchvision.models",
    "torchvision.ops",
    "torchvision.transforms",
    "lightning.pytorch.accelerators",
    "lightning.pytorch.callbacks",
    "lightning.pytorch.loggers",
    "lightning.pytorch.plugins",
    "lightning.pytorch.profilers",
    "lightning.pytorch.strategies",
    "lightning.fabric.accelerators",
    "lightning.fabric.plugins",
)
"""Packages whose classes any config or checkpoint may name."""


@contextmanager
def allow_class_paths(
    packages: Iterable[str] = (), report: Callable[[str], None] = print_error
) -> Iterator[None]:
    """Context in which configs may name classes from `TRUSTED` and anything from `packages`.

    Within the context, jsonargparse also replaces old names in configs, and resolves the short
    class names of `short_names`. If a later config or option names a different class, the arguments
    of the earlier class are dropped.

    Args:
        packages: dotted names of trusted modules and packages. A package includes all modules in
            it. Entries with a "/" are ignored here: they are trusted folders of VAEs, which
            `checkpoints.loading.check_codec_folder` uses.
        report: function to call with a message if arguments of an earlier class are dropped.
    """
    packages = tuple(name for name in packages if name.replace(".", "_").isidentifier())
    old_settings = dict(parsing_settings)
    find_paths, resolve_name = _util.canonical_import_paths, _typehints.resolve_class_path_by_name
    load_yaml: Any = get_loader("yaml")
    discard: Any = _typehints.discard_init_args_on_class_path_change
    reported = set[str]()  # one command line is parsed several times

    def find_allowed_paths(obj: Any) -> set[str]:
        paths = find_paths(obj)
        is_users = paths and all(is_within(path, packages) for path in paths)
        if not (is_users or inspect.isclass(obj)):
            path = min(paths, default=repr(obj))
            raise ImportDenied(f"Importing '{path}' is not allowed: it is not a class.")
        return paths

    def resolve_short_name(cls: Any, name: str) -> str:
        path = resolve_name(cls, name)
        return short_names().get(path, path)

    def discard_on_class_change(parser: Any, previous: Any, spec: Any) -> None:
        line = drop_arguments_of_other_class(previous, spec)
        if line and line not in reported:
            reported.add(line)
            report(line)
        discard(parser, previous, spec)

    try:
        set_loader("yaml", lambda text: rename_config(load_yaml(text)), (yaml.YAMLError,))
        set_parsing_settings(
            import_path_denylist=["*"],
            import_path_allowlist=[*TRUSTED, *packages],
            instantiate_subclass_spec_in_any=False,
        )
        # jsonargparse has no public way to allow only classes, so three of its functions are
        # replaced. It calls `canonical_import_paths` for each object that a value names. It calls
        # `resolve_class_path_by_name` for each name without dots, to find a subclass of the
        # setting's type. All merges of configs and options call
        # `discard_init_args_on_class_path_change`. setup.cfg caps the version of jsonargparse, and
        # tests check that it calls all three functions.
        _util.canonical_import_paths = find_allowed_paths
        _typehints.resolve_class_path_by_name = resolve_short_name
        _typehints.discard_init_args_on_class_path_change = discard_on_class_change
        yield
    finally:
        set_loader("yaml", load_yaml, (yaml.YAMLError,))
        _util.canonical_import_paths = find_paths
        _typehints.resolve_class_path_by_name = resolve_name
        _typehints.discard_init_args_on_class_path_change = discard
        parsing_settings.clear()
        parsing_settings.update(old_settings)


def is_within(path: str, packages: Iterable[str]) -> bool:
    """Whether a dotted path is one of the packages or inside one of them.

    Example:
        >>> is_within("torch.nn.Module", ["torch.nn"]), is_within("torchvision.ops", ["torch"])
        (True, False)
    """
    return any(f"{path}.".startswith(f"{package}.") for package in packages)


@cache
def short_names() -> dict[str, str]:
    """Return the short class names that configs may use, with the class path of each.

    Example:
        >>> short_names()["CosineBetas"], short_names()["EMA"]
        ('lit_diffusion.processes.CosineBetas', 'lit_diffusion.callbacks.EMA')
    """
    paths = dict[str, str]()
    for package in ("callbacks", "solvers"):  # class paths in these contain no module name
        text = files(f"lit_diffusion.{package}").joinpath("__init__.py").read_text()
        names = re.findall(r'"([A-Z]\w+)"', text)  # the entries of __all__
        paths |= {name: f"lit_diffusion.{package}.{name}" for name in names}
    for package in ("", ".networks", ".modules", ".data", ".lab.gan"):
        package = f"lit_diffusion{package}"
        for file in sorted(Path(str(files(package))).glob("*.py")):
            for name in re.findall(r"^class ([A-Z]\w+)", file.read_text(), re.MULTILINE):
                paths[name] = f"{package}.{file.stem}.{name}"
    return paths
