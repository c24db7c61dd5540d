"""A config of the real parts, small enough to train in seconds: digits, U-Net, EMA."""

from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.pytorch import LightningModule
from PIL import Image

from lit_diffusion.checkpoints.loading import build_module
from lit_diffusion.checkpoints.saving import write_checkpoint
from lit_diffusion.data.digits import Digits
from support.tiny_run import spec


def small_digits(steps: int, **trainer: Any) -> dict[str, Any]:
    """A complete config; `trainer` adds to its Trainer."""
    unet = {"in_channels": 1, "out_channels": 1, "model_channels": 8, "channel_mult": [1, 2]}
    unet |= {"num_res_blocks": 1, "attention_downsample": [2], "num_classes": 10, "norm_groups": 4}
    betas = spec("lit_diffusion.processes.LinearBetas")
    schedule = {"total_steps": 100, "warmup_steps": 4}
    return {
        "trainer": {
            "accelerator": "cpu",
            "max_steps": steps,
            "log_every_n_steps": 1,
            "num_sanity_val_steps": 0,
            "enable_model_summary": False,
            "callbacks": [spec("lit_diffusion.callbacks.ema.EMA", decays=[0.9])],
            **trainer,
        },
        "model": spec(
            "lit_diffusion.modules.diffusion.DiffusionModule",
            network=spec("lit_diffusion.networks.unet.UNet", **unet),
            process=spec("lit_diffusion.processes.DiscreteVP", betas=betas),
            parameterization=spec("lit_diffusion.parameterizations.Velocity"),
            loss=spec(
                "lit_diffusion.losses.DenoisingLoss",
                weighting=spec("lit_diffusion.losses.Simple"),
            ),
            times=spec("lit_diffusion.timesteps.Uniform"),
            solver=spec("lit_diffusion.solvers.DDIM", steps=4),
            optimizer=spec("torch.optim.Adam", lr=0.002),
            lr_scheduler=spec("lit_diffusion.lr_schedules.WarmupLinear", **schedule),
            image_shape=[1, 8, 8],
            num_classes=10,
            label_dropout=0.1,
        ),
        "data": spec("lit_diffusion.data.digits.Digits", batch_size=64),
    }


def hyper_parameters(config: dict[str, Any], key: str) -> dict[str, Any]:
    """What a checkpoint of such a run says of its model or data."""
    return {"_class_path": config[key]["class_path"], **config[key]["init_args"]}


def write_small_digits(path: Path, *, classes: bool = True) -> LightningModule:
    """A checkpoint of the small digits model, untrained; returns the module with its averages.

    In a folder checkpoints/, with the run's config beside that.
    """
    content, averaged = _small_digits(classes)
    write_checkpoint(content, path)
    if path.parent.name == "checkpoints":
        config = {"data": small_digits(1)["data"]}
        (path.parents[1] / "config.yaml").write_text(yaml.safe_dump(config))
    return averaged


@cache
def _small_digits(classes: bool) -> tuple[dict[str, Any], LightningModule]:
    config = small_digits(1)
    if not classes:
        model = config["model"]["init_args"]
        model["num_classes"] = model["network"]["init_args"]["num_classes"] = None
        model["label_dropout"] = 0.0
    hyper = hyper_parameters(config, "model")
    torch.manual_seed(0)
    raw, averaged = (build_module({"hyper_parameters": hyper}, "this") for _ in range(2))
    for module in (raw, averaged):  # networks begin with zeros in places
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
    shadows = {name: value.detach() for name, value in averaged.named_parameters()}
    ema = {"decays": [0.9], "steps": dict.fromkeys(shadows, 9), "shadows": [shadows]}
    content = {
        "state_dict": raw.state_dict(),
        "global_step": 9,
        "callbacks": {"EMA{'prefix': ''}": ema},
        "hyper_parameters": hyper,
        "datamodule_hyper_parameters": hyper_parameters(config, "data"),
    }
    return content, averaged.eval()


def write_digits(path: str, split: str, num: int) -> None:
    """The first images of a split, as PNG."""
    Path(path).mkdir()
    for i, image in enumerate(Digits().images(split)[:num]):
        Image.fromarray(image[0].numpy()).save(f"{path}/{i:04d}.png")
