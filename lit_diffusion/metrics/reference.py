"""Real images to compare with, their statistics, and the floor that these set under any FID."""

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset

from lit_diffusion.distributed import all_gather_objects, call_on_rank_zero, rank_and_world_size
from lit_diffusion.files import atomic_write
from lit_diffusion.metrics.batches import Where, uint8_images
from lit_diffusion.metrics.extractors import Features, match_channels
from lit_diffusion.metrics.frechet import REAL_SUMS, FrechetDistance
from lit_diffusion.seeding import fold

FEWEST = 4
"""Images of a reference, at least."""

DRAWS = 10
"""Draws of real images whose FIDs are averaged."""

POOL = 4
"""Images that are drawn from, as a multiple of those of one draw."""


LABELS = ("label", "labels", "class", "class_label", "cls", "target", "y")
"""What batches that are dictionaries call them."""


@runtime_checkable
class HasSplits(Protocol):
    """A data module that shows its splits "train" and "val" without augmentation."""

    def in_order(self, split: Any) -> DataLoader[Any]:
        """Every image of a split once."""

    def fingerprint(self, split: Any) -> str:
        """Changes when an image of the split does."""


@dataclass(frozen=True)
class RealImages:
    """A set of real images, called by its split or path; `collate` is as in `DataLoader`.

    `dataset` is map-style; `where` says where the images of its batches are, as `uint8_images`
    takes it. `known_fingerprint` gives the fingerprint faster than by reading all images.
    """

    name: str
    dataset: Dataset[Any]
    collate: Callable[[list[Any]], Any] | None = None
    num_workers: int = 0
    known_fingerprint: Callable[[], str] | None = None
    where: Where = None

    def __len__(self) -> int:
        if not hasattr(self.dataset, "__len__"):
            raise TypeError(
                f"{self.name}: {type(self.dataset).__name__} has no length; name a folder or an "
                ".npz file of images as the reference instead."
            )
        return len(self.dataset)

    def batches(
        self, batch_size: int, index: Sequence[int] | None = None
    ) -> Iterator[tuple[Tensor, list[int]]]:
        """Images uint8 (N, C, H, W) and their labels, in order: those of `index`, or all.

        The label is what a sample has second, or under one of `LABELS`; -1 if that is no integer.
        """
        chosen = Subset(self.dataset, range(len(self)) if index is None else index)
        options: dict[str, Any] = {"num_workers": self.num_workers, "collate_fn": self.collate}
        for batch in DataLoader(chosen, batch_size, **options):
            try:
                images = uint8_images(batch, self.where)
            except TypeError as error:
                raise TypeError(
                    f"{self.name}: {error} Or name a folder or an .npz file of images as the "
                    "reference."
                ) from error
            yield images, _labels(batch, len(images))

    def image(self, index: int) -> Tensor:
        """One image uint8 (C, H, W)."""
        one = Subset(self.dataset, [index])
        loader = DataLoader(one, collate_fn=self.collate, generator=torch.Generator())
        return uint8_images(next(iter(loader)), self.where)[0]

    def fingerprint(self) -> str:
        """16 hex digits that change with any pixel."""
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        if self.known_fingerprint is not None:
            return self.known_fingerprint()
        digest = hashlib.sha256()
        for images, _ in self.batches(256):
            digest.update(images.contiguous().numpy().tobytes())
        digest.update(repr(tuple(images.shape[1:])).encode())
        return digest.hexdigest()[:16]


def images_of_split(data: HasSplits, name: str) -> RealImages:
    """Images of "train", "val" or "test"; the last is the split that the data module `tests_on`."""
    split = getattr(data, "tests_on", "val") if name == "test" else name
    loader, known = data.in_order(split), partial(data.fingerprint, split)
    where = _of_latents if hasattr(data, "vae_sha256") else None
    return RealImages(split, loader.dataset, loader.collate_fn, loader.num_workers, known, where)


def _of_latents(batch: object) -> Tensor:
    raise TypeError("the data are latents, and images are compared with images.")


def _labels(batch: Any, count: int) -> list[int]:
    labels = batch[1] if isinstance(batch, (tuple, list)) and len(batch) > 1 else None
    if isinstance(batch, Mapping):
        labels = next((batch[name] for name in LABELS if name in batch), None)
    if isinstance(labels, Tensor) and labels.shape == (count,) and not labels.is_floating_point():
        return labels.long().tolist()
    return [-1] * count


@dataclass(frozen=True)
class Reference:
    """Statistics of the real images under one FID protocol, as `FrechetDistance.real_sums`.

    `floors` are FIDs of real images in place of samples, one per draw of them.
    """

    name: str
    fingerprint: str
    sums: dict[str, Tensor]
    floors: tuple[float, ...]
    floor_images: str

    @property
    def floor(self) -> float:
        """Mean over the draws."""
        return fmean(self.floors)

    @property
    def floor_sd(self) -> float | None:
        """Standard deviation over the draws; None where all images had to be drawn."""
        return stdev(self.floors) if len(self.floors) > 1 else None

    @property
    def num_images(self) -> int:
        """Number of real images."""
        return int(self.sums["real_features_num_samples"])


@dataclass(frozen=True)
class Scorer:
    """An extractor of `protocol.build()` on a device, and the batch size it is used with.

    Sums are kept on that device, on the CPU if it has no float64.
    """

    protocol: Features
    extractor: nn.Module
    device: torch.device
    batch_size: int

    @property
    def num_features(self) -> int:
        """Length of a feature vector."""
        return int(self.extractor.num_features)  # type: ignore[arg-type]

    def metric(self) -> FrechetDistance:
        """A new, empty metric."""
        device = "cpu" if self.device.type == "mps" else self.device
        return FrechetDistance(self.num_features).to(device)

    @torch.no_grad()
    def features(self, images: Tensor) -> Tensor:
        """uint8 (N, C, H, W) -> (N, num_features), in float32 whatever the Trainer's precision."""
        with torch.autocast(self.device.type, enabled=False):
            wanted = match_channels(images.to(self.device), self.protocol.channels)
            features: Tensor = self.extractor(wanted)
        return features

    def pool(self, images: RealImages, index: Sequence[int]) -> tuple[Tensor, list[int]]:
        """Features of this process's share of these images, and the labels of all. A collective."""
        rank, world_size = rank_and_world_size()
        features, labels = [torch.zeros(0, self.num_features, device=self.device)], []
        for batch, known in images.batches(self.batch_size, index[rank::world_size]):
            features.append(self.features(batch))
            labels += known
        shares = all_gather_objects(labels)
        places = [divmod(i, world_size) for i in range(len(index))]
        return torch.cat(features), [shares[other][k] for k, other in places]


def measure(
    scorer: Scorer,
    real: RealImages,
    others: RealImages | None,
    num_samples: int,
    cache: Path,
    labels: Sequence[int] | None = None,
) -> Reference:
    """Statistics of `real` and the floor, from the cache where they are known. A collective.

    The floor is the FID of real images in place of samples. With other real images (training images
    where the reference is the held-out split, and the reverse) it is that of `num_samples` of them,
    or of all if they are fewer, against the whole reference: what a model scores that draws from
    the training distribution. Without, some of the reference, at most one half and `num_samples`,
    are scored against others of it.

    An FID depends on the balance of classes, so the images are drawn with the labels of the
    samples, as far as there are so many. The floor is the mean over `DRAWS` draws from
    `POOL` times as many images, if there are so many.

    Args:
        scorer: extracts the features.
        real: images to compare samples with.
        others: real images that are not among those; None splits `real` for the floor.
        num_samples: that will be scored.
        cache: folder.
        labels: of these samples, if they have any.

    Raises:
        ValueError: If there are fewer than 4 real images, or fewer than 2 others.
    """
    if len(real) < FEWEST or (others is not None and len(others) < 2):
        raise ValueError(
            f"an FID needs at least 4 real images and 2 others for its floor, got {len(real)} of "
            f"{real.name}" + (f" and {len(others)} of {others.name}." if others else ".")
        )
    sources = [images for images in (real, others) if images]
    prints = call_on_rank_zero(lambda: [images.fingerprint() for images in sources])
    path = cache / _cache_name(scorer.protocol, prints, num_samples, labels)
    known = call_on_rank_zero(lambda: load_statistics(path))
    if known is None:
        known = _measure_now(scorer, real, others, num_samples, labels)
        if rank_and_world_size()[0] == 0:
            save_statistics(path, known)
    floors = tuple(known.pop("floors").tolist())
    found = int(known.pop("floor_matched"))
    if not all(math.isfinite(floor) for floor in floors):
        raise ValueError(
            f"the extractor {scorer.protocol.name} gives features of real images that are not "
            "finite: its weights are broken, or not made for such images."
        )
    size, count = _floor_sizes(real, others, num_samples)
    drawn = in_words(size, (others or real).name, found if labels else None)
    text = f"{drawn} against {real.name if others else f'{count - size} others of them'}"
    return Reference(real.name, prints[0], known, floors, text)


def _cache_name(
    protocol: Features, prints: list[str], num_samples: int, labels: Sequence[int] | None
) -> str:
    """Of a file of statistics: whatever they depend on. "draws" is how the floor is measured."""
    counts = repr(sorted(Counter(labels).items())) if labels else ""
    drawn = f"draws-{hashlib.sha256(counts.encode()).hexdigest()[:8]}" if labels else "draws"
    return "-".join([protocol.name, protocol.sha256[:8], *prints, str(num_samples), drawn]) + ".npz"


def _measure_now(
    scorer: Scorer,
    real: RealImages,
    others: RealImages | None,
    num_samples: int,
    labels: Sequence[int] | None,
) -> dict[str, Tensor]:
    metric = scorer.metric()
    rank, world_size = rank_and_world_size()
    for batch, _ in real.batches(scorer.batch_size, range(len(real))[rank::world_size]):
        metric.update(scorer.features(batch), real=True)
    sums = metric.real_sums()
    size, count = _floor_sizes(real, others, num_samples)
    source = others or real
    features, known = scorer.pool(source, shuffled(len(source), -1)[:count])
    wanted = Counter(labels[:size]) if labels else Counter()
    floors = []
    for number in range(1 if size == count else DRAWS):
        chosen = draw(known, wanted, size, number)
        metric = scorer.metric()
        if others is None:
            metric.update(features[_mine(set(range(count)) - set(chosen))], real=True)
        elif rank == 0:
            metric.add_real_sums(sums)
        metric.update(features[_mine(chosen)], real=False)
        floors.append(metric.compute().cpu())
    matched = torch.tensor((Counter(known) & wanted).total())
    return sums | {"floors": torch.stack(floors), "floor_matched": matched}


def _floor_sizes(real: RealImages, others: RealImages | None, num_samples: int) -> tuple[int, int]:
    """Numbers of images of a draw, and of images to draw from."""
    if others is not None:
        return min(num_samples, len(others)), min(POOL * num_samples, len(others))
    count = min(POOL * num_samples, len(real))
    return min(num_samples, count // 2), count


def evenly_spaced(size: int, num: int) -> list[int]:
    """At most `num` of the indices 0 .. size - 1, evenly: data sets are often sorted by class.

    Example:
        >>> evenly_spaced(10, 4)
        [0, 2, 5, 7]
    """
    num = min(num, size)
    return [i * size // num for i in range(num)]


def shuffled(count: int, number: int) -> list[int]:
    """0 .. count - 1 in a random order that is always the same for a number."""
    generator = torch.Generator().manual_seed(fold("floor images", number))
    order: list[int] = torch.randperm(count, generator=generator).tolist()
    return order


def draw(labels: Sequence[int], wanted: Mapping[int, int], size: int, number: int) -> list[int]:
    """Places of `size` of the images with these labels, at random but for their labels.

    So many images of each label as are `wanted`; where there are fewer, of any label for the rest.
    Another `number` is another draw.
    """
    left = Counter(wanted)
    chosen, others = [], []
    for image in shuffled(len(labels), number):
        if left[labels[image]] > 0:
            left[labels[image]] -= 1
            chosen.append(image)
        else:
            others.append(image)
    return chosen + others[: size - len(chosen)]


def in_words(count: int, name: str, of_samples: int | None) -> str:
    """What a draw is; `of_samples` of it have the labels of samples, None where these have none."""
    if of_samples is None:
        return f"{count} {name} images"
    how = " with" if of_samples == count else f", {of_samples} with"
    return f"{count} {name} images{how} the samples' labels" + "," * (of_samples < count)


def _mine(places: Iterable[int]) -> list[int]:
    """Where this process has the features of these places of a pool, as far as it has them."""
    rank, world_size = rank_and_world_size()
    return sorted(i // world_size for i in places if i % world_size == rank)


def load_statistics(path: Path) -> dict[str, Tensor] | None:
    """What `save_statistics` wrote; None if there is no such file, ValueError if it is broken."""
    if not path.exists():
        return None
    try:
        with np.load(path, allow_pickle=False) as arrays:
            found = {name: torch.from_numpy(arrays[name]) for name in arrays}
        dimensions = [found[name].ndim for name in (*REAL_SUMS, "floors", "floor_matched")]
        if dimensions != [1, 2, 0, 1, 0]:
            raise ValueError("it holds other arrays")
        return found
    except Exception as error:  # whatever zipfile and numpy say of a broken file
        raise ValueError(f"{path} is not a file of statistics ({error}); delete it.") from error


def save_statistics(path: Path, statistics: dict[str, Tensor]) -> None:
    """Write tensors as .npz, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path, shared=True) as file:
        np.savez(file, **{name: value.numpy() for name, value in statistics.items()})  # type: ignore[arg-type]
