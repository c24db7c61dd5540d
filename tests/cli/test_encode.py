import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file, save_file
from support import small_vae
from support.commands import call, checkpoint, sampling
from support.pictures import class_folders, save
from support.small_digits import small_digits
from support.tiny_run import spec

from lit_diffusion import load
from lit_diffusion.cli.encoding import (
    encode_shards,
    launcher_rank_and_world_size,
    plan_shards,
)
from lit_diffusion.cli.generator import load_generator
from lit_diffusion.data.image_folder import ImageFolder
from lit_diffusion.data.latents import LatentIndex, Latents
from lit_diffusion.metrics.images import open_split, read_image
from lit_diffusion.modules.vae import WEIGHTS, VAECodec

pytest.importorskip("diffusers", reason="pip install -e '.[diffusers]'")

ENCODE = "encode --images pictures --image-size 32 --vae vae --out latents --shard-size 5 --flips"
pytestmark = pytest.mark.filterwarnings("ignore:.*cannot fill a covariance")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with pictures, a VAE, and latents."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    small_vae.save("vae")
    class_folders(tmp_path / "pictures", "ab", each=8, size=(40, 32))
    class_folders(tmp_path / "crops", "ab", each=8, size=(32, 32))
    assert call(ENCODE) == 0


def write_config(reference):
    """latents.yaml, whose images are scored against `reference`."""
    fid = {"num_samples": 8, "extractor": "patches-cnn", "auxiliary_metrics": False}
    callbacks = [spec("EMA"), spec("SampleGrid", num=2), spec("NoiseLevelLoss", num_images=4)]
    callbacks.append(spec("FIDEvaluation", reference=reference, **fid))
    config = small_digits(4, default_root_dir="run", callbacks=callbacks)
    config["data"] = spec("Latents", train="latents", val=4, batch_size=4, num_workers=0)
    model = config["model"]["init_args"]
    model["codec"] = spec("VAECodec", folder="vae", scale=0.5)
    model["solver"] = spec("DPMSolverPP", steps=2, clip=False)
    model |= {"image_shape": [4, 16, 16], "num_classes": 2}
    model["network"]["init_args"] |= {"in_channels": 4, "out_channels": 4, "num_classes": 2}
    Path("latents.yaml").write_text(yaml.safe_dump(config))


def check_edits():
    """By pictures, and by a mask in pixels."""
    mask = np.zeros((32, 32), dtype=np.uint8)
    mask[:, 15:] = 255  # of the latent of pixels 14 and 15 one pixel is not kept
    Image.fromarray(mask).save("mask.png")
    module, keep = load("run"), torch.zeros(1, 1, 16, 16)
    keep[..., 8:] = 1
    init = read_image(Path("crops/a/0.png")).expand(2, -1, -1, -1)
    for option, expected in (
        ("--strength 0.5", module.edit(init, range(2), strength=0.5)),
        ("--mask mask.png", module.inpaint(init, keep, range(2))),
    ):
        generator = load_generator(sampling(f"--init crops/a/0.png {option}"))
        assert torch.equal(generator.generate(range(2)), expected)
    shapes = r"must have the shape \(3, 32, 32\) .*, got \(3, 32, 40\)"
    with pytest.raises(ValueError, match=shapes):
        load_generator(sampling("--init pictures/a/0.png"))


@pytest.mark.slow
@pytest.mark.usefixtures("folder")
def test_a_model_is_trained_scored_edited_and_sampled_on_what_it_writes(capsys, monkeypatch):
    assert call(ENCODE) == 0
    assert "0 shards were written to latents, which has 8 of 8." in capsys.readouterr().out
    with monkeypatch.context() as patch:
        patch.setenv("RANK", "1")
        patch.setenv("WORLD_SIZE", "2")
        assert call(ENCODE.replace("latents", "others")) == 0
    assert "4 shards were written to others, which has 4 of 8." in capsys.readouterr().out
    write_config(reference="val")
    assert call("fit --config latents.yaml") == 2
    assert "val: the data are latents, and samples can be compared only" in capsys.readouterr().err
    assert not Path("run/checkpoints/last.ckpt").exists()
    write_config(reference="crops")
    assert call("fit --config latents.yaml") == 0
    record = json.loads(Path("run/evaluations.jsonl").read_text().splitlines()[-1])
    assert (record["reference"], record["non_finite"]) == ("crops", 0)
    assert record["value"] > 0
    assert set(checkpoint("run")["codec"]) == {"name", "sha256"}
    evaluate = "evaluate --checkpoint run --num 4 --extractor patches-cnn"
    assert call(evaluate) == 0  # beside crops
    compare = "sample --checkpoint run --num 4 --compare DPMSolverPP --compare_steps 2"
    assert call(f"{compare} --out compared --reference crops") == 0
    assert '"reference": "crops"' in Path("compared/comparison.json").read_text()
    Path("run/evaluations.jsonl").unlink()
    capsys.readouterr()
    assert call(evaluate) == 2
    message = "run was trained on latents; add --reference DIR with real images"
    assert message in capsys.readouterr().err
    check_edits()
    weights = Path("vae/diffusion_pytorch_model.safetensors")
    state = bytearray(weights.read_bytes())
    state[-1] ^= 1
    weights.write_bytes(state)
    assert call("sample --checkpoint run --num 2 --out others") == 2
    assert "was trained on latents of the VAE vae with SHA-256" in capsys.readouterr().err


# Shards

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A folder of seven pictures, and a VAE."""
    folder = tmp_path_factory.mktemp("source")
    class_folders(folder / "pictures", "ab", each=3)
    save(folder / "pictures" / "b" / "9.png", seed=9, size=(16, 30))
    small_vae.save(folder / "vae")
    return folder


def open_source(source):
    cache = str(source / "cache")
    folder = str(source / "pictures")
    images = ImageFolder(folder, folder, 16, strict=False, num_workers=0, cache_dir=cache)
    return images, VAECodec(str(source / "vae"), batch_size=2)


def encode(source, out, place=(0, 1), flips=True, shard_size=3):
    images, codec = open_source(source)
    index = plan_shards(images, codec, out, shard_size, flips)
    return encode_shards(images, codec, out, index, CPU, *place)


def content(out):
    return {path.name: path.read_bytes() for path in sorted(out.iterdir())}


@pytest.fixture(scope="module")
def whole(source):
    assert encode(source, source / "whole") == 6
    return source / "whole"


STEP = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({}, (0, 1)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, (0, 1)),  # batch script
        (STEP | {"SLURM_NTASKS": "2"}, (1, 2)),  # srun
        (STEP | {"RANK": "3", "WORLD_SIZE": "8"}, (3, 8)),  # torchrun
        # The shell of `salloc -n 4`, which srun starts with --preserve-env.
        (STEP | {"SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, (0, 1)),
    ],
)
def test_a_process_has_a_share_only_if_a_launcher_started_several(monkeypatch, variables, place):
    for name in ("RANK", "WORLD_SIZE", "SLURM_NTASKS", *STEP):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert launcher_rank_and_world_size() == place


def test_shards_hold_the_moments_of_the_crops_that_training_on_images_sees(source, whole):
    images, codec = open_source(source)
    pixels = images.images("train")
    shards = [load_file(whole / f"latents-{i:05d}.safetensors") for i in range(3)]
    assert [len(shard["labels"]) for shard in shards] == [3, 3, 1]
    moments = torch.cat([shard["moments"] for shard in shards])
    torch.testing.assert_close(moments.float(), codec.moments(pixels), rtol=1e-3, atol=1e-3)
    assert torch.cat([shard["labels"] for shard in shards]).tolist() == [0, 0, 0, 1, 1, 1, 1]
    mirrored = load_file(whole / "flipped-00001.safetensors")["moments"].float()
    expected = codec.moments(pixels[3:6].flip(-1))
    torch.testing.assert_close(mirrored, expected, rtol=1e-3, atol=1e-3)
    data = Latents(str(whole), val=2)
    data.check()
    with pytest.raises(TypeError, match="latents, and samples can be compared only with images"):
        list(open_split(data, "val").batches(2))
    assert (data.image_shape, data.class_names) == ((3, 16, 16), ("a", "b"))
    assert data.vae_sha256 == codec.sha256


def test_a_call_that_was_stopped_goes_on_and_gives_the_same_files(
    source, whole, tmp_path, monkeypatch
):
    written = []

    def write_shard(self, path, *tensors):
        if len(written) == 3:
            raise KeyboardInterrupt
        written.append(path.name)
        unpatched(self, path, *tensors)

    unpatched = LatentIndex.write_shard
    with monkeypatch.context() as patch:
        patch.setattr(LatentIndex, "write_shard", write_shard)
        with pytest.raises(KeyboardInterrupt):
            encode(source, tmp_path / "out")
    (tmp_path / "out" / written[0]).write_bytes(b"cut")
    before = (tmp_path / "out" / written[1]).stat().st_mtime_ns
    assert encode(source, tmp_path / "out") == 4
    assert content(tmp_path / "out") == content(whole)
    assert (tmp_path / "out" / written[1]).stat().st_mtime_ns == before


def test_two_processes_write_what_one_does_and_flips_can_be_added(source, whole, tmp_path):
    ranks = [encode(source, tmp_path / "out", (rank, 2), flips=False) for rank in (1, 0)]
    assert ranks == [1, 2]
    assert not LatentIndex.read(tmp_path / "out").flips
    assert encode(source, tmp_path / "out") == 3
    assert encode(source, tmp_path / "out", flips=False) == 0
    assert content(tmp_path / "out") == content(whole)


def test_a_folder_of_other_latents_is_left_alone(source, whole, tmp_path):
    before = content(whole)
    with pytest.raises(ValueError, match="shard_size 3, but this command has 2; choose"):
        encode(source, whole, shard_size=2)
    small_vae.save(tmp_path / "vae", channels=(8, 16))
    with pytest.raises(ValueError, match="with vae_sha256 "):
        plan_shards(open_source(source)[0], VAECodec(str(tmp_path / "vae")), whole, 3, True)
    assert content(whole) == before


@pytest.mark.parametrize("stranger", ["others/latents-00001", "out/latents-00000"])
def test_a_shard_of_other_latents_or_another_place_is_written_again(
    source, whole, tmp_path, stranger
):
    """As where an index is removed, and another VAE encodes into the folder."""
    shutil.copytree(whole, tmp_path / "out")
    small_vae.save(tmp_path / "vae", channels=(8, 32))
    images, codec = open_source(source)[0], VAECodec(str(tmp_path / "vae"))
    index = plan_shards(images, codec, tmp_path / "others", 3, True)
    assert encode_shards(images, codec, tmp_path / "others", index, CPU) == 6
    shutil.copy(tmp_path / f"{stranger}.safetensors", tmp_path / "out/latents-00001.safetensors")
    with pytest.raises(ValueError, match=r"lacks 1 of 6 shards.* such as latents-00001"):
        Latents(str(tmp_path / "out"), val=2).check()
    assert encode(source, tmp_path / "out") == 1
    assert content(tmp_path / "out") == content(whole)


def test_a_folder_of_more_shards_than_can_be_read_is_not_begun(source, tmp_path, monkeypatch):
    monkeypatch.setattr("lit_diffusion.cli.encoding.MAX_SHARDS", 3)
    with pytest.raises(ValueError, match=r"shard_size must be >= 3, got 2\."):  # for 7 images
        encode(source, tmp_path / "out", shard_size=2)
    assert not (tmp_path / "out").exists()


def test_moments_that_are_not_finite_are_refused(source, tmp_path):
    """Of an encoder whose moments are beyond those of float16."""
    small_vae.save(tmp_path / "vae")
    state = load_file(tmp_path / "vae" / WEIGHTS)
    state["encoder.conv_out.bias"][0] = 1e9
    save_file(state, tmp_path / "vae" / WEIGHTS, metadata={"format": "pt"})
    images, codec = open_source(source)[0], VAECodec(str(tmp_path / "vae"))
    index = plan_shards(images, codec, tmp_path / "out", 3, False)
    with pytest.raises(ValueError, match=r"latents-00000.* finite .*the VAE vae returns others"):
        encode_shards(images, codec, tmp_path / "out", index, CPU)
    assert list(content(tmp_path / "out")) == ["index.json"]
