import errno
import os
import pathlib
import pickle
import subprocess
import sys
import tarfile
import traceback
import zipfile
from functools import partial

import lightning.pytorch as pl
import pytest
import torch
from support.plain_module import assert_same_bits
from support.small_digits import small_digits
from support.tiny_run import TinyModule, TinyNet
from torch import nn
from torch.distributed import checkpoint as distributed_checkpoint
from torch.distributed.fsdp import fully_shard

from lit_diffusion import checkpoints
from lit_diffusion.checkpoints import (
    AtomicCheckpointIO,
    load,
    load_with_record,
    read_checkpoint,
    write_checkpoint,
)
from lit_diffusion.protocols import NonFiniteSamples

DECAYS = (0.5, 0.25)


def checkpoint_of(module: nn.Module, **more) -> dict:
    """As a fit with EMA of two decays leaves it; each average differs from all else."""
    state = {name: torch.full_like(value, 1.0) for name, value in module.state_dict().items()}
    shadows = [{name: torch.full_like(v, 2.0 + i) for name, v in state.items()} for i in range(2)]
    ema = {"decays": list(DECAYS), "steps": dict.fromkeys(state, 7), "shadows": shadows}
    return {
        "state_dict": state,
        "global_step": 7,
        "callbacks": {"EMA{'prefix': ''}": ema, "Other": {"best": 1}},
        **more,
    }


def tiny(width: int = 3) -> TinyModule:
    return TinyModule(TinyNet(width), torch.optim.Adam)


@pytest.fixture
def file(tmp_path):
    write_checkpoint(checkpoint_of(tiny()), tmp_path / "last.ckpt")
    return tmp_path / "last.ckpt"


def digits_spec() -> dict:
    spec = small_digits(1)["model"]
    return {"_class_path": spec["class_path"], **spec["init_args"], "_instantiator": "os.system"}


# Which weights


@pytest.mark.parametrize(
    ("weights", "value", "name"),
    [("raw", 1, "raw"), ("ema", 2, "ema_0.5"), ("ema_0.5", 2, "ema_0.5"), ("ema_0.25", 3, None)],
)
def test_the_weights_asked_for_are_loaded_and_named(file, weights, value, name):
    loaded = load_with_record(file, weights, module=tiny())
    assert all((p == value).all() for p in loaded.module.parameters())
    assert (loaded.weights, loaded.step) == (name or weights, 7)
    assert not loaded.module.training


def test_weights_that_are_not_there_are_refused_with_those_that_are(file):
    with pytest.raises(ValueError, match=r"no weights 'ema_0.9'; it has raw, ema_0.5, ema_0.25"):
        load(file, "ema_0.9", module=tiny())


def test_a_file_without_averages_is_not_taken_for_one_with(tmp_path):
    content = checkpoint_of(tiny())
    del content["callbacks"]
    write_checkpoint(content, tmp_path / "x.ckpt")
    with pytest.raises(ValueError, match=r"no weights 'ema'; it has raw\."):
        load(tmp_path / "x.ckpt", module=tiny())


def test_weights_that_are_not_averaged_are_loaded_beside_those_that_are(tmp_path):
    content = checkpoint_of(tiny())
    averages = content["callbacks"]["EMA{'prefix': ''}"]
    frozen = next(iter(averages["steps"]))
    for by_name in (averages["steps"], *averages["shadows"]):
        del by_name[frozen]
    write_checkpoint(content, tmp_path / "x.ckpt")
    state = load(tmp_path / "x.ckpt", module=tiny()).state_dict()
    assert {name: value.max().item() for name, value in state.items()} == {
        name: 1.0 if name == frozen else 2.0 for name in state
    }


def test_the_averages_of_two_callbacks_are_put_together(tmp_path):
    content = checkpoint_of(tiny())
    (states,) = (content["callbacks"].pop("EMA{'prefix': ''}"),)
    for i, decay in ((0, 0.5), (1, 0.25)):
        names = [name for name in content["state_dict"] if f"layers.{2 * i}" in name or i == 0]
        shadows = [{name: states["shadows"][i][name] for name in names}]
        key = f"EMA{{'prefix': '{i}'}}"
        content["callbacks"][key] = {
            "decays": [decay],
            "steps": dict.fromkeys(names, 7),
            "shadows": shadows,
        }
    content["state_dict"] |= {"network.layers.0.bias": torch.zeros(3)}
    write_checkpoint(content, tmp_path / "x.ckpt")
    loaded = load_with_record(tmp_path / "x.ckpt", module=tiny())
    assert loaded.weights == "ema_0.5+ema_0.25"
    assert all((p >= 2).all() for p in loaded.module.parameters())


def test_weights_saved_from_a_compiled_network_fit_one_that_is_not(tmp_path):
    content = checkpoint_of(tiny())
    content["state_dict"] = {
        name.replace("network.", "network._orig_mod."): value
        for name, value in content["state_dict"].items()
    }
    write_checkpoint(content, tmp_path / "x.ckpt")
    for weights, value in (("raw", 1), ("ema", 2)):
        module = load(tmp_path / "x.ckpt", weights, module=tiny())
        assert all((p == value).all() for p in module.parameters())


def test_a_module_is_built_from_the_class_paths_in_the_file(tmp_path):
    first = checkpoints.build({"hyper_parameters": digits_spec()}, "x")
    content = checkpoint_of(first, hyper_parameters=digits_spec())
    content["state_dict"] = first.state_dict()
    write_checkpoint(content, tmp_path / "x.ckpt")
    again = load(tmp_path / "x.ckpt", "raw")
    seeds = [3, 1]
    assert torch.equal(again.generate(seeds), first.generate(seeds))


def test_samples_that_are_not_finite_are_told_without_a_step_that_is_not_theirs(tmp_path):
    content = checkpoint_of(checkpoints.build({"hyper_parameters": digits_spec()}, "x"))
    content["state_dict"] = {k: v * torch.nan for k, v in content["state_dict"].items()}
    write_checkpoint({**content, "hyper_parameters": digits_spec()}, tmp_path / "x.ckpt")
    with pytest.raises(NonFiniteSamples, match=r"^2 samples are not finite, from t = "):
        load(tmp_path / "x.ckpt", "raw").generate([0, 1])


def test_a_run_folder_stands_for_its_last_checkpoint(tmp_path):
    write_checkpoint(checkpoint_of(tiny()), tmp_path / "checkpoints" / "last.ckpt")
    assert load_with_record(tmp_path, module=tiny()).path == tmp_path / "checkpoints" / "last.ckpt"


def test_a_module_made_in_python_says_how_to_load_it(file):
    with pytest.raises(ValueError, match=r"was made in Python; build it and call load\(path, mod"):
        load(file)


# What is refused


def test_another_architecture_is_refused_with_the_first_differences(file):
    first = r"network\.layers\.0\.weight is \(3, 2\) in the file, \(5, 2\) in the module"
    with pytest.raises(ValueError, match=rf"last\.ckpt is of another architecture: {first}"):
        load(file, module=tiny(width=5))


def test_missing_and_unknown_weights_are_refused_by_name(tmp_path):
    content = checkpoint_of(tiny())
    content["state_dict"]["other"] = content["state_dict"].pop("network.layers.0.bias")
    write_checkpoint(content, tmp_path / "x.ckpt")
    with pytest.raises(ValueError, match=r"lacks network\.layers\.0\.bias; the module lacks oth"):
        load(tmp_path / "x.ckpt", "raw", module=tiny())


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


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no\.ckpt"):
        load(tmp_path / "no.ckpt")


def test_a_class_path_of_a_stranger_in_a_file_is_not_imported(tmp_path, monkeypatch):
    (tmp_path / "stranger.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')")
    monkeypatch.syspath_prepend(tmp_path)
    for hidden in (
        {"_class_path": "stranger.Module"},
        digits_spec() | {"network": {"class_path": "stranger.Net"}},
        digits_spec() | {"optimizer": "stranger.optimizer"},
        digits_spec() | {"codec": {"class_path": "stranger.Codec"}},
    ):
        write_checkpoint(checkpoint_of(tiny(), hyper_parameters=hidden), tmp_path / "x.ckpt")
        with pytest.raises(ValueError, match=r"x\.ckpt: .*stranger.* is not imported"):
            load(tmp_path / "x.ckpt")
    assert not (tmp_path / "imported").exists()


# Writing


def test_what_is_written_is_read_back_with_weights_only(file):
    content = torch.load(file, weights_only=True)
    assert content["callbacks"]["EMA{'prefix': ''}"]["decays"] == list(DECAYS)


def test_objects_among_the_hyper_parameters_are_left_out(tmp_path):
    given = {"lr": 0.1, "betas": (0.9, 0.99), "net": nn.Linear(1, 1), "path": pathlib.Path("x")}
    content = {"state_dict": {}, "hyper_parameters": given}
    write_checkpoint(content, tmp_path / "x.ckpt")
    kept = read_checkpoint(tmp_path / "x.ckpt")["hyper_parameters"]
    assert kept == {"lr": 0.1, "betas": (0.9, 0.99)}
    assert "net" in given


def test_what_could_not_be_read_back_is_refused_when_it_is_written(file):
    before = file.read_bytes()
    with pytest.raises(TypeError, match="tensors and plain builtins, got pathlib"):
        write_checkpoint({"state_dict": {}, "callbacks": {"A": pathlib.Path("x")}}, file)
    assert file.read_bytes() == before
    assert os.listdir(file.parent) == [file.name]


def test_a_failed_write_leaves_the_previous_file_and_no_other(file, monkeypatch):
    before = file.read_bytes()

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoints.os, "fsync", full)
    rule = r"last.ckpt could not be written, with \d+ MiB free there: .*No space.* is intact"
    with pytest.raises(OSError, match=rule):
        write_checkpoint(checkpoint_of(tiny()), file)
    assert file.read_bytes() == before
    assert os.listdir(file.parent) == [file.name]


@pytest.mark.system
def test_a_full_disk_leaves_the_previous_checkpoint(file):
    """A limit on the size of files stands for the disk: the write itself fails half-way."""
    before = file.read_bytes()
    script = (
        "import resource, sys, torch\n"
        "from lit_diffusion.checkpoints import write_checkpoint\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({2 * len(before)}, resource.RLIM_INFINITY))\n"
        "try: write_checkpoint({'state_dict': {'a': torch.randn(10**6)}}, sys.argv[1])\n"
        "except OSError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(file)], capture_output=True, text=True)
    assert "could not be written" in done.stdout, done.stderr
    assert "the checkpoint saved there before is intact" in done.stdout
    assert file.read_bytes() == before
    assert os.listdir(file.parent) == [file.name]


def test_the_plugin_writes_and_reads_for_the_trainer(tmp_path):
    module = tiny()
    trainer = pl.Trainer(
        plugins=[AtomicCheckpointIO()], logger=False, accelerator="cpu", enable_progress_bar=False
    )
    trainer.strategy.connect(module)
    trainer.save_checkpoint(tmp_path / "deep" / "x.ckpt", weights_only=True)
    again = trainer.strategy.load_checkpoint(tmp_path / "deep" / "x.ckpt")
    for name, value in module.state_dict().items():
        assert torch.equal(again["state_dict"][name], value)
    trainer.strategy.remove_checkpoint(tmp_path / "deep" / "x.ckpt")
    assert os.listdir(tmp_path / "deep") == []


def test_files_from_urls_are_read_without_running_code_too(monkeypatch):
    asked = []
    monkeypatch.setattr(
        torch.hub, "load_state_dict_from_url", lambda url, **options: asked.append(options)
    )
    monkeypatch.setattr(checkpoints.TorchCheckpointIO, "load_checkpoint", _without_looking)
    AtomicCheckpointIO().load_checkpoint("http://host/x.ckpt", weights_only=False)
    assert [options["weights_only"] for options in asked] == [True]


def test_code_in_a_file_from_a_url_is_refused_without_torchs_advice(monkeypatch):
    def refused(self, path, map_location=None, weights_only=None):
        advice = "Re-running `torch.load` with `weights_only` set to `False` will likely succeed."
        raise pickle.UnpicklingError(advice)

    monkeypatch.setattr(checkpoints.TorchCheckpointIO, "load_checkpoint", refused)
    with pytest.raises(ValueError, match=rf"^http://host/x\.ckpt {UNNAMED}") as told:
        AtomicCheckpointIO().load_checkpoint("http://host/x.ckpt")
    assert "set to" not in str(told.value)


def _without_looking(self, path, map_location=None, weights_only=None):
    from lightning.fabric.utilities.cloud_io import _load

    return _load(path, map_location, weights_only)


# Split weights


@pytest.fixture
def split():
    """A module whose weights are split over one rank, which is all of each."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    yield fully_shard(tiny(), mesh=mesh)
    torch.distributed.destroy_process_group()


def whole_state(module):
    return {name: value.full_tensor() for name, value in module.state_dict().items()}


def test_split_tensors_are_written_whole_and_read_without_any_rank(split, tmp_path):
    write_checkpoint(checkpoint_of(split), tmp_path / "x.ckpt")
    found = torch.load(tmp_path / "x.ckpt", weights_only=True)
    assert_same_bits(found, checkpoint_of(tiny()))
    assert all(type(value) is torch.Tensor for value in found["state_dict"].values())


def test_the_plugin_refuses_split_tensors_which_one_rank_alone_cannot_gather(split, tmp_path):
    state = {"state_dict": {}, "callbacks": {"Other": {"momenta": [next(split.parameters())]}}}
    for path in (tmp_path / "x.ckpt", f"file://{tmp_path}/y.ckpt"):
        with pytest.raises(TypeError, match=r"'callbacks\.Other\.momenta\.0'.*all ranks"):
            AtomicCheckpointIO().save_checkpoint(state, path)
    assert list(tmp_path.iterdir()) == []


def test_a_file_with_one_ranks_parts_is_refused_on_reading(split, tmp_path):
    torch.save({"state_dict": split.state_dict()}, tmp_path / "x.ckpt")
    with pytest.raises(ValueError, match=r"x\.ckpt holds one rank's part of a tensor \(state_dict"):
        read_checkpoint(tmp_path / "x.ckpt")


def test_a_folder_of_parts_is_refused_with_the_command_that_makes_a_file_of_it(split, tmp_path):
    folder = tmp_path / "checkpoints" / "last.ckpt"
    distributed_checkpoint.save({"state_dict": split.state_dict()}, checkpoint_id=folder)
    for path in (folder, tmp_path):
        with pytest.raises(ValueError, match=rf"consolidate_checkpoint {folder},"):
            load(path)
    with pytest.raises(ValueError, match="is a folder; name the checkpoint file in it"):
        read_checkpoint(tmp_path)
    torch.save({}, folder / "meta.pt")  # as Lightning adds it
    program = [sys.executable, "-m", "lightning.fabric.utilities.consolidate_checkpoint"]
    subprocess.run([*program, folder, "--output_file", tmp_path / "x.ckpt"], check=True)
    state = read_checkpoint(tmp_path / "x.ckpt")["state_dict"]
    assert_same_bits(
        state, {name: value.full_tensor() for name, value in split.state_dict().items()}
    )


def test_a_file_has_checksums_whatever_torch_is_told_elsewhere(tmp_path):
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


def test_averages_of_other_numbers_than_the_weights_are_refused(tmp_path):
    content = checkpoint_of(tiny())
    state = content["callbacks"]["EMA{'prefix': ''}"]
    for name, value in state["shadows"][1].items():
        state["shadows"][1][name] = value + 1j
    write_checkpoint(content, tmp_path / "x.ckpt")
    with pytest.raises(ValueError, match=r"is torch\.complex64 .*, and the weight torch\.float32"):
        load(tmp_path / "x.ckpt", module=tiny())
