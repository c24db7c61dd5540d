"""FID, KID, precision, recall and inception score, as torch-fidelity has them."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset
from torch_fidelity import calculate_metrics
from torch_fidelity.version import __version__ as FIDELITY_VERSION

from lit_diffusion.metrics.extractors import FIDProtocol, match_channels
from lit_diffusion.metrics.images import open_images
from lit_diffusion.metrics.reference import RealImages

_ALL = {"fid": True, "kid": True, "prc": True, "isc": True, "verbose": False, "cache": False}
"""What torch-fidelity computes; not its cache, as it unpickles what it finds there."""

_NAMES = {
    "fid": "frechet_inception_distance",
    "kid": "kernel_inception_distance_mean",
    "kid_std": "kernel_inception_distance_std",
    "precision": "precision",
    "recall": "recall",
    "inception_score": "inception_score_mean",
    "inception_score_std": "inception_score_std",
}


def score(
    fake: RealImages | Tensor | str | Path,
    real: RealImages | Tensor | str | Path,
    protocol: FIDProtocol,
    *,
    batch_size: int = 64,
    device: str = "cpu",
) -> dict[str, Any]:
    """Score images against real ones, with torch-fidelity doing all of it, on one process.

    Args:
        fake: images to score: uint8 (N, C, H, W), a folder or .npz of images, or a set of them.
        real: images to compare with, likewise.
        protocol: which features; precision and recall use them too (k = 3 neighbours), and the
            inception score uses its classes.
        batch_size: images at a time.
        device: "cpu" or "cuda".

    Returns:
        `fid`, `kid`, `kid_std` (of 100 subsets), `precision`, `recall`, `inception_score`,
        `inception_score_std`, and beside these floats under what protocol.

    Raises:
        ValueError: If there are fewer than 4 images of either kind, which leaves no 3 neighbours.

    Example:
        >>> from lit_diffusion.metrics.extractors import EmbeddedCNN
        >>> images = torch.arange(64 * 64, dtype=torch.int32).reshape(64, 1, 8, 8).to(torch.uint8)
        >>> found = score(images, images, EmbeddedCNN("digits-cnn"))
        >>> abs(found["fid"]) < 1e-3, found["precision"], found["num_fake"]
        (True, 1.0, 64)
    """
    fake, real = image_set(fake, "fake"), image_set(real, "real")
    if (fewest := min(len(fake), len(real))) < 4:
        raise ValueError(f"scores need 4 images of each kind, got {len(fake)} and {len(real)}.")
    settings = {
        "isc_splits": min(10, len(fake)),
        "kid_subset_size": min(1000, fewest // 2),  # of all images, they would have no spread
        "prc_neighborhood": 3,
        "rng_seed": 2020,  # of torch-fidelity's subsets and splits
    }
    found = calculate_metrics(
        input1=_Matched(fake, protocol.channels),
        input2=_Matched(real, protocol.channels),
        **_ALL,
        batch_size=batch_size,
        cuda=torch.device(device).type == "cuda",
        save_cpu_ram=fake.num_workers + real.num_workers == 0,
        **settings,
        **protocol.fidelity_arguments(),
    )
    return {name: float(found[key]) for name, key in _NAMES.items()} | {
        "num_fake": len(fake),
        "num_real": len(real),
        "protocol": protocol.name,
        "extractor_sha256": protocol.sha256,
        "resize": protocol.resize,
        "torch_fidelity": FIDELITY_VERSION,
        **settings,
    }


def image_set(source: RealImages | Tensor | str | Path, name: str) -> RealImages:
    """Images from wherever they are; a tensor is called `name`."""
    if isinstance(source, RealImages):
        return source
    if isinstance(source, Tensor):
        return RealImages(name, TensorDataset(source))
    return RealImages(str(source), open_images(source))


class _Matched(Dataset[Tensor]):
    """One image uint8 (C, H, W) at a time, of the extractor's own number of channels."""

    def __init__(self, images: RealImages, channels: int) -> None:
        self._images = images
        self._channels = channels

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> Tensor:
        return match_channels(self._images.image(index), self._channels)
