"""Long work in pieces: divided among processes, each kept when it is done, none done twice."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from lit_diffusion.callbacks.progress import pace
from lit_diffusion.cli.encoding import shared_place
from lit_diffusion.files import atomic_write, atomic_write_text
from lit_diffusion.signals import print_error

Arrays = Mapping[str, np.ndarray[Any, Any]]


def planned(folder: Path, plan: Mapping[str, Any]) -> None:
    """Make a folder for this work, or find that it is for it.

    Raises:
        ValueError: where it holds something else; says of what.
    """
    path = folder / "plan.json"
    # looked at before the plan, which another process may write meanwhile, hidden until it is whole
    holds_something = folder.is_file() or (folder.is_dir() and any(folder.glob("[!.]*")))
    text = json.dumps(plan, indent=1, default=str) + "\n"
    if path.is_file():
        there, now = _plan_in(path), json.loads(text)
        for name in now:
            if there.get(name) != now[name]:
                raise ValueError(
                    f"--out {folder} holds an analysis whose {name} is {there.get(name)}, and this "
                    f"call's is {now[name]}; choose another folder."
                )
        return
    if holds_something:
        raise ValueError(f"--out {folder} holds something else; choose another folder.")
    folder.mkdir(parents=True, exist_ok=True)
    atomic_write_text(path, text, shared=True)


def pieces(
    folder: Path, names: Sequence[str], make: Callable[[str], Arrays], unit: str
) -> list[Arrays] | None:
    """The arrays by the names of the pieces, those made that are missing.

    A process of torchrun or srun makes its share. None where others have not made theirs yet.

    Args:
        folder: where a piece is an .npz.
        names: of the pieces.
        make: one of them.
        unit: what a piece is, for the sign of life.
    """
    rank, size = shared_place()
    (folder / "pieces").mkdir(exist_ok=True)
    files = {name: folder / "pieces" / f"{name}.npz" for name in names}
    mine = [name for name in names[rank::size] if not files[name].is_file()]
    began = last = time.monotonic()
    try:
        for done, name in enumerate(mine, start=1):
            found = make(name)
            with atomic_write(files[name], shared=True) as file:
                np.savez_compressed(file, allow_pickle=False, **found)
            if done == 1 < len(mine) or time.monotonic() - last > 10:
                last = time.monotonic()
                told = pace(unit, done, len(mine) - done, last - began)
                print_error("  ".join([f"{done} of {len(mine)} {unit}s", *told]))
    except KeyboardInterrupt:
        there = sum(file.is_file() for file in files.values())
        print_error(
            f"Stopped with {there} of {len(names)} {unit}s in {folder}; the same command goes on."
        )
        raise
    if not all(file.is_file() for file in files.values()):
        return None
    return [_arrays_in(file) for file in files.values()]


def _plan_in(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        found.get("analysis")
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{path} is damaged ({error}); delete the folder.") from None
    return found


def _arrays_in(path: Path) -> Arrays:
    try:
        return dict(np.load(path))
    except (ValueError, OSError, BadZipFile) as error:
        raise ValueError(f"{path} is damaged ({error}); delete it.") from None
