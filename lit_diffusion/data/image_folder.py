"""Data modules for folders of image files, with a check for unusable files before training.

A check for unusable files decodes every file, which takes minutes for ImageNet. If a folder passes
the check, a cache outside the folder stores a digest of the files' names, sizes and modification
times. Later runs skip the check as long as the digest is the same.
"""

import hashlib
import logging
import os
import re
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from lit_diffusion.data.base import Split, split_rows
from lit_diffusion.data.cropped_images import CroppedImageDataModule, CroppedImages, Requirements
from lit_diffusion.files import IMAGE_EXTENSIONS, checked_read, open_image, user_cache, walk_files

MAX_NAMED = 10
"""Maximal number of files named in a message."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Listing:
    """The image files of a folder. Files and subfolders are sorted by name."""

    root: Path
    names: NDArray[np.bytes_]  # (N,) relative paths; workers would copy a list of str
    labels: Tensor  # (N,) int64; -1 in a folder without class folders
    stamp: str  # digest of names, sizes and modification times of all files of the folder

    def path(self, index: int) -> Path:
        """Path of one file."""
        return self.root / os.fsdecode(self.names[index])


def list_class_folders(root: Path) -> tuple[str, ...]:
    """List the names of the folders in `root`, sorted and without hidden ones.

    Raises:
        FileNotFoundError: if `root` is not a folder.
        ValueError: if there is no image in `root` and its subfolders.
    """
    if not root.is_dir():
        raise FileNotFoundError(f"A folder of images is needed, {root.absolute()} is not one.")
    if not any(file.lower().endswith(IMAGE_EXTENSIONS) for file in walk_files(root)):
        raise ValueError(f"{root} holds no images ({', '.join(IMAGE_EXTENSIONS)}).")
    return tuple(sorted(e.name for e in os.scandir(root) if e.is_dir() and e.name[0] != "."))


def list_images(root: Path, classes: Sequence[str]) -> Listing:
    """List all images below a folder.

    Files without an image extension are ignored, and an info line names them.

    Args:
        root: folder to list.
        classes: names of the class folders, in the order of their labels. Empty if the images are
            in `root` itself.

    Raises:
        ValueError: if there are classes but an image is in no class folder, if a class folder has
            no images, or if a folder is not among `classes`. The message names the images or the
            folder.
    """
    folders = list_class_folders(root)
    if unknown := sorted(set(folders) - set(classes)):
        raise ValueError(
            f"{root / unknown[0]} is not among the {len(classes)} class folders of the training"
            " images: remove it, or add it there."
        )
    label_of = {name: label for label, name in enumerate(classes)}
    names, labels, others, unclassified = [], [], [], []
    stamp = hashlib.sha256()
    for file in walk_files(root):  # a million files: no list of their paths is made
        if not file.lower().endswith(IMAGE_EXTENSIONS):
            others.append(file)
            continue
        name = file[len(os.path.join(root, "")) :]
        label = label_of.get(name.split(os.sep)[0], -1)
        if classes and label < 0:
            unclassified.append(file)
        status = os.stat(file)
        stamp.update(f"{name}\0{status.st_size}\0{status.st_mtime_ns}\0".encode(errors="replace"))
        names.append(os.fsencode(name))
        labels.append(label)
    extensions = ", ".join(IMAGE_EXTENSIONS)
    if others:
        rank_zero_info(
            f"Ignored files whose names do not end in {extensions}: {_join(sorted(others))}."
        )
    if unclassified:
        raise ValueError(f"In no class folder: {_join(unclassified)}. Move such images into one.")
    used = set(labels)
    if empty := [name for name in folders if label_of[name] not in used]:
        raise ValueError(f"{root / empty[0]} holds no images ({extensions}).")
    return Listing(root, np.array(names), torch.tensor(labels), stamp.hexdigest())


def check_images(listing: Listing, requirements: Requirements, cache: Path, threads: int) -> None:
    """Check every file, unless a marker in the folder `cache` shows that all have passed before.

    Raises:
        ValueError: if files fail. The message names the first ten.
    """
    key = hashlib.sha256(f"{listing.stamp} {requirements}".encode()).hexdigest()[:32]
    marker = cache / f"checked-{key}"
    if marker.exists():
        return
    num = len(listing.names)
    log.info("Checking %d image files in %s, once.", num, listing.root)

    def check_chunk(start: int) -> list[str]:
        paths = [listing.path(i) for i in range(start, min(start + 256, num))]
        faults = [(path, requirements.find_fault(path)) for path in paths]
        return [f"{path.relative_to(listing.root)} {fault}" for path, fault in faults if fault]

    with ThreadPoolExecutor(threads) as pool:  # Pillow releases the GIL while decoding
        faults = list(chain(*pool.map(check_chunk, range(0, num, 256))))
    if faults:
        remedies = ["remove or repair those that cannot be read"]
        if requirements.strict and any("cannot be read" not in fault for fault in faults):
            option = "--data.init_args.strict=false converts colors and enlarges small images"
            remedies = [option, "or choose channels and image_size to fit them", *remedies]
        raise ValueError(
            f"{len(faults)} of {num} files in {listing.root} cannot be used: "
            f"{'; '.join(remedies)}. These are: {_join(faults)}."
        )
    cache.mkdir(parents=True, exist_ok=True)
    marker.write_text(f"{listing.root}: {num} files, {requirements}\n")


def _join(names: Sequence[str]) -> str:
    more = f", and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more


@dataclass(frozen=True, eq=False)
class FileImages(CroppedImages):
    """Crops of image files."""

    listing: Listing

    def __len__(self) -> int:
        return len(self.listing.names)

    def read(self, index: Sequence[int]) -> tuple[Iterator[Image.Image], Tensor]:
        """Return the images at `index` of the split, decoded lazily, and their labels (B,)."""
        images = (self._decode(self.listing.path(i)) for i in index)
        return images, self.listing.labels[torch.tensor(index)]

    def _decode(self, path: Path) -> Image.Image:
        with checked_read(path, "image") as file, open_image(file) as image:
            return image.convert(self.mode)


class ImageFileDataModule(CroppedImageDataModule):
    """Base class of the data modules that read image files and check them before training.

    Args:
        image_size: pixels on each side of a crop, >= 1.
        full_check: whether the check decodes the files, which detects truncated files. If False,
            only their headers are read.
        cache_dir: folder that records which files have passed the check. None means `lit-diffusion`
            in $XDG_CACHE_HOME or ~/.cache.
        **options: options of `CroppedImageDataModule` (channels, flip, random_crop) and options of
            `ImageDataModule`.
    """

    strict: bool = False
    """Whether an image raises an error if its mode does not fit `channels`, or if it is smaller
    than `image_size`."""

    def __init__(
        self, image_size: int, full_check: bool = True, cache_dir: str | None = None, **options: Any
    ) -> None:
        super().__init__(image_size, **options)
        self.full_check = full_check
        self.cache = Path(cache_dir).expanduser() if cache_dir else user_cache()
        self._listings: dict[Path, Listing] = {}

    @abstractmethod
    def folder(self, split: Split) -> Path:
        """Folder of the files of a split."""

    @cached_property
    def class_names(self) -> tuple[str, ...]:
        """Names of the class folders of the training images; empty if there are none."""
        return list_class_folders(self.folder("train"))

    def check(self) -> None:
        """Raise ValueError if files cannot be used. The message names them."""
        requirements = Requirements(self.image_size, self.channels, self.strict, self.full_check)
        for folder in sorted({self.folder("train"), self.folder("val")}):
            check_images(self._listing(folder), requirements, self.cache, self.default_workers())

    def load(self, split: Split) -> FileImages:
        """Check files that were not checked before, and open a split without augmentation."""
        self.check()
        return FileImages(**self.crop_options(), listing=self.select(split))

    def select(self, split: Split) -> Listing:
        """The files of a split."""
        return self._listing(self.folder(split))

    def fingerprint(self, split: Split) -> str:
        """Hash of the image shape and of the files' names, sizes and mtimes, as 16 hex digits."""
        listing = self.select(split)
        digest = hashlib.sha256(f"{listing.stamp} {self.image_shape}".encode())
        digest.update(listing.names.tobytes())
        return digest.hexdigest()[:16]

    def _listing(self, folder: Path) -> Listing:
        if folder not in self._listings:
            self._listings[folder] = list_images(folder, self.class_names)
        return self._listings[folder]


class ImageFolder(ImageFileDataModule):
    """Your own images, in class folders (such as `cats/1.png`, `dogs/2.png`) or in one flat folder.

    Labels are numbered in the order of the class folders' names. Files in a flat folder have the
    label -1.

    Args:
        train: folder of the training images.
        val: folder of the held-out images, with the same class folders; or the number of training
            images to hold out. In the latter case, a hash of the file names selects the images.
        image_size: pixels on each side of a crop, >= 1.
        strict: whether to raise an error if an image is smaller than `image_size` or its mode does
            not fit `channels`. If False, small images are enlarged, and images of other modes are
            converted. The conversion drops the alpha channel if `channels` is 1 or 3.
        **options: options of `ImageFileDataModule`: full_check, cache_dir; channels, flip,
            random_crop; batch_size, num_workers, num_predict, seed.

    Raises:
        FileNotFoundError: if a folder does not exist.
        ValueError: if a folder is empty or has unusable files. The message names the folder or
            files.

    Example:
        >>> data = ImageFolder("photos/train", val=100, image_size=64, flip=True, batch_size=64)
        >>> data.image_shape
        (3, 64, 64)
    """

    def __init__(
        self, train: str, val: int | str, image_size: int, strict: bool = True, **options: Any
    ) -> None:
        super().__init__(image_size, **options)
        self.train = Path(train).expanduser()
        self.val = val if isinstance(val, int) else Path(val).expanduser()
        self.strict = strict

    def folder(self, split: Split) -> Path:
        """Folder of the files of a split."""
        name = "val" if split == "val" and isinstance(self.val, Path) else "train"
        folder: Path = getattr(self, name)
        if not folder.is_dir():
            raise FileNotFoundError(
                f"--data.{name}: there is no folder {folder} (here: {Path.cwd()}); name another."
            )
        return folder

    def select(self, split: Split) -> Listing:
        """The files of a split."""
        listing = super().select(split)
        if isinstance(self.val, Path):
            return listing
        names = [os.fsdecode(name) for name in listing.names]
        rows = split_rows(split, names, self.val, listing.root)
        return replace(listing, names=listing.names[rows.numpy()], labels=listing.labels[rows])


class ImageNet(ImageFileDataModule):
    """ImageNet (ILSVRC 2012), or a subset of its classes.

    Files are `train/n01440764/*.JPEG` and `val/n01440764/*.JPEG`. The held-out images are the
    50,000 validation images, which must be sorted into class folders. As in guided-diffusion, gray
    and CMYK files are converted, and small images are enlarged.

    Args:
        root: folder with `train` and `val`.
        image_size: pixels on each side of a crop, >= 1.
        **options: options of `ImageFileDataModule`: full_check, cache_dir; channels, flip,
            random_crop; batch_size, num_workers, num_predict, seed.

    Raises:
        FileNotFoundError: if `train` or `val` does not exist.
        ValueError: if a class folder is empty or not named like n01440764, or if a file is
            unreadable.

    Source: O. Russakovsky et al., "ImageNet Large Scale Visual Recognition Challenge", 2015.

    Example:
        >>> ImageNet("imagenet", image_size=64, random_crop=True).image_shape
        (3, 64, 64)
    """

    def __init__(self, root: str, image_size: int, **options: Any) -> None:
        super().__init__(image_size, **options)
        self.root = Path(root).expanduser()

    def folder(self, split: Split) -> Path:
        """Folder of the files of a split."""
        return self.root / split

    @cached_property
    def class_names(self) -> tuple[str, ...]:
        """WordNet ids of the classes."""
        names = list_class_folders(self.folder("train"))
        wrong = [name for name in names if not re.fullmatch(r"n\d{8}", name)]
        if wrong or not names:
            raise ValueError(
                f"ImageNet needs class folders such as n01440764 in {self.folder('train')}, got"
                f" {wrong[0] if wrong else 'none'}. For other names, use ImageFolder."
            )
        return names
