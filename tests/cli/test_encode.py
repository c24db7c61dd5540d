import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from support import small_vae
from support.commands import SCRIPT, call, checkpoint
from support.pictures import class_folders

from lit_diffusion import load
from lit_diffusion.metrics.images import read_image

pytest.importorskip("diffusers", reason="pip install -e '.[diffusers]'")

CONFIG = """
seed_everything: 0
data:
  class_path: lit_diffusion.data.latents.Latents
  init_args: {train: latents, val: 4, batch_size: 4, num_workers: 0}
model:
  class_path: lit_diffusion.modules.diffusion.DiffusionModule
  init_args:
    image_shape: [4, 16, 16]
    num_classes: 2
    codec: {class_path: VAECodec, init_args: {folder: vae, scale: 0.5}}
    network:
      class_path: UNet
      init_args:
        {in_channels: 4, out_channels: 4, model_channels: 4, channel_mult: [1], num_res_blocks: 1,
         attention_downsample: [], norm_groups: 2, num_classes: 2}
    process: ContinuousVP
    parameterization: Velocity
    loss: {class_path: DenoisingLoss, init_args: {weighting: Simple}}
    times: Uniform
    solver: {class_path: DPMSolverPP, init_args: {steps: 2, clip: false}}
    optimizer: {class_path: torch.optim.Adam, init_args: {lr: 1.0e-3}}
trainer:
  max_steps: 4
  default_root_dir: run
  callbacks:
    - class_path: lit_diffusion.callbacks.EMA
    - class_path: lit_diffusion.callbacks.SampleGrid
      init_args: {num: 2}
    - class_path: lit_diffusion.callbacks.NoiseLevelLoss
      init_args: {num_images: 4}
    - class_path: lit_diffusion.callbacks.FIDEvaluation
      init_args:
        {num_samples: 8, extractor: patches-cnn, reference: crops, auxiliary_metrics: false}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    small_vae.save("vae")
    class_folders(tmp_path / "pictures", "ab", each=8, size=(40, 32))
    class_folders(tmp_path / "crops", "ab", each=8, size=(32, 32))


ENCODE = "encode --images pictures --image-size 32 --vae vae --out latents --shard-size 5 --flips"


@pytest.mark.filterwarnings("ignore:.*cannot fill a covariance")
def test_a_model_is_trained_scored_and_sampled_on_what_it_writes(capsys, caplog):
    assert call(ENCODE) == 0
    assert "8 shards written to latents, which has 8 of 8." in capsys.readouterr().out
    assert call(ENCODE) == 0
    assert "0 shards written" in capsys.readouterr().out
    Path("latents.yaml").write_text(CONFIG)
    assert call("fit --config latents.yaml") == 0
    told = "SampleGrid shows no nearest training images: train: the data are latents"
    assert told in caplog.text
    record = json.loads(Path("run/evaluations.jsonl").read_text().splitlines()[-1])
    assert (record["reference"], record["non_finite"]) == ("crops", 0)
    assert record["value"] > 0
    assert set(checkpoint("run")["codec"]) == {"name", "sha256"}
    assert call("sample --checkpoint run --num 2 --out samples") == 0
    samples = json.loads(Path("samples/samples.json").read_text())
    assert samples["num"] == 2
    assert call("evaluate --checkpoint run --num 4 --extractor patches-cnn") == 0  # beside crops
    compare = (
        "sample --checkpoint run --num 4 --compare DPMSolverPP --compare_steps 2 --out compared"
    )
    assert call(f"{compare} --reference crops") == 0
    assert '"reference": "crops"' in Path("compared/comparison.json").read_text()
    Path("run/evaluations.jsonl").unlink()
    capsys.readouterr()
    assert call("evaluate --checkpoint run --num 4 --extractor patches-cnn") == 2
    assert "run was trained on latents; pass --reference DIR, a folder" in capsys.readouterr().err
    weights = Path("vae/diffusion_pytorch_model.safetensors")
    state = bytearray(weights.read_bytes())
    state[-1] ^= 1
    weights.write_bytes(state)
    capsys.readouterr()
    assert call("sample --checkpoint run --num 2 --out others") == 2
    assert "the checkpoint is of latents of the VAE vae with SHA-256" in capsys.readouterr().err


def test_a_reference_of_latents_is_refused_before_the_first_step(capsys):
    assert call(ENCODE) == 0
    Path("latents.yaml").write_text(CONFIG.replace("reference: crops", "reference: val"))
    assert call("fit --config latents.yaml") == 2
    told = "val: the data are latents, and images are compared with images. Or name a folder or an"
    assert told in capsys.readouterr().err
    assert not Path("run/checkpoints/last.ckpt").exists()


@pytest.mark.system
@pytest.mark.slow
def test_two_processes_share_the_shards():
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [*launcher, "--no-python", SCRIPT, *ENCODE.split()]
    subprocess.run(command, check=True, env=environment)
    assert call(ENCODE.replace("--out latents", "--out alone")) == 0
    together, alone = (
        {path.name: path.read_bytes() for path in Path(out).iterdir()}
        for out in ("latents", "alone")
    )
    assert together == alone


def test_a_picture_that_cannot_be_read_is_named(capsys):
    Path("pictures/a/3.png").write_bytes(b"no picture")
    assert call(ENCODE) == 2
    assert "3.png" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:.*cannot fill a covariance")
def test_latents_are_made_of_pictures_and_a_mask_in_pixels(capsys):
    assert call(ENCODE) == 0
    Path("latents.yaml").write_text(CONFIG)
    assert call("fit --config latents.yaml") == 0
    mask = np.zeros((32, 32), dtype=np.uint8)
    mask[:, 15:] = 255  # of the latent of pixels 14 and 15 one pixel is not kept
    Image.fromarray(mask).save("mask.png")
    module, keep = load("run"), torch.zeros(1, 1, 16, 16)
    keep[..., 8:] = 1
    begin = read_image(Path("crops/a/0.png")).expand(2, -1, -1, -1)
    sample = "sample --checkpoint run --num 2 --init crops/a/0.png"
    for out, option, expected in (
        ("half", "--strength 0.5", module.edit(begin, range(2), strength=0.5)),
        ("kept", "--mask mask.png", module.inpaint(begin, keep, range(2))),
    ):
        assert call(f"{sample} {option} --out {out}") == 0
        files = sorted(Path(out).glob("[0-9]*.png"))
        made = torch.stack([read_image(file) for file in files])
        assert (made.int() - expected.int()).abs().max() <= 1  # of sums in another order


@pytest.mark.filterwarnings("ignore:.*cannot fill a covariance")
@pytest.mark.parametrize(
    ("init", "told"),
    [
        ("pictures/a/0.png", "0.png is (3, 32, 40), and must be (3, 32, 32)"),
        ("grey.png", "grey.png: VAECodec('vae', scale=0.5, shift=0.0) takes images of 3 channels"),
    ],
)
def test_a_picture_that_latents_cannot_begin_at_is_named_in_pixels(capsys, init, told):
    assert call(ENCODE) == 0
    Path("latents.yaml").write_text(CONFIG)
    assert call("fit --config latents.yaml") == 0
    Image.new("L", (32, 32)).save("grey.png")
    assert call(f"sample --checkpoint run --num 1 --out out --init {init}") == 2
    assert told in capsys.readouterr().err
