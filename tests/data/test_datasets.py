import math
from dataclasses import replace

import pytest
import torch

from lit_diffusion.data.datasets import TensorImages, random_integers

IMAGES = torch.arange(500 * 12, dtype=torch.int64).remainder(251).to(torch.uint8).view(500, 1, 3, 4)
LABELS = torch.arange(500) % 5


def flipping(seed):
    return TensorImages(IMAGES, LABELS, flip=True, seed=seed)


def mirrored(dataset, epoch):
    """(N,) bool: which images differ from the original in this epoch."""
    images, _, index = dataset.__getitems__([epoch * len(dataset) + i for i in range(len(dataset))])
    assert index.tolist() == list(range(len(dataset)))
    return (images != IMAGES).flatten(1).any(1)


def test_a_batch_holds_the_images_labels_and_places_of_its_keys():
    images, labels, index = TensorImages(IMAGES, LABELS).__getitems__([7, 2, 507])
    assert torch.equal(images, IMAGES[[7, 2, 7]])
    assert labels.tolist() == [2, 2, 2]
    assert index.tolist() == [7, 2, 7]
    assert (images.dtype, labels.dtype, index.dtype) == (torch.uint8, torch.int64, torch.int64)


def test_half_of_the_images_are_mirrored_independently_in_each_epoch():
    flips = torch.stack([mirrored(flipping(0), epoch) for epoch in range(8)]).double()
    images, labels, _ = flipping(0).__getitems__(list(range(500)))
    assert torch.equal(images[flips[0] == 1], IMAGES[flips[0] == 1].flip(-1))
    assert torch.equal(labels, LABELS)
    assert not mirrored(replace(flipping(0), seed=None), epoch=0).any()
    assert abs(flips.mean() - 0.5) < 4 * 0.5 / math.sqrt(flips.numel())
    correlation = torch.corrcoef(flips) - torch.eye(8)
    assert correlation.abs().max() < 4 / math.sqrt(500)


@pytest.mark.parametrize(
    ("sizes", "bound"),  # 99.9% of chi-square with 5 and 13 degrees of freedom
    [([2, 3], 20.5), ([7, 1, 2], 34.6)],
)
def test_choices_are_uniform_and_independent(sizes, bound):
    draws = torch.tensor([random_integers(sizes, "test", i) for i in range(6000)])
    cell = torch.zeros(6000, dtype=torch.int64)
    for column, size in zip(draws.T, sizes, strict=True):
        assert ((column >= 0) & (column < size)).all()
        cell = cell * size + column
    cells = math.prod(sizes)
    expected = 6000 / cells
    chi_square = ((cell.bincount(minlength=cells) - expected) ** 2 / expected).sum()
    assert chi_square < bound
