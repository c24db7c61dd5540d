"""Checkpoints to which each rank writes its parts, on one rank; `test_sharding.py` has more."""

import errno
import os
import pickle
import shutil
import tracemalloc
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from support.plain_module import assert_same_bits
from support.tiny_checkpoint import checkpoint_of, tiny
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex

from lit_diffusion.callbacks.trainer_state import is_dtensor
from lit_diffusion.checkpoints import sharded
from lit_diffusion.checkpoints.loading import load
from lit_diffusion.checkpoints.reading import read_checkpoint, read_step
from lit_diffusion.checkpoints.saving import write_checkpoint
from lit_diffusion.checkpoints.sharded import write_folder
from lit_diffusion.cli.main import main
from lit_diffusion.files import path_after_replace, replace


@pytest.fixture
def folder(split, tmp_path):
    write_folder(checkpoint_of(split), tmp_path / "last.ckpt")
    return tmp_path / "last.ckpt"


def test_a_folder_is_read_as_the_file_of_the_same_checkpoint(split, folder, tmp_path):
    write_checkpoint(checkpoint_of(split), tmp_path / "file.ckpt")
    file = read_checkpoint(tmp_path / "file.ckpt")
    assert_same_bits(read_checkpoint(folder), file)
    assert read_step(folder) == file["global_step"]
    shapes = read_checkpoint(folder, shapes_only=True)
    for name, value in file["state_dict"].items():
        zeros = shapes["state_dict"][name]
        assert (zeros.shape, zeros.dtype) == (value.shape, value.dtype)
    parts = read_checkpoint(folder, parameters=dict(split.named_parameters()))
    assert all(map(is_dtensor, parts["callbacks"]["EMA{'prefix': ''}"]["shadows"][1].values()))
    weights = next(load(folder, weights="ema_0.25", module=tiny()).parameters())
    assert torch.equal(weights, torch.full_like(weights, 3.0))


class Killed(BaseException):
    """What `finally` clauses see of a kill; they change nothing here."""


@pytest.mark.parametrize("before", ["folder", "file"])
def test_a_kill_at_any_time_leaves_a_whole_checkpoint(split, tmp_path, monkeypatch, before):
    def kill_before(step, module, name):
        function = getattr(module, name)

        def killed(*args, **options):
            if calls.append(name) or len(calls) > step:
                raise Killed
            return function(*args, **options)

        monkeypatch.setattr(module, name, killed)

    path, calls, step = tmp_path / "last.ckpt", [], 0
    steps = set()
    while len(calls) >= step:
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
        old = checkpoint_of(split)
        write_folder(old, path) if before == "folder" else write_checkpoint(old, path)
        calls.clear()
        with monkeypatch.context():
            kill_before(step, sharded, "save_parts")
            kill_before(step, sharded, "save_plain")
            for name in ("rename", "replace", "unlink", "fsync"):
                kill_before(step, os, name)
            kill_before(step, shutil, "rmtree")
            with suppress(Killed):
                write_folder(checkpoint_of(split, global_step=8), path)
            monkeypatch.undo()
        steps.add(read_checkpoint(path_after_replace(path))["global_step"])
        step += 1
    assert steps == {7, 8}
    assert step > 8
    write_folder(checkpoint_of(split, global_step=9), path)
    assert os.listdir(tmp_path) == ["last.ckpt"]
    write_checkpoint(checkpoint_of(split), path)
    assert os.listdir(tmp_path) == ["last.ckpt"]
    assert path.is_file()


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_folder_that_a_run_replaces_meanwhile_is_not_read_half(
    split, folder, monkeypatch, is_whole
):
    """Its parts would be those of the later checkpoint, or of both."""

    def save_before(*args, **options):
        write_folder(checkpoint_of(split, global_step=8), folder)
        return load_parts(*args, **options) if is_whole else os.stat(folder / "of the old")

    load_parts = sharded.load_parts
    monkeypatch.setattr(sharded, "load_parts", save_before)
    with pytest.raises(ValueError, match=r"last\.ckpt was replaced by a later save"):
        read_checkpoint(folder)


@pytest.mark.parametrize("function", ["FileSystemWriter.write_data", "save_plain"])
def test_a_save_that_fails_leaves_no_files(split, folder, monkeypatch, function):
    """They would keep a full disk full."""

    def fail(*args, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    if function == "save_plain":
        monkeypatch.setattr(sharded, "save_plain", fail)
    else:
        monkeypatch.setattr(FileSystemWriter, "write_data", fail)
    with pytest.raises(OSError, match=r"No space left on device; the checkpoint .* is intact"):
        write_folder(checkpoint_of(split, global_step=8), folder)
    assert os.listdir(folder.parent) == ["last.ckpt"]
    assert read_checkpoint(folder)["global_step"] == 7


def test_a_folder_of_other_files_is_not_replaced(split, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "results.txt").write_text("of weeks")
    with pytest.raises(
        OSError, match=r"run could not be written.*: the path is .* not a checkpoint\.$"
    ):
        write_folder(checkpoint_of(split), tmp_path / "run")
    with pytest.raises(OSError, match=r"y\.ckpt could not be written.*: Not a directory\.$"):
        write_folder(checkpoint_of(split), tmp_path / "run" / "results.txt" / "x" / "y.ckpt")
    (tmp_path / "part").mkdir()
    with pytest.raises(OSError, match="not empty"):
        replace(tmp_path / "part", tmp_path / "run")
    assert os.listdir(tmp_path / "run") == ["results.txt"]


def rewrite(folder, change):
    """Change `.metadata` in place, or replace it by what `change` returns."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    changed = change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata if changed is None else changed))


class Code:
    def __reduce__(self):
        return os.mkdir, ("executed",)


def first(metadata):
    name, entry = next(iter(metadata.state_dict_metadata.items()))
    return entry, metadata.storage_data[MetadataIndex(name, entry.chunks[0].offsets)]


def climb(metadata):
    first(metadata)[1].relative_path = "../last.ckpt/__0_0.distcp"


def enlarge(metadata):
    entry, _ = first(metadata)
    entry.size = entry.chunks[0].sizes = torch.Size([2**40, *entry.size[1:]])


def move(metadata):
    first(metadata)[1].offset += 2**40


def repeat(metadata):
    place = max(metadata.storage_data.values(), key=lambda place: place.offset)
    place.offset, place.length = 0, place.offset
    metadata.storage_data = dict.fromkeys(metadata.storage_data, place)


def extend(metadata):
    first(metadata)[1].transform_descriptors = ["zstd"]


def lack(metadata):
    first(metadata)[0].chunks.clear()


def confuse(metadata):
    first(metadata)[0].properties.dtype = torch.Size([1])


HOSTILE = [
    (lambda _: Code(), r"contains pickled code \(posix.mkdir\), which is never run"),
    (lambda m: setattr(m, "planner_data", Code()), "pickled code"),
    (lambda _: [torch.nn.Linear], "pickled code"),
    *[(lambda _, x=x: x, "damaged") for x in (1, {}, torch.float32, torch.Size([1]))],
    *[(change, "damaged") for change in (climb, enlarge, move, repeat, extend, lack, confuse)],
]


@pytest.mark.parametrize(("change", "message"), HOSTILE)
def test_a_hostile_list_of_parts_is_refused_in_one_line(
    folder, change, message, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    rewrite(folder, change)
    assert main(["sample", "--checkpoint", str(folder), "--num=1", "--out=out"]) == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert str(folder) in line
    with pytest.raises(ValueError, match=message):
        read_checkpoint(folder)
    with pytest.raises(ValueError, match=message):
        read_checkpoint(folder, shapes_only=True)
    assert not Path("executed").exists()


def test_a_tensor_that_is_larger_than_its_file_is_refused_before_it_is_allocated(folder):
    rewrite(folder, enlarge)
    checkpoint = torch.load(folder / "meta.pt", weights_only=True)
    weights = checkpoint["state_dict"]
    weights["network.layers.0.weight"] = torch.empty(2**40, 2, device="meta")
    torch.save(checkpoint, folder / "meta.pt")
    for shapes_only in (False, True):
        with pytest.raises(ValueError, match=r"damaged .*shards with all their data"):
            read_checkpoint(folder, shapes_only=shapes_only)


def test_an_attribute_of_a_class_cannot_be_set_by_a_list_of_parts(folder):
    """Pickle sets attributes of whatever is on its stack, by a pair of dicts."""
    for name in (b"torch.distributed.checkpoint.metadata\nMetadata", b"torch\nSize"):
        (folder / ".metadata").write_bytes(b"c" + name + b"\n(}}X\x01\x00\x00\x00xK\x01stb.")
        with pytest.raises(ValueError, match="damaged"):
            read_checkpoint(folder)


def test_a_list_of_parts_takes_no_more_memory_than_it_has_objects(folder):
    """Pickle numbers objects for later use, and 9 bytes can ask for 4 billion numbers."""
    (folder / ".metadata").write_bytes(b"\x80\x04Nr\x00\x00\x00\x01.")  # number 2^24
    tracemalloc.start()
    with pytest.raises(ValueError, match="damaged"):
        read_checkpoint(folder)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**24


@pytest.mark.parametrize("change", ["flip", "cut", "delete"])
def test_a_damaged_part_is_noticed(folder, change):
    part = folder / "__0_0.distcp"
    content = bytearray(part.read_bytes())
    content[content.index(b"\x00\x00\x80\x3f")] ^= 1  # of a weight, 1.0
    part.unlink()
    if change != "delete":
        part.write_bytes(content if change == "flip" else content[:-100])
    with pytest.raises(ValueError, match="damaged"):
        read_checkpoint(folder)
