"""Features that nobody trained, so that nothing can have been tuned on what they learned."""

import hashlib
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_diffusion.metrics.classifier import SmallClassifier

GRID = 8
"""Pixels on a side of what `Pixels` compares; the digits of UCI were made so from 32x32."""

_SEED, _LARGEST, _SMALLEST = 0, 32, 4


class _Plain:
    """What extractors without weight files have in common."""

    def check(self) -> None:
        """Nothing can be missing."""


@dataclass(frozen=True)
class Pixels(_Plain):
    """The image itself, as means over an 8x8 grid, in [-1, 1].

    Example:
        >>> Pixels(channels=1).build()(torch.zeros(2, 1, 28, 28, dtype=torch.uint8)).shape
        torch.Size([2, 64])
    """

    channels: int

    name = "pixels"
    resize = f"{GRID}x{GRID}, means over areas"

    @property
    def sha256(self) -> str:
        """Of what is done and to how many channels, as there are no weights; 64 hex digits."""
        return hashlib.sha256(f"{self.resize}, {self.channels}".encode()).hexdigest()

    def build(self) -> nn.Module:
        """Images uint8 (N, channels, H, W) -> features (N, 64 channels)."""
        return _Grid(self.channels)


class _Grid(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.num_features = channels * GRID**2

    def forward(self, images: Tensor) -> Tensor:
        return F.adaptive_avg_pool2d(images.float() / 127.5 - 1, GRID).flatten(1)


@dataclass(frozen=True)
class RandomCNN(_Plain):
    """A small convolutional network as it is before any training, the same each time.

    Example:
        >>> RandomCNN(channels=3).build()(torch.zeros(2, 3, 64, 64, dtype=torch.uint8)).shape
        torch.Size([2, 64])
    """

    channels: int

    name = "random-cnn"
    resize = f"{_SMALLEST}x{_SMALLEST} to {_LARGEST}x{_LARGEST}, means over areas"

    @property
    def sha256(self) -> str:
        """Of the weights, 64 hex digits."""
        digest = hashlib.sha256()
        for weight in self.build().state_dict().values():
            digest.update(weight.numpy().tobytes())
        return digest.hexdigest()

    def build(self) -> nn.Module:
        """Images uint8 (N, channels, H, W) -> features (N, 64)."""
        return _Untrained(self.channels)


class _Untrained(nn.Module):
    num_features = 64

    def __init__(self, channels: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(_SEED)  # the GPUs' go on as they were
            self.network = SmallClassifier(channels, GRID, (24, 48, self.num_features), 2)
            for layer in self.network.stages:
                if isinstance(layer, nn.Conv2d):
                    nn.init.kaiming_normal_(layer.weight)  # features are as large as the images are
        self.eval().requires_grad_(False)

    def forward(self, images: Tensor) -> Tensor:
        height, width = (min(max(side, _SMALLEST), _LARGEST) for side in images.shape[2:])
        small = F.adaptive_avg_pool2d(images.float() / 127.5 - 1, (height, width))
        return self.network.features(small)
