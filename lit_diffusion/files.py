"""Atomic writes that survive a power cut, and safe reading of files from untrusted sources."""

import errno
import fcntl
import os
import shutil
import stat
import time
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from glob import escape
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

_KINDS = {
    stat.S_IFDIR: "folder",
    stat.S_IFIFO: "pipe",
    stat.S_IFSOCK: "socket",
    stat.S_IFBLK: "device",
    stat.S_IFCHR: "device",
}


def user_cache() -> Path:
    """Folder for cached results: $XDG_CACHE_HOME/lit-diffusion, or ~/.cache/lit-diffusion."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "lit-diffusion"


@contextmanager
def atomic_write(path: str | Path, shared: bool = False) -> Iterator[IO[bytes]]:
    """Context that yields a temporary binary file and renames it to `path` at the end.

    After any exception the old file at `path` is intact and the temporary file is removed.

    A write also removes what a killed process left of an earlier one.

    Args:
        path: file to write or replace.
        shared: whether several processes may write this file at the same time; each then uses its
            own temporary file, locked until it is renamed. Otherwise all writes share one name.

    Raises:
        OSError: if the file cannot be written, as on a full disk. It names `path`.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{uuid4().hex if shared else ''}part")
    try:
        if shared:
            _remove_leftovers(path)
        temporary.unlink(missing_ok=True)  # left by a crash, or a link placed by somebody else
        with temporary.open("x+b") as file:
            if shared:
                with suppress(OSError):  # a file system without locks
                    fcntl.flock(file, fcntl.LOCK_EX)
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, path)
    except OSError as error:
        if error.filename is not None:
            raise
        # Writes name no file, and encoders of images no number.
        number, reason = error.errno or errno.EIO, error.strerror or str(error)
        raise OSError(number, reason, str(path)) from error
    finally:
        with suppress(OSError):  # must not hide the exception of the write itself
            temporary.unlink()
    sync_folder(path.parent)


def _remove_leftovers(path: Path) -> None:
    """Delete temporary files of `path` that no process is writing: a kill ends a lock, too."""
    for leftover in path.parent.glob(f".{escape(path.name)}.*part"):
        with suppress(OSError, ValueError), check_regular(leftover).open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if time.time() - leftover.stat().st_mtime > 1:  # a newer one may not be locked yet
                leftover.unlink()


def atomic_write_text(path: str | Path, text: str, shared: bool = False) -> None:
    """Write `text` as UTF-8 with `atomic_write`; `shared` is passed on to it."""
    with atomic_write(path, shared) as file:
        file.write(text.encode())


def replace(source: Path, target: Path) -> None:
    """Rename a file or folder to `target`, which may be a file, or the folder of a checkpoint.

    No file system replaces a folder in one operation. So it is set aside under another name, which
    `path_after_replace` returns if the process is killed before the second operation.

    Raises:
        OSError: if another folder is there, which is not changed.
    """
    if is_checkpoint_folder(target) or (source.is_dir() and target.is_file()):
        remove(_set_aside(target))
        os.rename(target, _set_aside(target))
    os.replace(source, target)
    sync_folder(target.parent)
    remove(_set_aside(target))


def path_after_replace(path: Path) -> Path:
    """`path`, or what `replace` has set aside if it was killed before it could rename the new."""
    return path if path.exists() or not is_checkpoint(_set_aside(path)) else _set_aside(path)


def _set_aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.old")


def remove(path: Path) -> None:
    """Delete a file, or a folder with its content, if there is one."""
    if path.is_dir() and not path.is_symlink():
        (path / ".metadata").unlink(missing_ok=True)  # what a kill leaves is no checkpoint
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def is_checkpoint_folder(path: Path) -> bool:
    """Whether `path` is a folder to which ranks have written the parts of a checkpoint."""
    return (path / ".metadata").is_file()


def is_checkpoint(path: Path) -> bool:
    """Whether `path` is a file, or a folder of a checkpoint."""
    return path.is_file() or is_checkpoint_folder(path)


def sync_folder(folder: Path) -> None:
    """Flush a folder's directory entries to the disk, so that renames survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_regular(path: str | Path) -> Path:
    """Check that `path` is a regular file, or a link to one, and return it.

    Everything that a user or a file names is opened after this check: reading a pipe waits for a
    writer, and reading a device may never end.

    Raises:
        FileNotFoundError: if nothing is there.
        ValueError: if there is a folder, pipe, socket or device.
    """
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "special file")
        raise ValueError(f"{path} is no regular file, but a {kind}; put the file itself there.")
    return Path(path)


def check_option_values(options: Iterable[str]) -> None:
    """Check that no option NAME=VALUE, or VALUE alone, names a pipe, socket or device.

    jsonargparse reads each value of a class that is the path of anything but a folder.

    Raises:
        ValueError: if one does. The message has the path.
    """
    for option in options:
        value = option.partition("=")[2] if option.startswith("--") else option
        if os.path.exists(value) and not os.path.isdir(value):
            check_regular(value)


@contextmanager
def checked_read(
    path: str | Path, content: str, fix: str = "copy or write it again, or name another file"
) -> Iterator[Path]:
    """Context that yields the path of a regular file, and in which the file is read.

    Any error in the context means that the file is damaged: decoders raise many types, also a
    MemoryError where a file asks for more than there is.

    Args:
        path: file to read.
        content: what it must hold, for the message.
        fix: what to do if it does not, for the message.

    Raises:
        OSError: if the file is missing or may not be read.
        ValueError: if it is damaged or no regular file. The message has the path and the reason.
    """
    path = check_regular(path)
    try:
        yield path
    except PermissionError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:300].rstrip(".") or type(error).__name__
        if isinstance(error, KeyError):
            reason = f"it lacks {reason}"
        elif isinstance(error, RecursionError):
            reason = "it is nested too deep"
        raise ValueError(f"{path} is damaged or no {content} ({reason}); {fix}.") from error


def check_archive(file: Path | BytesIO) -> None:
    """Check the checksums and the unpacked size of a file of `torch.save`, or of its content.

    This reads the whole file, about as fast as the disk. Files of other formats pass.

    Raises:
        ValueError, zipfile.BadZipFile: with the reason, but not the file's name.
    """
    if not zipfile.is_zipfile(file):
        return
    size = file.stat().st_size if isinstance(file, Path) else len(file.getbuffer())
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        unpacked_size = sum(member.file_size for member in members)
        is_stored = all(member.compress_type == zipfile.ZIP_STORED for member in members)
        if not is_stored or unpacked_size > size:
            raise ValueError(
                f"it would unpack to {unpacked_size:,} bytes: torch.save compresses nothing"
            )
        for member in members:
            if member.external_attr & 0x10:  # torch.load reads no bytes of it, and raises no error
                raise ValueError(f"{member.filename} is marked as a folder")
        if (broken := archive.testzip()) is not None:
            raise ValueError(
                f"the checksum of {broken} is wrong, or was left out by "
                "torch.serialization.set_crc32_options(False); then save it again with True"
            )


def open_image(source: Path | BytesIO) -> "Image":
    """Open an image of one of `IMAGE_FORMATS`; reads only its header.

    Raises:
        ValueError: if `source` is the path of a folder, pipe or device.
        OSError: if the content has another format.
    """
    from PIL import Image

    if isinstance(source, Path):
        check_regular(source)
    return Image.open(source, formats=IMAGE_FORMATS)
