"""MNIST and what is stored like it, whole in memory."""

import shutil
import tempfile
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor
from torchvision import datasets
from torchvision.datasets.mnist import read_image_file, read_label_file

from lit_diffusion.data.base import Awaited, ImageDataModule, Split
from lit_diffusion.data.datasets import TensorImages, part_of

_PREFIX = {"train": "train", "val": "t10k"}


class MNIST(ImageDataModule):
    """60,000 training and 10,000 held-out grey digits of 28x28 pixels.

    Downloaded once where there is a network, otherwise expected in `root`.

    Args:
        root: folder that holds, or will hold, `MNIST/raw/train-images-idx3-ubyte` and so on.
        part: (k, n) trains on every n-th training image from the k-th on.
        **loader: as in `ImageDataModule`: batch_size, num_workers, num_predict, seed.

    Raises:
        FileNotFoundError: If files are missing and cannot be downloaded; says which, and where to
            put them.
        ValueError: If a file is cut or holds something else, or unless 0 <= k < n.

    Source: Y. LeCun, C. Cortes and C. Burges, "The MNIST database of handwritten digits", 1998.
    """

    image_shape = (1, 28, 28)
    class_names: ClassVar[tuple[str, ...]] = tuple("0123456789")
    _source: ClassVar[type[datasets.MNIST]] = datasets.MNIST

    def __init__(self, root: str = "data", part: tuple[int, int] = (0, 1), **loader: Any) -> None:
        super().__init__(**loader)
        self.part = part
        self.root = Path(root).expanduser()

    def check(self) -> None:
        """Download what is missing."""
        if not self._missing():
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self._folder) as own:  # others may download too
                self._source(own, download=True)
                for name in self._missing():
                    shutil.move(Path(own, self._name, "raw", name), self._folder / name)
        except (OSError, RuntimeError, ValueError) as error:
            reason = " ".join(str(error).split())  # torchvision tells of each mirror in lines
            raise FileNotFoundError(
                f"The files of {self._name} could not be downloaded ({reason}). In {self._folder}: "
                f"{', '.join(self._missing())} missing. Put these there, unpacked."
            ) from error

    def awaited(self) -> Awaited | None:
        """Whether files have yet to be downloaded."""
        if not self._missing():
            return None
        return Awaited(f"{self._name} will be downloaded into {self.root}", needs_network=True)

    def load(self, split: Split) -> TensorImages:
        """Open a split."""
        images = self._read(f"{_PREFIX[split]}-images-idx3-ubyte")
        labels = self._read(f"{_PREFIX[split]}-labels-idx1-ubyte")
        if images.shape[1:] != (28, 28) or labels.shape != images.shape[:1] or labels.max() > 9:
            raise ValueError(
                f"The {split} files of {self._name} in {self._folder} hold images "
                f"{tuple(images.shape)} and labels {tuple(labels.shape)} up to {labels.max()}; "
                "delete them."
            )
        found = TensorImages(images.view(-1, *self.image_shape), labels.long())
        return found if split == "val" else part_of(found, self.part)

    def _read(self, name: str) -> Tensor:
        path = self._folder / name
        read = read_image_file if "images" in name else read_label_file
        try:
            found: Tensor = read(str(path))
            if found.numel() == 0 or found.min() < 0:
                raise ValueError("no such numbers")
        except Exception as error:  # torchvision asserts, indexes and views as it reads
            reason = str(error) or type(error).__name__
            raise ValueError(f"{path} is no file of {self._name} ({reason}); delete it.") from error
        return found

    @property
    def _name(self) -> str:
        return self._source.__name__

    @property
    def _folder(self) -> Path:
        return self.root / self._name / "raw"

    def _missing(self) -> list[str]:
        names = [Path(name).stem for name, _ in self._source.resources]
        return [name for name in names if not (self._folder / name).is_file()]


class FashionMNIST(MNIST):
    """60,000 training and 10,000 held-out grey pictures of clothes, of 28x28 pixels.

    Args:
        root: folder that holds, or will hold, `FashionMNIST/raw/train-images-idx3-ubyte` and so on.
        part, **loader: as of `MNIST`.

    Raises:
        FileNotFoundError, ValueError: as `MNIST`.

    Source: Xiao, Rasul & Vollgraf 2017 (arXiv 1708.07747).
    """

    class_names = tuple(datasets.FashionMNIST.classes)
    _source = datasets.FashionMNIST
