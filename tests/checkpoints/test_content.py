import re
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

from lit_diffusion.checkpoints.content import (
    check_archive,
    check_content,
    check_resumable,
    no_larger_than,
)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "a.ckpt"
    torch.save({"state_dict": {"w": torch.arange(1000.0)}}, path)
    return path


def test_a_sound_file_is_let_through_and_one_of_another_format_is_left_to_its_reader(
    file, tmp_path
):
    check_archive(file)
    (tmp_path / "text").write_text("text")
    check_archive(tmp_path / "text")


@pytest.mark.parametrize("bit", range(8))
def test_a_flipped_bit_of_a_weight_is_found_which_torch_would_load(file, bit):
    data = bytearray(file.read_bytes())
    with zipfile.ZipFile(file) as archive:
        header = archive.getinfo("a/data/0").header_offset
    data[header + 1000] ^= 1 << bit
    file.write_bytes(data)
    loaded = torch.load(file, weights_only=True)["state_dict"]["w"]
    assert not torch.equal(loaded, torch.arange(1000.0))
    with pytest.raises(ValueError, match="checksum of a/data/0 is wrong"):
        check_archive(file)


def test_a_file_that_would_unpack_to_more_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "bomb.ckpt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data/0", bytes(10**6))
    with pytest.raises(ValueError, match="would unpack to 1,000,000 bytes"):
        check_archive(tmp_path / "bomb.ckpt")


GOOD = {
    "state_dict": {"w": torch.zeros(2)},
    "callbacks": {"EMA{}": {}},
    "hyper_parameters": {"_class_path": "a.B", "steps": [1, None]},
    "loops": {"fit_loop": {"epoch_progress": {"total": {"ready": 3}}, "state_dict": {"a": "b"}}},
    "optimizer_states": [{"state": {}}],
    "global_step": 3,
}


def test_what_a_run_saves_is_let_through():
    check_content(GOOD)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"state_dict": None}, "its 'state_dict' is NoneType None, as no run saves it"),
        ({"state_dict": {1: torch.zeros(2)}}, "its 'state_dict' is dict {1: tensor"),
        ({"state_dict": {"w": "text"}}, "its weight w is no dense tensor, but str 'text'"),
        ({"state_dict": {"w": torch.zeros(2).to_sparse()}}, "w is no dense tensor, but a tensor"),
        ({"state_dict": {"w": torch.zeros(2, device="meta")}}, "on meta"),
        ({"callbacks": []}, "its 'callbacks' is list []"),
        ({"optimizer_states": {}}, "its 'optimizer_states' is dict {}"),
        ({"optimizer_states": [3]}, "its 'optimizer_states' is list [3]"),
        ({"global_step": -1}, "its 'global_step' is int -1"),
        ({"global_step": True}, "its 'global_step' is bool True"),
        ({"loops": {"a_progress": {"ready": torch.zeros(2)}}}, "ready must be a count"),
        ({"loops": {"a_progress": {"ready": -2}}}, "ready must be a count, and is -2"),
        ({"hyper_parameters": {"_class_path": "a", "b": torch.zeros(1)}}, "plain builtins"),
    ],
)
def test_what_no_run_saves_is_refused_and_told(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        check_content(GOOD | changes)


@pytest.mark.parametrize("content", [None, [], {}, {"weights": 3}, torch.zeros(2)])
def test_what_is_no_checkpoint_has_no_state_dict(content):
    with pytest.raises(ValueError, match="it has no 'state_dict'"):
        check_content(content)


def test_weights_alone_are_nothing_to_resume_from():
    whole = GOOD | {"epoch": 1, "lr_schedulers": []}
    check_resumable(whole, Path("a.ckpt"))
    del whole["loops"]
    with pytest.raises(ValueError, match=r"a\.ckpt holds no loops, so no run can be resumed"):
        check_resumable(whole, Path("a.ckpt"))


def test_a_network_is_not_built_that_is_far_larger_than_its_weights():
    with no_larger_than(nn.Linear(100, 100).state_dict()):
        nn.Linear(100, 100)
        with pytest.raises(ValueError, match="far more parameters than its 2 weights"):
            nn.Linear(2000, 2000)
    nn.Linear(2000, 2000)


def test_a_network_without_end_is_not_built():
    with no_larger_than({}), pytest.raises(ValueError, match="far more parameters"):
        nn.Sequential(*(nn.Linear(1, 1) for _ in range(10**12)))
