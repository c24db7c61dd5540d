"""Which real images stand in for samples, so that an FID has a floor to be read against."""

from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from lit_diffusion.seeding import fold

DRAWS = 10
"""Draws of real images whose FIDs are averaged."""

POOL = 4
"""Images that are drawn from, as a multiple of those of one draw."""


def shuffled(count: int, number: int) -> list[int]:
    """0 .. count - 1 in a random order that is always the same for a number."""
    generator = torch.Generator().manual_seed(fold("floor images", number))
    order: list[int] = torch.randperm(count, generator=generator).tolist()
    return order


def draw(labels: Sequence[int], wanted: Mapping[int, int], size: int, number: int) -> list[int]:
    """Places of `size` images, at random but for their labels.

    Args:
        labels: of the images that there are.
        wanted: images of each label, `size` in all; fewer are taken of a label that has fewer, and
            of any for the rest. Empty takes all as they come.
        size: number of images, <= len(labels).
        number: of the draw; another number is another draw.

    Example:
        >>> sorted(draw([0, 1, 1, 1, 0], {0: 2, 1: 1}, 3, number=0))[0]
        0
    """
    left = Counter(wanted)
    chosen, others = [], []
    for place in shuffled(len(labels), number):
        if left[labels[place]] > 0:
            left[labels[place]] -= 1
            chosen.append(place)
        else:
            others.append(place)
    return chosen + others[: size - len(chosen)]


def matched(labels: Sequence[int], wanted: Mapping[int, int]) -> int:
    """How many of the wanted labels a draw finds.

    Example:
        >>> matched([0, 1, 1, 1, 0], {0: 3, 1: 1})
        3
    """
    return (Counter(labels) & Counter(wanted)).total()


def in_words(count: int, name: str, of_samples: int | None) -> str:
    """What a draw is.

    Args:
        count: images of it.
        name: of the set that they are from.
        of_samples: how many of them have labels as the samples have; None where samples have none.

    Example:
        >>> in_words(360, "train", 360)
        "360 train images with the samples' labels"
        >>> in_words(360, "train", 350)
        "360 train images, 350 with the samples' labels,"
        >>> in_words(360, "train", None)
        '360 train images'
    """
    if of_samples is None:
        return f"{count} {name} images"
    how = " with" if of_samples == count else f", {of_samples} with"
    return f"{count} {name} images{how} the samples' labels" + "," * (of_samples < count)
