"""Compute the statistics of the reference images of an FID, and the real-data floor.

The real-data floor is the FID of real images that are scored like generated samples. A perfect
model would have about this FID. It is above 0 because the number of images is finite.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
import torch
from torch import Tensor, nn

from lit_diffusion.distributed import all_gather_objects, call_on_rank_zero, rank_and_world_size
from lit_diffusion.files import atomic_write, checked_read
from lit_diffusion.metrics.extractors import FIDProtocol, match_channels
from lit_diffusion.metrics.frechet import REAL_SUMS, FrechetDistance
from lit_diffusion.metrics.images import ImageSet
from lit_diffusion.seeding import fold

MIN_IMAGES = 4
"""Minimum number of reference images."""

NUM_DRAWS = 10
"""Number of random draws of real images over which the real-data floor is averaged."""

POOL_FACTOR = 4
"""Maximum size of the pool of images from which these draws are taken, divided by the number of
samples."""


@dataclass(frozen=True)
class Reference:
    """Statistics of real images under one FID protocol."""

    name: str  # split or path of the real images
    fingerprint: str  # fingerprint of the images' pixels
    sums: dict[str, Tensor]  # `FrechetDistance.real_sums` of the images' features
    floors: tuple[float, ...]  # FIDs of real images scored like samples, one per random draw
    floor_images: str  # description of the images that were drawn and compared

    @property
    def floor(self) -> float:
        """Real-data floor: the mean of `floors`."""
        return fmean(self.floors)

    @property
    def floor_sd(self) -> float | None:
        """Standard deviation of `floors`; None if there was a single draw."""
        return stdev(self.floors) if len(self.floors) > 1 else None

    @property
    def num_images(self) -> int:
        """Number of real images."""
        return int(self.sums["real_features_num_samples"])


@dataclass(frozen=True)
class Scorer:
    """The feature extractor of an FID protocol on a device, with a batch size."""

    protocol: FIDProtocol
    extractor: nn.Module
    device: torch.device
    batch_size: int

    @property
    def num_features(self) -> int:
        """Length of a feature vector."""
        return int(self.extractor.num_features)  # type: ignore[arg-type]

    def metric(self) -> FrechetDistance:
        """Return a new, empty metric for the features.

        The metric accumulates on `device`, or on the CPU if `device` is MPS, which does not support
        float64.
        """
        device = "cpu" if self.device.type == "mps" else self.device
        return FrechetDistance(self.num_features).to(device)

    @torch.no_grad()
    def features(self, images: Tensor) -> Tensor:
        """Extract features (N, num_features) of images uint8 (N, C, H, W), without autocast."""
        with torch.autocast(self.device.type, enabled=False):
            return self.extractor(match_channels(images.to(self.device), self.protocol.channels))

    def features_of_share(self, images: ImageSet, index: Sequence[int]) -> tuple[Tensor, list[int]]:
        """Extract the features of this process's share of the images at `index`.

        With R processes, process r extracts the features of the images at index[r], index[r + R],
        index[r + 2R] and so on. All processes must call this method.

        Returns:
            The features of this process's share, and the labels of all images at `index`.
        """
        rank, world_size = rank_and_world_size()
        features, labels = [torch.zeros(0, self.num_features, device=self.device)], []
        for batch, batch_labels in images.batches(self.batch_size, index[rank::world_size]):
            features.append(self.features(batch))
            labels += batch_labels
        shares = all_gather_objects(labels)
        return torch.cat(features), [
            shares[i % world_size][i // world_size] for i in range(len(index))
        ]


def measure_reference(
    scorer: Scorer,
    real: ImageSet,
    others: ImageSet | None,
    num_samples: int,
    cache: Path,
    labels: Sequence[int] | None = None,
    real_features: Tensor | None = None,
) -> Reference:
    """Measure the statistics of `real` and the real-data floor, or read both from the cache.

    The real-data floor is the FID of real images that are scored like samples. With `others`, the
    function draws up to `num_samples` images of `others` and scores them against all of `real`.
    Without `others`, it scores a part of `real` against the rest. The part has at most half of the
    images of `real`, and at most `num_samples` images.

    An FID depends on the proportions of the classes. Therefore, the function draws images with the
    same labels as the samples, as far as possible. It draws `NUM_DRAWS` times from a pool of up to
    `POOL_FACTOR * num_samples` images, and the floor is the mean of the FIDs of these draws. If a
    single draw takes the whole pool, the function draws only once.

    All processes must call this function.

    Args:
        scorer: feature extractor.
        real: reference images.
        others: real images that are not in `real`, or None. Usually, one of the two is the training
            split, and the other one is the held-out split.
        num_samples: number of samples that will be scored.
        cache: folder in which statistics are cached.
        labels: labels of the samples; None if they have no labels.
        real_features: features (N, F) of all reference images, if they have been computed already.
            They are allowed only with a single process.

    Raises:
        ValueError: if there are fewer than 4 images in `real` or fewer than 2 in `others`, or if
            features are not finite.
    """
    if len(real) < MIN_IMAGES or (others is not None and len(others) < 2):
        raise ValueError(
            f"an FID needs at least 4 real images, and 2 others for its real-data floor, got "
            f"{len(real)} of {real.name}"
            + (f" and {len(others)} of {others.name}." if others else ".")
        )
    # The file name encodes everything that the statistics depend on.
    sources = [images for images in (real, others) if images]
    fingerprints = call_on_rank_zero(lambda: [images.fingerprint for images in sources])
    draws = "draws"
    if labels:  # their numbers, and which real images have which label
        key = repr(sorted(Counter(labels).items()))
        key += call_on_rank_zero(lambda: (others or real).label_fingerprint)
        draws = f"draws-{hashlib.sha256(key.encode()).hexdigest()[:8]}"
    protocol = scorer.protocol
    parts = [protocol.name, protocol.sha256[:8], *fingerprints, str(num_samples), draws]
    path = cache / f"{'-'.join(parts)}.npz"
    statistics = call_on_rank_zero(lambda: load_statistics(path))
    if statistics is None:
        statistics = _measure_statistics(scorer, real, others, num_samples, labels, real_features)
        if rank_and_world_size()[0] == 0:
            save_statistics(path, statistics)
    floors = tuple(statistics.pop("floors").tolist())
    num_matched = int(statistics.pop("floor_matched"))
    if not all(math.isfinite(floor) for floor in floors):
        raise ValueError(
            f"the features of real images from the extractor {protocol.name} are not finite: its "
            "weights are broken, or are not meant for such images."
        )
    size, pool = _floor_sizes(real, others, num_samples)
    origin = f"{size} {(others or real).name} images"
    if labels and num_matched == size:
        origin += " with the samples' labels"
    elif labels:
        origin += f", {num_matched} with the samples' labels,"
    floor_images = f"{origin} against {real.name if others else f'{pool - size} others of them'}"
    return Reference(real.name, fingerprints[0], statistics, floors, floor_images)


def _measure_statistics(
    scorer: Scorer,
    real: ImageSet,
    others: ImageSet | None,
    num_samples: int,
    labels: Sequence[int] | None,
    real_features: Tensor | None,
) -> dict[str, Tensor]:
    metric = scorer.metric()
    rank, world_size = rank_and_world_size()
    if real_features is not None:
        for features in torch.split(real_features, scorer.batch_size):
            metric.update(features.to(metric.device), real=True)
    else:
        for batch, _ in real.batches(scorer.batch_size, range(len(real))[rank::world_size]):
            metric.update(scorer.features(batch), real=True)
    sums = metric.real_sums()
    draw_size, pool_size = _floor_sizes(real, others, num_samples)
    source = others or real
    index = shuffled_range(len(source), -1)[:pool_size]
    features, pool_labels = scorer.features_of_share(source, index)
    wanted = Counter(labels[:draw_size]) if labels else Counter()
    floors = []
    for number in range(1 if draw_size == pool_size else NUM_DRAWS):
        draw = draw_by_labels(pool_labels, wanted, draw_size, number)
        metric = scorer.metric()
        if others is None:
            metric.update(features[_rows_of_share(set(range(pool_size)) - set(draw))], real=True)
        elif rank == 0:
            metric.add_real_sums(sums)
        metric.update(features[_rows_of_share(draw)], real=False)
        floors.append(metric.compute().cpu())
    num_matched = torch.tensor((Counter(pool_labels) & wanted).total())
    return sums | {"floors": torch.stack(floors), "floor_matched": num_matched}


def _floor_sizes(real: ImageSet, others: ImageSet | None, num_samples: int) -> tuple[int, int]:
    """Return the number of images per draw, and the size of the pool to draw from."""
    if others is not None:
        return min(num_samples, len(others)), min(POOL_FACTOR * num_samples, len(others))
    pool = min(POOL_FACTOR * num_samples, len(real))
    return min(num_samples, pool // 2), pool


def _rows_of_share(index: Iterable[int]) -> list[int]:
    """Return the rows of this process's `features_of_share` that belong to pool images `index`."""
    rank, world_size = rank_and_world_size()
    return sorted(i // world_size for i in index if i % world_size == rank)


def shuffled_range(size: int, number: int) -> list[int]:
    """Permute 0, ..., size - 1 at random. `number` is the random seed."""
    generator = torch.Generator().manual_seed(fold("floor images", number))
    return torch.randperm(size, generator=generator).tolist()


def draw_by_labels(
    labels: Sequence[int], wanted: Mapping[int, int], size: int, number: int
) -> list[int]:
    """Draw `size` images from a pool at random, as far as possible with the `wanted` labels.

    If the pool has too few images with a label, the function draws images with other labels
    instead. The result is a list of indices into the pool.

    Args:
        labels: labels of the images in the pool.
        wanted: for each label, the number of images to draw with it.
        size: number of images to draw.
        number: random seed of the draw.

    Example:
        >>> sorted(draw_by_labels([0, 0, 1, 1], wanted={1: 2}, size=2, number=0))
        [2, 3]
    """
    remaining = Counter(wanted)
    matching, others = [], []
    for i in shuffled_range(len(labels), number):
        if remaining[labels[i]] > 0:
            remaining[labels[i]] -= 1
            matching.append(i)
        else:
            others.append(i)
    return matching + others[: size - len(matching)]


def load_statistics(path: Path) -> dict[str, Tensor] | None:
    """Load tensors from a file that `save_statistics` wrote; return None if there is no file.

    Raises:
        ValueError: if the file is broken.
    """
    if not path.exists():
        return None
    with checked_read(path, "file of statistics", "delete it") as file:
        with np.load(file, allow_pickle=False) as arrays:
            statistics = {name: torch.from_numpy(arrays[name]) for name in arrays}
        dimensions = [statistics[name].ndim for name in (*REAL_SUMS, "floors", "floor_matched")]
        if dimensions != [1, 2, 0, 1, 0]:
            raise ValueError("it holds other arrays")
        return statistics


def save_statistics(path: Path, statistics: Mapping[str, Tensor]) -> None:
    """Write tensors to an .npz file, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path, shared=True) as file:
        np.savez(file, **{name: value.numpy() for name, value in statistics.items()})  # type: ignore[arg-type]
