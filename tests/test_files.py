import os

import pytest

from lit_diffusion.files import replace_text


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
