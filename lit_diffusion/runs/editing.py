"""What --init, --strength and --mask make of sampling: images begin at others, or keep parts."""

from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms.functional import pil_to_tensor

from lit_diffusion.metrics.images import OVERVIEWS

Generate = Callable[[Sequence[int], Sequence[int], Any], Tensor]
"""(numbers of samples, their seeds, labels) -> images uint8 (N, C, H, W)."""


def generator(module: Any, args: Namespace) -> Generate:
    """How the samples of these options are made.

    Raises:
        ValueError: for options that do not go together, or pictures that do not fit the module.
    """
    if args.init is None:
        if args.mask or args.strength is not None:
            raise ValueError("--mask and --strength need --init, an image or a folder of them.")
        return lambda numbers, seeds, labels: module.generate(seeds, labels)
    if args.mask and args.strength is not None:
        raise ValueError("give --strength, or --mask, not both.")
    pictures = _pictures(Path(args.init), tuple(module.image_shape))

    def begin(numbers: Sequence[int]) -> Tensor:
        return pictures[torch.tensor([i % len(pictures) for i in numbers])]

    if args.mask:
        _, height, width = module.image_shape
        mask = (_pictures(Path(args.mask), (1, height, width))[:1] > 127).float()
        return lambda numbers, seeds, labels: module.inpaint(begin(numbers), mask, seeds, labels)
    strength = 0.6 if args.strength is None else args.strength
    return lambda numbers, seeds, labels: module.edit(begin(numbers), seeds, labels, strength)


def _pictures(path: Path, shape: tuple[int, ...]) -> Tensor:
    numbered = set(path.glob("*.png")) - {path / name for name in OVERVIEWS}
    files = sorted(numbered) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        raise ValueError(f"{path} is no picture, and no folder of PNG files.")
    mode = "L" if shape[0] == 1 else "RGB"
    found = [pil_to_tensor(Image.open(file).convert(mode)) for file in files]
    for file, picture in zip(files, found, strict=True):
        if picture.shape != shape:
            raise ValueError(
                f"{file} is {tuple(picture.shape)}, but the model's images are {shape}; resize it."
            )
    return torch.stack(found)
