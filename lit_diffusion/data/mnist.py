"""MNIST and FashionMNIST, loaded into memory."""

import shutil
import tempfile
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torchvision import datasets
from torchvision.datasets.mnist import read_image_file, read_label_file

from lit_diffusion.data.base import ImageDataModule, Split
from lit_diffusion.data.datasets import TensorImages, take_part


class MNIST(ImageDataModule):
    """MNIST: 60,000 training and 10,000 held-out gray digits of 28x28 pixels.

    Missing files are downloaded into `root`. Without internet access, put them there yourself.

    Args:
        root: folder that contains `MNIST/raw/train-images-idx3-ubyte` and the other files.
        part: pair (k, n). Training uses only the training images k, k + n, k + 2n, and so on.
        image_size: pixels on each side: 28, 16 or 8. With 16 or 8, images are padded to 32x32
            pixels, and each pixel is the mean of a block of 2x2 or 4x4 pixels.
        **loader: options of `ImageDataModule`: batch_size, num_workers, num_predict, seed.

    Raises:
        FileNotFoundError: if files are missing and cannot be downloaded. The message names the
            files and their folder.
        ValueError: if a file is truncated or has unexpected content, if `part` does not satisfy
            `0 <= k < n`, or if `image_size` is not 28, 16 or 8.

    Source: Y. LeCun, C. Cortes and C. Burges, "The MNIST database of handwritten digits", 1998.

    Example:
        >>> data = MNIST(root="data", batch_size=128)
        >>> data.image_shape, data.num_classes
        ((1, 28, 28), 10)
    """

    class_names: ClassVar[tuple[str, ...]] = tuple("0123456789")
    _source: ClassVar[type[datasets.MNIST]] = datasets.MNIST

    def __init__(
        self,
        root: str = "data",
        part: tuple[int, int] = (0, 1),
        image_size: int = 28,
        **loader: Any,
    ) -> None:
        super().__init__(**loader)
        if image_size not in (28, 16, 8):
            raise ValueError(f"image_size must be 28, 16 or 8, got {image_size}.")
        self.image_size = image_size
        self.part = part
        self.root = Path(root).expanduser()

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(C, H, W) of every image."""
        return 1, self.image_size, self.image_size

    def check(self) -> None:
        """Download missing files."""
        if not self._missing():
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            # Other processes may download at the same time, so each uses a temporary folder.
            with tempfile.TemporaryDirectory(dir=self._folder) as temporary:
                self._source(temporary, download=True)
                for name in self._missing():
                    shutil.move(Path(temporary, self._name, "raw", name), self._folder / name)
        except (OSError, RuntimeError, ValueError) as error:
            reason = " ".join(str(error).split())  # torchvision reports one line per mirror
            raise self._missing_files_error(f"could not be downloaded ({reason})") from error

    def pending_setup(self) -> str | None:
        """Return text that announces a download; None if no file is missing."""
        if not self._missing():
            return None
        return f"{self._name} will be downloaded into {self.root}, which needs a network"

    def load(self, split: Split) -> TensorImages:
        """Open a split, without augmentation."""
        prefix = self._folder / ("t10k" if split == "val" else "train")
        try:
            # torchvision's class is not used, because it prefers an old `processed` folder.
            images = read_image_file(f"{prefix}-images-idx3-ubyte")
            labels = read_label_file(f"{prefix}-labels-idx1-ubyte")
            if images.shape != (len(labels), 28, 28) or not 0 <= labels.min() <= labels.max() <= 9:
                raise ValueError(f"images {tuple(images.shape)}, labels {tuple(labels.shape)}")
        except FileNotFoundError as error:
            raise self._missing_files_error("are not complete") from error
        except Exception as error:  # torchvision raises many types for damaged files
            reason = str(error) or type(error).__name__
            raise ValueError(
                f"{prefix}-* are not files of {self._name} ({reason}); delete them."
            ) from error
        images = images[:, None]
        if self.image_size != 28:
            padded = F.pad(images, (2, 2, 2, 2)).float()
            images = F.avg_pool2d(padded, 32 // self.image_size).round().to(torch.uint8)
        data = TensorImages(images, labels)
        return data if split == "val" else take_part(data, self.part)

    @property
    def _name(self) -> str:
        return self._source.__name__

    @property
    def _folder(self) -> Path:
        return self.root / self._name / "raw"

    def _missing(self) -> list[str]:
        names = [Path(name).stem for name, _ in self._source.resources]
        return [name for name in names if not (self._folder / name).is_file()]

    def _missing_files_error(self, reason: str) -> FileNotFoundError:
        return FileNotFoundError(
            f"The files of {self._name} {reason}. In {self._folder}: "
            f"{', '.join(self._missing())} missing. Put these files there, unpacked."
        )


class FashionMNIST(MNIST):
    """FashionMNIST: 60,000 training and 10,000 held-out gray images of clothes, 28x28 pixels.

    Missing files are downloaded into `root`. Without internet access, put them there yourself.

    Args:
        root: folder that contains `FashionMNIST/raw/train-images-idx3-ubyte` and the other files.
        part: pair (k, n). Training uses only the training images k, k + n, k + 2n, and so on.
        image_size: pixels on each side: 28, 16 or 8. With 16 or 8, images are padded to 32x32
            pixels, and each pixel is the mean of a block of 2x2 or 4x4 pixels.
        **loader: options of `ImageDataModule`: batch_size, num_workers, num_predict, seed.

    Raises:
        FileNotFoundError: if files are missing and cannot be downloaded. The message names the
            files and their folder.
        ValueError: if a file is truncated or has unexpected content, if `part` does not satisfy
            `0 <= k < n`, or if `image_size` is not 28, 16 or 8.

    Source: Xiao, Rasul & Vollgraf 2017 (arXiv 1708.07747).

    Example:
        >>> FashionMNIST(root="data").class_names[0]
        'T-shirt/top'
    """

    class_names = tuple(datasets.FashionMNIST.classes)
    _source = datasets.FashionMNIST
