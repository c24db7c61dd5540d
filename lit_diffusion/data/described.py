"""The digits with a written description of what is measured on each: "thick seven leaning right".

Ink and slant are thin, medium, thick and leaning left, upright, leaning right, by terciles of all
training digits. So the words say the same of every class, and some descriptions have no training
image: no seven leans left.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from lit_diffusion.conditioning import Words
from lit_diffusion.data.base import Split
from lit_diffusion.data.datasets import TensorImages
from lit_diffusion.data.digits import Digits

INKS = ("thin", "medium", "thick")
NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
SLANTS = ("leaning left", "upright", "leaning right")
DESCRIPTIONS = tuple(f"{ink} {name} {slant}" for name in NAMES for ink in INKS for slant in SLANTS)
"""Number 9 class + 3 ink + slant, as of `described`."""


@dataclass(frozen=True)
class DigitWords(Words):
    """The words of the descriptions; seeds take the 90 descriptions in turn.

    Example:
        >>> DigitWords().encode("thin one upright").tolist(), DigitWords().num_words
        ([0, 4, 14, -1], 17)
    """

    vocabulary: tuple[str, ...] = (*INKS, *NAMES, "leaning", "upright", "left", "right")
    length: int = 4
    texts: tuple[str, ...] = DESCRIPTIONS


class DescribedDigits(Digits):
    """`Digits` with words (B, 4) int64 of `DigitWords` in the place of labels.

    Example:
        >>> images, words, index = next(iter(DescribedDigits(batch_size=4).val_dataloader()))
        >>> words.shape, words.dtype
        (torch.Size([4, 4]), torch.int64)
    """

    class_names = ()

    def load(self, split: Split) -> TensorImages:
        """Open a split."""
        digits = super().load(split)
        words = DigitWords().for_seeds(described(digits.images, digits.labels).tolist())
        assert isinstance(words, Tensor)
        return TensorImages(digits.images, words)

    def condition_of(self, seeds: Tensor) -> Tensor:
        """Descriptions in turn."""
        words = DigitWords().for_seeds(seeds.tolist())
        assert isinstance(words, Tensor)
        return words


def described(images: Tensor, classes: Tensor) -> Tensor:
    """(N,) int64 numbers in DESCRIPTIONS, of images (N, 1, 8, 8) of these classes (N,)."""
    ink, slant = (
        torch.bucketize(values, cuts)
        for values, cuts in zip(measured(images), terciles(), strict=True)
    )
    return 9 * classes + 3 * ink + slant


@cache
def terciles() -> tuple[Tensor, Tensor]:
    """(2,) float64 of ink, and of slant, that part the training digits in thirds."""
    thirds = torch.tensor([1 / 3, 2 / 3], dtype=torch.float64)
    ink, slant = measured(Digits().load("train").images)
    return ink.quantile(thirds), slant.quantile(thirds)


def measured(images: Tensor) -> tuple[Tensor, Tensor]:
    """Ink and slant of bright figures on black.

    With weights w of the pixels and r, c the row and column less their means under w, ink is the
    mean of w, and slant -sum(w r c) / sum(w r^2): pixels to the right for each pixel up.

    Args:
        images: (N, 1, H, W) uint8.

    Returns:
        (N,) float64 each; ink in [0, 1], slant 0 where all ink is in one row.

    Example:
        >>> diagonal = 255 * torch.eye(4, dtype=torch.uint8)[None, None]
        >>> measured(torch.cat([diagonal, diagonal.flip(-1)]))
        (tensor([0.2500, 0.2500], dtype=torch.float64), tensor([-1.,  1.], dtype=torch.float64))
    """
    w = images[:, 0].double() / 255
    total = w.sum((1, 2), keepdim=True).clamp(min=1e-12)
    row, column = (torch.arange(size).double() for size in w.shape[1:])
    r = row[:, None] - (w * row[:, None]).sum((1, 2), keepdim=True) / total
    c = column - (w * column).sum((1, 2), keepdim=True) / total
    return w.mean((1, 2)), -(w * r * c).sum((1, 2)) / (w * r * r).sum((1, 2)).clamp(min=1e-12)
