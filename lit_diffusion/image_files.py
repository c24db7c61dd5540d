"""Opening image files that somebody else may have written."""

from io import BytesIO
from pathlib import Path

from PIL import Image

FORMATS = ("BMP", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""What is read. Pillow knows more, whatever a file is called, and starts Ghostscript for some."""


def open_image(path: Path | BytesIO) -> Image.Image:
    """An image file of one of `FORMATS`, of which only the header is read yet."""
    return Image.open(path, formats=FORMATS)
