"""FID protocols, which fix the feature extractor of an FID, its weights and the image resizing.

Two FIDs are comparable only if they were computed with the same FID protocol, and with the same
numbers of generated and of real images.
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
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

from lit_diffusion.files import atomic_write, check_regular, checked_read, sha256_of
from lit_diffusion.metrics.small_classifier import SmallClassifier, load_small_classifier
from lit_diffusion.metrics.vision_transformers import CLIP, DINOv2
from lit_diffusion.metrics.weight_files import INCEPTION, WEIGHT_FILES, require_sha256

GRID = 8
"""Height and width of the grid over which `Pixels` averages an image. UCI's digits were reduced
from 32x32 to the same grid."""


def distance_name(protocol: "FIDProtocol") -> str:
    """Return the name of the protocol's Frechet distance in logs, such as "fid" or "fd_dinov2".

    Example:
        >>> distance_name(DINOv2()), distance_name(EmbeddedCNN("digits-cnn"))
        ('fd_dinov2', 'fid')
    """
    return str(getattr(protocol, "metric", "fid"))


@runtime_checkable
class FIDProtocol(Protocol):
    """FID protocol: a named feature extractor with fixed weights and a fixed way to resize images.

    The metric is logged as `fid_<num_samples>`. If the protocol has an attribute `metric`, its
    value replaces "fid" in this name.

    Example:
        >>> isinstance(Pixels(channels=3), FIDProtocol)
        True
    """

    @property
    def name(self) -> str:
        """Name of the FID protocol."""

    @property
    def channels(self) -> int:
        """Number of channels of the images that the extractor takes."""

    @property
    def sha256(self) -> str:
        """SHA-256 of the weights, 64 hex digits."""

    @property
    def resize(self) -> str:
        """Description of how images are resized before feature extraction."""

    def check(self) -> None:
        """Raise an error if the weights are missing or corrupt. The check must be fast."""

    def build(self) -> nn.Module:
        """Build a module that maps images uint8 (N, channels, H, W) to features (N, F).

        The module must be in eval mode. Its attribute `num_features` must be F, the number of
        features. For the inception score, it also needs a method `logits(features)` that returns
        (N, classes).
        """


@dataclass(frozen=True)
class InceptionV3Compat:
    """FID protocol of published FIDs, as in torch-fidelity and the original TensorFlow code.

    The features are the 2048 pooled features of the Inception-v3 network of 2015-12-05. Images are
    resized to 299x299 as in TensorFlow 1, with bilinear interpolation and without antialiasing.
    FIDs with this protocol equal FIDs from torchmetrics' `FrechetInceptionDistance` with
    `antialias=False`. By default, torchmetrics uses antialiasing, so its FIDs are not comparable
    with published FIDs.

    Args:
        weights_path: weight file. None means torch-fidelity's file in the cache of `torch.hub`.
        sha256: expected SHA-256 of the weight file.

    Source: Heusel et al. 2017 (arXiv 1706.08500), section 4. The network and the resizing are the
    same as in torch-fidelity.

    Example:
        >>> InceptionV3Compat().name
        'inception-v3-compat'
    """

    weights_path: str | None = None
    sha256: str = WEIGHT_FILES[INCEPTION].sha256

    name = INCEPTION
    channels = 3
    resize = "299x299, bilinear as in TensorFlow 1, not antialiased"

    def check(self) -> None:
        """Raise an error if the weight file is missing or has a different hash."""
        WEIGHT_FILES[INCEPTION].check(self.weights_path, self.sha256)

    def build(self) -> nn.Module:
        """Build a module that maps images uint8 (N, 3, H, W) to features (N, 2048)."""
        path = WEIGHT_FILES[INCEPTION].check(self.weights_path, self.sha256)
        state = torch.load(check_regular(path), map_location="cpu", weights_only=True)
        return _Inception(state).eval()


class _Inception(FeatureExtractorInceptionV3):  # type: ignore[misc]
    num_features = 2048

    def __init__(self, state: dict[str, Tensor]) -> None:
        # torch-fidelity would unpickle a weight file without restrictions, so it gets weights in
        # memory instead. This class must not take a path as an argument, because a class path in a
        # checkpoint could then make it unpickle any file.
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        super().__init__(InceptionV3Compat.name, ["2048"], feature_extractor_weights_path=file)

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images)[0]

    def logits(self, features: Tensor) -> Tensor:
        """Compute logits (N, 1008) without bias, for the inception score."""
        return features.mm(self.fc.weight.T)


class _SmallCNN:
    """Base class of FID protocols whose extractor is a `SmallClassifier` in a safetensors file."""

    name: str
    path: Path
    sha256: str
    size: int | Sequence[int]  # height and width of the images in pixels; an int if equal
    channels: int
    resize = "none"
    remedy: str

    def check(self) -> None:
        """Raise an error if the weight file is missing or has a different hash."""
        require_sha256(self.path, self.sha256, self.remedy)

    def build(self) -> nn.Module:
        """Build a module that maps images uint8 (N, channels, H, W) to (N, num_features)."""
        self.check()
        return load_small_classifier(load_file(check_regular(self.path)), self.size)


@cache
def _shipped_classifiers() -> dict[str, dict[str, Any]]:
    """Metadata of the classifiers in this package, by name."""
    return dict(json.loads(Path(__file__).with_name("classifiers.json").read_text()))


class EmbeddedCNN(_SmallCNN):
    """FID protocol whose extractor is a small classifier that ships with the package.

    Use this protocol for images that differ too much from Inception's training images. The
    classifier `digits-cnn` is for gray digits of 8x8 pixels, and `patches-cnn` is for 32x32 color
    crops of photographs. A few hundred images are enough for an FID, because both classifiers have
    only 64 features. Such an FID is comparable only with FIDs of the same classifier, never with
    published FIDs.

    Each classifier was trained only on the training split of its dataset, with the script
    tests/benchmarks/train_classifiers.py at commit 4282dab.

    Args:
        name: "digits-cnn" or "patches-cnn".

    Raises:
        ValueError: if `name` is another name.

    Example:
        >>> protocol = EmbeddedCNN("digits-cnn")
        >>> protocol.build()(torch.zeros(2, 1, 8, 8, dtype=torch.uint8)).shape
        torch.Size([2, 64])
    """

    remedy = "Install lit-diffusion again."

    def __init__(self, name: str) -> None:
        records = _shipped_classifiers()
        if name not in records:
            raise ValueError(f"name must be one of {', '.join(records)}, got {name!r}.")
        self.name = name
        self.path = Path(__file__).with_name(f"{name}.safetensors")
        self.sha256: str = records[name]["sha256"]
        self.size: int = records[name]["network"]["size"]
        self.channels: int = records[name]["network"]["channels"]


class TrainedCNN(_SmallCNN):
    """FID protocol whose extractor was trained on your images by `lit-diffusion train-extractor`.

    The name of the protocol ends in the first 8 digits of the weight file's SHA-256, because an FID
    is comparable only with FIDs of the same data and the same weights.

    Args:
        path: file written by `lit-diffusion train-extractor`.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the file does not contain an extractor.

    Example:
        >>> protocol = TrainedCNN("extractor.safetensors")  # doctest: +SKIP
    """

    remedy = "Train the extractor again."

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.exists():
            raise FileNotFoundError(
                f"there is no file {path}. Train it: lit-diffusion train-extractor --config FILE "
                f"--out {path}; or train without FID: --trainer.callbacks.FIDEvaluation=null."
            )
        with checked_read(self.path, "file of `train-extractor`"):
            self.sha256 = sha256_of(self.path)
            with safe_open(self.path, "pt") as file:
                self.record = dict(json.loads(file.metadata()["extractor"]))
            self.name = f"{self.record['name']}-{self.sha256[:8]}"
            if self.name != Path(self.name).name:  # `copy_to` would write to another folder
                raise ValueError(f"its name is {self.record['name']!r}")
            self.size = [int(pixels) for pixels in self.record["size"]]
            self.channels = load_small_classifier(load_file(self.path), self.size).channels

    def copy_to(self, folder: Path) -> None:
        """Copy the weight file into a run folder, under the protocol's name."""
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_write(folder / f"{self.name}.safetensors") as file:
            file.write(check_regular(self.path).read_bytes())


@dataclass(frozen=True)
class Pixels:
    """FID protocol without a network: the features are pixels, averaged to an 8x8 grid.

    The features lie in [-1, 1].

    Example:
        >>> Pixels(channels=1).build()(torch.zeros(2, 1, 28, 28, dtype=torch.uint8)).shape
        torch.Size([2, 64])
    """

    channels: int

    name = "pixels"
    resize = f"{GRID}x{GRID}, means over areas"

    @property
    def sha256(self) -> str:
        """SHA-256 of `resize` and `channels` (there are no weights), 64 hex digits."""
        return hashlib.sha256(f"{self.resize}, {self.channels}".encode()).hexdigest()

    def check(self) -> None:
        """Do nothing, because there is no weight file."""

    def build(self) -> nn.Module:
        """Build a module that maps uint8 (N, channels, H, W) to features (N, 64 * channels)."""
        return _PixelGrid(self.channels)


class _PixelGrid(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.num_features = channels * GRID**2

    def forward(self, images: Tensor) -> Tensor:
        return F.adaptive_avg_pool2d(images.float() / 127.5 - 1, GRID).flatten(1)


@dataclass(frozen=True)
class RandomCNN:
    """FID protocol whose extractor is a small convolutional network with fixed random weights.

    Example:
        >>> RandomCNN(channels=3).build()(torch.zeros(2, 3, 64, 64, dtype=torch.uint8)).shape
        torch.Size([2, 64])
    """

    channels: int

    name = "random-cnn"
    resize = "4x4 to 32x32, means over areas"

    @property
    def sha256(self) -> str:
        """SHA-256 of the weights, 64 hex digits."""
        digest = hashlib.sha256()
        for weight in self.build().state_dict().values():
            digest.update(weight.numpy().tobytes())
        return digest.hexdigest()

    def check(self) -> None:
        """Do nothing, because there is no weight file."""

    def build(self) -> nn.Module:
        """Build a module that maps images uint8 (N, channels, H, W) to features (N, 64)."""
        return _RandomClassifier(self.channels)


class _RandomClassifier(SmallClassifier):
    def __init__(self, channels: int) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)  # does not touch the GPUs' generators
            super().__init__(channels, GRID, (24, 48, 64), 2)
            for layer in self.stages:
                if isinstance(layer, nn.Conv2d):
                    nn.init.kaiming_normal_(layer.weight)  # preserves the scale of the activations
        self.eval().requires_grad_(False)

    def forward(self, images: Tensor) -> Tensor:
        height, width = (min(max(side, 4), 32) for side in images.shape[2:])
        return self.features(F.adaptive_avg_pool2d(images.float() / 127.5 - 1, (height, width)))


def protocol_by_name(name: str) -> FIDProtocol:
    """Return the FID protocol with this name.

    Args:
        name: "inception-v3-compat", "dinov2-vit-l-14", "clip-vit-b-32", the name of a classifier of
            `EmbeddedCNN`, or the path of a .safetensors file written by `lit-diffusion
            train-extractor`.

    Raises:
        ValueError: if there is no such FID protocol.

    Example:
        >>> protocol_by_name("digits-cnn").channels
        1
    """
    published: dict[str, FIDProtocol] = {
        each.name: each for each in (InceptionV3Compat(), DINOv2(), CLIP())
    }
    if name in published:
        return published[name]
    if name in _shipped_classifiers():
        return EmbeddedCNN(name)
    if name.endswith(".safetensors"):
        return TrainedCNN(name)
    raise ValueError(
        f"there is no FID protocol {name!r}; choose from "
        f"{', '.join([*published, *_shipped_classifiers()])}, or give the path of a "
        ".safetensors file that `lit-diffusion train-extractor` has written."
    )


def match_channels(images: Tensor, channels: int) -> Tensor:
    """Convert images uint8 (..., C, H, W) to the number of channels that an extractor takes.

    A gray channel is repeated three times for RGB. RGB images become gray only if their three
    channels are equal, for example because a gray PNG was read as RGB.

    Raises:
        ValueError: if any other conversion would be necessary.
    """
    actual = images.shape[-3]
    if actual == channels:
        return images
    if actual == 1 and channels == 3:
        return images.expand(*images.shape[:-3], channels, *images.shape[-2:])
    gray = images[..., :1, :, :]
    if channels == 1 and actual == 3 and bool((images == gray).all()):
        return gray
    raise ValueError(f"the extractor takes images of {channels} channel(s), got {actual}.")
