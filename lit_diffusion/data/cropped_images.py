"""Square crops of images of any size, for the data modules that decode images.

Crops are computed as in the reference implementation of ADM, because FID depends on how images are
resized. A box filter halves the image until its shorter side is less than twice the target size. A
bicubic filter then resizes the image to the exact size. The EXIF orientation is ignored.

Source: guided_diffusion/image_datasets.py (`center_crop_arr`, `random_crop_arr`) of
github.com/openai/guided-diffusion.
"""

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from PIL import Image, ImageOps
from torch import Tensor
from torchvision.transforms.functional import pil_to_tensor

from lit_diffusion.data.base import ImageDataModule, require_at_least
from lit_diffusion.data.datasets import Batch, ImageDataset, is_mirrored, random_integers
from lit_diffusion.data.loaders import usable_cores
from lit_diffusion.files import IMAGE_MODES, open_image

CONVERTIBLE_MODES = {"1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr"}
"""Modes of at most 8 bits. Pillow clips deeper modes when it converts them."""

MAX_ENLARGED = 2 * 10**8
"""Maximum number of pixels of an image after its shorter side is enlarged to the side of a crop. A
file of 1 x 1,000,000 pixels takes 1 kB, and would take 16 GB when it is enlarged to 64 pixels."""


def resize_shorter_side(image: Image.Image, side: int) -> Image.Image:
    """Resize an image to `side` pixels on its shorter side, and keep its aspect ratio.

    Example:
        >>> resize_shorter_side(Image.new("RGB", (200, 100)), 32).size
        (64, 32)
    """
    while min(image.size) >= 2 * side:
        width, height = image.size
        image = image.resize((width // 2, height // 2), Image.Resampling.BOX)
    scale = side / min(image.size)
    width, height = image.size
    return image.resize((round(width * scale), round(height * scale)), Image.Resampling.BICUBIC)


def center_crop(image: Image.Image, size: int) -> Image.Image:
    """Crop the largest center square of an image and resize it to size x size pixels."""
    image = resize_shorter_side(image, size)
    width, height = image.size
    left, upper = (width - size) // 2, (height - size) // 2
    return image.crop((left, upper, left + size, upper + size))


def random_crop(image: Image.Image, size: int, *key: int | str) -> Image.Image:
    """Crop a random square and resize it to size x size pixels.

    The side of the square is at least 0.8 of the image's shorter side. The size and position of the
    square are functions of `key`.
    """
    (margin,) = random_integers([math.ceil(size / 0.8) - size + 1], "scale", *key)
    image = resize_shorter_side(image, size + margin)
    width, height = image.size
    left, upper = random_integers([width - size + 1, height - size + 1], "place", *key)
    return image.crop((left, upper, left + size, upper + size))


@dataclass(frozen=True)
class Requirements:
    """Requirements on image files.

    If all files meet the requirements, `check_images` writes a marker file. The name of the marker
    file contains a hash of the requirements (the repr of this object), so that other requirements
    cause a new check.

    Attributes:
        image_size: pixels on each side of a crop.
        channels: channels of the images.
        strict: whether an image must have the Pillow mode for `channels` (such as RGB for 3), and
            at least `image_size` pixels on its shorter side. If False, the image may be smaller,
            and may have any mode that Pillow converts without clipping.
        full: whether to decode files, which detects truncated files. If False, only headers are
            read.
    """

    image_size: int
    channels: int
    strict: bool
    full: bool

    def find_fault(self, path: Path) -> str | None:
        """Return the fault of a file as a phrase, such as "has mode P"; None if it is usable."""
        try:
            with open_image(path) as image:
                mode, size = image.mode, image.size
                if self.full:
                    image.draft("L", (1, 1))  # a JPEG is read to its end, but decoded at 1/8 scale
                    image.load()
        except Exception as error:  # Pillow's decoders raise anything on broken data
            return f"cannot be read ({error})"
        return self.find_mismatch(mode, size)

    def find_mismatch(self, mode: str, size: tuple[int, int]) -> str | None:
        """Return why an image with this mode and size is unusable; None if it is usable."""
        expected, side = IMAGE_MODES[self.channels], min(size)
        if mode not in ({expected} if self.strict else CONVERTIBLE_MODES):
            return f"has mode {mode}, not {expected}"
        if self.strict and side < self.image_size:
            return f"is only {side} pixels on its shorter side, less than {self.image_size}"
        if max(size) * self.image_size**2 > MAX_ENLARGED * side:
            long = "{}x{}".format(*size)
            return f"has {long} pixels, too long to enlarge its shorter side to {self.image_size}"
        return None


@dataclass(frozen=True, eq=False)
class CroppedImages(ImageDataset):
    """Square crops of images. Without a seed they are center crops."""

    image_size: int  # pixels on each side of a crop
    mode: str  # Pillow mode, such as RGB
    flip: bool  # whether images are flipped with probability 1/2, anew in every epoch
    random_crop: bool  # whether crops are random; otherwise center crops

    @abstractmethod
    def read(self, index: Sequence[int]) -> tuple[Iterator[Image.Image], Tensor]:
        """Return the images at `index` of the split, decoded lazily, and their labels (B,)."""

    def fetch(self, epochs: Sequence[int], index: Sequence[int]) -> Batch:
        """Load image `index[i]` with the augmentation of epoch `epochs[i]`, for each i."""
        images, labels = self.read(index)
        crops = []
        for image, epoch, i in zip(images, epochs, index, strict=True):
            if self.random_crop and self.seed is not None:
                crop = random_crop(image, self.image_size, self.seed, epoch, i)
            else:
                crop = center_crop(image, self.image_size)
            if self.flip and self.seed is not None and is_mirrored(self.seed, epoch, i):
                crop = ImageOps.mirror(crop)
            crops.append(pil_to_tensor(crop))
        return torch.stack(crops), labels, torch.tensor(index)


class CroppedImageDataModule(ImageDataModule):
    """Base class of the data modules that decode and crop images.

    Args:
        image_size: pixels on each side of a crop, >= 1.
        channels: 1 (gray), 2 (gray with alpha), 3 (RGB) or 4 (RGB with alpha).
        flip: whether to flip training images horizontally with probability 1/2. Flips differ
            between epochs.
        random_crop: whether training crops are random. The side of a random square is at least
            0.8 of the image's shorter side. The square is resized to `image_size`.
        **loader: options of `ImageDataModule`: batch_size, num_workers, num_predict, seed.

    Raises:
        ValueError: if `channels` is not 1 to 4, or `image_size` is below 1.
    """

    def __init__(
        self,
        image_size: int,
        channels: int = 3,
        flip: bool = False,
        random_crop: bool = False,
        **loader: Any,
    ) -> None:
        super().__init__(**loader)
        require_at_least(1, image_size=image_size)
        if channels not in IMAGE_MODES:
            raise ValueError(
                f"channels must be 1 (gray), 3 (RGB), 2 or 4 (with alpha), got {channels}."
            )
        self.image_size = image_size
        self.channels = channels
        self.flip = flip
        self.random_crop = random_crop

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(C, H, W) of every image."""
        return self.channels, self.image_size, self.image_size

    def crop_options(self) -> dict[str, Any]:
        """Arguments of `CroppedImages`."""
        return {
            "image_size": self.image_size,
            "mode": IMAGE_MODES[self.channels],
            "flip": self.flip,
            "random_crop": self.random_crop,
        }

    def default_workers(self) -> int:
        """Number of CPU cores for each process of this node, at most 16.

        A process that srun starts sees only its own cores. Otherwise, as under torchrun, all
        processes of a node see the same cores, so these are divided by the number of processes.
        """
        is_shared = TorchElasticEnvironment.detect() or not SLURMEnvironment.detect()
        processes = self.trainer.num_devices if self.trainer and is_shared else 1
        return max(1, min(16, usable_cores() // processes))
