"""Files that are written whole or not at all, and stay so through a power cut."""

import os
from pathlib import Path


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
        with part.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
