import json
import re
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch import LightningDataModule
from support.commands import call
from support.small_digits import small_digits
from support.tiny_checkpoint import checkpoint_of, tiny
from torch.distributed import checkpoint as distributed_checkpoint

from lit_diffusion.checkpoints.loading import (
    build_module,
    check_codec_folder,
    instantiate,
    load,
    load_module,
)
from lit_diffusion.checkpoints.reading import read_checkpoint
from lit_diffusion.checkpoints.saving import write_checkpoint
from lit_diffusion.cli.run_folder import model_settings, read_command_line
from lit_diffusion.protocols import NonFiniteSamples


def digits_spec() -> dict:
    spec = small_digits(1)["model"]
    return {"_class_path": spec["class_path"], **spec["init_args"], "_instantiator": "os.system"}


# Which weights


@pytest.mark.parametrize(
    ("weights", "value", "name"),
    [("raw", 1, "raw"), ("ema", 2, "ema_0.5"), ("ema_0.5", 2, "ema_0.5"), ("ema_0.25", 3, None)],
)
def test_the_weights_asked_for_are_loaded_and_named(file, weights, value, name):
    loaded = load_module(file, weights, module=tiny())
    assert all((p == value).all() for p in loaded.module.parameters())
    assert (loaded.weights, loaded.step) == (name or weights, 7)
    assert not loaded.module.training


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


def test_weights_saved_from_a_compiled_network_fit_one_that_is_not(tmp_path):
    content = checkpoint_of(tiny())
    state = content["state_dict"].items()
    content["state_dict"] = {k.replace("network.", "network._orig_mod."): v for k, v in state}
    write_checkpoint(content, tmp_path / "x.ckpt")
    for weights, value in (("raw", 1), ("ema", 2)):
        module = load(tmp_path / "x.ckpt", weights, module=tiny())
        assert all((p == value).all() for p in module.parameters())


def test_a_module_is_built_from_the_class_paths_in_the_file(tmp_path):
    """Samples that are not finite are reported without a step that is not theirs."""
    first = build_module({"hyper_parameters": digits_spec()}, "x")
    content = checkpoint_of(first, hyper_parameters=digits_spec())
    content["state_dict"] = first.state_dict()
    write_checkpoint(content, tmp_path / "x.ckpt")
    again = load(tmp_path / "x.ckpt", "raw")
    seeds = [3, 1]
    assert torch.equal(again.generate(seeds), first.generate(seeds))
    content["state_dict"] = {k: v * torch.nan for k, v in content["state_dict"].items()}
    write_checkpoint(content, tmp_path / "x.ckpt")
    with pytest.raises(NonFiniteSamples, match=r"^2 samples are not finite, from t = "):
        load(tmp_path / "x.ckpt", "raw", module=again).generate(seeds)


# What is refused


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


def codec_spec(folder) -> dict:
    return {"class_path": "lit_diffusion.modules.vae.VAECodec", "init_args": {"folder": folder}}


def test_a_folder_that_a_checkpoint_alone_names_is_not_read(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    codec, spec = codec_spec("sd vae"), small_digits(1)["model"]
    nested = spec | {"init_args": spec["init_args"] | {"codec": codec}}
    for hidden in ({"codec": json.dumps(codec)}, {"codec": codec}, {"network": nested}):
        saved = digits_spec() | hidden
        write_checkpoint(checkpoint_of(tiny(), hyper_parameters=saved), tmp_path / "x.ckpt")
        fix = re.escape(f"--trust '{tmp_path / 'sd vae'}'.")
        with pytest.raises(ValueError, match=rf"^x\.ckpt: the checkpoint names .*{fix}$"):
            load("x.ckpt", trust=["sd vae"])  # a name without "/" is a package
    for trusted in ("./sd vae", str(tmp_path / "sd vae")):
        with pytest.raises(ValueError, match="sd vae holds no"):
            load("x.ckpt", trust=[trusted])
    assert call("validate --ckpt_path x.ckpt --data=Digits") == 2
    assert f"add --trust '{tmp_path / 'sd vae'}'." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("folder", "options"),
    [
        ("vae", ["--model.codec.folder=vae"]),
        ("vae", ["--config=model: {codec: {folder: vae}}"]),
        ("vae", ["--config", "own.yaml"]),
    ],
)
def test_the_folder_of_a_codec_may_be_named_by_the_command_line(
    tmp_path, monkeypatch, folder, options
):
    monkeypatch.chdir(tmp_path)
    model = {"init_args": {"codec": codec_spec(folder)}}
    Path("own.yaml").write_text(yaml.safe_dump({"model": model}))
    settings = model_settings(read_command_line(["fit", *options]))
    check_codec_folder(model, Path("x.ckpt"), (), settings)
    others = f"--data.folder={folder}", f"--config=data: {{folder: {folder}}}"
    settings = model_settings(read_command_line(["fit", *others]))
    with pytest.raises(ValueError, match="names the folder"):
        check_codec_folder(model, Path("x.ckpt"), (), settings)


def test_the_folder_of_a_codec_may_be_in_the_run_folder_or_named_by_a_config_there(
    tmp_path, monkeypatch
):
    file = tmp_path / "run" / "checkpoints" / "last.ckpt"
    file.parent.mkdir(parents=True)
    model = {"init_args": {"codec": codec_spec("vae")}}
    check_codec_folder(codec_spec(str(tmp_path / "run" / "x")), file)
    config = tmp_path / "run" / "config.yaml"
    config.write_text(yaml.safe_dump({"data": model}))
    with pytest.raises(ValueError, match="names the folder"):
        check_codec_folder(model, file)
    config.write_text(yaml.safe_dump({"model": model}))
    check_codec_folder(model, file)
    monkeypatch.chdir(file.parent)
    check_codec_folder(codec_spec("../x"), Path(file.name))


def test_a_config_may_name_a_class_alone_and_a_later_one_and_options_change_its_arguments():
    later, options = {"init_args": {"batch_size": 3}}, ["--data.num_workers=1"]
    data = instantiate(["Digits", later], LightningDataModule, (), "x", options, key="data")
    assert (data.batch_size, data.num_workers) == (3, 1)


def test_averages_of_other_numbers_than_the_weights_are_refused(tmp_path):
    content = checkpoint_of(tiny())
    state = content["callbacks"]["EMA{'prefix': ''}"]
    for shadow in state["shadows"]:
        shadow.update({name: value + 1j for name, value in shadow.items()})
    write_checkpoint(content, tmp_path / "x.ckpt")
    with pytest.raises(ValueError, match=r"is torch\.complex64 .*, torch\.float32 in the module"):
        load(tmp_path / "x.ckpt", module=tiny())


def test_a_folder_of_parts_is_refused_with_the_command_that_makes_a_file_of_it(split, tmp_path):
    folder = tmp_path / "checkpoints" / "last.ckpt"
    distributed_checkpoint.save({"state_dict": split.state_dict()}, checkpoint_id=folder)
    for path in (folder, tmp_path):
        with pytest.raises(ValueError, match=rf"consolidate_checkpoint {folder},"):
            load(path)
    with pytest.raises(
        ValueError, match="is a folder, not a checkpoint; use a checkpoint file in it"
    ):
        read_checkpoint(tmp_path)


def test_what_does_not_fit_or_is_not_there_is_refused_by_name(file, tmp_path):
    first = r"size mismatch for network\.layers\.0\.weight: .*\[3, 2\].*\[5, 2\]"
    match = rf"last\.ckpt has a different architecture: {first}.* Use the config with which it was"
    module = tiny(width=5)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(ValueError, match=match):
        load(file, module=module)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    with pytest.raises(ValueError, match=r"no weights 'ema_0.9'; it has raw, ema_0.5, ema_0.25"):
        load(file, "ema_0.9", module=tiny())
    with pytest.raises(ValueError, match=r"in Python; build the module and call load\(path, mod"):
        load(file)
    with pytest.raises(FileNotFoundError, match=r"no\.ckpt"):
        load(tmp_path / "no.ckpt")
    content = checkpoint_of(tiny())
    del content["callbacks"]
    content["state_dict"]["other"] = content["state_dict"].pop("network.layers.0.bias")
    write_checkpoint(content, tmp_path / "checkpoints" / "last.ckpt")
    with pytest.raises(ValueError, match=r"no weights 'ema'; it has raw\."):
        load(tmp_path, module=tiny())
    with pytest.raises(ValueError, match=r"Missing .*layers\.0\.bias.* Unexpected .*other"):
        load(tmp_path, "raw", module=tiny())  # a run folder
