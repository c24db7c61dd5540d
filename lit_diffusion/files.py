"""Write files atomically, so that they survive a power cut, and read untrusted files safely."""

import errno
import fcntl
import hashlib
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
"""Formats that `open_image` accepts. Pillow detects the format from the content of a file, not from
its name. Other formats are excluded because Pillow runs Ghostscript to read some of them."""

IMAGE_EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".pgm", ".bmp", ".tif", ".tiff", ".webp")
"""Extensions of the files that are images in a folder of training images."""

IMAGE_MODES = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}
"""Pillow's name of the image mode for each number of channels."""

_KINDS = {
    stat.S_IFDIR: "folder",
    stat.S_IFIFO: "pipe",
    stat.S_IFSOCK: "socket",
    stat.S_IFBLK: "device",
    stat.S_IFCHR: "device",
}


def user_cache() -> Path:
    """Return `$XDG_CACHE_HOME/lit-diffusion`, by default `~/.cache/lit-diffusion`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "lit-diffusion"


@contextmanager
def atomic_write(path: str | Path, shared: bool = False) -> Iterator[IO[bytes]]:
    """Context that yields a temporary binary file, and renames it to `path` at the end.

    If the context raises an exception, the old file at `path` is unchanged, and the temporary file
    is removed. If the process is killed, the temporary file remains. The next `atomic_write` to the
    same path removes it.

    Args:
        path: file to write or replace.
        shared: whether several processes may write this file at the same time.

    Raises:
        OSError: if the file cannot be written, for example because the disk is full. The error
            names `path`.

    Example:
        >>> from tempfile import mkdtemp
        >>> path = Path(mkdtemp()) / "hello.txt"
        >>> with atomic_write(path) as file:
        ...     _ = file.write(b"hello")
        >>> path.read_text()
        'hello'
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{uuid4().hex if shared else ''}part")
    try:
        if shared:
            _remove_leftovers(path)
        temporary.unlink(missing_ok=True)  # left by a killed process, or a link that others placed
        with temporary.open("x+b") as file:
            if shared:
                with suppress(OSError):  # some file systems do not support locks
                    fcntl.flock(file, fcntl.LOCK_EX)
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, path)
    except OSError as error:
        if error.filename is not None:
            raise
        # Errors of writes do not name the file, and errors of image encoders have no errno.
        number, reason = error.errno or errno.EIO, error.strerror or str(error)
        raise OSError(number, reason, str(path)) from error
    finally:
        with suppress(OSError):  # must not hide the exception of the write itself
            temporary.unlink()
    sync_folder(path.parent)


def _remove_leftovers(path: Path) -> None:
    """Delete the temporary files of `path` that no process has locked.

    The operating system releases the locks of a process that is killed.
    """
    for leftover in path.parent.glob(f".{escape(path.name)}.*part"):
        with suppress(OSError, ValueError), check_regular(leftover).open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if time.time() - leftover.stat().st_mtime > 1:  # a newer file may not be locked yet
                leftover.unlink()


def atomic_write_text(path: str | Path, text: str, shared: bool = False) -> None:
    """Write text as UTF-8. The docstring of `atomic_write` describes the arguments."""
    with atomic_write(path, shared) as file:
        file.write(text.encode())


def replace(source: Path, target: Path) -> None:
    """Rename `source` to `target`, and replace a file or checkpoint folder that exists there.

    An old checkpoint folder at `target` is first renamed. Then, `source` is renamed to `target`,
    and the old folder is deleted. If the process is killed between the two renames,
    `path_after_replace` returns the old folder.

    Raises:
        OSError: if `target` is a folder that is neither empty nor a checkpoint. In this case, the
            folder is not changed.

    Example:
        >>> from tempfile import mkdtemp
        >>> folder = Path(mkdtemp())
        >>> _ = (folder / "new").write_text("new"), (folder / "old").write_text("old")
        >>> replace(folder / "new", folder / "old")
        >>> (folder / "old").read_text()
        'new'
    """
    if is_checkpoint_folder(target) or (source.is_dir() and target.is_file()):
        remove(_set_aside(target))
        os.rename(target, _set_aside(target))
    os.replace(source, target)
    sync_folder(target.parent)
    remove(_set_aside(target))


def path_after_replace(path: Path) -> Path:
    """Return `path`. If `replace` was killed halfway, return the renamed old checkpoint instead."""
    return path if path.exists() or not is_checkpoint(_set_aside(path)) else _set_aside(path)


def _set_aside(path: Path) -> Path:
    """Return the name that `replace` gives to an old checkpoint before it deletes it."""
    return path.with_name(f".{path.name}.old")


def remove(path: Path) -> None:
    """Delete a file, or a folder with its content. Do nothing if `path` does not exist."""
    if path.is_dir() and not path.is_symlink():
        # First, so that a folder that is only partly deleted does not count as a checkpoint.
        (path / ".metadata").unlink(missing_ok=True)
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def is_checkpoint_folder(path: Path) -> bool:
    """Whether `path` is a folder with a complete sharded checkpoint (one part per rank)."""
    return (path / ".metadata").is_file()


def is_checkpoint(path: Path) -> bool:
    """Whether `path` is a file, or a folder with a complete sharded checkpoint."""
    return path.is_file() or is_checkpoint_folder(path)


def sync_folder(folder: Path) -> None:
    """Flush the directory entries of a folder to the disk, so that renames survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def walk_files(root: str | Path) -> Iterator[str]:
    """Yield all files below a folder in sorted order, except hidden files.

    The function skips hidden folders. To avoid endless recursion, it also skips a link to a folder
    that contains the link.

    Raises:
        OSError: if a folder cannot be read.
    """
    for folder, subfolders, names in os.walk(root, onerror=_raise, followlinks=True):
        visible = (name for name in subfolders if name[0] != ".")
        subfolders[:] = sorted(n for n in visible if not _leads_back(os.path.join(folder, n)))
        yield from (os.path.join(folder, name) for name in sorted(names) if name[0] != ".")


def _raise(error: OSError) -> None:
    raise error


def _leads_back(path: str) -> bool:
    """Whether a folder is a link to a folder that contains it."""
    if not os.path.islink(path):
        return False
    parents = [os.path.join(os.path.realpath(parent), "") for parent in Path(path).parents]
    target = os.path.join(os.path.realpath(path), "")
    return any(parent.startswith(target) for parent in parents)  # other links may be among them


def check_regular(path: str | Path) -> Path:
    """Check that `path` is a regular file, or a link to one, and return it.

    Call this function before you open a path from a command line or from another file. Reading a
    pipe would wait for a writer, and reading a device may never end.

    Raises:
        FileNotFoundError: if the path does not exist.
        ValueError: if the path is a folder, pipe, socket or device.
    """
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "special file")
        raise ValueError(f"{path} is not a regular file, but a {kind}; put the file itself there.")
    return Path(path)


def sha256_of(path: str | Path) -> str:
    """Return the SHA-256 of a regular file, 64 hex digits."""
    with check_regular(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_option_values(options: Iterable[str]) -> None:
    """Check that no value of a command-line option is the path of a pipe, socket or device.

    If an option expects a class and its value is an existing path, jsonargparse opens the path to
    read a config file. Reading a pipe or device could take forever. The options have the form
    `--NAME=VALUE`, or `--NAME` and then `VALUE`.
    """
    for option in options:
        value = option.partition("=")[2] if option.startswith("--") else option
        if os.path.exists(value) and not os.path.isdir(value):
            check_regular(value)


@contextmanager
def checked_read(
    path: str | Path, content: str, fix: str = "copy or write it again, or name another file"
) -> Iterator[Path]:
    """Context for reading a file that may be damaged. It yields the path of the file.

    If a file is damaged, its decoder may raise an exception of almost any type, even a MemoryError.
    Therefore, any exception inside the context, except PermissionError, is raised again as a
    ValueError that says that the file is damaged.

    Args:
        path: file to read.
        content: kind of file that is expected, such as "YAML", for the error message.
        fix: advice at the end of the error message.

    Raises:
        OSError: if the file does not exist, or if reading it is not permitted.
        ValueError: if the file is damaged, or if it is not a regular file. The message has the path
            and the reason.
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
    """Check the checksums and the unpacked size of a zip archive that `torch.save` has written.

    The function reads the whole file, at about the speed of the disk. If the file is not a zip
    archive, the function does nothing.

    Raises:
        ValueError, zipfile.BadZipFile: if the file is damaged. The message has the reason, but not
            the path of the file.
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
                f"it would unpack to {unpacked_size:,} bytes, but torch.save does not compress"
            )
        for member in members:
            if member.external_attr & 0x10:  # torch.load would read no bytes and raise no error
                raise ValueError(f"{member.filename} is marked as a folder")
        if (broken := archive.testzip()) is not None:
            raise ValueError(
                f"the checksum of {broken} is wrong, or it is missing because of "
                "torch.serialization.set_crc32_options(False); in that case, save it with True"
            )


def open_image(source: Path | BytesIO) -> "Image":
    """Open an image in one of the formats `IMAGE_FORMATS`, and read only the header of the file.

    Raises:
        ValueError: if `source` is the path of a folder, pipe or device.
        OSError: if the content is not an image in one of these formats.
    """
    from PIL import Image

    if isinstance(source, Path):
        check_regular(source)
    return Image.open(source, formats=IMAGE_FORMATS)
