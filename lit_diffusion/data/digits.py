"""The handwritten digits that ship inside scikit-learn: real images, no download."""

from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor

from lit_diffusion.data.base import ImageDataModule, Split
from lit_diffusion.data.datasets import TensorImages, part_of
from lit_diffusion.seeding import fold


class Digits(ImageDataModule):
    """1,797 handwritten digits of 8x8 pixels: 1,437 to train on, 360 held out, 36 of each class.

    The 17 grey levels v = 0..16 become round(255 v / 16) in uint8.

    Args:
        part: (k, n) trains on every n-th training digit from the k-th on.
        **loader: as in `ImageDataModule`: batch_size, num_workers, num_predict, seed.

    Raises:
        ValueError: unless 0 <= k < n.

    Source: E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine
    Learning Repository, 1998; its test part, as distributed with scikit-learn.

    Example:
        >>> images, labels, index = next(iter(Digits(batch_size=4).val_dataloader()))
        >>> images.shape, images.dtype, len(Digits().dataset("train"))
        (torch.Size([4, 1, 8, 8]), torch.uint8, 1437)
    """

    image_shape = (1, 8, 8)
    class_names = tuple("0123456789")

    def __init__(self, *args: Any, part: tuple[int, int] = (0, 1), **loader: Any) -> None:
        super().__init__(*args, **loader)
        self.part = part

    def load(self, split: Split) -> TensorImages:
        """Open a split."""
        pixels, classes = load_digits(return_X_y=True)
        levels = torch.from_numpy(pixels).long().view(-1, *self.image_shape)
        images, labels = (levels * 255 + 8) // 16, torch.from_numpy(classes).long()
        chosen = is_held_out(labels) if split == "val" else ~is_held_out(labels)
        found = TensorImages(images[chosen].to(torch.uint8), labels[chosen])
        return found if split == "val" else part_of(found, self.part)


def is_held_out(labels: Tensor) -> Tensor:
    """Which digits of scikit-learn's file are held out, (N,) bool, by their labels (N,) in 0..9.

    In each class, the 36 whose places i in the file have the least `fold("digits held out", i)`.
    """
    held_out = torch.zeros(len(labels), dtype=torch.bool)
    for label in range(10):
        places = (labels == label).nonzero().flatten().tolist()
        places.sort(key=lambda place: fold("digits held out", place))
        held_out[places[:36]] = True
    return held_out
