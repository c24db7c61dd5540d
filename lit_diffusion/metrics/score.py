"""Compute FID, KID, precision, recall and inception score from features, with torch-fidelity."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch_fidelity.metric_fid import fid_features_to_statistics, fid_statistics_to_metric
from torch_fidelity.metric_isc import isc_features_to_metric
from torch_fidelity.metric_kid import kid_features_to_metric
from torch_fidelity.metric_prc import prc_features_to_metric
from torch_fidelity.version import __version__ as FIDELITY_VERSION

from lit_diffusion.metrics.extractors import FIDProtocol, distance_name
from lit_diffusion.metrics.images import ImageSet, as_image_set
from lit_diffusion.metrics.reference import Scorer


def score_images(
    fake: ImageSet | Tensor | str | Path,
    real: ImageSet | Tensor | str | Path,
    protocol: FIDProtocol,
    *,
    batch_size: int = 64,
    device: str = "cpu",
) -> dict[str, Any]:
    """Score images against real images, on one process.

    Args:
        fake: images to score, as a uint8 tensor (N, C, H, W), as the path of a folder or .npz file,
            or as an `ImageSet`.
        real: reference images, in one of the same forms.
        protocol: FID protocol, which defines the feature extractor.
        batch_size: number of images per forward pass.
        device: "cpu" or "cuda".

    Returns:
        The result of `score_features`: the scores, and entries that describe how they were
        measured.

    Raises:
        ValueError: if there are fewer than 4 fake or fewer than 4 real images.

    Example:
        >>> from lit_diffusion.metrics.extractors import EmbeddedCNN
        >>> images = torch.arange(64 * 64, dtype=torch.int32).reshape(64, 1, 8, 8).to(torch.uint8)
        >>> scores = score_images(images, images, EmbeddedCNN("digits-cnn"))
        >>> abs(scores["fid"]) < 1e-3, scores["precision"], scores["num_fake"]
        (True, 1.0, 64)
    """
    scorer = Scorer(protocol, protocol.build().to(device), torch.device(device), batch_size)
    sets = as_image_set(fake, "fake"), as_image_set(real, "real")
    return score_features(scorer, *(extract_features(scorer, images) for images in sets))


def extract_features(scorer: Scorer, images: ImageSet) -> Tensor:
    """Extract the features (N, F) of all images, on the CPU.

    Example:
        >>> from lit_diffusion.metrics.extractors import Pixels
        >>> from lit_diffusion.metrics.images import as_image_set
        >>> scorer = Scorer(Pixels(1), Pixels(1).build(), torch.device("cpu"), batch_size=64)
        >>> zeros = as_image_set(torch.zeros(5, 1, 16, 16, dtype=torch.uint8), "zeros")
        >>> extract_features(scorer, zeros).shape
        torch.Size([5, 64])
    """
    return torch.cat(
        [scorer.features(batch).cpu() for batch, _ in images.batches(scorer.batch_size)]
    )


@torch.no_grad()
def score_features(scorer: Scorer, fake: Tensor, real: Tensor) -> dict[str, Any]:
    """Score images by their features.

    Args:
        scorer: feature extractor. If it has a method `logits`, the inception score is computed.
        fake: features (N, F) of the images to score, on the CPU.
        real: features (M, F) of the reference images, on the CPU.

    Returns:
        A dictionary with the scores `fid`, `kid`, `precision` and `recall`. Extractors that
        classify images also give `inception_score`. The entry `metric` is the name of the
        Frechet distance in `fid`, such as "fid" or "fd_dinov2". Precision and recall use 3
        neighbors. `kid_std` is the standard deviation of KID over 100 random subsets.
        `inception_score_std` is the standard deviation of the inception score over splits of the
        images. The other entries are the numbers of images, the FID protocol, and the settings of
        torch-fidelity.

    Raises:
        ValueError: if there are fewer than 4 fake or fewer than 4 real images, because precision
            and recall need 3 neighbors of each image.

    Example:
        See `score_images`.
    """
    if min(len(fake), len(real)) < 4:
        raise ValueError(
            f"scores need at least 4 fake and 4 real images, got {len(fake)} and {len(real)}."
        )
    settings = {
        "isc_splits": min(10, len(fake)),
        # If every subset consisted of all images, kid_std would be 0.
        "kid_subset_size": min(1000, min(len(fake), len(real)) // 2),
        "prc_neighborhood": 3,
        "rng_seed": 2020,  # seed of torch-fidelity's subsets and splits
    }
    statistics = [fid_features_to_statistics(features) for features in (fake, real)]
    scores = {
        **fid_statistics_to_metric(*statistics, verbose=False),
        **kid_features_to_metric(fake, real, **settings, verbose=False),
        **prc_features_to_metric(fake, real, **settings, save_cpu_ram=True, verbose=False),
    }
    return {
        "metric": distance_name(scorer.protocol),
        "fid": float(scores["frechet_inception_distance"]),
        "kid": float(scores["kernel_inception_distance_mean"]),
        "kid_std": float(scores["kernel_inception_distance_std"]),
        "precision": float(scores["precision"]),
        "recall": float(scores["recall"]),
        **_inception_score(scorer, fake, settings),
        "num_fake": len(fake),
        "num_real": len(real),
        "protocol": scorer.protocol.name,
        "extractor_sha256": scorer.protocol.sha256,
        "resize": scorer.protocol.resize,
        "torch_fidelity": FIDELITY_VERSION,
        **settings,
    }


def _inception_score(scorer: Scorer, fake: Tensor, settings: dict[str, Any]) -> dict[str, float]:
    """The inception score and its standard deviation; {} if the extractor has no logits."""
    if not hasattr(scorer.extractor, "logits"):
        return {}
    logits = torch.cat(
        [
            scorer.extractor.logits(features.to(scorer.device)).cpu()  # type: ignore[operator]
            for features in torch.split(fake, scorer.batch_size)
        ]
    )
    scores = isc_features_to_metric(logits, settings["isc_splits"], rng_seed=settings["rng_seed"])
    return {
        "inception_score": float(scores["inception_score_mean"]),
        "inception_score_std": float(scores["inception_score_std"]),
    }
