import os
import pickle
import re
import tarfile
import traceback
import zipfile
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from lit_diffusion.checkpoints.reading import (
    check_content,
    check_resumable,
    limit_parameters,
    read_checkpoint,
    read_step,
)
from lit_diffusion.files import check_archive


@pytest.mark.parametrize("part", [0.0, 0.999])
def test_a_truncated_file_is_refused_by_name(file, part):
    content = file.read_bytes()
    file.write_bytes(content[: int(part * len(content))])
    with pytest.raises(ValueError, match=r"last\.ckpt is truncated, damaged or not a checkpoint"):
        read_checkpoint(file)


def pickled(content, path):
    path.write_bytes(pickle.dumps(content))


NAMED = r"contains pickled code \((posix|nt)\.system\), which is never run"
UNNAMED = "may contain pickled code, which is never run"


@pytest.mark.parametrize(
    ("save", "reason"),
    [
        (torch.save, NAMED),
        (partial(torch.save, pickle_protocol=4), UNNAMED),
        (partial(torch.save, _use_new_zipfile_serialization=False), NAMED),
        (pickled, UNNAMED),
    ],
)
def test_a_malicious_pickle_is_refused_for_what_it_is_and_not_executed(tmp_path, save, reason):
    class Malicious:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'executed'}",)

    save({"state_dict": {}, "payload": Malicious()}, tmp_path / "evil.ckpt")
    assert_refused(tmp_path / "evil.ckpt", reason)
    assert not (tmp_path / "executed").exists()


def assert_refused(path, reason):
    for shapes_only in (False, True):
        with pytest.raises(ValueError, match=rf"{path.name} {reason}") as error:
            read_checkpoint(path, shapes_only=shapes_only)
        # What a person sees, traceback and all, has no advice of torch to run the file.
        assert "weights_only` set to" not in "".join(traceback.format_exception(error.value))


@pytest.mark.filterwarnings("default:'torch.load' received a zip file")  # torch's, not ours
def test_formats_that_torch_reads_only_by_running_them_are_refused_without_its_advice(tmp_path):
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        tar.addfile(tarfile.TarInfo("storages"))
    with zipfile.ZipFile(tmp_path / "script.pt", "w") as script:
        script.writestr("script/constants.pkl", b"")
        script.writestr("script/version", b"3")
    for name in ("x.tar", "script.pt"):
        assert_refused(tmp_path / name, UNNAMED)


@pytest.mark.parametrize("content", [None, {"weights": 3}, torch.zeros(2)])
def test_a_file_that_is_no_checkpoint_is_refused(tmp_path, content):
    torch.save(content, tmp_path / "x.ckpt")
    with pytest.raises(ValueError, match="is not a training checkpoint: it has no 'state_dict'"):
        read_checkpoint(tmp_path / "x.ckpt")


def test_a_file_with_one_ranks_parts_is_refused_on_reading(split, tmp_path):
    torch.save({"state_dict": split.state_dict()}, tmp_path / "x.ckpt")
    with pytest.raises(ValueError, match=r"x\.ckpt holds one rank's part of a tensor \(state_dict"):
        read_checkpoint(tmp_path / "x.ckpt")


def test_the_step_of_a_file_is_read_without_the_file(tmp_path):
    for content, expected in (({"global_step": 7}, 7), ({"global_step": "7"}, -1), ([], -1)):
        torch.save(content, tmp_path / "x.ckpt")
        assert read_step(tmp_path / "x.ckpt") == expected
    (tmp_path / "x.ckpt").write_text("no checkpoint")
    assert read_step(tmp_path / "x.ckpt") == -1


def test_a_flipped_bit_of_a_weight_is_noticed_which_torch_would_load(tmp_path):
    archive = tmp_path / "a.ckpt"
    torch.save({"state_dict": {"w": torch.arange(1000.0)}}, archive)
    data = bytearray(archive.read_bytes())
    with zipfile.ZipFile(archive) as members:
        header = members.getinfo("a/data/0").header_offset
    data[header + 1000] ^= 1
    archive.write_bytes(data)
    loaded = torch.load(archive, weights_only=True)["state_dict"]["w"]
    assert not torch.equal(loaded, torch.arange(1000.0))
    with pytest.raises(ValueError, match="checksum of a/data/0 is wrong"):
        check_archive(archive)


def test_a_weight_that_is_marked_as_a_folder_is_refused_which_torch_would_load_as_anything(
    tmp_path,
):
    archive = tmp_path / "a.ckpt"
    torch.save({"state_dict": {"w": torch.arange(1000.0)}}, archive)
    data = bytearray(archive.read_bytes())
    data[data.rindex(b"a/data/0") - 8] ^= 0x10  # external attributes, in the directory of the file
    archive.write_bytes(data)
    torch.load(archive)  # whatever the memory holds
    with pytest.raises(ValueError, match="a/data/0 is marked as a folder"):
        check_archive(archive)


def test_a_file_that_would_unpack_to_more_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "bomb.ckpt", "w", zipfile.ZIP_DEFLATED) as members:
        members.writestr("archive/data/0", bytes(10**6))
    with pytest.raises(ValueError, match="would unpack to 1,000,000 bytes"):
        check_archive(tmp_path / "bomb.ckpt")


GOOD = {
    "state_dict": {"w": torch.zeros(2)},
    "callbacks": {"EMA{}": {}},
    "hyper_parameters": {"_class_path": "a.B", "steps": [1, None]},
    "loops": {"fit_loop": {"epoch_progress": {"total": {"ready": 3}}, "state_dict": {"a": "b"}}},
    "optimizer_states": [{"state": {}}],
    "global_step": 3,
    "callback_metrics": {"val/loss": torch.zeros(())},
    "model_checkpoints": {"ModelCheckpoint{}": {"current_score": None}},
}


def test_what_a_run_saves_is_let_through():
    check_content(GOOD)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"state_dict": {1: torch.zeros(2)}}, "its 'state_dict' is dict {1: tensor"),
        ({"state_dict": {"w": "text"}}, "its weight w is not a dense tensor, but str 'text'"),
        ({"state_dict": {"w": torch.zeros(2, device="meta")}}, "on meta"),
        ({"callbacks": []}, "its 'callbacks' is list []"),
        ({"callback_metrics": {"a": 3}}, "its metric a is not a dense tensor, but int 3"),
        ({"model_checkpoints": []}, "its 'model_checkpoints' is list []"),
        ({"model_checkpoints": {"a": 3}}, "its state of a is int 3"),
        ({"global_step": -1}, "its 'global_step' is int -1"),
        ({"global_step": 2**63}, "its 'global_step' is int 9223372036854775808"),
        ({"loops": {"a_progress": {"ready": -2}}}, "ready must be a count, got -2"),
        ({"loops": {"combined_loader": torch.zeros(2)}}, "combined_loader must be"),
        ({"loops": {"state_dict": {"_batches_that_stepped": {}}}}, "stepped must be a count"),
        ({"hyper_parameters": {"_class_path": "a", "b": [{"class_path": 1}]}}, "name a class"),
        (
            {"hyper_parameters": {"_class_path": "a", "init_args": {1: 2}}},
            "names of init_args must be text",
        ),
        ({"hyper_parameters": {"_class_path": "a", "b": {1: 2, None: 3}}}, "names must be text"),
        ({"hyper_parameters": {"_class_path": "a", "b": torch.zeros(1)}}, "plain builtins"),
    ],
)
def test_what_no_run_saves_is_refused_and_described(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        check_content(GOOD | changes)


def test_weights_alone_are_nothing_to_resume_from():
    whole = GOOD | {"epoch": 1, "lr_schedulers": []}
    check_resumable(whole, Path("a.ckpt"))
    del whole["loops"]
    with pytest.raises(ValueError, match=r"a\.ckpt has no loops, so no run can be resumed"):
        check_resumable(whole, Path("a.ckpt"))


def test_a_network_is_not_built_that_is_far_larger_than_its_weights_or_has_no_end():
    with limit_parameters(nn.Linear(100, 100).state_dict()):
        nn.Linear(100, 100)
        with pytest.raises(ValueError, match="far more parameters than its 2 weights"):
            nn.Linear(2000, 2000)
        with pytest.raises(ValueError, match="far more parameters"):
            nn.Sequential(*(nn.Linear(1, 1) for _ in range(10**12)))
    nn.Linear(2000, 2000)


def test_networks_that_trusted_code_builds_are_not_limited():
    """As a frozen teacher that a module of the user has outside of its state_dict."""

    def teacher():
        return nn.Linear(2000, 2000)

    with limit_parameters(nn.Linear(100, 100).state_dict(), iter([__name__])):
        teacher()
        teacher()
    with limit_parameters({}, ["others", "./folder"]), pytest.raises(ValueError, match="far more"):
        teacher()
    # The caller is not in the checkpoint, as a trusted script that calls `load`.
    with limit_parameters({}, [__name__]), pytest.raises(ValueError, match="far more"):
        nn.Linear(2000, 2000)
