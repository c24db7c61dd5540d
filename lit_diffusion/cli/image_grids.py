"""Pictures in rows and columns, and what is written beside them."""

from collections.abc import Sequence
from itertools import accumulate

from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torchvision.transforms.functional import to_pil_image

from lit_diffusion.callbacks.sample_grid import image_grid

GAP = 8


def tile(images: Tensor, width: int) -> Image.Image:
    """uint8 (N, C, H, W) as a grid: small ones enlarged to about `width` pixels, large ones shrunk.

    The latter to twice as many at most.
    """
    picture: Image.Image = to_pil_image(image_grid(images, width=width)).convert("RGB")
    picture.thumbnail((2 * width, 2 * width))
    return picture


def written(text: str) -> Image.Image:
    """Black on white, no larger than it is."""
    font = ImageFont.load_default(13)
    nothing = ImageDraw.Draw(Image.new("RGB", (1, 1)))
    *_, width, height = nothing.multiline_textbbox((0, 0), text, font=font)
    picture = Image.new("RGB", (round(width) + 1, round(height) + 1), "white")
    ImageDraw.Draw(picture).multiline_text((0, 0), text, "black", font=font, align="center")
    return picture


def table(rows: Sequence[Sequence[Image.Image]]) -> Image.Image:
    """Pictures in rows of equal length, each in the middle of its cell, on white."""
    widths = [max(picture.width for picture in column) + GAP for column in zip(*rows, strict=True)]
    heights = [max(picture.height for picture in row) + GAP for row in rows]
    whole = Image.new("RGB", (sum(widths), sum(heights)), "white")
    for row, height, bottom in zip(rows, heights, accumulate(heights), strict=True):
        for picture, width, right in zip(row, widths, accumulate(widths), strict=True):
            place = right - (width + picture.width) // 2, bottom - (height + picture.height) // 2
            whole.paste(picture, place)
    return whole
