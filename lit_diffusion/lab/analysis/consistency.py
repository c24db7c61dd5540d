"""Whether models make the same image of the same noise, and what chance would give.

Source: "Why diffusion models are stable and how to make them faster" (2023), section 3.1.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lit_diffusion.lab.analysis.saved import Saved
from lit_diffusion.metrics.image_distances import MAX_PSNR, pairwise_psnr, psnr

Floats = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


@dataclass(frozen=True)
class Consistency(Saved):
    """What images (M, N, C, H, W) of M models by N seeds have in common.

    Attributes:
        names: of the models.
        paper: Eq. 1, in dB: the first model beside each of the others.
        all_pairs: mean over all pairs of models, in dB.
        pairs: (M, M) mean PSNR of each pair.
        shuffled: as all_pairs, of each image beside the others' images of all other seeds.
        same_class: as shuffled, of other seeds of the same class, which images share however they
            were made; None without classes, or where none has two seeds.
        nearest: mean PSNR of the images beside the training images nearest to them: models that
            agree no better may only agree on these. None without training images.
        same_nearest: share of pairs whose nearest training image is the same.
        features: 1 - distance of features over that of other seeds, of the same class where there
            are classes: 1 for the same, 0 for chance; None without an extractor.
        per_seed: (N,) mean over pairs.
    """

    names: list[str]
    paper: float
    all_pairs: float
    pairs: Floats
    shuffled: float
    same_class: float | None
    nearest: float | None
    same_nearest: float | None
    features: float | None
    per_seed: Floats


def consistency(
    images: Tensor,
    names: list[str],
    nearest_of: Callable[[Tensor], Tensor] | None = None,
    features_of: Callable[[Tensor], Tensor] | None = None,
    labels: Tensor | None = None,
) -> Consistency:
    """Compare the images of models, seed by seed.

    Args:
        images: uint8 (M, N, C, H, W) of M >= 2 models by the same N >= 2 seeds.
        names: of the models.
        nearest_of: uint8 (N, C, H, W) -> the training images nearest to these.
        features_of: uint8 (N, C, H, W) -> (N, F).
        labels: (N,) of the seeds.

    Raises:
        ValueError: for fewer models or seeds.
    """
    if len(images) < 2 or images.shape[1] < 2:
        raise ValueError(
            f"two models and two seeds are the least, got {len(images)} and {images.shape[1]}."
        )
    by_pair = {(i, j): psnr(images[i], images[j]) for i in range(len(images)) for j in range(i)}
    pairs = np.full((len(images), len(images)), MAX_PSNR)
    for (i, j), found in by_pair.items():
        pairs[i, j] = pairs[j, i] = found.mean().item()
    others = ~torch.eye(images.shape[1], dtype=torch.bool)
    alike = None if labels is None else others & (labels[:, None] == labels)
    alike = None if alike is None or not alike.any() else alike
    nearest = same_nearest = None
    if nearest_of is not None:
        found = torch.stack([nearest_of(each) for each in images])
        nearest = psnr(images.flatten(0, 1), found.flatten(0, 1)).mean().item()
        same_nearest = _mean_of_pairs(found, _same)
    return Consistency(
        names=names,
        paper=float(pairs[0, 1:].mean()),
        all_pairs=torch.stack(list(by_pair.values())).mean().item(),
        pairs=pairs,
        shuffled=_mean_of_pairs(images, lambda a, b: pairwise_psnr(a, b)[others]),
        same_class=None
        if alike is None
        else _mean_of_pairs(images, lambda a, b: pairwise_psnr(a, b)[alike]),
        nearest=nearest,
        same_nearest=same_nearest,
        features=None
        if features_of is None
        else _by_features(images, features_of, others if alike is None else alike),
        per_seed=torch.stack(list(by_pair.values())).mean(0).numpy(),
    )


def _mean_of_pairs(images: Tensor, compare: Callable[[Tensor, Tensor], Tensor]) -> float:
    pairs = [compare(images[i], images[j]).mean() for i in range(len(images)) for j in range(i)]
    return torch.stack(pairs).mean().item()


def _same(a: Tensor, b: Tensor) -> Tensor:
    return (a == b).flatten(1).all(1).double()


def _by_features(images: Tensor, features_of: Callable[[Tensor], Tensor], others: Tensor) -> float:
    """Of the way from the pairs that are `others` (N, N) to those of the same seeds."""
    found = torch.stack([features_of(each).double() for each in images])
    same = _mean_of_pairs(found, lambda a, b: (a - b).norm(dim=1))
    return 1 - same / _mean_of_pairs(found, lambda a, b: torch.cdist(a, b)[others])
