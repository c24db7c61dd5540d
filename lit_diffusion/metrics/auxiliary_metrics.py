"""Compute auxiliary metrics: further scores of the samples whose FID is measured.

A method that was tuned on one FID may improve only this FID. Therefore, the auxiliary metrics score
the same samples with other feature extractors, and compare the samples with held-out images. They
also measure how many samples are near-duplicates of training images. A record in evaluations.jsonl
stores the metrics under the key "second_look".
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset
from torch_fidelity.metric_prc import prc_features_to_metric

from lit_diffusion.distributed import all_gather_objects, call_on_rank_zero, rank_and_world_size
from lit_diffusion.files import atomic_write, check_regular, checked_read
from lit_diffusion.metrics.extractors import Pixels, RandomCNN
from lit_diffusion.metrics.image_distances import nearest_neighbors
from lit_diffusion.metrics.images import ImageSet, evenly_spaced
from lit_diffusion.metrics.reference import MIN_IMAGES, Reference, Scorer, measure_reference

MAX_REAL = 50_000
"""Maximum number of real images for `Pixels` and `RandomCNN`. Of a larger set, they use evenly
spaced images."""

MAX_NEIGHBORS = 5_000
"""Maximum number of real images, and of samples, for precision, recall and memorization."""

DISTANCES = ("held-out", "pixels", "random-cnn")
"""Names of the Frechet distances. With the suffix " floor", they name the distances of real images
in place of samples."""

FRACTIONS = ("precision", "recall", "pixel precision", "pixel recall", "memorized")
"""Names of the metrics in [0, 1]."""


@dataclass(frozen=True)
class FeatureComparison:
    """A Frechet distance to measure: its feature extractor and the statistics of real images.

    Attributes:
        name: name of the metric; "" for the FID itself.
        scorer: feature extractor.
        reference: statistics of the real images' features.
        real_features: features (N, F) of up to `MAX_NEIGHBORS` real images, for precision and
            recall. They are None on all processes except the first, and for comparisons that do not
            measure precision and recall.
    """

    name: str
    scorer: Scorer
    reference: Reference
    real_features: Tensor | None = None


@dataclass(frozen=True)
class AuxiliaryMetrics:
    """Measurements of real images with which `accumulator` scores samples.

    Attributes:
        comparisons: Frechet distances to measure. The first is the FID.
        memorization: the features (N, F) of the training images, and the median distance from a
            held-out image to its nearest training image. A sample counts as memorized if its
            distance to the nearest training image is at most this median. Therefore, all copies of
            training images count as memorized. If samples have the same distances to the training
            images as held-out images have, about half of the samples count as memorized.
            `memorization` is None on all processes except the first, and for data that lack a
            training or a validation split.
        num_samples: number of samples in an evaluation.
    """

    comparisons: tuple[FeatureComparison, ...]
    memorization: tuple[Tensor, Tensor] | None = None
    num_samples: int = 0

    def accumulator(self) -> "MetricAccumulator":
        """Return an empty accumulator for the samples of one evaluation."""
        return MetricAccumulator(self)


class MetricAccumulator:
    """Accumulator of the features of one evaluation's samples.

    Each process adds its own samples. Process r of R must add the samples with the numbers
    `r, r + R, r + 2R, ...`, in this order. The method `compute` combines the samples of all
    processes.
    """

    def __init__(self, metrics: AuxiliaryMetrics) -> None:
        self._metrics = metrics
        self._subset = frozenset(evenly_spaced(metrics.num_samples, MAX_NEIGHBORS))
        rank, self._stride = rank_and_world_size()
        self._next = rank
        self._distances = [each.scorer.metric() for each in metrics.comparisons]
        # Features of the samples in the subset, for precision, recall and memorization.
        self._features = [
            [torch.zeros(0, each.scorer.num_features)] for each in metrics.comparisons
        ]
        if rank == 0:
            for each, distance in zip(metrics.comparisons, self._distances, strict=True):
                distance.add_real_sums(each.reference.sums)

    def add(self, images: Tensor) -> Tensor:
        """Add samples uint8 (N, C, H, W), and return their features (N, F) for the FID."""
        numbers = range(self._next, self._next + len(images) * self._stride, self._stride)
        self._next = numbers.stop
        in_subset = torch.tensor([i in self._subset for i in numbers], dtype=torch.bool)
        by_scorer: dict[int, Tensor] = {}
        for i, each in enumerate(self._metrics.comparisons):
            key = id(each.scorer)
            if key not in by_scorer:
                by_scorer[key] = each.scorer.features(images)
            self._distances[i].update(by_scorer[key], real=False)
            self._features[i].append(by_scorer[key].cpu()[in_subset])
        return next(iter(by_scorer.values()))

    def compute(self) -> tuple[float, dict[str, float]]:
        """Return the FID, and the other metrics by name, of the samples of all processes.

        All processes must call this method. Only the first process gets precision, recall and the
        fraction of memorized samples.
        """
        comparisons = self._metrics.comparisons
        fid, *fids = (distance.compute().item() for distance in self._distances)
        values = dict[str, float]()
        for each, distance in zip(comparisons[1:], fids, strict=True):
            values |= {each.name: distance, f"{each.name} floor": each.reference.floor}
        if not fids:
            return fid, values
        for each, features in zip(comparisons, self._features, strict=True):
            if each.name in ("", Pixels.name):
                samples = torch.cat(all_gather_objects(torch.cat(features)))
                if each.real_features is not None:
                    prefix = "pixel " if each.name else ""
                    values |= _precision_and_recall(samples, each.real_features, prefix)
                if each.name and self._metrics.memorization is not None:
                    training, median = self._metrics.memorization
                    is_near = nearest_neighbors(samples, training)[0] <= median
                    values["memorized"] = is_near.double().mean().item()
        return fid, values


def build_auxiliary_metrics(
    fid: FeatureComparison,
    real: ImageSet,
    others: ImageSet | None,
    num_samples: int,
    cache: Path,
    labels: Sequence[int] | None,
) -> AuxiliaryMetrics:
    """Measure the real images with which the auxiliary metrics compare samples.

    If `real` is the training split, the metrics include the Frechet distance between the samples
    and the held-out images `others`. All processes must call this function.

    Args:
        fid: feature extractor of the FID, and statistics of `real`.
        real: reference images of the FID.
        others: real images that are not in `real`, or None.
        num_samples: number of samples that will be scored.
        cache: folder in which statistics are cached.
        labels: labels of the samples; None if they have no labels.
    """
    real_subset, other_subset = _subsample(real), None if others is None else _subsample(others)
    settings = (num_samples, cache, labels)
    channels, device = fid.scorer.protocol.channels, fid.scorer.device
    pixels, random_cnn = (
        replace(fid.scorer, protocol=protocol, extractor=protocol.build().to(device))
        for protocol in (Pixels(channels), RandomCNN(channels))
    )
    if fid.real_features is None:
        features = _cached_features(fid.scorer, real_subset, MAX_NEIGHBORS, cache)
        fid = replace(fid, real_features=features)
    comparisons = [fid]
    if real.name == "train" and others is not None and len(others) >= MIN_IMAGES:
        held_out = measure_reference(fid.scorer, others, real, *settings)
        comparisons.append(FeatureComparison("held-out", fid.scorer, held_out))
    features = _cached_features(pixels, real_subset, MAX_NEIGHBORS, cache)
    reference = measure_reference(pixels, real_subset, other_subset, *settings)
    comparisons.append(FeatureComparison(Pixels.name, pixels, reference, features))
    reference = measure_reference(random_cnn, real_subset, other_subset, *settings)
    comparisons.append(FeatureComparison(RandomCNN.name, random_cnn, reference))
    splits = {images.name: images for images in (real_subset, other_subset) if images is not None}
    memorization = None
    if splits.keys() >= {"train", "val"}:
        training = _cached_features(pixels, splits["train"], MAX_REAL, cache)
        held_out_features = _cached_features(pixels, splits["val"], MAX_NEIGHBORS, cache)
        if training is not None and held_out_features is not None:
            median = nearest_neighbors(held_out_features, training)[0].median()
            memorization = training, median
    return AuxiliaryMetrics(tuple(comparisons), memorization, num_samples)


def _subsample(images: ImageSet) -> ImageSet:
    """Return all images, or `MAX_REAL` evenly spaced images of a larger set."""
    if len(images) <= MAX_REAL:
        return images
    return replace(images, dataset=Subset(images.dataset, evenly_spaced(len(images), MAX_REAL)))


def _cached_features(scorer: Scorer, real: ImageSet, max_images: int, cache: Path) -> Tensor | None:
    """Load or compute features (N, F) of at most `max_images` evenly spaced real images.

    Returns:
        The features on the first process, and None on the other processes.

    Raises:
        ValueError: if the cache file is broken.
    """
    protocol, key = scorer.protocol, f"{call_on_rank_zero(lambda: real.fingerprint)}-{max_images}"
    path = cache / f"{protocol.name}-{protocol.sha256[:8]}-features-{key}.npy"

    def is_cached() -> bool:
        if not path.exists():
            return False
        with checked_read(path, "file of features", "delete it") as file:
            return len(np.load(file, mmap_mode="r")) > 0

    if not call_on_rank_zero(is_cached):
        local_features, _ = scorer.features_of_share(real, evenly_spaced(len(real), max_images))
        features = torch.cat(all_gather_objects(local_features.cpu()))
        if rank_and_world_size()[0] == 0:
            cache.mkdir(parents=True, exist_ok=True)
            with atomic_write(path, shared=True) as file:
                np.save(file, features.numpy())
    return torch.from_numpy(np.load(check_regular(path))) if rank_and_world_size()[0] == 0 else None


def _precision_and_recall(samples: Tensor, real: Tensor, prefix: str) -> dict[str, float]:
    """Compute precision and recall with k = 3 neighbors from features (N, F) and (M, F).

    The names of the metrics begin with `prefix`. The dictionary is empty if there are fewer than
    `MIN_IMAGES` samples or real images, or if a feature of a sample is not finite.

    Source: Kynkaanniemi et al. 2019, "Improved Precision and Recall Metric for Assessing Generative
    Models"; computed by torch-fidelity.
    """
    if min(len(samples), len(real)) < MIN_IMAGES or not bool(samples.isfinite().all()):
        return {}
    scores: dict[str, Any] = prc_features_to_metric(
        samples, real, prc_neighborhood=3, prc_batch_size=1000, save_cpu_ram=True, verbose=False
    )
    return {f"{prefix}{name}": float(scores[name]) for name in ("precision", "recall")}
