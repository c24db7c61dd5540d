"""Real images to compare with, their statistics, and the floor that these set under any FID."""

import hashlib
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset

from lit_diffusion.metrics.frechet import FrechetDistance
from lit_diffusion.metrics.protocols import FIDProtocol, match_channels
from lit_diffusion.seeding import fold

T = TypeVar("T")


@runtime_checkable
class HasSplits(Protocol):
    """A data module that shows its splits "train" and "val" without augmentation."""

    def in_order(self, split: Any) -> DataLoader[Any]:
        """Every image of a split once."""
        ...

    def fingerprint(self, split: Any) -> str:
        """Changes when an image of the split does."""
        ...


@dataclass(frozen=True)
class RealImages:
    """A set of real images.

    Args:
        name: split or path.
        dataset: map-style; a sample is an image uint8 (C, H, W) or a tuple that begins with one.
        collate: as in `DataLoader`.
        num_workers: processes that load.
        known_fingerprint: gives the fingerprint faster than by reading all images; None reads them.
    """

    name: str
    dataset: Dataset[Any]
    collate: Callable[[list[Any]], Any] | None = None
    num_workers: int = 0
    known_fingerprint: Callable[[], str] | None = None

    def __len__(self) -> int:
        if not hasattr(self.dataset, "__len__"):
            raise TypeError(
                f"{self.name}: {type(self.dataset).__name__} has no length, so its images cannot "
                "be counted; name a folder or an .npz file of them as the reference instead."
            )
        return len(self.dataset)

    def batches(self, batch_size: int, index: Sequence[int] | None = None) -> Iterator[Tensor]:
        """Images uint8 (N, C, H, W), in order.

        Args:
            batch_size: images at a time.
            index: which; None is all.

        Raises:
            TypeError: If they are not uint8.
        """
        chosen = Subset(self.dataset, range(len(self)) if index is None else index)
        loader = DataLoader(
            chosen, batch_size, num_workers=self.num_workers, collate_fn=self.collate
        )
        for batch in loader:
            images = batch[0] if isinstance(batch, (tuple, list)) else batch
            if not isinstance(images, Tensor) or images.dtype != torch.uint8 or images.ndim != 4:
                raise TypeError(
                    f"{self.name}: real images must be uint8 (C, H, W) in [0, 255], as they are "
                    f"before any transform, got {getattr(images, 'dtype', type(images))}; name a "
                    "folder or an .npz file of them as the reference instead."
                )
            yield images

    def image(self, index: int) -> Tensor:
        """One image uint8 (C, H, W)."""
        sample = self.dataset[index]
        image: Tensor = sample[0] if isinstance(sample, (tuple, list)) else sample
        return image[0] if image.ndim == 4 else image  # a data set may fetch a batch of one

    def fingerprint(self) -> str:
        """16 hex digits that change with any pixel."""
        if self.known_fingerprint is not None:
            return self.known_fingerprint()
        digest = hashlib.sha256()
        for images in self.batches(256):
            digest.update(images.contiguous().numpy().tobytes())
        digest.update(repr(tuple(images.shape[1:])).encode())
        return digest.hexdigest()[:16]


@dataclass(frozen=True)
class Reference:
    """Statistics of the real images under one FID protocol.

    Attributes:
        name: split or path of the images.
        fingerprint: of their pixels.
        sums: as `FrechetDistance.real_sums` gives them.
        floor: FID of real images in place of samples.
        floor_images: which ones.
    """

    name: str
    fingerprint: str
    sums: dict[str, Tensor]
    floor: float
    floor_images: str

    @property
    def num_images(self) -> int:
        """Number of real images."""
        return int(self.sums["real_features_num_samples"])


@dataclass(frozen=True)
class Scorer:
    """An extractor on a device, and the batch size it is used with.

    Args:
        protocol: that the extractor follows.
        extractor: what `protocol.build()` gave.
        device: of the extractor; the sums are kept there, on the CPU if it has no float64.
        batch_size: images at a time.
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

    def add_real(
        self, metric: FrechetDistance, images: RealImages, index: Sequence[int], real: bool
    ) -> None:
        """Add this process's share of real images, as real or in the place of fake ones."""
        rank, world_size = place()
        for batch in images.batches(self.batch_size, index[rank::world_size]):
            metric.update(self.features(batch), real=real)


def measure(
    scorer: Scorer, real: RealImages, others: RealImages | None, num_samples: int, cache: Path
) -> Reference:
    """Statistics of `real` and the floor, from the cache where they are known. A collective.

    The floor is the FID of real images in place of samples. With other real images (training images
    where the reference is the held-out split, and the reverse) it is that of `num_samples` of them,
    or of all if they are fewer, against the whole reference: what a model scores that draws from
    the training distribution. Without, one half of the reference, up to `num_samples`, is scored
    against the other.

    Args:
        scorer: extracts the features.
        real: images to compare samples with.
        others: real images that are not among those; None splits `real` in halves for the floor.
        num_samples: that will be scored.
        cache: folder.

    Raises:
        ValueError: If there are fewer than 4 real images, or fewer than 2 others.
    """
    if len(real) < 4 or (others is not None and len(others) < 2):
        raise ValueError(
            f"an FID needs at least 4 real images and 2 others for its floor, got {len(real)} of "
            f"{real.name}" + (f" and {len(others)} of {others.name}." if others else ".")
        )
    prints = from_first(lambda: [images.fingerprint() for images in (real, others) if images])
    path = cache / "-".join(
        [scorer.protocol.name, scorer.protocol.sha256[:8], *prints, f"{num_samples}.npz"]
    )
    known = from_first(lambda: load_statistics(path))
    if known is None:
        known = _measure_now(scorer, real, others, num_samples)
        if place()[0] == 0:
            save_statistics(path, known)
    floor = float(known.pop("floor"))
    if not math.isfinite(floor):
        raise ValueError(
            f"the extractor {scorer.protocol.name} gives features of real images that are not "
            "finite: its weights are broken, or not made for such images."
        )
    return Reference(real.name, prints[0], known, floor, _floor_images(real, others, num_samples))


def _measure_now(
    scorer: Scorer, real: RealImages, others: RealImages | None, num_samples: int
) -> dict[str, Tensor]:
    metric = scorer.metric()
    scorer.add_real(metric, real, range(len(real)), real=True)
    sums = metric.real_sums()
    if others is not None:
        scorer.add_real(metric, others, _drawn(len(others))[:num_samples], real=False)
    else:
        metric, drawn = scorer.metric(), _drawn(len(real))
        half = len(drawn) // 2
        scorer.add_real(metric, real, drawn[:half][:num_samples], real=False)
        scorer.add_real(metric, real, drawn[half:], real=True)
    return sums | {"floor": metric.compute().cpu()}


def _floor_images(real: RealImages, others: RealImages | None, num_samples: int) -> str:
    """What the floor compares, in words."""
    if others is not None:
        return f"{min(num_samples, len(others))} {others.name} images against {real.name}"
    half = len(real) // 2
    return f"{min(num_samples, half)} {real.name} images against {len(real) - half} others of them"


def _drawn(count: int) -> list[int]:
    """Indices in a random order that is always the same."""
    generator = torch.Generator().manual_seed(fold("floor images"))
    order: list[int] = torch.randperm(count, generator=generator).tolist()
    return order


def place() -> tuple[int, int]:
    """Rank of this process and number of processes."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return 0, 1
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


def from_first(ask: Callable[[], T]) -> T:
    """What `ask` gives, or raises, on the first process: on every process."""
    rank, world_size = place()
    if world_size == 1:
        return ask()
    answer: list[Any] = [None, None]
    if rank == 0:
        try:
            answer[0] = ask()
        except Exception as error:  # the others must not wait for an answer for ever
            answer[1] = error
    torch.distributed.broadcast_object_list(answer)
    if answer[1] is not None:
        raise answer[1]
    return answer[0]  # type: ignore[no-any-return]


def default_cache() -> Path:
    """Folder for statistics of real images: $XDG_CACHE_HOME/lit-diffusion, ~/.cache without it."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "lit-diffusion"


def load_statistics(path: Path) -> dict[str, Tensor] | None:
    """What `save_statistics` wrote; None if there is no such file.

    Raises:
        ValueError: If the file is broken.
    """
    if not path.exists():
        return None
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return {name: torch.from_numpy(arrays[name]) for name in arrays}
    except Exception as error:  # whatever zipfile and numpy say of a broken file
        raise ValueError(f"{path} is not a file of statistics ({error}); delete it.") from error


def save_statistics(path: Path, statistics: dict[str, Tensor]) -> None:
    """Write tensors as .npz, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, suffix=".part")
    with os.fdopen(descriptor, "wb") as file:
        np.savez(file, **{name: value.numpy() for name, value in statistics.items()})  # type: ignore[arg-type]
    os.replace(temporary, path)
