"""Our classes by their names alone, as configs may have them: EMA, UNet, Velocity."""

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

_ROOMS = ("", ".networks", ".modules", ".data", ".callbacks")


@cache
def short_names() -> dict[str, str]:
    """Class path by class name, of what configs are made of.

    Example:
        >>> short_names()["CosineBetas"], short_names()["EMA"]
        ('lit_diffusion.processes.CosineBetas', 'lit_diffusion.callbacks.EMA')
    """
    found = {}
    for room in _ROOMS:
        spec = find_spec(f"lit_diffusion{room}")
        assert spec is not None
        assert spec.submodule_search_locations is not None
        for file in sorted(Path(spec.submodule_search_locations[0]).glob("*.py")):
            module = "" if room == ".callbacks" else f".{file.stem}"
            for name in re.findall(r"^class ([A-Z]\w+)", file.read_text(), re.MULTILINE):
                found[name] = f"lit_diffusion{room}{module}.{name}"
    return found
