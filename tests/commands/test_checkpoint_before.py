import os
from pathlib import Path

import pytest

from lit_diffusion.commands.checkpoint_before import CheckpointBefore
from lit_diffusion.files import replace_text


@pytest.fixture
def last(tmp_path) -> Path:
    replace_text(tmp_path / "last.ckpt", "first")
    return tmp_path / "last.ckpt"


def test_what_was_kept_first_comes_back_until_it_is_let_go(last):
    before = CheckpointBefore(last)
    before.keep()
    replace_text(last, "second")
    before.keep()
    replace_text(last, "third")
    assert before.bring_back()
    assert last.read_text() == "first"
    before.keep()
    replace_text(last, "fourth")
    before.let_go()
    assert not before.bring_back()
    assert last.read_text() == "fourth"


def test_without_a_file_there_is_nothing_to_keep(tmp_path):
    before = CheckpointBefore(tmp_path / "last.ckpt")
    before.keep()
    before.let_go()
    assert not before.is_there
    assert not before.bring_back()


def test_another_object_finds_what_a_process_that_died_has_kept(last):
    CheckpointBefore(last).keep()
    replace_text(last, "second")
    assert CheckpointBefore(last).bring_back()
    assert last.read_text() == "first"


def test_no_bytes_are_copied(last):
    CheckpointBefore(last).keep()
    assert os.path.samefile(last, last.with_name("before-last.ckpt"))


def test_a_file_system_without_hard_links_is_told(last, monkeypatch):
    def link(*paths):
        raise OSError("Operation not supported")

    monkeypatch.setattr(os, "link", link)
    before = CheckpointBefore(last)
    with pytest.warns(UserWarning, match=r"without its old content being kept .*not supported"):
        before.keep()
    assert not before.is_there
