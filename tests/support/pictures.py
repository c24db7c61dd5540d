"""Image files for tests: smooth random pictures, and files that are broken in known ways."""

from pathlib import Path

import numpy as np
from PIL import Image


def picture(seed: int, mode: str = "RGB", size: tuple[int, int] = (40, 30)) -> Image.Image:
    """A smooth random picture of (width, height) pixels."""
    noise = np.random.default_rng(seed).integers(0, 256, (6, 8, 4), dtype=np.uint8)
    smooth = Image.fromarray(noise, "RGBA" if mode == "RGBA" else None).resize(size)
    return smooth if mode == "RGBA" else smooth.convert("RGB").convert(mode)


def save(path: Path, seed: int = 0, mode: str = "RGB", size: tuple[int, int] = (40, 30)) -> Path:
    """Write such a picture, in the format that the name says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    picture(seed, mode, size).save(path)
    return path


def class_folders(root: Path, classes: str = "ab", each: int = 3, **kwargs: object) -> Path:
    """PNG files root/a/0.png, ..., each another picture."""
    for label, name in enumerate(classes):
        for i in range(each):
            save(root / name / f"{i}.png", seed=100 * label + i, **kwargs)
    return root


def truncate(path: Path) -> Path:
    """Cut a file in half."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return path
