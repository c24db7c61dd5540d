import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from support.commands import call
from support.tiny_run import spec, tiny_config, write_config
from torchvision.transforms.functional import to_pil_image

CONFIG = """
data:
  class_path: lit_diffusion.data.image_folder.ImageFolder
  init_args: {train: photos, val: 70, image_size: 8, channels: 4, batch_size: 4, num_workers: 0}
model:
  class_path: lit_diffusion.modules.diffusion.DiffusionModule
  init_args:
    image_shape: [4, 8, 8]
    network:
      class_path: lit_diffusion.networks.unet.UNet
      init_args:
        {in_channels: 4, out_channels: 4, model_channels: 4, channel_mult: [1], num_res_blocks: 1,
         attention_downsample: [], norm_groups: 2}
    process:
      class_path: lit_diffusion.processes.DiscreteVP
      init_args:
        betas: {class_path: lit_diffusion.processes.CosineBetas, init_args: {num_steps: 9}}
    parameterization: lit_diffusion.parameterizations.Velocity
    loss:
      class_path: lit_diffusion.losses.DenoisingLoss
      init_args: {weighting: lit_diffusion.losses.MinSNR}
    times: lit_diffusion.timesteps.Uniform
    solver: {class_path: lit_diffusion.solvers.DDIM, init_args: {steps: 2}}
    optimizer: {class_path: torch.optim.Adam, init_args: {lr: 1.0e-3}}
trainer:
  max_steps: 2
  callbacks:
    - class_path: lit_diffusion.callbacks.FIDEvaluation
      init_args: {num_samples: 70, extractor: mine.safetensors, weights: raw, every_n_steps: 2}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    Path("photos").mkdir()
    pixels = torch.randint(0, 256, (150, 4, 9, 12), generator=torch.Generator().manual_seed(0))
    for i, image in enumerate(pixels.byte()):
        to_pil_image(image).save(f"photos/{i:03d}.png")
    Path("photos.yaml").write_text(CONFIG)


@pytest.mark.slow
def test_a_run_is_scored_by_the_network_of_its_user_and_takes_it_along(capsys):
    Path("train.yaml").write_text("data: {init_args: {train: photos}}")
    train = "train-extractor --config bare.yaml --config train.yaml --steps 3 --batch-size 8"
    Path("bare.yaml").write_text(CONFIG.replace("train: photos, ", ""))
    assert call(f"{train} --out mine.safetensors --data.init_args.val=60") == 0
    assert "holds mine-" in capsys.readouterr().err
    assert call("fit --config photos.yaml --trainer.default_root_dir=run") == 0
    record = json.loads(Path("run/evaluations.jsonl").read_text())
    name = record["protocol"]
    Path("mine.safetensors").unlink()
    assert Path(f"run/{name}.safetensors").is_file()
    shutil.move("run", "moved")
    capsys.readouterr()
    command = "evaluate --checkpoint moved --weights raw --steps 2 --batch-size 8 --device cpu"
    assert call(command) == 0
    scored = json.loads(capsys.readouterr().out)
    assert (scored["protocol"], scored["extractor_sha256"]) == (name, record["extractor_sha256"])


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        ("model: {}", "", "must name data with splits"),
        (CONFIG, "--out photos.yaml", "ends in .safetensors"),
        (CONFIG, "--out there.safetensors", "exists already"),
        (CONFIG, "--data=pipe", "pipe is not a regular file"),
        (CONFIG.replace("train: photos, ", ""), "", "train must be given"),
    ],
)
def test_a_mistake_ends_in_one_line(capsys, config, options, message):
    Path("other.yaml").write_text(config)
    Path("there.safetensors").touch()
    os.mkfifo("pipe")
    assert call(f"train-extractor --config other.yaml --out mine.safetensors {options}") == 2
    lines = capsys.readouterr().err.strip().split("\n")
    assert message in lines[-1]
    assert not any("Traceback" in line for line in lines)


def test_a_config_without_the_file_names_the_command_that_makes_it(capsys):
    fid = spec("FIDEvaluation", num_samples=70, extractor="mine.safetensors")
    write_config(tiny_config(callbacks=[fid]))
    assert call("fit --config tiny.yaml --trust support") == 2
    assert "train-extractor --config FILE --out mine.safetensors" in capsys.readouterr().err
