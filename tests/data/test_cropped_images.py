import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_sample_image
from support.pictures import picture

from lit_diffusion.data.cropped_images import CroppedImages, center_crop, random_crop


def box(x):
    return ((x > -0.5) & (x <= 0.5)).astype(float)


def bicubic(x, a=-0.5):
    x = np.abs(x)
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * a
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))


def resample(pixels, axis, size, kernel):
    """One pass of a separable resize, as a dense matrix in float64, rounded to grey levels."""
    scale = pixels.shape[axis] / size
    place = (np.arange(size)[:, None] + 0.5) * scale
    weights = kernel((np.arange(pixels.shape[axis]) + 0.5 - place) / max(scale, 1.0))
    weights /= weights.sum(1, keepdims=True)
    out = np.moveaxis(np.tensordot(weights, pixels, axes=(1, axis)), 0, axis)
    return np.clip(np.floor(out + 0.5), 0, 255)


def resize(pixels, width, height, kernel):
    return resample(resample(pixels, 1, width, kernel), 0, height, kernel)


def reference_crop(pixels, size):
    """The centre crop of guided-diffusion, without Pillow."""
    pixels = pixels.astype(float)
    while min(pixels.shape[:2]) >= 2 * size:
        pixels = resize(pixels, pixels.shape[1] // 2, pixels.shape[0] // 2, box)
    scale = size / min(pixels.shape[:2])
    pixels = resize(pixels, round(pixels.shape[1] * scale), round(pixels.shape[0] * scale), bicubic)
    top, left = ((side - size) // 2 for side in pixels.shape[:2])
    return pixels[top : top + size, left : left + size]


@pytest.mark.parametrize(("size", "turned"), [(32, False), (100, True), (500, False)])
def test_centre_crop_equals_an_independent_implementation(size, turned):
    pixels = load_sample_image("china.jpg")
    pixels = np.ascontiguousarray(pixels.transpose(1, 0, 2)) if turned else pixels
    ours = np.array(center_crop(Image.fromarray(pixels), size)).astype(float)
    difference = np.abs(ours - reference_crop(pixels, size))
    assert difference.max() <= 1  # Pillow's weights have 22 bits, so ties may round the other way
    assert difference.mean() < 0.01


def gradient(width, height):
    """A picture whose grey level is the column."""
    return Image.fromarray(np.tile(np.arange(width, dtype=np.uint8), (height, 1)))


def test_random_crops_show_between_four_fifths_and_all_of_the_shorter_side():
    image = gradient(200, 100)
    spans = []
    for i in range(200):
        crop = np.array(random_crop(image, 50, i)).astype(float)
        assert crop.shape == (50, 50)
        spans.append((crop[25, -2] - crop[25, 1]) / 47 * 50)
    assert 78 < min(spans) < 84
    assert 96 < max(spans) < 102


def test_random_crops_reach_both_ends_of_the_longer_side():
    image = gradient(200, 100)
    left = np.array([np.array(random_crop(image, 50, i))[25, 0] for i in range(400)]).astype(float)
    assert left.min() < 6
    assert left.max() > 94
    assert abs(left.mean() - 55) < 4 * 32 / math.sqrt(400)  # uniform up to 200 minus the span


INDEX = list(range(6))


@dataclass(frozen=True, eq=False)
class Drawn(CroppedImages):
    """Six pictures, of which number i has label i."""

    image_size: int = 16
    mode: str = "RGB"
    flip: bool = False
    random_crop: bool = False

    def __len__(self):
        return len(INDEX)

    def read(self, index):
        return (picture(i) for i in index), torch.tensor(index)


def views(epoch, **options):
    """All six as they look in an epoch."""
    images, labels, index = Drawn(**options).fetch([epoch] * 6, INDEX)
    assert images.shape == (6, 3, 16, 16)
    assert labels.tolist() == index.tolist() == INDEX
    return images


def test_flips_mirror_the_crop_in_training_only():
    plain = views(0)
    assert torch.equal(views(0, flip=True, random_crop=True), plain)
    mirrored = 0
    for epoch in range(4):
        images = views(epoch, flip=True, seed=0)
        changed = (images != plain).flatten(1).any(1)
        assert torch.equal(images[changed], plain[changed].flip(-1))
        mirrored += changed.sum().item()
    assert 0 < mirrored < 24


def test_random_crops_differ_from_epoch_to_epoch_and_not_from_run_to_run():
    options = {"random_crop": True, "flip": True, "seed": 0}
    assert torch.equal(views(1, **options), views(1, **options))
    assert (views(1, **options) != views(2, **options)).flatten(1).any(1).all()
    assert (views(1, **options) != views(1, **options | {"seed": 1})).flatten(1).any(1).all()


def test_a_view_does_not_depend_on_the_other_pictures_of_its_batch():
    data = replace(Drawn(random_crop=True, flip=True), seed=3)
    together = data.fetch([2] * 6, INDEX)[0]
    assert torch.equal(data.fetch([2, 2], [4, 1])[0], together[[4, 1]])
