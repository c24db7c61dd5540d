"""Color crops of the two photographs that scikit-learn contains. Nothing is downloaded."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sklearn.datasets import load_sample_images
from torch import Tensor

from lit_diffusion.data.base import ImageDataModule, Split, require_at_least
from lit_diffusion.data.datasets import Batch, ImageDataset, random_integers

SIZE = 32
TRAIN_ROWS = 284
"""The upper two thirds of the 427 rows are for training. No crop crosses this boundary."""


@dataclass(frozen=True, eq=False)
class RandomPatches(ImageDataset):
    """Random 32x32 crops of photos. The label of a crop is the index of its photo.

    Crop positions are a function of (seed, epoch, index). If `seed` is None, a fixed seed is used.
    """

    photos: Tensor  # (P, C, H, W) uint8
    count: int  # number of crops in an epoch
    stream: str  # name of the random stream that crop positions are drawn from

    def __len__(self) -> int:
        return self.count

    def fetch(self, epochs: Sequence[int], index: Sequence[int]) -> Batch:
        """Load the crops at `index`. The position of each crop depends on its epoch."""
        windows = self.photos.unfold(2, SIZE, 1).unfold(3, SIZE, 1)  # a view (P, C, Y, X, 32, 32)
        num_photos, _, num_rows, num_columns = windows.shape[:4]
        sizes = [num_photos, num_rows, num_columns]
        seed = "fixed" if self.seed is None else self.seed
        positions = [
            random_integers(sizes, self.stream, seed, epoch, i)
            for epoch, i in zip(epochs, index, strict=True)
        ]
        photo, y, x = torch.tensor(positions).unbind(1)
        return windows[photo, :, y, x], photo, torch.tensor(index)


class PhotoPatches(ImageDataModule):
    """Random 32x32 color crops of two photographs: a temple (label 0) and a flower (label 1).

    Each photograph has 427 rows and 640 columns. Training crops are from rows 0-283, and are drawn
    anew in every epoch. Held-out crops are from rows 284-426 and are fixed. The two splits have no
    pixel in common. `images("train")` returns fixed crops of the training rows.

    Args:
        epoch_size: number of training crops in an epoch, >= 1.
        num_val: number of held-out crops, >= 1.
        **loader: options of `ImageDataModule`: batch_size, num_workers, num_predict, seed.

    Source: photographs by danielbuechele and vultilion on Flickr (CC BY 2.0), as distributed with
    scikit-learn.

    Example:
        >>> images, labels, index = next(iter(PhotoPatches(batch_size=4).val_dataloader()))
        >>> images.shape, images.dtype
        (torch.Size([4, 3, 32, 32]), torch.uint8)
    """

    image_shape = (3, SIZE, SIZE)
    class_names = ("china", "flower")

    def __init__(self, epoch_size: int = 12_800, num_val: int = 1024, **loader: Any) -> None:
        super().__init__(**loader)
        require_at_least(1, epoch_size=epoch_size, num_val=num_val)
        self.epoch_size = epoch_size
        self.num_val = num_val

    def load(self, split: Split) -> RandomPatches:
        """Open a split, without augmentation."""
        photos = torch.stack(
            [torch.tensor(photo).permute(2, 0, 1) for photo in load_sample_images().images]
        )
        if split == "train":
            return RandomPatches(photos[:, :, :TRAIN_ROWS], self.epoch_size, "train crops")
        return RandomPatches(photos[:, :, TRAIN_ROWS:], self.num_val, "val crops")
