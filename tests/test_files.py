import os

import pytest

from lit_diffusion.files import replace_text, whole_file


def test_a_file_is_replaced(tmp_path):
    path = tmp_path / "notes.txt"
    replace_text(path, "one")
    replace_text(path, "two")
    assert path.read_text() == "two"
    assert os.listdir(tmp_path) == ["notes.txt"]


def test_what_cannot_be_written_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "notes.txt"
    replace_text(path, "one")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        replace_text(path, "two")
    assert path.read_text() == "one"
    assert os.listdir(tmp_path) == ["notes.txt"]


def test_text_is_on_the_disk_before_its_name_is(tmp_path, monkeypatch):
    """A power cut after a rename that came first would leave an empty file."""
    done = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (done.append("sync"), fsync(fd))[1])
    monkeypatch.setattr(os, "replace", lambda *names: (done.append("name"), replace(*names))[1])
    replace_text(tmp_path / "notes.txt", "one")
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
    replace_text(tmp_path / "notes.txt", "one")
    assert victim.read_text() == "precious"
    assert (tmp_path / "notes.txt").read_text() == "one"
    assert not (tmp_path / "notes.txt").is_symlink()


def test_a_folder_in_its_place_is_named(tmp_path):
    (tmp_path / ".notes.txt.part").mkdir()
    with pytest.raises(OSError, match=r"\.notes\.txt\.part"):
        replace_text(tmp_path / "notes.txt", "one")


def test_two_processes_that_write_one_file_each_leave_a_whole_one(tmp_path):
    path = tmp_path / "cache"
    with whole_file(path, shared=True) as one, whole_file(path, shared=True) as other:
        one.write(b"one")
        other.write(b"other")
    assert path.read_bytes() == b"one"
    assert os.listdir(tmp_path) == ["cache"]


def test_an_exception_leaves_the_old_file(tmp_path):
    replace_text(tmp_path / "a", "old")
    with pytest.raises(TypeError), whole_file(tmp_path / "a") as file:
        file.write("no bytes")
    assert (tmp_path / "a").read_text() == "old"
    assert os.listdir(tmp_path) == ["a"]
