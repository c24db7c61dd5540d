"""Configs that are installed with the package."""

import re
from importlib.util import find_spec
from pathlib import Path


def shipped_configs() -> Path:
    """The folder of the configs that are installed with the package.

    It is `configs/` of a checkout, and `lit_diffusion/configs/` of a wheel: in both the neighbour
    of `callbacks/`.

    Example:
        >>> (shipped_configs() / "digits.yaml").exists()
        True
    """
    package = find_spec("lit_diffusion.callbacks")
    assert package is not None
    assert package.submodule_search_locations is not None
    return Path(package.submodule_search_locations[0]).parent / "configs"


def find_shipped_config(argument: str) -> str | None:
    """The argument of a command line with the path of a shipped config; None if it names none.

    An argument `configs/NAME.yaml`, or `--OPTION=configs/NAME.yaml`, names a shipped config unless
    the current folder has a file of that path.
    """
    match = re.fullmatch(r"(-[\w.-]+=)?configs/([\w./-]+\.yaml)", argument)
    if match is None or ".." in match[2] or Path("configs", match[2]).exists():
        return None
    path = shipped_configs() / match[2]
    return f"{match[1] or ''}{path}" if path.exists() else None
