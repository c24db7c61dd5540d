"""Networks of equal size by others, and their training steps."""

import copy
import os
import sys
import tempfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measure import device
from torch import Tensor, nn


def diffusers_unet(tiny: bool, **settings: Any) -> nn.Module:
    """UNet2DModel of the sizes of configs/cifar10-improved.yaml; settings override arguments."""
    from diffusers import UNet2DModel

    torch.manual_seed(0)
    common = {"in_channels": 3, "out_channels": 6, "dropout": 0.3, "norm_num_groups": 32}
    common |= {"resnet_time_scale_shift": "scale_shift"}
    if tiny:
        sizes = {"sample_size": 8, "layers_per_block": 1, "block_out_channels": (32, 64)}
        down, up = ("DownBlock2D", "AttnDownBlock2D"), ("AttnUpBlock2D", "UpBlock2D")
    else:
        sizes = {"sample_size": 32, "layers_per_block": 3}
        sizes |= {"block_out_channels": (128, 256, 256, 256)}
        down = ("DownBlock2D", "AttnDownBlock2D", "AttnDownBlock2D", "DownBlock2D")
        up = ("UpBlock2D", "AttnUpBlock2D", "AttnUpBlock2D", "UpBlock2D")
    sizes |= {"down_block_types": down, "up_block_types": up}
    sizes |= {"attention_head_dim": 16 if tiny else 64}
    return UNet2DModel(**common | sizes | settings).to(device()).train()


def diffusers_dit(tiny: bool) -> nn.Module:
    """DiTTransformer2DModel of the size of DiT-XL/2."""
    from diffusers import DiTTransformer2DModel

    torch.manual_seed(0)
    common = {"in_channels": 4, "out_channels": 8, "patch_size": 2, "num_embeds_ada_norm": 1000}
    names = ("num_attention_heads", "attention_head_dim", "num_layers", "sample_size")
    sizes = dict(zip(names, (4, 16, 2, 8) if tiny else (16, 72, 28, 32), strict=True))
    return DiTTransformer2DModel(**common, **sizes).to(device()).train()


def noise_loss(
    call: Callable[..., Tensor], inputs: Tensor, labels: Tensor | None = None, steps: int = 1000
) -> Callable[[], Tensor]:
    """Diffusers' examples: add noise, predict it by call(x_t, t, labels), mean squared error."""
    betas = torch.linspace(1e-4, 0.02, steps, device=device())
    alpha_bar = (1 - betas).cumprod(0)
    alphas, sigmas = alpha_bar.sqrt(), (1 - alpha_bar).sqrt()

    def loss() -> Tensor:
        x0 = inputs.float() / 127.5 - 1 if inputs.dtype == torch.uint8 else inputs
        t = torch.randint(0, steps, (len(x0),), device=x0.device)
        noise = torch.randn_like(x0)
        x_t = alphas[t].view(-1, 1, 1, 1) * x0 + sigmas[t].view(-1, 1, 1, 1) * noise
        output = call(x_t, t, labels)[:, : x0.shape[1]]
        return F.mse_loss(output.float(), noise)

    return loss


# The references' own code, from clones of their repositories


def _import_from(folder: str) -> None:
    """Put a clone on the path. On one device it needs nothing of what is stubbed here."""
    sys.path.append(str(Path(os.environ["LIT_DIFFUSION_PEERS"], folder)))
    for name in ("blobfile", "mpi4py"):
        sys.modules[name] = stub = types.ModuleType(name)
        stub.MPI = types.SimpleNamespace()


def improved_diffusion_step(images: Tensor, tiny: bool) -> Callable[[], Any]:
    """TrainLoop.run_step of improved-diffusion with its fp16 mode and its README's CIFAR-10."""
    _import_from("improved")
    import improved_diffusion

    improved_diffusion.dist_util = stub = types.ModuleType("improved_diffusion.dist_util")
    sys.modules["improved_diffusion.dist_util"], stub.dev = stub, device
    from improved_diffusion import logger, train_util
    from improved_diffusion.resample import UniformSampler
    from improved_diffusion.script_util import (
        create_model_and_diffusion,
        model_and_diffusion_defaults,
    )

    logger.configure(dir=tempfile.mkdtemp(), format_strs=["log"])
    flags = {"image_size": 32, "learn_sigma": True, "dropout": 0.3, "diffusion_steps": 4000}
    flags |= {"num_channels": 32 if tiny else 128, "num_res_blocks": 1 if tiny else 3}
    defaults = model_and_diffusion_defaults() | {"noise_schedule": "cosine"}
    torch.manual_seed(0)
    model, diffusion = create_model_and_diffusion(**defaults | flags)
    model.to(device())
    loop = object.__new__(train_util.TrainLoop)  # whose constructor wants processes
    settings = {"model": model, "ddp_model": model, "diffusion": diffusion, "use_ddp": False}
    settings |= dict.fromkeys(("batch_size", "microbatch", "global_batch"), len(images))
    settings |= {"lr": 1e-4, "ema_rate": [0.9999], "weight_decay": 0.0, "lr_anneal_steps": 0}
    settings |= {"step": 0, "resume_step": 0, "log_interval": 100}
    settings |= {"schedule_sampler": UniformSampler(diffusion), "use_fp16": True}
    settings |= {"model_params": list(model.parameters()), "fp16_scale_growth": 1e-3}
    vars(loop).update(settings, lg_loss_scale=train_util.INITIAL_LOG_LOSS_SCALE)
    loop.master_params = loop.model_params
    loop._setup_fp16()
    loop.opt = torch.optim.AdamW(loop.master_params, lr=1e-4, weight_decay=0.0)
    loop.ema_params = [copy.deepcopy(loop.master_params)]
    x = images.float() / 127.5 - 1
    x = x.repeat(1, 1, 4, 4) if tiny else x  # its network has four levels
    return lambda: loop.run_step(x, {})


def improved_diffusion_loss(
    images: Tensor, labels: Tensor | None, diffusion: dict[str, Any], **sizes: Any
) -> tuple[nn.Module, Callable[[], Tensor]]:
    """improved-diffusion's network in float32, and its own loss; `diffusion` are its flags."""
    _import_from("improved")
    from improved_diffusion.script_util import create_gaussian_diffusion
    from improved_diffusion.unet import UNetModel

    torch.manual_seed(0)
    network = UNetModel(in_channels=images.shape[1], **sizes).to(device()).train()
    process = create_gaussian_diffusion(noise_schedule="cosine", **diffusion)
    condition = {} if labels is None else {"y": labels}

    def loss() -> Tensor:
        t = torch.randint(0, process.num_timesteps, (len(images),), device=images.device)
        x = images.float() / 127.5 - 1
        return process.training_losses(network, x, t, model_kwargs=condition)["loss"].mean()

    return network, loss


def dit_loss(tiny: bool) -> tuple[nn.Module, Callable[[nn.Module, Tensor, Tensor], Tensor]]:
    """The network of facebookresearch/DiT, and the loss of its train.py."""
    _import_from("dit")
    from diffusion import create_diffusion
    from models import DiT

    torch.manual_seed(0)
    names = ("depth", "hidden_size", "num_heads", "input_size")
    sizes = dict(zip(names, (2, 64, 4, 8) if tiny else (28, 1152, 16, 32), strict=True))
    diffusion = create_diffusion(timestep_respacing="")

    def loss(network: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
        t = torch.randint(0, diffusion.num_timesteps, (len(x),), device=x.device)
        return diffusion.training_losses(network, x, t, {"y": labels})["loss"].mean()

    return DiT(patch_size=2, num_classes=1000, **sizes).to(device()).train(), loss


def guided_diffusion_step(images: Tensor, labels: Tensor, tiny: bool) -> Callable[[], Any]:
    """A step of guided-diffusion's TrainLoop in its fp16 mode, with its README's ImageNet-128."""
    _import_from("guided")
    sys.modules["guided_diffusion.dist_util"] = types.ModuleType("guided_diffusion.dist_util")
    from guided_diffusion import logger
    from guided_diffusion.fp16_util import MixedPrecisionTrainer
    from guided_diffusion.nn import update_ema
    from guided_diffusion.script_util import (
        create_model_and_diffusion,
        model_and_diffusion_defaults,
    )

    logger.configure(dir=tempfile.mkdtemp(), format_strs=["log"])
    flags = {"class_cond": True, "learn_sigma": True, "num_heads": 4, "resblock_updown": True}
    flags |= {"use_fp16": True, "use_scale_shift_norm": True, "attention_resolutions": "32,16,8"}
    flags |= {"image_size": 64 if tiny else 128, "num_channels": 32 if tiny else 256}
    flags |= {"num_res_blocks": 1 if tiny else 2, "diffusion_steps": 1000}
    model, diffusion = create_model_and_diffusion(**model_and_diffusion_defaults() | flags)
    model.to(device()).train()
    mixed = MixedPrecisionTrainer(model=model, use_fp16=True, fp16_scale_growth=1e-3)
    optimizer = torch.optim.AdamW(mixed.master_params, lr=1e-4, weight_decay=0.0)
    average = [p.detach().clone() for p in mixed.master_params]
    x = images.float() / 127.5 - 1
    x = x.repeat(1, 1, 4, 4) if tiny else x

    def step() -> None:
        mixed.zero_grad()
        t = torch.randint(0, 1000, (len(x),), device=x.device)
        loss = diffusion.training_losses(model, x, t, model_kwargs={"y": labels})["loss"].mean()
        mixed.backward(loss)
        if mixed.optimize(optimizer):
            update_ema(average, mixed.master_params, rate=0.9999)

    return step
