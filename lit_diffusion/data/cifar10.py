"""CIFAR-10, whole in memory."""

from pathlib import Path
from typing import Any

import torch
from torchvision.datasets import CIFAR10 as Source
from torchvision.datasets.utils import check_integrity

from lit_diffusion.data.base import Awaited, ImageDataModule, Split
from lit_diffusion.data.datasets import TensorImages


class CIFAR10(ImageDataModule):
    """50,000 training and 10,000 held-out colour images of 32x32 pixels in ten classes.

    Downloaded once where there is a network, otherwise expected in `root`; every file is checked
    against its published MD5 before it is opened.

    Args:
        root: folder that holds, or will hold, `cifar-10-batches-py` or `cifar-10-python.tar.gz`.
        flip: whether half of the training images, chosen anew every epoch, are mirrored.
        **loader: as in `ImageDataModule`: batch_size, num_workers, num_predict, seed.

    Raises:
        FileNotFoundError: If files are missing or damaged and cannot be downloaded; says which,
            and where to put them.

    Source: A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009.
    """

    image_shape = (3, 32, 32)
    class_names = (
        *("airplane", "automobile", "bird", "cat", "deer"),
        *("dog", "frog", "horse", "ship", "truck"),
    )
    source = Source
    """Where files come from and what their MD5s are."""

    def __init__(self, root: str = "data", flip: bool = False, **loader: Any) -> None:
        super().__init__(**loader)
        self.root = Path(root).expanduser()
        self.flip = flip

    def check(self) -> None:
        """Download what is missing."""
        try:
            self.source(self.root, download=True)
        except (OSError, RuntimeError) as error:
            raise self._not_found(f"could not be downloaded ({error})") from error

    def awaited(self) -> Awaited | None:
        """Whether the archive has yet to be unpacked, or downloaded."""
        if not self._faults():
            return None
        archive = self.root / self.source.filename
        if check_integrity(archive, self.source.tgz_md5):
            return Awaited(f"{archive} will be unpacked", needs_network=False)
        text = f"{self.source.filename} will be downloaded from {self.source.url} into {self.root}"
        return Awaited(text, needs_network=True)

    def load(self, split: Split) -> TensorImages:
        """Open a split."""
        try:
            files = self.source(self.root, train=split == "train")
        except (OSError, RuntimeError) as error:
            raise self._not_found("are not complete") from error
        images = torch.from_numpy(files.data).permute(0, 3, 1, 2).contiguous()
        return TensorImages(images, torch.tensor(files.targets), self.flip)

    def _faults(self) -> list[str]:
        """Files that are missing or damaged."""
        folder = self.root / self.source.base_folder
        meta = [self.source.meta["filename"], self.source.meta["md5"]]
        return [
            f"{name} is {'damaged' if (folder / name).is_file() else 'missing'}"
            for name, md5 in [*self.source.train_list, *self.source.test_list, meta]
            if not check_integrity(folder / name, md5)
        ]

    def _not_found(self, what_happened: str) -> FileNotFoundError:
        return FileNotFoundError(
            f"The files of CIFAR-10 {what_happened}. In {self.root / self.source.base_folder}:"
            f" {', '.join(self._faults())}. Put {self.source.filename} (MD5 {self.source.tgz_md5},"
            f" from {self.source.url}) into {self.root.resolve()}; it is unpacked by itself."
        )
