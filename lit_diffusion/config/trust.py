"""Which classes a config or a checkpoint may name, and our own by their names alone.

A class path is code to import and call, so a file from a stranger could run anything. Therefore a
class path outside the packages below and those that the user names is refused before its module is
imported. Of the packages below only classes are allowed: among their functions are some that run
their argument, and a function that returns the type of a setting would be accepted for it.
"""

import inspect
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import _typehints, _util, get_loader, set_loader, set_parsing_settings
from jsonargparse._common import ImportDenied, parsing_settings

from lit_diffusion.config.renamed import rename_config

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
"""Packages whose classes class paths may always name."""

_WITH_PUBLIC_NAMES = ("callbacks", "solvers")  # class paths of these packages name no file
_PACKAGES = ("networks", "modules", "data", "lab.gan")


@contextmanager
def allow_class_paths(packages: Iterable[str] = ()) -> Iterator[None]:
    """Context in which jsonargparse imports classes of `TRUSTED` and anything of `packages`.

    It also replaces old names in configs, and completes names of our classes (`short_names`).

    Args:
        packages: dotted names of modules, or of packages with everything below them.
    """
    packages = tuple(packages)
    old_settings = dict(parsing_settings)
    find_paths, resolve_name = _util.canonical_import_paths, _typehints.resolve_class_path_by_name
    load_yaml = get_loader("yaml")

    def find_allowed_paths(obj: Any) -> set[str]:
        paths = find_paths(obj)
        is_users = paths and all(is_within(path, packages) for path in paths)
        if not (is_users or inspect.isclass(obj)):
            path = min(paths, default=repr(obj))
            raise ImportDenied(f"Importing '{path}' is not allowed: it is no class.")
        return paths

    def resolve_short_name(cls: Any, name: str) -> str:
        path = resolve_name(cls, name)
        return short_names().get(path, path)

    try:
        set_loader("yaml", lambda text: rename_config(load_yaml(text)), (yaml.YAMLError,))
        set_parsing_settings(
            import_path_denylist=["*"],
            import_path_allowlist=[*TRUSTED, *packages],
            instantiate_subclass_spec_in_any=False,
        )
        # jsonargparse documents no way to allow classes alone. It calls the first function for each
        # object that a value names, to learn which paths must be allowed; the second for a name
        # without dots, which it completes for subclasses of a setting's type only. setup.cfg limits
        # its version, and a test checks that both are called.
        _util.canonical_import_paths = find_allowed_paths
        _typehints.resolve_class_path_by_name = resolve_short_name
        yield
    finally:
        set_loader("yaml", load_yaml, (yaml.YAMLError,))
        _util.canonical_import_paths = find_paths
        _typehints.resolve_class_path_by_name = resolve_name
        parsing_settings.clear()
        parsing_settings.update(old_settings)


def is_within(path: str, packages: Iterable[str]) -> bool:
    """Whether a dotted path is one of the packages or below it.

    Example:
        >>> is_within("torch.nn.Module", ["torch.nn"]), is_within("torchvision.ops", ["torch"])
        (True, False)
    """
    return any(f"{path}.".startswith(f"{package}.") for package in packages)


@cache
def short_names() -> dict[str, str]:
    """Class paths by class names, of our classes that configs are made of.

    Example:
        >>> short_names()["CosineBetas"], short_names()["EMA"]
        ('lit_diffusion.processes.CosineBetas', 'lit_diffusion.callbacks.EMA')
    """
    paths = dict[str, str]()
    for package in _WITH_PUBLIC_NAMES:
        text = files(f"lit_diffusion.{package}").joinpath("__init__.py").read_text()
        names = re.findall(r'"([A-Z]\w+)"', text)  # of its __all__
        paths |= {name: f"lit_diffusion.{package}.{name}" for name in names}
    for package in ("lit_diffusion", *(f"lit_diffusion.{name}" for name in _PACKAGES)):
        for file in sorted(Path(str(files(package))).glob("*.py")):
            for name in re.findall(r"^class ([A-Z]\w+)", file.read_text(), re.MULTILINE):
                paths[name] = f"{package}.{file.stem}.{name}"
    return paths
