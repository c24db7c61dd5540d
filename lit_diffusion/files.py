"""Files that are written whole or not at all, and stay so through a power cut."""

import os
from contextlib import suppress
from pathlib import Path
from typing import IO


def replace_text(path: str | Path, text: str) -> None:
    r"""Write a file in place of the one that is there, if any.

    Args:
        path: of the file, in a folder that is there.
        text: all of it.

    Raises:
        OSError: where it cannot be written; the old file is intact.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     replace_text(f"{folder}/notes.txt", "one line\n")
        ...     print(Path(f"{folder}/notes.txt").read_text(), end="")
        one line
    """
    path = Path(path)
    part = path.with_name(f".{path.name}.part")
    try:
        with new_file(part) as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        discard(part)
    sync_folder(path.parent)


def new_file(path: Path) -> IO[bytes]:
    """Open a file of one's own to write, in place of a file or link that is there.

    Raises:
        OSError: where it cannot be made, as where a folder is in its place.
    """
    path.unlink(missing_ok=True)
    return os.fdopen(
        os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666), "wb"
    )


def discard(path: Path) -> None:
    """Remove a file where it can be; what failed before is to be told, and not this."""
    with suppress(OSError):
        path.unlink()


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
