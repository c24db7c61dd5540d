"""Datasets that fetch whole batches, by keys that tell the epoch.

A key is `epoch * len(dataset) + index`. A worker process learns the epoch from the key itself, so a
random flip or crop is a function of (seed, epoch, index) whatever the number of workers, and plain
indices 0, 1, ... are keys of epoch 0.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import Dataset

from lit_diffusion.seeding import fold

Batch: TypeAlias = tuple[Tensor, Any, Tensor]
"""(images, labels, index): images (B, C, H, W) uint8; labels (B,) int64 in [0, num_classes), or -1
without a label, or another condition, which is a tensor or a tuple of tensors; index (B,) int64,
the place of each image in its split."""


def random_integers(sizes: Sequence[int], *key: int | str) -> list[int]:
    """Independent random integers, the k-th uniform in [0, sizes[k]), as a function of the key.

    They are the mixed-radix digits of one 63-bit number; the bias is below prod(sizes) / 2^63.
    """
    number = fold(*key)
    integers = []
    for size in sizes:
        number, remainder = divmod(number, size)
        integers.append(remainder)
    return integers


def is_mirrored(seed: int, epoch: int, index: int) -> bool:
    """Whether random flips mirror the image `index` in `epoch`."""
    return random_integers([2], "mirror", seed, epoch, index) == [1]


@dataclass(frozen=True, eq=False)
class ImageDataset(Dataset[Batch]):
    """Images of one split, by key.

    `seed` is of random augmentation; None leaves every image as it is. So
    `dataclasses.replace(dataset, seed=0)` is the same data, augmented.
    """

    seed: int | None = field(default=None, kw_only=True)

    @abstractmethod
    def __len__(self) -> int:
        """Number of images."""

    @abstractmethod
    def fetch(self, epochs: Sequence[int], index: Sequence[int]) -> Batch:
        """The batch of the images `index` of the split, augmented as in `epochs`."""

    def __getitems__(self, keys: Sequence[int]) -> Batch:
        """The batch of these keys. DataLoader calls this method once a batch."""
        size = len(self)
        return self.fetch([key // size for key in keys], [key % size for key in keys])

    def __getitem__(self, key: int) -> Batch:
        """A batch of one."""
        return self.__getitems__([key])


@dataclass(frozen=True, eq=False)
class TensorImages(ImageDataset):
    """Images in memory, mirrored at random if `flip` and a seed are set."""

    images: Tensor  # (N, C, H, W) uint8
    labels: Any  # (N,) int64, or another condition: a tensor or a tuple of tensors of N rows
    flip: bool = False  # whether half of the images, others in every epoch, are mirrored

    def __len__(self) -> int:
        return len(self.images)

    def fetch(self, epochs: Sequence[int], index: Sequence[int]) -> Batch:
        """The batch of the images `index` of the split, augmented as in `epochs`."""
        rows = torch.tensor(index, dtype=torch.int64)
        images = self.images[rows]
        if self.flip and self.seed is not None:
            keys = zip(epochs, index, strict=True)
            mirrored = torch.tensor([is_mirrored(self.seed, *key) for key in keys])
            images = torch.where(mirrored[:, None, None, None], images.flip(-1), images)
        if isinstance(self.labels, Tensor):
            return images, self.labels[rows], rows
        return images, tuple(part[rows] for part in self.labels), rows


def take_part(data: TensorImages, part: tuple[int, int]) -> TensorImages:
    """Every n-th image from the k-th on, for part = (k, n). Parts of one n are disjoint.

    Raises:
        ValueError: unless 0 <= k < n, with k below the number of images.

    Example:
        >>> data = TensorImages(torch.arange(5), torch.arange(5))
        >>> take_part(data, (0, 2)).images.tolist(), take_part(data, (1, 2)).images.tolist()
        ([0, 2, 4], [1, 3])
    """
    first, step = part
    if not 0 <= first < min(step, len(data)):
        raise ValueError(f"part must be (k, n) with 0 <= k < n, of {len(data)}, got {tuple(part)}.")
    return TensorImages(data.images[first::step], data.labels[first::step])
