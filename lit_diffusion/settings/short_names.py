"""Our classes by their names alone, as configs may have them: EMA, UNet, Velocity."""

import re
from functools import cache
from importlib.resources import files
from pathlib import Path

_ROOMS = ("networks", "modules", "data")


@cache
def short_names() -> dict[str, str]:
    """Class path by class name, of what configs are made of.

    Example:
        >>> short_names()["CosineBetas"], short_names()["EMA"]
        ('lit_diffusion.processes.CosineBetas', 'lit_diffusion.callbacks.EMA')
    """
    callbacks = files("lit_diffusion.callbacks").joinpath("__init__.py")
    names = re.findall(r'"([A-Z]\w+)"', callbacks.read_text())  # of its __all__
    found = {name: f"lit_diffusion.callbacks.{name}" for name in names}
    for room in ("lit_diffusion", *(f"lit_diffusion.{name}" for name in _ROOMS)):
        for file in sorted(Path(str(files(room))).glob("*.py")):
            for name in re.findall(r"^class ([A-Z]\w+)", file.read_text(), re.MULTILINE):
                found[name] = f"{room}.{file.stem}.{name}"
    return found
