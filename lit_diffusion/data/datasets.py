"""Datasets that fetch whole batches, by keys that encode epoch and index.

Datasets are indexed by keys `epoch * len(dataset) + index`, where index is the position of an image
in the dataset. Worker processes compute the epoch from the key, so random flips and crops are
functions of (seed, epoch, index) for any number of workers. Plain indices 0, 1, ... are the keys of
epoch 0.
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
for unlabeled images, or another condition (a tensor or a tuple of tensors); index (B,) int64, the
position of each image in its split."""


def random_integers(sizes: Sequence[int], *key: int | str) -> list[int]:
    """Compute independent random integers from a key. Integer k is uniform in [0, sizes[k]).

    The integers are the mixed-radix digits of a 63-bit hash of the key. The bias of their
    distribution is below `prod(sizes) / 2**63`.
    """
    number = fold(*key)
    integers = []
    for size in sizes:
        number, remainder = divmod(number, size)
        integers.append(remainder)
    return integers


def is_mirrored(seed: int, epoch: int, index: int) -> bool:
    """Whether random flipping mirrors image `index` in `epoch` (probability 1/2)."""
    return random_integers([2], "mirror", seed, epoch, index) == [1]


@dataclass(frozen=True, eq=False)
class ImageDataset(Dataset[Batch]):
    """Images of one split, by key.

    Attributes:
        seed: seed of random augmentation. None disables augmentation. For example,
            `dataclasses.replace(dataset, seed=0)` returns the same data with augmentation.
    """

    seed: int | None = field(default=None, kw_only=True)

    @abstractmethod
    def __len__(self) -> int:
        """Number of images."""

    @abstractmethod
    def fetch(self, epochs: Sequence[int], index: Sequence[int]) -> Batch:
        """Load image `index[i]` with the augmentation of epoch `epochs[i]`, for each i."""

    def __getitems__(self, keys: Sequence[int]) -> Batch:
        """The batch with these keys. DataLoader calls this method once per batch."""
        size = len(self)
        return self.fetch([key // size for key in keys], [key % size for key in keys])

    def __getitem__(self, key: int) -> Batch:
        """A batch with one image."""
        return self.__getitems__([key])


@dataclass(frozen=True, eq=False)
class TensorImages(ImageDataset):
    """Images in memory. If `flip` and `seed` are set, images are randomly flipped horizontally.

    Example:
        >>> data = TensorImages(torch.zeros(5, 1, 8, 8, dtype=torch.uint8), torch.arange(5))
        >>> images, labels, index = data[3]
        >>> images.shape, labels, index
        (torch.Size([1, 1, 8, 8]), tensor([3]), tensor([3]))
    """

    images: Tensor  # (N, C, H, W) uint8
    labels: Any  # (N,) int64, or another condition: a tensor or tuple of tensors with N rows
    flip: bool = False  # whether images are flipped with probability 1/2, anew in every epoch

    def __len__(self) -> int:
        return len(self.images)

    def fetch(self, epochs: Sequence[int], index: Sequence[int]) -> Batch:
        """Load image `index[i]` with the augmentation of epoch `epochs[i]`, for each i."""
        rows = torch.tensor(index, dtype=torch.int64)
        images = self.images[rows]
        if self.flip and self.seed is not None:
            keys = zip(epochs, index, strict=True)
            mirrored = torch.tensor([is_mirrored(self.seed, *key) for key in keys])
            images = torch.where(mirrored[:, None, None, None], images.flip(-1), images)
        if isinstance(self.labels, Tensor):
            return images, self.labels[rows], rows
        return images, tuple(tensor[rows] for tensor in self.labels), rows


def take_part(data: TensorImages, part: tuple[int, int]) -> TensorImages:
    """Select the images k, k + n, k + 2n, ... for part = (k, n).

    Parts with the same n and different k have no image in common.

    Raises:
        ValueError: if not 0 <= k < n, or if k is not below the number of images.

    Example:
        >>> data = TensorImages(torch.arange(5), torch.arange(5))
        >>> take_part(data, (0, 2)).images.tolist(), take_part(data, (1, 2)).images.tolist()
        ([0, 2, 4], [1, 3])
    """
    first, step = part or (0, 0)  # null in a config
    if not 0 <= first < min(step, len(data)):
        raise ValueError(
            f"part must be (k, n) with 0 <= k < n, and k below {len(data)}, got {part}."
        )
    return TensorImages(data.images[first::step], data.labels[first::step])
