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
    """Places of `size` of the images with these labels, at random but for their labels.

    So many images of each label as are `wanted`; where there are fewer, of any label for the rest.
    Another `number` is another draw.
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


def in_words(count: int, name: str, of_samples: int | None) -> str:
    """What a draw is; `of_samples` of it have the labels of samples, None where these have none."""
    if of_samples is None:
        return f"{count} {name} images"
    how = " with" if of_samples == count else f", {of_samples} with"
    return f"{count} {name} images{how} the samples' labels" + "," * (of_samples < count)
