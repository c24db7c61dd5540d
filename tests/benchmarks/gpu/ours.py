"""Our modules, as the shipped configs build them, and their training steps."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.pytorch import LightningModule
from measure import device
from torch import Tensor, nn

from lit_diffusion.checkpoints.loading import instantiate
from lit_diffusion.modules.diffusion import DiffusionModule
from lit_diffusion.timesteps import draw_uniforms

CONFIGS = Path(__file__).parents[3] / "configs"
TINY_UNET = {"model_channels": 32, "channel_mult": [1, 2], "num_res_blocks": 1}
TINY = {
    "cifar10-improved": ([3, 8, 8], TINY_UNET | {"attention_downsample": [2]}),
    "imagenet128-guided": ([3, 16, 16], TINY_UNET | {"attention_downsample": [2]}),
    "imagenet256-latents": ([4, 8, 8], {"image_size": 8, "width": 64, "depth": 2, "num_heads": 4}),
}
"""Image shape and network of a config in a size for one core."""
CPU_BACKEND = {"backend": "eager"}  # of small networks, which would take minutes to compile
MODES = {"compiled": "default", "CUDA graphs": "reduce-overhead"}
HOWS = ("eager", *MODES, "blocks compiled")
BLOCKS = ("DiTBlock", "BasicTransformerBlock")


def build(config: str, tiny: bool = False, **settings: Any) -> DiffusionModule:
    """The module of a config, on the device; settings override its arguments."""
    path = CONFIGS / f"{config}.yaml"
    spec = yaml.safe_load(path.read_text())["model"]
    arguments = spec["init_args"]
    arguments.pop("codec", None)  # which is a pretrained VAE: the benchmark starts with latents
    if tiny and config in TINY:
        arguments["image_shape"], sizes = TINY[config]
        arguments["network"]["init_args"].update(sizes)
    arguments.update(settings)
    torch.manual_seed(0)
    return instantiate([spec], LightningModule, (), path).to(device()).train()


def ddim(steps: int) -> dict[str, Any]:
    return {"class_path": "lit_diffusion.solvers.DDIM", "init_args": {"steps": steps}}


def compile_(module: DiffusionModule, how: str) -> None:
    """Compile the network of a module in place, as one of `HOWS`."""
    if how in MODES and torch.cuda.is_available():
        module.compile_network(MODES[how])
    else:
        compile_network_(module.network, how)


def compile_network_(network: nn.Module, how: str) -> None:
    """Compile any network in place, as one of `HOWS`.

    Blocks of one shape share their code: compiling them all takes as long as compiling one.
    """
    on_gpu = torch.cuda.is_available()
    if how == "blocks compiled":
        for block in network.modules():
            if type(block).__name__ in BLOCKS:
                block.compile(**({"dynamic": False} if on_gpu else CPU_BACKEND))
    elif how in MODES:
        network.compile(**({"mode": MODES[how]} if on_gpu else CPU_BACKEND))


class Training:
    """Optimizer and average of a network's weights, which use memory only while they are in use."""

    def __init__(
        self, network: nn.Module, optimizer: type = torch.optim.Adam, fused: bool | None = None
    ) -> None:
        self.parameters = [p for p in network.parameters() if p.requires_grad]
        no_decay = {"weight_decay": 0.0} if optimizer is torch.optim.AdamW else {}
        fused = torch.cuda.is_available() if fused is None else fused
        self.optimizer = optimizer(self.parameters, lr=1e-4, fused=fused, **no_decay)
        self.average: list[Tensor] = []

    @torch.no_grad()
    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.average = self.average or [p.detach().clone() for p in self.parameters]
        torch._foreach_lerp_(self.average, self.parameters, 1e-4)

    def release(self) -> None:
        """Give the memory back to others, until the next update."""
        self.optimizer.zero_grad()
        self.optimizer.state.clear()
        self.average = []


def loss_of(module: DiffusionModule, inputs: Tensor, labels: Tensor | None = None) -> Tensor:
    """`DiffusionModule.training_step` without its Trainer; inputs are uint8 images or latents."""
    x0 = module.codec.encode(inputs) if inputs.dtype == torch.uint8 else inputs
    u = draw_uniforms(len(x0), None, module.uniforms, device=x0.device)
    t, noise = module.times.quantile(u, module.process), torch.randn_like(x0)
    if labels is not None:
        dropped = torch.rand(len(x0), device=x0.device) < module.label_dropout
        labels = module.conditioning.drop(labels, dropped)
    return module.per_sample_loss(x0, labels, t, noise, 0).mean()


def training_step(
    training: Training, loss_of_batch: Callable[[], Tensor], mixed: bool = True
) -> Callable[[], Tensor]:
    """A step in bf16-mixed, or else in float32."""

    def step() -> Tensor:
        with torch.autocast(device().type, torch.bfloat16, enabled=mixed):
            loss = loss_of_batch()
        loss.backward()
        training.update()
        return loss

    return step
