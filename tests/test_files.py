import errno
import fcntl
import itertools
import os
import socket
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock

import pytest
from PIL import Image

from lit_diffusion.files import (
    IMAGE_FORMATS,
    atomic_write,
    atomic_write_text,
    check_regular,
    checked_read,
    open_image,
    walk_files,
)


def test_what_cannot_be_written_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "notes.txt"
    for text in ("zero", "one"):
        atomic_write_text(path, text)
    full = OSError(28, "No space left on device")
    monkeypatch.setattr(os, "fsync", Mock(side_effect=full))
    with pytest.raises(TypeError), atomic_write(path) as file:
        file.write("no bytes")
    with pytest.raises(OSError, match=r"No space left on device: '.*notes\.txt'"):
        atomic_write_text(path, "two")
    assert path.read_text() == "one"
    assert os.listdir(tmp_path) == ["notes.txt"]


def test_text_is_on_the_disk_before_its_name_is(tmp_path, monkeypatch):
    """A power cut after a rename that came first would leave an empty file."""
    done = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (done.append("sync"), fsync(fd))[1])
    monkeypatch.setattr(os, "replace", lambda *names: (done.append("name"), replace(*names))[1])
    atomic_write_text(tmp_path / "notes.txt", "one")
    assert done == ["sync", "name", "sync"]


@pytest.mark.parametrize(
    "place", [Path.symlink_to, lambda part, _: os.mkfifo(part), Path.hardlink_to]
)
def test_what_lies_where_a_file_is_written_first_is_replaced_and_not_followed(tmp_path, place):
    path, victim = tmp_path / "notes.txt", tmp_path / "victim"
    victim.write_text("precious")
    place(tmp_path / ".notes.txt.part", victim)
    atomic_write_text(path, "one")
    assert (victim.read_text(), path.read_text()) == ("precious", "one")
    assert not path.is_symlink()


def test_two_processes_that_write_one_file_each_leave_a_whole_one(tmp_path):
    path = tmp_path / "cache"
    with atomic_write(path, shared=True) as one, atomic_write(path, shared=True) as other:
        one.write(b"one")
        other.write(b"other")
    assert path.read_bytes() == b"one"
    assert os.listdir(tmp_path) == ["cache"]


def test_an_error_of_an_encoder_that_names_no_file_gets_the_name(tmp_path):
    named = pytest.raises(OSError, match=r"encoder error -2.*a\.gif")
    with named as caught, atomic_write(tmp_path / "a.gif"):
        raise OSError("encoder error -2 when writing image file")  # Pillow, on a full disk
    assert caught.value.errno


def test_a_shared_write_removes_what_a_killed_process_left_but_not_what_is_being_written(tmp_path):
    names = (".cache.11part", ".cache.22part", ".cache2.33part")
    killed, written, others = (tmp_path / name for name in names)
    for part in (killed, written, others):
        part.write_text("half")
        os.utime(part, (0, 0))
    with written.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        atomic_write_text(tmp_path / "cache", "whole", shared=True)
    assert set(os.listdir(tmp_path)) == {"cache", written.name, others.name}


def test_only_regular_files_and_links_to_them_are_opened(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the path of a socket is short
    Path("file").write_text("text")
    Path("link").symlink_to("file")
    for name in ("file", "link"):
        assert check_regular(name).read_text() == "text"
    os.mkfifo("pipe")
    Path("zero").symlink_to("/dev/zero")
    kinds = {"pipe": "pipe", "zero": "device", "socket": "socket", ".": "fold"}
    reads = (check_regular, open_image, lambda path: checked_read(path, "text").__enter__())
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
        for (name, kind), read in itertools.product(kinds.items(), reads):
            with pytest.raises(ValueError, match=f"{name} is not a regular file, but a {kind}"):
                read(Path(name))
    with pytest.raises(FileNotFoundError, match="nothing"):
        check_regular("nothing")


def test_a_lack_of_permission_is_no_damage(tmp_path):
    (tmp_path / "a").touch()
    with pytest.raises(PermissionError), checked_read(tmp_path / "a", "record"):
        raise PermissionError


@pytest.mark.parametrize("kind", [*IMAGE_FORMATS, "EPS", "GIF"])
def test_images_of_some_formats_are_read_whatever_their_file_name(tmp_path, kind):
    Image.new("RGB", (32, 32)).save(tmp_path / "0.png", format=kind)
    is_read = kind in IMAGE_FORMATS
    expected = nullcontext() if is_read else pytest.raises(OSError, match="cannot identify")
    with expected, open_image(tmp_path / "0.png") as image:
        assert image.convert("RGB").size == (32, 32)


def test_a_folder_that_cannot_be_read_is_not_left_out(tmp_path, monkeypatch):
    scandir = os.scandir

    def denied(path):
        if os.path.basename(path) == "b":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return scandir(path)

    for name in "abc":
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.png").touch()
    monkeypatch.setattr(os, "scandir", denied)
    with pytest.raises(PermissionError, match=r"b'$"):
        list(walk_files(tmp_path))
