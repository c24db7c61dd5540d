"""Our classes by their names alone, as configs may have them: EMA, UNet, Velocity."""

import re
from functools import cache
from importlib.resources import files
from pathlib import Path

_SHOWN = ("callbacks", "solvers")  # whose classes are imported from the room itself
_ROOMS = ("networks", "modules", "data", "lab.gan")


@cache
def short_names() -> dict[str, str]:
    """Class path by class name, of what configs are made of.

    Example:
        >>> short_names()["CosineBetas"], short_names()["EMA"]
        ('lit_diffusion.processes.CosineBetas', 'lit_diffusion.callbacks.EMA')
    """
    found = dict[str, str]()
    for room in _SHOWN:
        text = files(f"lit_diffusion.{room}").joinpath("__init__.py").read_text()
        names = re.findall(r'"([A-Z]\w+)"', text)  # of its __all__
        found |= {name: f"lit_diffusion.{room}.{name}" for name in names}
    for room in ("lit_diffusion", *(f"lit_diffusion.{name}" for name in _ROOMS)):
        for file in sorted(Path(str(files(room))).glob("*.py")):
            for name in re.findall(r"^class ([A-Z]\w+)", file.read_text(), re.MULTILINE):
                found[name] = f"{room}.{file.stem}.{name}"
    return found
