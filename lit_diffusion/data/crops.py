"""Square crops of pictures of any size, resized as the reference implementation of ADM does it.

A box filter halves the picture while it can, then a bicubic filter makes the shorter side exact.
FID moves with the resize, so it is part of what makes figures comparable.

Source: guided_diffusion/image_datasets.py (`center_crop_arr`, `random_crop_arr`) of
github.com/openai/guided-diffusion.
"""

import math

from PIL import Image

from lit_diffusion.data.datasets import choose


def resize_shorter_side(image: Image.Image, side: int) -> Image.Image:
    """The picture with its shorter side `side` pixels long, and its proportions."""
    while min(image.size) >= 2 * side:
        width, height = image.size
        image = image.resize((width // 2, height // 2), Image.Resampling.BOX)
    scale = side / min(image.size)
    width, height = image.size
    return image.resize((round(width * scale), round(height * scale)), Image.Resampling.BICUBIC)


def center_crop(image: Image.Image, size: int) -> Image.Image:
    """The middle of the picture, with all of its shorter side, as size x size pixels."""
    image = resize_shorter_side(image, size)
    width, height = image.size
    left, upper = (width - size) // 2, (height - size) // 2
    return image.crop((left, upper, left + size, upper + size))


def random_crop(image: Image.Image, size: int, *key: int | str) -> Image.Image:
    """A square with at least 0.8 of the shorter side at a random place, as size x size pixels.

    Scale and place are functions of the key.
    """
    (larger,) = choose([math.ceil(size / 0.8) - size + 1], "scale", *key)
    image = resize_shorter_side(image, size + larger)
    width, height = image.size
    left, upper = choose([width - size + 1, height - size + 1], "place", *key)
    return image.crop((left, upper, left + size, upper + size))
