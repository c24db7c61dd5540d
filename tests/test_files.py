import os

import pytest
from PIL import Image

from lit_diffusion.files import IMAGE_FORMATS, atomic_write, atomic_write_text, open_image


def test_a_file_is_replaced(tmp_path):
    path = tmp_path / "notes.txt"
    atomic_write_text(path, "one")
    atomic_write_text(path, "two")
    assert path.read_text() == "two"
    assert os.listdir(tmp_path) == ["notes.txt"]


def test_what_cannot_be_written_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "notes.txt"
    atomic_write_text(path, "one")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
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


@pytest.mark.parametrize("place", ["link", "pipe", "file"])
def test_what_lies_where_a_file_is_written_first_is_replaced_and_not_followed(tmp_path, place):
    part, victim = tmp_path / ".notes.txt.part", tmp_path / "victim"
    victim.write_text("precious")
    {
        "link": lambda: part.symlink_to(victim),
        "pipe": lambda: os.mkfifo(part),
        "file": lambda: os.link(victim, part),
    }[place]()
    atomic_write_text(tmp_path / "notes.txt", "one")
    assert victim.read_text() == "precious"
    assert (tmp_path / "notes.txt").read_text() == "one"
    assert not (tmp_path / "notes.txt").is_symlink()


def test_a_folder_in_its_place_is_named(tmp_path):
    (tmp_path / ".notes.txt.part").mkdir()
    with pytest.raises(OSError, match=r"\.notes\.txt\.part"):
        atomic_write_text(tmp_path / "notes.txt", "one")


def test_two_processes_that_write_one_file_each_leave_a_whole_one(tmp_path):
    path = tmp_path / "cache"
    with atomic_write(path, shared=True) as one, atomic_write(path, shared=True) as other:
        one.write(b"one")
        other.write(b"other")
    assert path.read_bytes() == b"one"
    assert os.listdir(tmp_path) == ["cache"]


def test_an_exception_leaves_the_old_file(tmp_path):
    atomic_write_text(tmp_path / "a", "old")
    with pytest.raises(TypeError), atomic_write(tmp_path / "a") as file:
        file.write("no bytes")
    assert (tmp_path / "a").read_text() == "old"
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("kind", IMAGE_FORMATS)
def test_image_formats_are_read(tmp_path, kind):
    Image.new("RGB", (3, 2)).save(tmp_path / "0.png", format=kind)
    with open_image(tmp_path / "0.png") as image:
        assert image.convert("RGB").size == (3, 2)


@pytest.mark.parametrize("kind", ["EPS", "GIF", "ICO", "PDF"])
def test_other_image_formats_are_refused_whatever_their_file_name(tmp_path, kind):
    Image.new("RGB", (32, 32)).save(tmp_path / "0.png", format=kind)
    with pytest.raises(OSError, match="cannot identify"):
        open_image(tmp_path / "0.png")


def test_an_image_is_not_read_from_a_pipe(tmp_path):
    os.mkfifo(tmp_path / "0.png")  # opening it would wait for a writer
    with pytest.raises(ValueError, match="no regular file"):
        open_image(tmp_path / "0.png")
