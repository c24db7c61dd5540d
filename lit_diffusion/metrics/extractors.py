"""FID protocols: under one name, which network with which weights sees the images at which size.

Two FIDs compare only if they were measured under one protocol, with the same numbers of images.
"""

import hashlib
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch_fidelity.feature_extractor_base import FeatureExtractorBase
from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3
from torch_fidelity.registry import FEATURE_EXTRACTORS_REGISTRY, register_feature_extractor

from lit_diffusion.files import atomic_write
from lit_diffusion.metrics.classifier import SmallClassifier, classifier_of
from lit_diffusion.metrics.weights import (
    FETCH,
    INCEPTION_SHA256,
    cached_inception,
    require,
)


class Features(Protocol):
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


@runtime_checkable
class FIDProtocol(Features, Protocol):
    """An extractor that an FID goes by, and torch-fidelity's other scores."""

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


class _SmallCNN:
    """What protocols of a `SmallClassifier` have in common."""

    name: str
    resize = "none"

    def source(self) -> tuple[Path, int | Sequence[int]]:
        """File of the weights; height and width of the images in pixels, one number if equal."""
        raise NotImplementedError

    @property
    def channels(self) -> int:
        """1 for grey, 3 for colour, 4 with alpha."""
        return self.network().channels

    def check(self) -> None:
        """Raise if the weight file is missing or another one."""
        raise NotImplementedError

    def build(self) -> nn.Module:
        """Images uint8 (N, channels, H, W) -> features (N, its num_features)."""
        return self.network()

    def network(self) -> SmallClassifier:
        """The classifier whose features these are."""
        self.check()
        path, size = self.source()
        return classifier_of(load_file(path), size)

    def fidelity_arguments(self) -> dict[str, Any]:
        """Arguments that make `torch_fidelity.calculate_metrics` use this extractor."""
        if self.name not in FEATURE_EXTRACTORS_REGISTRY:
            kind = type("Features", (_ForFidelity,), {"protocol": self})
            register_feature_extractor(self.name, kind)
        return {"feature_extractor": self.name}


@dataclass(frozen=True)
class EmbeddedCNN(_SmallCNN):
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

    def __post_init__(self) -> None:
        if self.name not in _shipped():
            raise ValueError(f"shipped classifiers are {', '.join(_shipped())}, got {self.name!r}.")

    def source(self) -> tuple[Path, int]:
        """File of the weights; height and width of the images in pixels."""
        size = int(_shipped()[self.name]["network"]["size"])
        return Path(__file__).with_name(f"{self.name}.safetensors"), size

    @property
    def sha256(self) -> str:
        """Of the weights, 64 hex digits."""
        return str(_shipped()[self.name]["sha256"])

    def check(self) -> None:
        """Raise if the weight file is missing or another one."""
        require(self.source()[0], self.sha256, "Install lit-diffusion again.")


class TrainedCNN(_SmallCNN):
    """A small network that `lit-diffusion train-extractor` trained on images of one's own.

    Its name has the first digits of its weights' hash, so no two of them are mixed up. Such an FID
    compares within these data, under these weights.

    Args:
        path: file that the command wrote.

    Raises:
        FileNotFoundError: If there is none.
        ValueError: If it is another file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise FileNotFoundError(
                f"there is no extractor {path}; `lit-diffusion train-extractor` makes one."
            )
        self.sha256 = hashlib.sha256(self.path.read_bytes()).hexdigest()
        try:
            with safe_open(self.path, "pt") as file:
                self.record = dict(json.loads(file.metadata()["extractor"]))
            self.name = f"{self.record['name']}-{self.sha256[:8]}"
            self._size = [int(pixels) for pixels in self.record["size"]]
            self.network()
        except Exception as error:  # whatever a file may hold
            reason = f"{type(error).__name__}: {str(error)[:200]}"
            raise ValueError(f"{path} is no file of `train-extractor` ({reason}).") from error

    def source(self) -> tuple[Path, Sequence[int]]:
        """File of the weights; height and width of the images in pixels."""
        return self.path, self._size

    def check(self) -> None:
        """Raise if the weight file is missing or another one than before."""
        require(self.path, self.sha256, "Train the extractor again.")

    def copy_to(self, folder: Path) -> None:
        """Put the file into a run folder, under the protocol's name."""
        with atomic_write(folder / f"{self.name}.safetensors") as file:
            file.write(self.path.read_bytes())


class _ForFidelity(FeatureExtractorBase):  # type: ignore[misc]
    """Shows a protocol to torch-fidelity, which reads grey files as RGB."""

    protocol: _SmallCNN

    def __init__(self, name: str, features_list: list[str], **kwargs: Any) -> None:
        super().__init__(name, features_list)
        self.network = self.protocol.network()

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        features = self.network(match_channels(images, self.network.channels))
        named = {"pooled": features, "logits": self.network.head(features)}
        return tuple(named[key] for key in self.features_list)

    @staticmethod
    def get_provided_features_list() -> tuple[str, ...]:
        return "pooled", "logits"

    @staticmethod
    def get_default_feature_layer_for_metric(metric: str) -> str:
        return "logits" if metric == "isc" else "pooled"


def protocol_by_name(name: str) -> FIDProtocol:
    """The protocol called `name`, with the weights that it is known for, or that of a file."""
    if name == InceptionV3Compat.name:
        return InceptionV3Compat()
    if name in _shipped():
        return EmbeddedCNN(name)
    if name.endswith(".safetensors"):
        return TrainedCNN(name)
    known = ", ".join([InceptionV3Compat.name, *_shipped()])
    raise ValueError(
        f"there is no FID protocol {name!r}; choose from {known}, or name a file that "
        "`lit-diffusion train-extractor` made of your images."
    )


def match_channels(images: Tensor, channels: int) -> Tensor:
    """Images with the number of channels that an extractor wants.

    Grey becomes colour by repetition; colour becomes grey only where it is grey already, as a grey
    PNG read as RGB is. Images are uint8 (..., C, H, W).
    """
    found = images.shape[-3]
    if found == channels:
        return images
    if found == 1 and channels == 3:
        return images.expand(*images.shape[:-3], channels, *images.shape[-2:])
    grey = images[..., :1, :, :]
    if channels == 1 and found == 3 and bool((images == grey).all()):
        return grey
    raise ValueError(f"the extractor takes images of {channels} channel(s), got {found}.")


@cache
def _shipped() -> dict[str, dict[str, Any]]:
    """What is known of the classifiers in this package, by name."""
    return dict(json.loads(Path(__file__).with_name("classifiers.json").read_text()))
