"""Long work in pieces: shared among processes, each piece kept when it is done, none done twice."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from lit_diffusion.callbacks.progress import format_speed
from lit_diffusion.cli.encoding import launcher_rank_and_world_size
from lit_diffusion.files import atomic_write, atomic_write_text
from lit_diffusion.signals import print_error

Arrays = Mapping[str, np.ndarray[Any, Any]]


def prepare_folder(folder: Path, plan: Mapping[str, Any]) -> None:
    """Create a folder with plan.json for this work, or check that it was created for the same.

    Raises:
        ValueError: where it holds something else; says what differs.
    """
    path = folder / "plan.json"
    # Asked before the plan: another process may write that meanwhile, hidden until it is whole.
    holds_something = folder.is_file() or (folder.is_dir() and any(folder.glob("[!.]*")))
    text = json.dumps(plan, indent=1, default=str) + "\n"
    if not path.is_file():
        if holds_something:
            raise ValueError(f"--out {folder} holds something else; choose another folder.")
        folder.mkdir(parents=True, exist_ok=True)
        atomic_write_text(path, text, shared=True)
        return
    try:
        old: dict[str, Any] = json.loads(path.read_text())
        old.get("analysis")
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{path} is damaged ({error}); delete the folder.") from None
    for name, value in json.loads(text).items():
        if old.get(name) != value:
            raise ValueError(
                f"--out {folder} holds an analysis whose {name} is {old.get(name)}, and this "
                f"call's is {value}; choose another folder."
            )


def compute_pieces(
    folder: Path, names: Sequence[str], compute: Callable[[str], Arrays], unit: str
) -> list[Arrays] | None:
    """The arrays of all pieces, of which those without a file are computed.

    Each process of torchrun or srun computes its share. None where others have not finished theirs.

    Args:
        folder: where pieces/NAME.npz are.
        names: of the pieces.
        compute: from a name to the arrays of its piece.
        unit: what a piece is called where progress is printed.
    """
    rank, world_size = launcher_rank_and_world_size()
    (folder / "pieces").mkdir(exist_ok=True)
    files = {name: folder / "pieces" / f"{name}.npz" for name in names}
    mine = [name for name in names[rank::world_size] if not files[name].is_file()]
    start = last_print = time.monotonic()
    try:
        for done, name in enumerate(mine, start=1):
            arrays = compute(name)
            with atomic_write(files[name], shared=True) as file:
                np.savez_compressed(file, allow_pickle=False, **arrays)
            if done == 1 < len(mine) or time.monotonic() - last_print > 10:
                last_print = time.monotonic()
                rate = format_speed(unit, done, len(mine) - done, last_print - start)
                print_error("  ".join([f"{done} of {len(mine)} {unit}s", *rate]))
    except KeyboardInterrupt:
        num = sum(file.is_file() for file in files.values())
        print_error(
            f"Stopped with {num} of {len(names)} {unit}s in {folder}; the same command goes on."
        )
        raise
    if not all(file.is_file() for file in files.values()):
        return None
    return [_read_arrays(file) for file in files.values()]


def _read_arrays(path: Path) -> Arrays:
    try:
        return dict(np.load(path))
    except (ValueError, OSError, BadZipFile) as error:
        raise ValueError(f"{path} is damaged ({error}); delete it.") from None
