"""Configs that are installed with the package."""

import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

CONFIG_OPTIONS = ("--config", "-c", "--arms", "--data")
"""Command-line options whose values are configs."""

FLAGS = ("--print", "--debug")
"""Options without a value, after which the next argument may be a config."""


def shipped_configs() -> Path:
    """Return the folder of the configs that are installed with the package.

    The folder is `configs/` in a checkout, and `lit_diffusion/configs/` in an installed wheel.

    Example:
        >>> (shipped_configs() / "digits.yaml").exists()
        True
    """
    callbacks = find_spec("lit_diffusion.callbacks")
    assert callbacks is not None
    return Path(str(callbacks.origin)).parents[1] / "configs"


def find_shipped_config(path: str) -> str | None:
    """Return the path of an installed config, for a name such as `configs/digits.yaml`.

    Return None if no installed config has the name `path`. Also return None if the current folder
    contains a file of this name, because that file takes precedence.
    """
    match = re.fullmatch(r"configs/([\w./-]+\.yaml)", path)
    if match is None or ".." in match[1] or Path(path).exists():
        return None
    shipped = shipped_configs() / match[1]
    return str(shipped) if shipped.exists() else None


def use_shipped_configs(args: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Replace names of installed configs on a command line with their paths.

    The function replaces these names in positional arguments and in the values of the options in
    `CONFIG_OPTIONS`. A value may consist of several names that are joined with +, such as
    `a.yaml+b.yaml`.

    Returns:
        The new command line, and a dictionary that maps each replaced name to its path.
    """
    shipped_paths: dict[str, str] = {}

    def replace(value: str) -> str:
        parts = value.split("+")
        paths = {part: path for part in parts if (path := find_shipped_config(part))}
        shipped_paths.update(paths)
        return "+".join(paths.get(part, part) for part in parts)

    words = []
    for previous, word in zip(["", *args], args, strict=False):
        name, equals, value = word.partition("=")
        is_other_value = re.match("-[^=]*$", previous) and previous not in (*CONFIG_OPTIONS, *FLAGS)
        if equals and name in CONFIG_OPTIONS:
            word = f"{name}={replace(value)}"
        elif not (word.startswith("-") or is_other_value):
            word = replace(word)
        words.append(word)
    return words, shipped_paths
