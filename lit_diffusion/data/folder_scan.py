"""Finds the images of a folder, and names the bad ones before training starts.

A full check decodes every file, several at a time. As that takes minutes for ImageNet, a folder
that passed is remembered by the names, sizes and modification times of its files, in a cache
outside of it.
"""

import hashlib
import logging
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info
from numpy.typing import NDArray
from torch import Tensor

from lit_diffusion.files import open_image

EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".pgm", ".bmp", ".tif", ".tiff", ".webp")
MODES = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}
"""Pillow's mode for each number of channels."""
CONVERTIBLE = {"1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr"}
"""Modes of 8 bits or fewer; Pillow clips deeper ones when it converts them."""
NAMED = 10
"""How many bad files a message names."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Listing:
    """The images of a folder, sorted by name: names relative to it, and labels (N,) int64.

    Names are bytes in an array: worker processes would copy a list of str, by counting references.
    Labels are -1 in a folder without class folders. `stamp` is a digest of names, sizes and
    modification times.
    """

    root: Path
    names: NDArray[np.bytes_]
    labels: Tensor
    stamp: str

    def path(self, index: int) -> Path:
        """Of one image."""
        return self.root / os.fsdecode(self.names[index])

    def part(self, chosen: Tensor) -> "Listing":
        """The images where `chosen`, (N,) bool, holds; with the stamp of the whole."""
        return Listing(self.root, self.names[chosen.numpy()], self.labels[chosen], self.stamp)


@dataclass(frozen=True)
class Requirements:
    """What a usable file is.

    `strict` asks for the very mode of so many channels and for `image_size` pixels on the shorter
    side; otherwise any mode that converts without clipping will do. `full` decodes files, which
    finds truncated ones; else only headers are read.
    """

    image_size: int
    channels: int
    strict: bool
    full: bool

    def fault(self, path: Path) -> str | None:
        """What is wrong with a file, if anything."""
        try:
            with open_image(path) as image:
                mode, side = image.mode, min(image.size)
                if self.full:
                    image.draft("L", (1, 1))  # a JPEG is read to its end, but at 1/8 of its scale
                    image.load()
        except Exception as error:  # Pillow's decoders raise anything on broken data
            return f"cannot be read ({error})"
        return self.misfit(mode, side)

    def misfit(self, mode: str, side: int) -> str | None:
        """Why a picture of this mode, and pixels on its shorter side, is refused, if it is."""
        wanted = MODES[self.channels]
        if mode not in ({wanted} if self.strict else CONVERTIBLE):
            return f"has mode {mode}, not {wanted}"
        if self.strict and side < self.image_size:
            return f"is only {side} pixels on its shorter side, less than {self.image_size}"
        return None


def class_folders(root: Path) -> tuple[str, ...]:
    """Names of the folders in `root`, sorted, without hidden ones."""
    if not root.is_dir():
        raise FileNotFoundError(f"A folder of images is needed, {root.absolute()} is not one.")
    return tuple(sorted(e.name for e in os.scandir(root) if e.is_dir() and e.name[0] != "."))


def list_images(root: Path, classes: Sequence[str]) -> Listing:
    """All images below a folder: in folders of the training classes, in `root` itself without any.

    Files that are no images by their names are left out, and that is said.

    Raises:
        ValueError: If an image is in no class folder where there are classes, or if a folder is
            empty or not of these classes. The message names them.
    """
    found = class_folders(root)
    if unknown := sorted(set(found) - set(classes)):
        raise ValueError(
            f"{root / unknown[0]} is not among the {len(classes)} class folders of the training"
            " images: remove it, or add it there."
        )
    everything = list(_walk(root))
    files = [file for file in everything if file.lower().endswith(EXTENSIONS)]
    known = ", ".join(EXTENSIONS)
    if others := sorted(set(everything) - set(files)):
        rank_zero_info(f"Left out, as no images by their names ({known}): {_some(others)}.")
    names = [file[len(os.path.join(root, "")) :] for file in files]
    tops = [name.split(os.sep)[0] for name in names]
    label_of = {name: label for label, name in enumerate(classes)}
    stray = [file for file, top in zip(files, tops, strict=True) if top not in label_of]
    if classes and stray:
        raise ValueError(f"In no class folder: {_some(stray)}. Move such images into one.")
    empty = sorted(set(found) - set(tops)) if files else [""]
    if empty:
        raise ValueError(f"{root / empty[0]} holds no images ({known}).")
    labels = torch.tensor([label_of.get(top, -1) for top in tops])
    return Listing(root, np.array([os.fsencode(n) for n in names]), labels, _stamp(files, names))


def check_images(listing: Listing, requirements: Requirements, cache: Path, threads: int) -> None:
    """Look at every file, unless all of them passed before, as a file in `cache` then says.

    Files are read by so many threads: Pillow decodes without the interpreter lock. A ValueError
    names the first ten that fail.
    """
    key = hashlib.sha256(f"{listing.stamp} {requirements}".encode()).hexdigest()[:32]
    passed = cache / f"checked-{key}"
    if passed.exists():
        return
    log.info("Checking %d image files in %s, once.", len(listing.names), listing.root)
    if faults := _faults(listing, requirements, threads):
        remedy = ", or convert and enlarge them with strict=False" if requirements.strict else ""
        raise ValueError(
            f"{len(faults)} of {len(listing.names)} files in {listing.root} cannot be used:"
            f" {_some(faults)}. Repair or remove unreadable files; choose"
            f" channels and image_size to fit the others{remedy}."
        )
    cache.mkdir(parents=True, exist_ok=True)
    passed.write_text(f"{listing.root}: {len(listing.names)} files, {requirements}\n")


def _some(names: Sequence[str]) -> str:
    more = f", and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def _faults(listing: Listing, requirements: Requirements, threads: int) -> list[str]:
    def of_part(start: int) -> list[str]:
        paths = [listing.path(i) for i in range(start, min(start + 256, len(listing.names)))]
        faults = [(path, requirements.fault(path)) for path in paths]
        return [f"{path.relative_to(listing.root)} {fault}" for path, fault in faults if fault]

    with ThreadPoolExecutor(threads) as pool:
        return list(chain(*pool.map(of_part, range(0, len(listing.names), 256))))


def _walk(root: Path) -> Iterator[str]:
    for folder, subfolders, names in os.walk(root, followlinks=True):
        here = os.path.realpath(folder)
        inside = {name: os.path.realpath(os.path.join(folder, name)) for name in subfolders}
        loops = {name for name, real in inside.items() if f"{here}/".startswith(f"{real}/")}
        subfolders[:] = sorted(name for name in inside if name[0] != "." and name not in loops)
        yield from (os.path.join(folder, name) for name in sorted(names) if name[0] != ".")


def _stamp(files: Sequence[str], names: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for file, name in zip(files, names, strict=True):
        status = os.stat(file)
        digest.update(f"{name}\0{status.st_size}\0{status.st_mtime_ns}\0".encode(errors="replace"))
    return digest.hexdigest()
