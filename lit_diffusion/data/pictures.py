"""What data modules of pictures share, wherever these lie: square crops, mirrored or not."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from PIL import Image, ImageOps
from torch import Tensor
from torchvision.transforms.functional import pil_to_tensor

from lit_diffusion.data.base import ImageDataModule, require_at_least
from lit_diffusion.data.crops import center_crop, random_crop
from lit_diffusion.data.datasets import Batch, ImageDataset, mirror
from lit_diffusion.data.folder_scan import MODES
from lit_diffusion.data.loaders import usable_cores


@dataclass(frozen=True, eq=False)
class CroppedPictures(ImageDataset):
    """Square crops of pictures in Pillow's `mode`; without a seed, of their middle."""

    image_size: int
    mode: str
    flip: bool
    random_crop: bool

    @abstractmethod
    def read(self, index: Sequence[int]) -> tuple[Iterator[Image.Image], Tensor]:
        """Pictures `index` of the split, in `mode` and decoded one by one, and labels (B,)."""

    def fetch(self, epochs: Sequence[int], index: Sequence[int]) -> Batch:
        """Images `index` of the split as they look in `epochs`."""
        pictures, labels = self.read(index)
        crops = [self._crop(*each) for each in zip(pictures, epochs, index, strict=True)]
        return torch.stack([pil_to_tensor(crop) for crop in crops]), labels, torch.tensor(index)

    def _crop(self, image: Image.Image, epoch: int, index: int) -> Image.Image:
        if self.seed is not None and self.random_crop:
            image = random_crop(image, self.image_size, self.seed, epoch, index)
        else:
            image = center_crop(image, self.image_size)
        mirrored = self.flip and self.seed is not None and mirror(self.seed, epoch, index)
        return ImageOps.mirror(image) if mirrored else image


class Pictures(ImageDataModule):
    """Base of the data modules that decode pictures.

    A picture is resized so that its shorter side fits, and cropped, as in guided-diffusion
    (`crops`); EXIF orientation is ignored, as there.

    Args:
        image_size: pixels on each side of a crop, >= 1.
        channels: 1 (grey), 3 (RGB), or 2 or 4 for these with alpha.
        flip: whether half of the training images, chosen anew every epoch, are mirrored.
        random_crop: whether training crops are random, with at least 0.8 of the shorter side.
        **loader: as in `ImageDataModule`: batch_size, num_workers, num_predict, seed.
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
        if channels not in MODES:
            raise ValueError(
                f"channels must be 1 (grey), 3 (RGB), 2 or 4 (with alpha), got {channels}."
            )
        self.image_size = image_size
        self.channels = channels
        self.flip = flip
        self.random_crop = random_crop

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(C, H, W) of every image."""
        return self.channels, self.image_size, self.image_size

    def view(self) -> dict[str, Any]:
        """What `CroppedPictures` is told of the crops."""
        return {
            "image_size": self.image_size,
            "mode": MODES[self.channels],
            "flip": self.flip,
            "random_crop": self.random_crop,
        }

    def default_workers(self) -> int:
        """CPUs for each of this node's processes, at most 16.

        Slurm lets a process see its own CPUs only; elsewhere processes share those they see.
        """
        shared = self.trainer is not None and not SLURMEnvironment.detect()
        processes = self.trainer.num_devices if self.trainer and shared else 1
        return max(1, min(16, usable_cores() // processes))
