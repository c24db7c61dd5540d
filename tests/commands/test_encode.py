import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import small_vae
from support.commands import SCRIPT, call, checkpoint
from support.pictures import class_folders

pytest.importorskip("diffusers", reason="pip install lit-diffusion[diffusers]")

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
      init_args: {num_samples: 8, extractor: patches-cnn, reference: crops, second_look: false}
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
