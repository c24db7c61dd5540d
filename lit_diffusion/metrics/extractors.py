"""FID protocols: under one name, which network with which weights sees the images at which size.

Two FIDs compare only if they were measured under one protocol, with the same numbers of images.
"""

import io
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch_fidelity.feature_extractor_base import FeatureExtractorBase
from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3
from torch_fidelity.registry import FEATURE_EXTRACTORS_REGISTRY, register_feature_extractor

from lit_diffusion.metrics.classifier import SmallClassifier
from lit_diffusion.metrics.weights import FETCH, INCEPTION_SHA256, cached_inception, require


@runtime_checkable
class FIDProtocol(Protocol):
    """A feature extractor under a name."""

    @property
    def name(self) -> str:
        """What the protocol is called."""

    @property
    def channels(self) -> int:
        """Channels of the images that the extractor wants."""

    @property
    def sha256(self) -> str:
        """Of the weights, 64 hex digits."""

    @property
    def resize(self) -> str:
        """What happens to the images' size before they are scored, in words."""

    def check(self) -> None:
        """Raise if the weights are missing or broken. Cheap: called before training starts."""

    def build(self) -> nn.Module:
        """A module in eval mode: uint8 (N, channels, H, W) -> features (N, its num_features)."""

    def fidelity_arguments(self) -> dict[str, Any]:
        """Arguments that make `torch_fidelity.calculate_metrics` use this extractor."""


@dataclass(frozen=True)
class InceptionV3Compat:
    """The FID of the literature, as torch-fidelity and the original TensorFlow program compute it.

    Inception-v3 of 2015-12-05, 2048 pooled features, images resized to 299x299 as TensorFlow 1 did:
    bilinear, no antialiasing. It equals `FrechetInceptionDistance(antialias=False)` of
    torchmetrics, whose default, antialiased, compares with no published number.

    Args:
        weights_path: weight file; None is torch-fidelity's own in the cache of `torch.hub`.
        sha256: of that file.

    Source: as of `frechet.FrechetDistance`, section 4; network and resize of torch-fidelity.
    """

    weights_path: str | None = None
    sha256: str = INCEPTION_SHA256

    name = "inception-v3-compat"
    channels = 3
    resize = "299x299, bilinear as in TensorFlow 1, not antialiased"

    def check(self) -> None:
        """Raise if the weight file is missing or another one."""
        require(self._path(), self.sha256, FETCH)

    def build(self) -> nn.Module:
        """Images uint8 (N, 3, H, W) -> features (N, 2048)."""
        return _Inception(self._weights())

    def fidelity_arguments(self) -> dict[str, Any]:
        """Arguments that make `torch_fidelity.calculate_metrics` use this extractor."""
        weights = self._weights()
        return {"feature_extractor": self.name, "feature_extractor_weights_path": weights}

    def _path(self) -> Path:
        return cached_inception() if self.weights_path is None else Path(self.weights_path)

    def _weights(self) -> io.BytesIO:
        """The weight file, taken apart by the safe loader and put together again.

        torch-fidelity unpickles whatever it is given; so it is given what we pickled.
        """
        self.check()
        state = torch.load(self._path(), map_location="cpu", weights_only=True)
        copy = io.BytesIO()
        torch.save(state, copy)
        copy.seek(0)
        return copy


class _Inception(nn.Module):
    num_features = 2048

    def __init__(self, weights: io.BytesIO) -> None:
        super().__init__()
        self.network = FeatureExtractorInceptionV3(
            InceptionV3Compat.name, ["2048"], feature_extractor_weights_path=weights
        )
        self.eval()

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.network(images)[0]
        return features


@dataclass(frozen=True)
class EmbeddedCNN:
    """A small classifier that ships with the package, for data on which Inception says little.

    `digits-cnn` takes 8x8 grey digits, `patches-cnn` 32x32 colour crops of photographs. Both have
    64 features, so a few hundred images are enough, and saw the training part of the embedded data
    only (tests/benchmarks/train_classifiers.py). Such an FID compares with others of the same
    protocol, never with a published one.

    Example:
        >>> protocol = EmbeddedCNN("digits-cnn")
        >>> protocol.build()(torch.zeros(2, 1, 8, 8, dtype=torch.uint8)).shape
        torch.Size([2, 64])
    """

    name: str

    resize = "none"

    def __post_init__(self) -> None:
        if self.name not in _shipped():
            raise ValueError(f"shipped classifiers are {', '.join(_shipped())}, got {self.name!r}.")

    @property
    def channels(self) -> int:
        """1 for grey, 3 for colour."""
        return int(_shipped()[self.name]["network"]["channels"])

    @property
    def sha256(self) -> str:
        """Of the weights, 64 hex digits."""
        return str(_shipped()[self.name]["sha256"])

    def check(self) -> None:
        """Raise if the weight file is missing or another one."""
        require(self._path(), self.sha256, "Install lit-diffusion again.")

    def build(self) -> nn.Module:
        """Images uint8 (N, channels, H, W) -> features (N, 64)."""
        self.check()
        network = SmallClassifier(**_shipped()[self.name]["network"])
        network.load_state_dict(load_file(self._path()))
        return network.eval().requires_grad_(False)

    def fidelity_arguments(self) -> dict[str, Any]:
        """Arguments that make `torch_fidelity.calculate_metrics` use this extractor."""
        if self.name not in FEATURE_EXTRACTORS_REGISTRY:
            register_feature_extractor(self.name, _EmbeddedForFidelity)
        return {"feature_extractor": self.name}

    def _path(self) -> Path:
        return Path(__file__).with_name(f"{self.name}.safetensors")


class _EmbeddedForFidelity(FeatureExtractorBase):  # type: ignore[misc]
    """Shows an `EmbeddedCNN` to torch-fidelity, which hands over RGB whatever the file held."""

    def __init__(self, name: str, features_list: list[str], **kwargs: Any) -> None:
        super().__init__(name, features_list)
        protocol = EmbeddedCNN(name)
        self.channels = protocol.channels
        self.network = protocol.build()

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        features = self.network(match_channels(images, self.channels))
        named = {"pooled": features, "logits": self.network.head(features)}  # type: ignore[operator]
        return tuple(named[key] for key in self.features_list)

    @staticmethod
    def get_provided_features_list() -> tuple[str, ...]:
        return "pooled", "logits"

    @staticmethod
    def get_default_feature_layer_for_metric(metric: str) -> str:
        return "logits" if metric == "isc" else "pooled"


def protocol_by_name(name: str) -> FIDProtocol:
    """The protocol called `name`, with the weights that it is known for."""
    if name == InceptionV3Compat.name:
        return InceptionV3Compat()
    if name in _shipped():
        return EmbeddedCNN(name)
    known = ", ".join([InceptionV3Compat.name, *_shipped()])
    raise ValueError(f"there is no FID protocol {name!r}; choose from {known}.")


def match_channels(images: Tensor, channels: int) -> Tensor:
    """Images with the number of channels that an extractor wants.

    Grey becomes colour by repetition; colour becomes grey only where it is grey already, as a grey
    PNG read as RGB is. Images are uint8 (..., C, H, W).
    """
    found = images.shape[-3]
    if found == channels:
        return images
    if found == 1:
        return images.expand(*images.shape[:-3], channels, *images.shape[-2:])
    grey = images[..., :1, :, :]
    if channels == 1 and found == 3 and bool((images == grey).all()):
        return grey
    raise ValueError(f"the extractor takes images of {channels} channel(s), got {found}.")


@cache
def _shipped() -> dict[str, dict[str, Any]]:
    """What is known of the classifiers in this package, by name."""
    return dict(json.loads(Path(__file__).with_name("classifiers.json").read_text()))
