"""Which packages a config or a checkpoint may name.

A class path is code to import and call, so a file from a stranger could run anything. Here, a class
path outside the packages below and those that the user names is refused before its module is
imported. Of the packages below only classes are taken: among their functions are some that run
their argument, and one that returns what a setting wants would pass for it.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import yaml
from jsonargparse import _typehints, _util, get_loader, set_loader, set_parsing_settings
from jsonargparse._common import ImportDenied, parsing_settings

from lit_diffusion.config.renamed import rename_config
from lit_diffusion.config.short_names import short_names

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


@contextmanager
def trusting(packages: Iterable[str] = ()) -> Iterator[None]:
    """Within this context, jsonargparse imports classes of `TRUSTED` and anything of `packages`.

    Those are dotted names of modules, or of packages with all below them.
    """
    before, packages = dict(parsing_settings), tuple(packages)
    paths_of, resolve = _util.canonical_import_paths, _typehints.resolve_class_path_by_name
    load_yaml = get_loader("yaml")
    try:
        set_loader("yaml", lambda text: rename_config(load_yaml(text)), (yaml.YAMLError,))
        set_parsing_settings(
            import_path_denylist=["*"],
            import_path_allowlist=[*TRUSTED, *packages],
            instantiate_subclass_spec_in_any=False,
        )
        # jsonargparse documents no way to take classes alone. This is what it asks, of each object
        # that a value names, for paths that must be allowed; setup.cfg caps its version.
        _util.canonical_import_paths = _classes_only(paths_of, packages)  # type: ignore[assignment]
        # Nor one to name classes alone that do not inherit from the type of a setting.
        _typehints.resolve_class_path_by_name = _or_ours(resolve)  # type: ignore[assignment]
        yield
    finally:
        set_loader("yaml", load_yaml, (yaml.YAMLError,))
        _util.canonical_import_paths = paths_of
        _typehints.resolve_class_path_by_name = resolve
        parsing_settings.clear()
        parsing_settings.update(before)


def within(path: str, packages: Iterable[str]) -> bool:
    """Whether a dotted path is one of the packages or below it.

    Example:
        >>> within("torch.nn.Module", ["torch.nn"]), within("torchvision.ops", ["torch"])
        (True, False)
    """
    return any(f"{path}.".startswith(f"{package}.") for package in packages)


def _or_ours(resolve: Callable[[Any, str], str]) -> Callable[[Any, str], str]:
    """`resolve`, and what it leaves as it is by `short_names`."""

    def path(cls: Any, name: str) -> str:
        found = resolve(cls, name)
        return short_names().get(found, found)

    return path


def _classes_only(
    paths_of: Callable[[Any], set[str]], packages: tuple[str, ...]
) -> Callable[[Any], set[str]]:
    """`paths_of`, which refuses what is no class and not of `packages`."""

    def paths(named: Any) -> set[str]:
        found = paths_of(named)
        own = found and all(within(path, packages) for path in found)
        if not (own or inspect.isclass(named)):
            path = min(found, default=repr(named))
            raise ImportDenied(f"Importing '{path}' is not allowed: it is no class.")
        return found

    return paths
