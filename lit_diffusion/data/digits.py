"""The handwritten digits that come with scikit-learn, with labels or descriptions."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor

from lit_diffusion.conditioning import Words
from lit_diffusion.data.base import ImageDataModule, Split
from lit_diffusion.data.datasets import TensorImages, take_part
from lit_diffusion.seeding import fold


class Digits(ImageDataModule):
    """1,797 handwritten digits of 8x8 pixels: 1,437 for training, and 360 held out (36 per class).

    The 17 gray levels v = 0, ..., 16 become `round(255 * v / 16)` in uint8.

    Args:
        part: pair (k, n). Training uses only the training digits k, k + n, k + 2n, and so on.
        **loader: options of `ImageDataModule`: batch_size, num_workers, num_predict, seed.

    Raises:
        ValueError: if not 0 <= k < n.

    Source: E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine
    Learning Repository, 1998. scikit-learn distributes the test set of these data.

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
        """Open a split, without augmentation."""
        pixels, classes = load_digits(return_X_y=True)
        levels = torch.from_numpy(pixels).long().view(-1, *self.image_shape)
        images, labels = (levels * 255 + 8) // 16, torch.from_numpy(classes).long()
        mask = is_held_out(labels) if split == "val" else ~is_held_out(labels)
        data = TensorImages(images[mask].to(torch.uint8), labels[mask])
        return data if split == "val" else take_part(data, self.part)


def is_held_out(labels: Tensor) -> Tensor:
    """Return a bool mask (N,) of the held-out digits, from the labels (N,) of scikit-learn's file.

    In each class, the 36 digits with the smallest hashes `fold("digits held out", i)` are held out,
    where i is the index of a digit in the file.
    """
    mask = torch.zeros(len(labels), dtype=torch.bool)
    for label in range(10):
        indices = (labels == label).nonzero().flatten().tolist()
        indices.sort(key=lambda i: fold("digits held out", i))
        mask[indices[:36]] = True
    return mask


# Descriptions of ink and slant, such as "thick seven leaning right". The three words for ink are
# terciles over all training digits, and so are the three for slant. A word means the same for every
# class, and some descriptions have no training image: no seven leans left.

INKS = ("thin", "medium", "thick")
NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
SLANTS = ("leaning left", "upright", "leaning right")
DESCRIPTIONS = tuple(f"{ink} {name} {slant}" for name in NAMES for ink in INKS for slant in SLANTS)
"""All 90 descriptions, at index 9 * class + 3 * ink + slant."""


@dataclass(frozen=True)
class DigitWords(Words):
    """Condition of `DescribedDigits`: descriptions in words, over a fixed vocabulary.

    By default, seeds cycle through the 90 descriptions.

    Example:
        >>> DigitWords().encode("thin one upright").tolist(), DigitWords().num_words
        ([0, 4, 14, -1], 17)
    """

    vocabulary: tuple[str, ...] = (*INKS, *NAMES, "leaning", "upright", "left", "right")
    length: int = 4
    texts: tuple[str, ...] = DESCRIPTIONS


class DescribedDigits(Digits):
    """`Digits` with descriptions instead of labels.

    A batch contains the descriptions as word ids (B, 4) int64 (see `DigitWords`).

    Example:
        >>> images, words, index = next(iter(DescribedDigits(batch_size=4).val_dataloader()))
        >>> words.shape, words.dtype
        (torch.Size([4, 4]), torch.int64)
    """

    class_names = ()

    def load(self, split: Split) -> TensorImages:
        """Open a split, without augmentation."""
        digits = super().load(split)
        numbers = number_descriptions(digits.images, digits.labels)
        return TensorImages(digits.images, self.condition_of(numbers))

    def condition_of(self, seeds: Tensor) -> Tensor:
        """Return int64 word ids (B, 4) for images to generate. Seed s has description `s % 90`."""
        words = DigitWords().for_seeds(seeds.tolist())
        assert isinstance(words, Tensor)
        return words


def number_descriptions(images: Tensor, classes: Tensor) -> Tensor:
    """Return indices (N,) in `DESCRIPTIONS`, one for each of the images (N, 1, 8, 8) uint8."""
    ink, slant = (
        torch.bucketize(values, boundaries)
        for values, boundaries in zip(measure_ink_and_slant(images), _terciles(), strict=True)
    )
    return 9 * classes + 3 * ink + slant


@cache
def _terciles() -> tuple[Tensor, Tensor]:
    """Tercile boundaries (2,) float64 of ink and of slant over the training digits."""
    thirds = torch.tensor([1 / 3, 2 / 3], dtype=torch.float64)
    ink, slant = measure_ink_and_slant(Digits().load("train").images)
    return ink.quantile(thirds), slant.quantile(thirds)


def measure_ink_and_slant(images: Tensor) -> tuple[Tensor, Tensor]:
    """Measure ink and slant of bright figures on black.

    Let w be the pixel values, and let r and c be the row and column of a pixel relative to the
    center of the ink (the mean position weighted by w). Ink is `mean(w)`. Slant is
    `-sum(w * r * c) / sum(w * r**2)`, the number of pixels by which a stroke moves to the right for
    each pixel upwards.

    Args:
        images: (N, 1, H, W) uint8.

    Returns:
        Ink and slant, each (N,) float64. Ink is in [0, 1]. Slant is 0 if all ink is in one row.

    Example:
        >>> diagonal = 255 * torch.eye(4, dtype=torch.uint8)[None, None]
        >>> measure_ink_and_slant(torch.cat([diagonal, diagonal.flip(-1)]))
        (tensor([0.2500, 0.2500], dtype=torch.float64), tensor([-1.,  1.], dtype=torch.float64))
    """
    w = images[:, 0].double() / 255  # (N, H, W)
    total = w.sum((1, 2), keepdim=True).clamp(min=1e-12)
    row, column = (torch.arange(size).double() for size in w.shape[1:])
    r = row[:, None] - (w * row[:, None]).sum((1, 2), keepdim=True) / total  # (N, H, 1)
    c = column - (w * column).sum((1, 2), keepdim=True) / total  # (N, 1, W)
    return w.mean((1, 2)), -(w * r * c).sum((1, 2)) / (w * r * r).sum((1, 2)).clamp(min=1e-12)
