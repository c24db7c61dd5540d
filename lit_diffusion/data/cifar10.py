"""CIFAR-10, loaded into memory."""

import fcntl
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torchvision import datasets
from torchvision.datasets.utils import check_integrity

from lit_diffusion.data.base import ImageDataModule, Split
from lit_diffusion.data.datasets import TensorImages
from lit_diffusion.files import check_regular


class CIFAR10(ImageDataModule):
    """CIFAR-10: 50,000 training and 10,000 held-out color images of 32x32 pixels, in ten classes.

    Missing files are downloaded into `root`. Without internet access, put them there yourself.
    Before a file is opened, its MD5 is compared with the published MD5.

    Args:
        root: folder that contains `cifar-10-batches-py` or `cifar-10-python.tar.gz`.
        flip: whether to flip training images horizontally with probability 1/2. Flips differ
            between epochs.
        **loader: options of `ImageDataModule`: batch_size, num_workers, num_predict, seed.

    Raises:
        FileNotFoundError: if files are missing or damaged and cannot be downloaded. The message
            names the files and their folder.

    Source: A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009.

    Example:
        >>> data = CIFAR10(root="data", flip=True, batch_size=128)
        >>> data.image_shape, data.num_classes
        ((3, 32, 32), 10)
    """

    image_shape = (3, 32, 32)
    class_names = (
        *("airplane", "automobile", "bird", "cat", "deer"),
        *("dog", "frog", "horse", "ship", "truck"),
    )
    source = datasets.CIFAR10
    """torchvision class with the archive's URL, and the names and MD5s of its files."""

    def __init__(self, root: str = "data", flip: bool = False, **loader: Any) -> None:
        super().__init__(**loader)
        self.root = Path(root).expanduser()
        self.flip = flip

    def check(self) -> None:
        """Download missing files. One process downloads while the others wait."""
        if not self._faults():
            return
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            lock = self.root / ".cifar-10-download"
            if lock.exists():
                check_regular(lock)
            with lock.open("w") as file:
                with suppress(OSError):  # a file system without locks
                    fcntl.flock(file, fcntl.LOCK_EX)
                self.source(self.root, download=True)
        except (OSError, RuntimeError) as error:
            raise self._missing_files_error(f"could not be downloaded ({error})") from error

    def pending_setup(self) -> str | None:
        """Return text that announces a download or unpacking; None if neither is needed."""
        if not self._faults():
            return None
        archive = self.root / self.source.filename
        if check_integrity(archive, self.source.tgz_md5):
            return f"{archive} will be unpacked"
        return f"{archive.name} will be downloaded into {self.root}, which needs a network"

    def load(self, split: Split) -> TensorImages:
        """Open a split, without augmentation."""
        try:
            files = self.source(self.root, train=split == "train")
        except (OSError, RuntimeError) as error:
            raise self._missing_files_error("are not complete") from error
        images = torch.from_numpy(files.data).permute(0, 3, 1, 2).contiguous()
        return TensorImages(images, torch.tensor(files.targets), self.flip)

    def _faults(self) -> list[str]:
        """One phrase per missing or damaged file."""
        folder = self.root / self.source.base_folder
        meta = [self.source.meta["filename"], self.source.meta["md5"]]
        return [
            f"{name} is {'damaged' if (folder / name).is_file() else 'missing'}"
            for name, md5 in [*self.source.train_list, *self.source.test_list, meta]
            if not check_integrity(folder / name, md5)
        ]

    def _missing_files_error(self, reason: str) -> FileNotFoundError:
        return FileNotFoundError(
            f"The files of CIFAR-10 {reason}. In {self.root / self.source.base_folder}:"
            f" {', '.join(self._faults())}. Put {self.source.filename} (MD5 {self.source.tgz_md5},"
            f" from {self.source.url}) into {self.root.resolve()}; it is unpacked by itself."
        )
