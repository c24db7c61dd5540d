import errno
import os
import pathlib
import signal

import pytest
import torch
from lightning.fabric.utilities.cloud_io import _load
from support.plain_module import assert_same_bits
from support.tiny_checkpoint import checkpoint_of, tiny
from torch import nn

from lit_diffusion.checkpoints import saving
from lit_diffusion.checkpoints.reading import read_checkpoint
from lit_diffusion.checkpoints.saving import AtomicCheckpointIO, write_checkpoint


def test_objects_among_the_hyper_parameters_are_left_out(tmp_path):
    hyper = {"lr": 0.1, "betas": (0.9, 0.99), "net": nn.Linear(1, 1), "path": pathlib.Path("x")}
    write_checkpoint({"state_dict": {}, "hyper_parameters": hyper}, tmp_path / "x.ckpt")
    content = read_checkpoint(tmp_path / "x.ckpt")
    assert content["hyper_parameters"] == {"lr": 0.1, "betas": (0.9, 0.99)}
    assert "net" in hyper


def test_what_could_not_be_read_back_is_refused_when_it_is_written(file):
    before = file.read_bytes()
    with pytest.raises(TypeError, match="tensors and plain builtins, got pathlib"):
        write_checkpoint({"state_dict": {}, "callbacks": {"A": pathlib.Path("x")}}, file)
    assert file.read_bytes() == before
    assert os.listdir(file.parent) == [file.name]


@pytest.mark.usefixtures("terminal_signals")
def test_ctrl_c_waits_for_the_file_and_is_no_full_disk(file, monkeypatch):
    def interrupted(content, opened):
        os.kill(os.getpid(), signal.SIGINT)
        save(content, opened)

    save, content = torch.save, {"state_dict": {"w": torch.ones(9)}}
    monkeypatch.setattr(torch, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(content, file)
    assert_same_bits(read_checkpoint(file)["state_dict"], content["state_dict"])
    assert os.listdir(file.parent) == [file.name]


def test_a_failed_write_leaves_the_previous_file_and_no_other(file, monkeypatch):
    before = file.read_bytes()

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    rule = r"last.ckpt could not be written, with \d+ MiB free there: .*No space.* is intact"
    with pytest.raises(OSError, match=rule):
        write_checkpoint(checkpoint_of(tiny()), file)
    assert file.read_bytes() == before
    assert os.listdir(file.parent) == [file.name]


def test_the_checkpoint_io_of_a_fit_is_atomic_on_a_disk_and_writes_to_urls(tmp_path, monkeypatch):
    written, content = [], {"state_dict": {"w": torch.ones(9)}}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        saving.TorchCheckpointIO, "save_checkpoint", lambda _, *parts: written.append(parts[1])
    )
    for path in (tmp_path / "x.ckpt", "s3://bucket/x.ckpt"):
        AtomicCheckpointIO().save_checkpoint(content, path)
    assert_same_bits(read_checkpoint(tmp_path / "x.ckpt")["state_dict"], content["state_dict"])
    assert written == ["s3://bucket/x.ckpt"]


def test_files_from_urls_are_read_without_running_code_too(monkeypatch):
    asked = []
    monkeypatch.setattr(
        torch.hub, "load_state_dict_from_url", lambda url, **options: asked.append(options)
    )

    def without_checks(self, path, map_location=None, weights_only=None):
        return _load(path, map_location, weights_only)

    monkeypatch.setattr(saving.TorchCheckpointIO, "load_checkpoint", without_checks)
    AtomicCheckpointIO().load_checkpoint("http://host/x.ckpt", weights_only=False)
    assert [options["weights_only"] for options in asked] == [True]


def test_split_tensors_are_written_whole_and_read_without_any_rank(split, tmp_path):
    write_checkpoint(checkpoint_of(split), tmp_path / "x.ckpt")
    content = torch.load(tmp_path / "x.ckpt", weights_only=True)
    assert_same_bits(content, checkpoint_of(tiny()))
    assert all(type(value) is torch.Tensor for value in content["state_dict"].values())


def test_the_plugin_refuses_split_tensors_which_one_rank_alone_cannot_gather(split, tmp_path):
    state = {"state_dict": {}, "callbacks": {"Other": {"momenta": [next(split.parameters())]}}}
    for path in (tmp_path / "x.ckpt", f"file://{tmp_path}/y.ckpt"):
        with pytest.raises(TypeError, match=r"'callbacks\.Other\.momenta\.0'.*all ranks"):
            AtomicCheckpointIO().save_checkpoint(state, path)
    assert list(tmp_path.iterdir()) == []


def test_a_file_has_checksums_whatever_torch_is_set_to_elsewhere(tmp_path):
    content = {"state_dict": {"a": torch.ones(2)}}
    try:
        torch.serialization.set_crc32_options(False)
        write_checkpoint(content, tmp_path / "ours.ckpt")
        assert not torch.serialization.get_crc32_options()
        torch.save(content, tmp_path / "theirs.ckpt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert_same_bits(read_checkpoint(tmp_path / "ours.ckpt"), content)
    with pytest.raises(ValueError, match=r"set_crc32_options\(False\)"):
        read_checkpoint(tmp_path / "theirs.ckpt")
