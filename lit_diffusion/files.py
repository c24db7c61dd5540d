"""Files that are written whole or not at all, and stay so through a power cut."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO
from uuid import uuid4


def user_cache() -> Path:
    """Folder for what is found out once: $XDG_CACHE_HOME/lit-diffusion, ~/.cache without it."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "lit-diffusion"


def replace_text(path: str | Path, text: str, shared: bool = False) -> None:
    """Write a file in place of one that is there, if any; after an OSError that one is intact.

    `shared` as of `whole_file`.
    """
    with whole_file(path, shared) as file:
        file.write(text.encode())


@contextmanager
def whole_file(path: str | Path, shared: bool = False) -> Iterator[IO[bytes]]:
    """Context that gives a file to write, which takes the place of the one at `path` at its end.

    After any exception the old file is intact. With `shared`, other processes may write it
    meanwhile. (Without, the next write does away with what a crash has left of the last one.)
    """
    path = Path(path)
    part = path.with_name(f".{path.name}.{uuid4().hex if shared else ''}part")
    try:
        part.unlink(missing_ok=True)  # left by a crash, or a link by somebody else
        with part.open("x+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        with suppress(OSError):  # what failed before is to be told, and not this
            part.unlink()
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
