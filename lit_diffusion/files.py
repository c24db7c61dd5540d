"""Atomic writes that survive a power cut, and safe reading of files from untrusted sources."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path
from typing import IO, TYPE_CHECKING
from uuid import uuid4

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGE_FORMATS = ("BMP", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""Image formats that may be read. Pillow detects the format from the content of a file, and runs
Ghostscript for some of its other formats."""

IMAGE_MODES = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}
"""Pillow's mode for each number of channels."""


def user_cache() -> Path:
    """Folder for cached results: $XDG_CACHE_HOME/lit-diffusion, or ~/.cache/lit-diffusion."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "lit-diffusion"


@contextmanager
def atomic_write(path: str | Path, shared: bool = False) -> Iterator[IO[bytes]]:
    """Context that yields a temporary binary file and renames it to `path` at the end.

    After any exception the old file at `path` is intact and the temporary file is removed.

    Args:
        path: file to write or replace.
        shared: whether several processes may write this file at the same time; each then uses its
            own temporary file. Otherwise all writes share one temporary name, so that a write also
            removes the leftover of a crash.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{uuid4().hex if shared else ''}part")
    try:
        temporary.unlink(missing_ok=True)  # left by a crash, or a link placed by somebody else
        with temporary.open("x+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        with suppress(OSError):  # must not hide the exception of the write itself
            temporary.unlink()
    sync_folder(path.parent)


def atomic_write_text(path: str | Path, text: str, shared: bool = False) -> None:
    """Write `text` as UTF-8 with `atomic_write`; `shared` is passed on to it."""
    with atomic_write(path, shared) as file:
        file.write(text.encode())


def sync_folder(folder: Path) -> None:
    """Flush a folder's directory entries to the disk, so that renames survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def require_regular_file(path: Path) -> None:
    """Raise ValueError for a folder, pipe or device at `path`, which must exist."""
    if not path.is_file():
        raise ValueError(f"{path} is no regular file.")


def open_image(source: Path | BytesIO) -> "Image":
    """Open an image of one of `IMAGE_FORMATS`; reads only its header.

    Raises:
        ValueError: if `source` is the path of a folder, pipe or device.
        OSError: if the content has another format.
    """
    from PIL import Image

    if isinstance(source, Path):
        require_regular_file(source)
    return Image.open(source, formats=IMAGE_FORMATS)
