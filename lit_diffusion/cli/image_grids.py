"""Arrange images and text in rows and columns of one picture."""

from collections.abc import Sequence
from itertools import accumulate

from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torchvision.transforms.functional import to_pil_image

from lit_diffusion.callbacks.sample_grid import image_grid

GAP = 8
"""Pixels between the cells of a table."""


def tile(images: Tensor, width: int) -> Image.Image:
    """Arrange images (N, C, H, W) uint8 in a grid that is about `width` pixels wide.

    If the grid is wider or higher than `2 * width` pixels, it is scaled down to this limit.
    """
    picture: Image.Image = to_pil_image(image_grid(images, width=width)).convert("RGB")
    picture.thumbnail((2 * width, 2 * width))
    return picture


def text_image(text: str) -> Image.Image:
    """Render text in black on white, in a picture of the text's size."""
    font = ImageFont.load_default(13)
    measure = ImageDraw.Draw(Image.new("RGB", (1, 1)))
    *_, width, height = measure.multiline_textbbox((0, 0), text, font=font)
    picture = Image.new("RGB", (round(width) + 1, round(height) + 1), "white")
    ImageDraw.Draw(picture).multiline_text((0, 0), text, "black", font=font, align="center")
    return picture


def table(rows: Sequence[Sequence[Image.Image]]) -> Image.Image:
    """Arrange rows of pictures in a white table; each picture is centered in its cell."""
    widths = [max(picture.width for picture in column) + GAP for column in zip(*rows, strict=True)]
    heights = [max(picture.height for picture in row) + GAP for row in rows]
    whole = Image.new("RGB", (sum(widths), sum(heights)), "white")
    for row, height, bottom in zip(rows, heights, accumulate(heights), strict=True):
        for picture, width, right in zip(row, widths, accumulate(widths), strict=True):
            left = right - (width + picture.width) // 2
            whole.paste(picture, (left, bottom - (height + picture.height) // 2))
    return whole
