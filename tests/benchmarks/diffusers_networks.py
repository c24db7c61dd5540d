"""diffusers' UNet2DModel as a network of ours, as docs/interchange.md shows it."""

from typing import Any

import torch
from diffusers import UNet2DModel
from torch import Tensor


class DiffusersUNet(torch.nn.Module):
    """(x, noise_label, labels) -> (B, out_channels, H, W)."""

    def __init__(self, num_classes: int, config: dict[str, Any]) -> None:
        super().__init__()
        self.num_classes = num_classes  # the row after the classes is for none
        self.inner = UNet2DModel(num_class_embeds=num_classes + 1, **config)

    def forward(self, x: Tensor, noise_label: Tensor, labels: Tensor) -> Tensor:
        classes = torch.where(labels < 0, self.num_classes, labels)
        return self.inner(x, noise_label, classes).sample
