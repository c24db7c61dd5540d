"""Images from files: a folder of PNGs, or an .npz."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset
from torchvision.transforms.functional import pil_to_tensor

from lit_diffusion.files import open_image

ENDINGS = (".png", ".jpg", ".jpeg")
MODES = ("L", "LA", "RGB", "RGBA")
OVERVIEWS = ("grid.png", "trajectory.png")
"""What `lit-diffusion sample` puts beside samples."""


class FolderImages(Dataset[Tensor]):
    """The PNG and JPEG files of a folder and of those below it, in order of their paths.

    Each is uint8 (C, H, W), C = 1 for grey, 3 for colour, 2 and 4 with alpha, all of one shape.
    Files with the names of OVERVIEWS are left out.

    Raises:
        ValueError: If it holds no image; on reading, if a file is unreadable or another shape.
    """

    def __init__(self, folder: str | Path) -> None:
        files = (p for p in Path(folder).rglob("*") if p.suffix.lower() in ENDINGS)
        self.paths = sorted(p for p in files if p.name not in OVERVIEWS)
        if not self.paths:
            raise ValueError(f"{folder} holds no {', '.join(ENDINGS)} file.")
        self.shape = read_image(self.paths[0]).shape

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Tensor:
        image = read_image(self.paths[index])
        if image.shape != self.shape:
            raise ValueError(
                f"{self.paths[index]} is {tuple(image.shape)} (C, H, W), but {self.paths[0].name} "
                f"is {tuple(self.shape)}; images that are scored together have one shape."
            )
        return image


def read_image(path: Path) -> Tensor:
    """A grey or RGB file, with alpha or without, as uint8 (C, H, W)."""
    try:
        with open_image(path) as image:
            mode = image.mode
            pixels: Tensor | None = pil_to_tensor(image) if mode in MODES else None
    except Exception as error:  # Pillow's decoders raise anything on broken data
        raise ValueError(f"{path} is not a readable image: {error}") from error
    if pixels is None:
        raise ValueError(
            f"{path} has mode {mode}; images must be of mode L, LA, RGB or RGBA: convert it."
        )
    return pixels


def open_images(path: str | Path) -> Dataset[Any]:
    """Images of a folder of PNG and JPEG files, or of an .npz with `arr_0` uint8 (N, H, W, C).

    The latter is the form in which guided-diffusion publishes samples and references.
    """
    path = Path(path)
    if path.is_dir():
        return FolderImages(path)
    if path.suffix == ".npz" and path.is_file():
        return TensorDataset(_images_of_npz(path))
    raise ValueError(f"{path} is neither a folder of images nor an .npz file of them.")


def _images_of_npz(path: Path) -> Tensor:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            images = arrays.get("arr_0")
    except Exception as error:  # whatever zipfile and numpy say of a broken file
        raise ValueError(f"{path} cannot be read as .npz: {error}.") from error
    if images is None or images.dtype != np.uint8 or images.ndim != 4:
        found = "none" if images is None else f"{images.dtype} {images.shape}"
        raise ValueError(f"{path} must hold arr_0, uint8 (N, H, W, C), got {found}.")
    return torch.from_numpy(images).permute(0, 3, 1, 2)
