"""Folders of image files, and ImageNet."""

import hashlib
import os
import re
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from lit_diffusion.data import folder_scan
from lit_diffusion.data.base import Split, require_at_least
from lit_diffusion.data.folder_scan import Listing, Requirements, class_folders
from lit_diffusion.data.pictures import CroppedPictures, Pictures
from lit_diffusion.files import open_image, user_cache
from lit_diffusion.seeding import fold


@dataclass(frozen=True, eq=False)
class FileImages(CroppedPictures):
    """Those of image files."""

    listing: Listing

    def __len__(self) -> int:
        return len(self.listing.names)

    def read(self, index: Sequence[int]) -> tuple[Iterator[Image.Image], Tensor]:
        """Pictures `index` of the split, and their labels."""
        pictures = (_read(self.listing.path(each), self.mode) for each in index)
        return pictures, self.listing.labels[torch.tensor(index)]


class PictureFiles(Pictures):
    """Base of the data modules that read image files.

    All files are checked before anything else happens, and remembered when they passed.

    Args:
        image_size: pixels on each side of a crop, >= 1.
        full_check: whether the check decodes the files, which finds truncated ones, rather than
            reading their headers only.
        cache_dir: folder that remembers checked folders; None takes `lit-diffusion` in
            $XDG_CACHE_HOME or ~/.cache.
        **pictures: as in `Pictures`: channels, flip, random_crop, and its `loader` too.
    """

    strict: bool = False
    """Whether pictures of another mode, or smaller than `image_size`, are refused."""

    def __init__(
        self,
        image_size: int,
        full_check: bool = True,
        cache_dir: str | None = None,
        **pictures: Any,
    ) -> None:
        super().__init__(image_size, **pictures)
        self.full_check = full_check
        self.cache = Path(cache_dir).expanduser() if cache_dir else user_cache()
        self._listings: dict[Path, Listing] = {}

    @abstractmethod
    def folder(self, split: Split) -> Path:
        """Where the files of a split lie."""

    @cached_property
    def class_names(self) -> tuple[str, ...]:
        """Names of the class folders of the training images; empty if there are none."""
        return class_folders(self.folder("train"))

    def check(self) -> None:
        """Name the files that cannot be used."""
        requirements = Requirements(self.image_size, self.channels, self.strict, self.full_check)
        for folder in sorted({self.folder("train"), self.folder("val")}):
            listing, threads = self._listing(folder), self.default_workers()
            folder_scan.check_images(listing, requirements, self.cache, threads)

    def load(self, split: Split) -> FileImages:
        """Open a split, whose files are checked by now or else here."""
        self.check()
        return FileImages(**self.view(), listing=self.select(split))

    def select(self, split: Split) -> Listing:
        """The files of a split."""
        return self._listing(self.folder(split))

    def fingerprint(self, split: Split) -> str:
        """16 hex digits that change with the names, sizes or times of the files, or the crop."""
        listing = self.select(split)
        digest = hashlib.sha256(f"{listing.stamp} {self.image_shape}".encode())
        digest.update(listing.names.tobytes())
        return digest.hexdigest()[:16]

    def _listing(self, folder: Path) -> Listing:
        if folder not in self._listings:
            self._listings[folder] = folder_scan.list_images(folder, self.class_names)
        return self._listings[folder]


class ImageFolder(PictureFiles):
    """Pictures of one's own: class folders `cats/1.png`, `dogs/2.png`, or one flat folder.

    Class folders are labelled in the order of their names; files of a flat folder have label -1.
    Files must be images of one mode and large enough, and lie where they belong; others are named.

    Args:
        train: folder of the training images.
        val: folder of the held-out images, in the same class folders; or how many training images
            to hold out: those whose names n have the least `fold("held out", n)`.
        image_size: pixels on each side of a crop, >= 1.
        strict: whether pictures of another mode, or smaller than `image_size`, are refused;
            otherwise they are converted (without alpha, if `channels` has none) and enlarged.
        **pictures: as in `PictureFiles`, and its `loader` too.

    Raises:
        FileNotFoundError: If a folder does not exist.
        ValueError: If a folder is empty or files in it cannot be used; names them.
    """

    def __init__(
        self, train: str, val: int | str, image_size: int, strict: bool = True, **pictures: Any
    ) -> None:
        super().__init__(image_size, **pictures)
        if isinstance(val, int):
            require_at_least(1, val=val)
        self.train = Path(train).expanduser()
        self.val = val if isinstance(val, int) else Path(val).expanduser()
        self.strict = strict

    def folder(self, split: Split) -> Path:
        """Where the files of a split lie."""
        return self.val if split == "val" and isinstance(self.val, Path) else self.train

    def select(self, split: Split) -> Listing:
        """The files of a split."""
        listing = super().select(split)
        if isinstance(self.val, Path):
            return listing
        count = len(listing.names)
        if self.val >= count:
            raise ValueError(
                f"val={self.val} images cannot be held out of the {count} in {listing.root}."
            )
        rank = [fold("held out", os.fsdecode(name)) for name in listing.names]
        held_out = torch.zeros(count, dtype=torch.bool)
        held_out[np.argsort(rank)[: self.val]] = True
        return listing.part(held_out if split == "val" else ~held_out)


class ImageNet(PictureFiles):
    """ILSVRC 2012: `train/n01440764/*.JPEG` and `val/n01440764/*.JPEG`, or a subset of its classes.

    Its grey and CMYK files are converted, its small ones enlarged, as in guided-diffusion. Held out
    are the 50,000 validation images, which must be sorted into class folders.

    Args:
        root: folder that holds `train` and `val`.
        image_size: pixels on each side of a crop, >= 1.
        **pictures: as in `PictureFiles`, and its `loader` too.

    Raises:
        FileNotFoundError: If `train` or `val` does not exist.
        ValueError: If a folder is not named as a class, is empty, or files in it cannot be read.

    Source: O. Russakovsky et al., "ImageNet Large Scale Visual Recognition Challenge", 2015.
    """

    def __init__(self, root: str, image_size: int, **pictures: Any) -> None:
        super().__init__(image_size, **pictures)
        self.root = Path(root).expanduser()

    def folder(self, split: Split) -> Path:
        """Where the files of a split lie."""
        return self.root / split

    @cached_property
    def class_names(self) -> tuple[str, ...]:
        """WordNet ids of the classes."""
        names = class_folders(self.folder("train"))
        wrong = [name for name in names if not re.fullmatch(r"n\d{8}", name)]
        if wrong or not names:
            raise ValueError(
                f"ImageNet wants class folders such as n01440764 in {self.folder('train')}, got"
                f" {wrong[0] if wrong else 'none'}. For other names, use ImageFolder."
            )
        return names


def _read(path: Path, mode: str) -> Image.Image:
    try:
        with open_image(path) as image:
            return image.convert(mode)
    except Exception as error:  # Pillow's decoders raise anything on broken data
        raise OSError(f"{path} cannot be read ({error}).") from error
