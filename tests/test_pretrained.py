"""The models that ship with the package, and exported folders in place of checkpoints."""

import json
import os
import random
import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from support.commands import call
from support.small_digits import write_small_digits

from lit_diffusion import load
from lit_diffusion.checkpoints.loading import load_module
from lit_diffusion.cli.convert import export
from lit_diffusion.cli.init_weights import read_init
from lit_diffusion.cli.run_data import protocol_of_run, real_images
from lit_diffusion.interchange import load_network
from lit_diffusion.pretrained import FOLDER, find_model, list_models

pytestmark = pytest.mark.usefixtures("folder")

SHAPES = {"digits": (1, 8, 8), "mnist": (1, 28, 28)}
MODELS = list_models()
RECORD = "network.json"


@pytest.fixture
def exported(folder):
    """A folder of `convert export`, and the module that it holds."""
    module = write_small_digits(Path("run/checkpoints/last.ckpt"))
    export("run", "out")
    return module


def edit(change):
    """Change the record of the exported folder."""
    path = Path("out", RECORD)
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))


# Models of the package


@pytest.mark.parametrize("name", MODELS)
def test_a_packaged_model_is_loaded_by_its_name_and_generates_images(name):
    loaded = load_module(name)
    assert (loaded.path, loaded.weights[:4]) == (FOLDER / name, "ema_")
    images = loaded.module.generate([0, 7], torch.tensor([3, -1]))
    assert (images.shape, images.dtype) == ((2, *SHAPES[name]), torch.uint8)
    assert images.float().std() > 30  # it is no untrained model


@pytest.mark.parametrize("name", MODELS)
def test_its_images_are_sampled_by_one_command(name):
    assert call(f"sample --checkpoint {name} --num 3 --steps 3 --out samples --labels 1,7") == 0
    record = json.loads(Path("samples/samples.json").read_text())
    assert (record["weights"][:4], record["labels"]) == ("ema_", [1, 7])
    assert record["class_names"] == [*"0123456789"]
    assert Path("samples/grid.png").exists()


def test_it_is_scored_on_the_data_and_by_the_extractor_of_its_run(capsys):
    assert call("evaluate --checkpoint digits --num 20 --steps 3") == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["protocol"], record["reference"], record["num_real"]) == (
        "digits-cnn",
        "val",
        360,
    )
    real, others = real_images(None, "digits", None, [])
    assert (real.name, others.name) == ("val", "train")


@pytest.mark.skipif("mnist" not in MODELS, reason="not in this checkout")
def test_the_extractor_of_mnist_is_in_the_package():
    protocol = protocol_of_run("mnist")
    assert re.fullmatch(r"mnist-cnn-[0-9a-f]{8}\.safetensors", Path(protocol).name)
    assert Path(protocol).is_file()


@pytest.mark.parametrize("name", MODELS)
def test_its_network_is_read_alone(name):
    network, module = load_network(find_model(name)), load(name)
    x, t, labels = torch.randn(2, *SHAPES[name]), torch.tensor([0.0, 700]), torch.tensor([3, -1])
    with torch.no_grad():
        outputs = network(x, t, labels), module.network(x, t, labels)
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)  # one has channels last


def test_training_starts_from_it():
    text, state, settings = read_init("digits")
    assert text.startswith("ema_")
    assert all(name.startswith("network.") for name in state)
    assert settings["image_shape"] == [1, 8, 8]


def test_a_run_is_not_resumed_from_it(capsys):
    configs = Path(__file__).parents[1] / "configs"
    assert call(f"fit --config {configs}/digits.yaml --ckpt_path digits") == 2
    assert "`fit --init_weights digits`" in capsys.readouterr().err
    assert call(f"fit --config {configs}/digits.yaml --ckpt_path {FOLDER / 'digits'}") == 2


@pytest.mark.parametrize("name", MODELS)
def test_it_goes_out_again_as_the_same_model(name):
    export(name, "out")
    assert load_module("out").weights == load_module(name).weights
    first, second = load(name), load("out")
    assert torch.equal(first.generate([1, 2]), second.generate([1, 2]))


def test_other_weights_are_refused():
    name = load_module("digits").weights
    assert load_module("digits", name).weights == name
    with pytest.raises(ValueError, match=rf"no weights 'raw'; it has {name}\.$"):
        load("digits", "raw")


def test_a_file_or_folder_of_its_name_comes_first():
    write_small_digits(Path("digits/checkpoints/last.ckpt"))
    assert load_module("digits").step == 9
    assert load_module("digits").path == Path("digits/checkpoints/last.ckpt")
    shutil.rmtree("digits")
    Path("digits").mkdir()
    with pytest.raises(FileNotFoundError, match="The folder digits here hides the packaged model"):
        load("digits")
    Path("digits").rmdir()
    Path("digits").write_text("no checkpoint")
    with pytest.raises(ValueError, match=r"^digits .* The file digits here hides the packaged"):
        load("digits")


@pytest.mark.parametrize("name", ["digit", "./digits", "../pretrained/digits", ""])
def test_other_names_are_paths(name, capsys):
    assert find_model(name) is None
    if name:
        assert call(f"sample --checkpoint {name} --num 1 --out samples") == 2
        assert "or name a packaged model: digits" in capsys.readouterr().err


def test_its_files_are_small():
    sizes = {file: file.stat().st_size for file in FOLDER.glob("*/*")}
    digits = sum(size for file, size in sizes.items() if file.parent.name == "digits")
    assert digits < 3e6
    assert sum(sizes.values()) < 8e6


@pytest.mark.parametrize("name", MODELS)
def test_its_card_says_how_it_was_made(name):
    text = (FOLDER / name / "README.md").read_text()
    head = yaml.safe_load(text.split("---\n")[1])
    assert (head["library_name"], head["license"]) == ("lit-diffusion", "mit")
    fid = head["model-index"][0]["results"][0]["metrics"][0]
    assert (fid["type"], 0 < fid["value"] < 100) == ("fid", True)
    for part in (f"--checkpoint {name}", "lit-diffusion fit --config configs/", "## Data"):
        assert part in text
    assert re.search(r"commit `[0-9a-f]{40}`", text)


@pytest.mark.parametrize("name", MODELS)
def test_its_files_name_no_path_of_a_machine(name):
    texts = [file for file in (FOLDER / name).iterdir() if file.suffix != ".safetensors"]
    assert {file.name for file in texts} == {
        *("README.md", "config.yaml", "evaluations.jsonl", RECORD)
    }
    for file in texts:
        assert re.findall(r"(?<![\w.])/\w+", file.read_text()) == [], file


# Exported folders


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_an_exported_folder_is_loaded_as_its_checkpoint(exported, dtype):
    if dtype != "float32":
        assert call(f"convert export --checkpoint run --out out --dtype {dtype}") == 0
    stored = load_file("out/network.safetensors")
    assert {str(value.dtype) for value in stored.values()} == {f"torch.{dtype}"}
    loaded = load_module("out")
    assert (loaded.step, loaded.weights) == (9, "ema_0.9")
    for parameter, original in zip(loaded.module.parameters(), exported.parameters(), strict=True):
        assert torch.equal(parameter, original.to(getattr(torch, dtype)).float())
    if dtype == "float32":
        assert torch.equal(loaded.module.generate([3, 4]), exported.generate([3, 4]))
        assert call("convert export --checkpoint out --out again") == 0
        assert (
            Path("again/network.safetensors").read_bytes()
            == Path("out/network.safetensors").read_bytes()
        )


def test_weights_that_a_dtype_does_not_hold_are_refused(folder):
    write_small_digits(Path("run/checkpoints/last.ckpt"))
    content = torch.load("run/checkpoints/last.ckpt", weights_only=True)
    next(iter(content["callbacks"].values()))["shadows"][0]["network.out.2.weight"].fill_(1e6)
    torch.save(content, "run/checkpoints/last.ckpt")
    with pytest.raises(ValueError, match=r"out\.2\.weight has weights too large for torch.float16"):
        export("run", "out", dtype="float16")
    assert not Path("out").exists()


def test_the_data_of_an_exported_folder_are_not_opened(exported, capsys):
    """A folder may be a stranger's. So may be a config in it."""
    shutil.copy("run/config.yaml", "out/config.yaml")
    assert call("evaluate --checkpoint out --num 2 --extractor digits-cnn") == 2
    assert "add --data CONFIG" in capsys.readouterr().err


def test_a_folder_with_a_run_in_it_is_a_run_folder(exported):
    shutil.copytree("out", "run", dirs_exist_ok=True)
    assert load_module("run").path == Path("run/checkpoints/last.ckpt")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r["module"].update(class_path="stranger.Module"), "stranger.* is not imported"),
        (lambda r: r["network"].update(class_path="stranger.Net"), "stranger.* is not imported"),
        (lambda r: r["process"].update(class_path="os.system"), "is not imported"),
        (lambda r: r["module"].update(class_path=3), "class_path must name a class"),
        (lambda r: r["module"].update(class_path=None), "class_path must name a class"),
        (lambda r: r["module"].update(init_args=3), "holds a network alone"),
        (lambda r: r.pop("module"), "holds a network alone"),
        (lambda r: r.update(step=-1), "its 'global_step' is int -1"),
        (lambda r: r.update(weights=["ema"]), "values of other types"),
        (lambda r: r.update(codec={"sha256": "0" * 64}), "another codec|on latents of the VAE"),
        (lambda r: r["network"]["init_args"].update(model_channels=16), "a different architecture"),
        (lambda r: r["network"]["init_args"].update(model_channels=4096), "far more parameters"),
        (lambda r: r.pop("image_shape"), "image_shape"),
    ],
)
def test_a_record_of_a_stranger_runs_no_code_of_its_own(
    exported, tmp_path, monkeypatch, change, message
):
    Path("stranger.py").write_text("open('imported', 'w')")
    monkeypatch.syspath_prepend(tmp_path)
    edit(change)
    with pytest.raises(ValueError, match=message):
        load("out")
    assert not Path("imported").exists()


def test_a_folder_of_a_codec_that_the_record_names_is_not_read(exported):
    codec = {"class_path": "lit_diffusion.modules.vae.VAECodec", "init_args": {"folder": "/vae"}}
    edit(lambda record: record["module"]["init_args"].update(codec=codec))
    with pytest.raises(ValueError, match="names the folder /vae of its codec"):
        load("out")


def test_only_the_weights_of_the_loss_may_be_missing(folder):
    from support.small_digits import small_digits  # a module with an uncertainty of the loss
    from support.tiny_run import spec

    from lit_diffusion.checkpoints.loading import build_module
    from lit_diffusion.checkpoints.saving import write_checkpoint

    config = small_digits(1)["model"]
    config["init_args"]["loss"] = spec(
        "lit_diffusion.losses.UncertaintyLoss", weighting=spec("lit_diffusion.losses.Simple")
    )
    hyper = {"_class_path": config["class_path"], **config["init_args"]}
    module = build_module({"hyper_parameters": hyper}, "x").eval()
    assert any(name.startswith("loss.") for name in module.state_dict())
    content = {"state_dict": module.state_dict(), "hyper_parameters": hyper, "global_step": 1}
    write_checkpoint(content, Path("x.ckpt"))
    export("x.ckpt", "out", "raw")
    assert torch.equal(load("out", "raw").generate([0]), module.generate([0]))


@pytest.mark.parametrize("seed", range(3))
def test_a_damaged_folder_is_loaded_or_refused_with_its_name(exported, seed):
    """Bytes of the record are changed or deleted, or those of the weights."""
    draw = random.Random(seed)
    for file in (Path("out", RECORD), Path("out/network.safetensors")):
        intact = file.read_bytes()
        for _ in range(8):
            content = bytearray(intact)
            position = draw.randrange(len(content))
            if draw.random() < 0.5:
                content[position] = draw.randrange(256)
            else:
                del content[position : position + draw.choice((1, 9, 10**6))]
            file.write_bytes(content)
            try:
                load("out")
            except ValueError as error:
                assert "out" in str(error)  # noqa: PT017
        file.write_bytes(intact)


def test_a_record_nested_too_deep_is_refused(exported):
    for depth in (500, 100_000):
        text = Path("out", RECORD).read_text()
        deep = text.replace('"step"', f'"image_shape": {"[" * depth}{"]" * depth}, "step"', 1)
        Path("out", RECORD).write_text(deep)
        with pytest.raises(ValueError, match=r"^out"):
            load("out")
        Path("out", RECORD).write_text(text)


def test_a_pipe_in_place_of_the_record_is_not_waited_for(exported):
    for name in ("network.safetensors", RECORD):
        Path("out", name).unlink()
        os.mkfifo(Path("out", name))
        with pytest.raises(ValueError, match="not a regular file, but a pipe"):
            load("out")


def test_a_pipe_that_a_setting_names_is_not_waited_for(exported):
    os.mkfifo("pipe")
    text = Path("out", RECORD).read_text()
    for name in ("solver", "loss", "times"):
        settings = json.loads(text)
        settings["module"]["init_args"][name] = str(Path("pipe").absolute())
        Path("out", RECORD).write_text(json.dumps(settings))
        with pytest.raises(ValueError, match=r"names the file .*pipe"):
            load("out")
