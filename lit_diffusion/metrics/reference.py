"""Statistics of the real images that an FID compares with, and the floor that they set."""

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
from lit_diffusion.files import atomic_write
from lit_diffusion.metrics.extractors import FIDProtocol, match_channels
from lit_diffusion.metrics.frechet import REAL_SUMS, FrechetDistance
from lit_diffusion.metrics.images import ImageSet
from lit_diffusion.seeding import fold

MIN_IMAGES = 4
"""Least number of images in a reference."""

NUM_DRAWS = 10
"""Number of draws of real images whose FIDs are averaged for the floor."""

POOL_FACTOR = 4
"""Number of images to draw from, as a multiple of those of one draw."""


@dataclass(frozen=True)
class Reference:
    """Statistics of real images under one FID protocol."""

    name: str  # split or path of the images
    fingerprint: str  # of their pixels
    sums: dict[str, Tensor]  # of their features, from `FrechetDistance.real_sums`
    floors: tuple[float, ...]  # FIDs of real images in place of samples, one for each draw of them
    floor_images: str  # which images were drawn and compared, in words

    @property
    def floor(self) -> float:
        """Mean FID over the draws."""
        return fmean(self.floors)

    @property
    def floor_sd(self) -> float | None:
        """Standard deviation over the draws; None for a single draw, of all images."""
        return stdev(self.floors) if len(self.floors) > 1 else None

    @property
    def num_images(self) -> int:
        """Number of real images."""
        return int(self.sums["real_features_num_samples"])


@dataclass(frozen=True)
class Scorer:
    """An extractor of `protocol.build()` on its device, and the batch size that it is used with.

    Sums of features are on that device too, or on the CPU if it has no float64.
    """

    protocol: FIDProtocol
    extractor: nn.Module
    device: torch.device
    batch_size: int

    @property
    def num_features(self) -> int:
        """Length of a feature vector."""
        return int(self.extractor.num_features)  # type: ignore[arg-type]

    def metric(self) -> FrechetDistance:
        """A new, empty metric for these features."""
        device = "cpu" if self.device.type == "mps" else self.device
        return FrechetDistance(self.num_features).to(device)

    @torch.no_grad()
    def features(self, images: Tensor) -> Tensor:
        """Features (N, num_features) of images uint8 (N, C, H, W), without autocast."""
        with torch.autocast(self.device.type, enabled=False):
            matched = match_channels(images.to(self.device), self.protocol.channels)
            features: Tensor = self.extractor(matched)
        return features

    def features_of_share(self, images: ImageSet, index: Sequence[int]) -> tuple[Tensor, list[int]]:
        """Features of this process's share of the images `index`, and the labels of all of them.

        Process r of R has index[r], index[r + R], .... A collective: all processes call it.
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
    """Statistics of `real` and the floor, from the cache if they are in it. A collective.

    The floor is the FID of real images in place of samples. With `others` (training images where
    the reference is the held-out split, and the reverse) at most `num_samples` of them are scored
    against the whole reference: a model that draws from the training distribution scores that.
    Without, some of the reference, at most one half and `num_samples`, are scored against others of
    it. An FID depends on the balance of classes, so the images are drawn with the labels of the
    samples, as far as there are enough. The floor is the mean over `NUM_DRAWS` draws from
    `POOL_FACTOR` times as many images, if there are enough.

    Args:
        scorer: extracts the features.
        real: images to compare samples with.
        others: real images that are not among those; None splits `real` for the floor.
        num_samples: number of samples that will be scored.
        cache: folder of files of statistics.
        labels: of these samples; None if they have none.
        real_features: features (N, F) of all real images, if a single process has them already.

    Raises:
        ValueError: If there are fewer than 4 real images, fewer than 2 others, or features that are
            not finite.
    """
    if len(real) < MIN_IMAGES or (others is not None and len(others) < 2):
        raise ValueError(
            f"an FID needs at least 4 real images and 2 others for its floor, got {len(real)} of "
            f"{real.name}" + (f" and {len(others)} of {others.name}." if others else ".")
        )
    # The name of the cache file has all that the statistics depend on.
    sources = [images for images in (real, others) if images]
    prints = call_on_rank_zero(lambda: [images.fingerprint for images in sources])
    counts = repr(sorted(Counter(labels).items())) if labels else ""
    draws = f"draws-{hashlib.sha256(counts.encode()).hexdigest()[:8]}" if labels else "draws"
    protocol = scorer.protocol
    parts = [protocol.name, protocol.sha256[:8], *prints, str(num_samples), draws]
    path = cache / f"{'-'.join(parts)}.npz"
    statistics = call_on_rank_zero(lambda: load_statistics(path))
    if statistics is None:
        statistics = _measure(scorer, real, others, num_samples, labels, real_features)
        if rank_and_world_size()[0] == 0:
            save_statistics(path, statistics)
    floors = tuple(statistics.pop("floors").tolist())
    num_matched = int(statistics.pop("floor_matched"))
    if not all(math.isfinite(floor) for floor in floors):
        raise ValueError(
            f"the extractor {protocol.name} gives features of real images that are not finite: its "
            "weights are broken, or not made for such images."
        )
    size, pool = _floor_sizes(real, others, num_samples)
    drawn = f"{size} {(others or real).name} images"
    if labels and num_matched == size:
        drawn += " with the samples' labels"
    elif labels:
        drawn += f", {num_matched} with the samples' labels,"
    floor_images = f"{drawn} against {real.name if others else f'{pool - size} others of them'}"
    return Reference(real.name, prints[0], statistics, floors, floor_images)


def _measure(
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
    size, pool = _floor_sizes(real, others, num_samples)
    source = others or real
    index = shuffled_range(len(source), -1)[:pool]
    features, pool_labels = scorer.features_of_share(source, index)
    wanted = Counter(labels[:size]) if labels else Counter()
    floors = []
    for number in range(1 if size == pool else NUM_DRAWS):
        drawn = draw_by_labels(pool_labels, wanted, size, number)
        metric = scorer.metric()
        if others is None:
            metric.update(features[_rows_of_share(set(range(pool)) - set(drawn))], real=True)
        elif rank == 0:
            metric.add_real_sums(sums)
        metric.update(features[_rows_of_share(drawn)], real=False)
        floors.append(metric.compute().cpu())
    num_matched = torch.tensor((Counter(pool_labels) & wanted).total())
    return sums | {"floors": torch.stack(floors), "floor_matched": num_matched}


def _floor_sizes(real: ImageSet, others: ImageSet | None, num_samples: int) -> tuple[int, int]:
    """Numbers of images of a draw, and of images to draw from."""
    if others is not None:
        return min(num_samples, len(others)), min(POOL_FACTOR * num_samples, len(others))
    pool = min(POOL_FACTOR * num_samples, len(real))
    return min(num_samples, pool // 2), pool


def _rows_of_share(index: Iterable[int]) -> list[int]:
    """Rows of `features_of_share` that this process has of the images `index` of a pool."""
    rank, world_size = rank_and_world_size()
    return sorted(i // world_size for i in index if i % world_size == rank)


def shuffled_range(size: int, number: int) -> list[int]:
    """0, ..., size - 1 in a random order that is a function of the two numbers."""
    generator = torch.Generator().manual_seed(fold("floor images", number))
    order: list[int] = torch.randperm(size, generator=generator).tolist()
    return order


def draw_by_labels(
    labels: Sequence[int], wanted: Mapping[int, int], size: int, number: int
) -> list[int]:
    """Draw `size` images at random, with as many of each label as `wanted`.

    Where there are fewer of a label, images of any label fill up. Another `number` is another draw.

    Returns:
        Places of the images in `labels`, which are those of the images to draw from.
    """
    left = Counter(wanted)
    matching, others = [], []
    for image in shuffled_range(len(labels), number):
        if left[labels[image]] > 0:
            left[labels[image]] -= 1
            matching.append(image)
        else:
            others.append(image)
    return matching + others[: size - len(matching)]


def load_statistics(path: Path) -> dict[str, Tensor] | None:
    """Tensors from `save_statistics`; None if there is no such file.

    Raises:
        ValueError: if the file is broken.
    """
    if not path.exists():
        return None
    try:
        with np.load(path, allow_pickle=False) as arrays:
            statistics = {name: torch.from_numpy(arrays[name]) for name in arrays}
        dimensions = [statistics[name].ndim for name in (*REAL_SUMS, "floors", "floor_matched")]
        if dimensions != [1, 2, 0, 1, 0]:
            raise ValueError("it holds other arrays")
        return statistics
    except Exception as error:  # zipfile and numpy raise anything on a broken file
        raise ValueError(f"{path} is not a file of statistics ({error}); delete it.") from error


def save_statistics(path: Path, statistics: Mapping[str, Tensor]) -> None:
    """Write tensors as .npz, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path, shared=True) as file:
        np.savez(file, **{name: value.numpy() for name, value in statistics.items()})  # type: ignore[arg-type]
