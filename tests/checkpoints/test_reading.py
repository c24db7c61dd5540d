import os
import pickle
import tarfile
import traceback
import zipfile
from functools import partial

import pytest
import torch
from support.plain_module import assert_same_bits

from lit_diffusion.checkpoints.reading import read_checkpoint, saved_step


@pytest.mark.parametrize("part", [0.0, 0.3, 0.9, 0.99, 0.999])
def test_a_truncated_file_is_refused_by_name(file, part):
    content = file.read_bytes()
    file.write_bytes(content[: int(part * len(content))])
    with pytest.raises(ValueError, match=r"last\.ckpt is truncated, damaged or no checkpoint"):
        read_checkpoint(file)


def pickled(content, path, protocol=None):
    path.write_bytes(pickle.dumps(content, protocol))


NAMED = r"holds pickled code \((posix|nt)\.system\), which is never run"
UNNAMED = "may hold pickled code, which is never run"


@pytest.mark.parametrize(
    ("save", "reason"),
    [
        (torch.save, NAMED),
        (partial(torch.save, pickle_protocol=4), UNNAMED),
        (partial(torch.save, _use_new_zipfile_serialization=False), NAMED),
        (pickled, UNNAMED),
        (partial(pickled, protocol=2), NAMED),
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
    for mmap in (False, True):
        with pytest.raises(ValueError, match=rf"{path.name} {reason}") as told:
            read_checkpoint(path, mmap=mmap)
        # What a person sees, traceback and all, has no advice of torch to run the file.
        assert "weights_only` set to" not in "".join(traceback.format_exception(told.value))


@pytest.mark.filterwarnings("default:'torch.load' received a zip file")  # torch's, not ours
def test_formats_that_torch_reads_only_by_running_them_are_refused_without_its_advice(tmp_path):
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        tar.addfile(tarfile.TarInfo("storages"))
    with zipfile.ZipFile(tmp_path / "script.pt", "w") as script:
        script.writestr("script/constants.pkl", b"")
        script.writestr("script/version", b"3")
    for name in ("x.tar", "script.pt"):
        assert_refused(tmp_path / name, UNNAMED)


def test_a_file_of_tensors_in_the_format_of_old_versions_is_read(tmp_path):
    content = {"state_dict": {"a": torch.ones(2)}}
    torch.save(content, tmp_path / "x.ckpt", _use_new_zipfile_serialization=False)
    for mmap in (False, True):
        assert_same_bits(read_checkpoint(tmp_path / "x.ckpt", mmap=mmap), content)


def test_a_file_that_is_no_checkpoint_is_refused(tmp_path):
    torch.save({"a": 1}, tmp_path / "x.ckpt")
    with pytest.raises(ValueError, match="is not a training checkpoint: it has no 'state_dict'"):
        read_checkpoint(tmp_path / "x.ckpt")


def test_a_file_with_one_ranks_parts_is_refused_on_reading(split, tmp_path):
    torch.save({"state_dict": split.state_dict()}, tmp_path / "x.ckpt")
    with pytest.raises(ValueError, match=r"x\.ckpt holds one rank's part of a tensor \(state_dict"):
        read_checkpoint(tmp_path / "x.ckpt")


def test_the_step_of_a_file_is_read_without_the_file(tmp_path):
    for content, expected in (({"global_step": 7}, 7), ({"global_step": "7"}, -1), ([], -1)):
        torch.save(content, tmp_path / "x.ckpt")
        assert saved_step(tmp_path / "x.ckpt") == expected
    (tmp_path / "x.ckpt").write_text("no checkpoint")
    assert saved_step(tmp_path / "x.ckpt") == -1
