"""What --init, --strength and --mask make of sampling: images begin at others, or keep parts."""

from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import max_pool2d

from lit_diffusion.metrics.images import OVERVIEWS, read_image
from lit_diffusion.solvers.editing import repaint_solver, truncate_solver

Generate = Callable[[Sequence[int], Sequence[int], Any], Tensor]
"""(numbers of samples, their seeds, labels) -> images uint8 (N, C, H, W)."""


STRENGTH = 0.6
"""Without --strength."""


def check_editing(args: Namespace) -> None:
    """Refuse options that do not go together, and say the strength where it is not given."""
    if args.init is None:
        if args.mask or args.strength is not None:
            raise ValueError("--mask and --strength need --init, an image or a folder of them.")
        return
    if args.mask and args.strength is not None:
        raise ValueError("give --strength, or --mask, not both.")
    if args.mask and (args.solver or args.solver_options):
        raise ValueError(
            "--mask fills in by RePaint, on the steps and times of the checkpoint's own solver; "
            "leave out --solver. --steps may be given."
        )
    if not args.mask and args.strength is None:
        args.strength = STRENGTH


def editing_solver(module: Any, args: Namespace) -> Any:
    """What makes the images: the module's solver, the end of it, or RePaint in its place."""
    if args.init is None:
        return module.solver
    if args.mask:
        return repaint_solver(module.solver, torch.empty(0), torch.empty(0))
    return truncate_solver(module.solver, args.strength)


def editing_record(module: Any, args: Namespace) -> dict[str, Any]:
    """What differs in `sampling_record` for images that begin at others or keep parts."""
    if args.init is None:
        return {}
    solver = editing_solver(module, args)
    return {"solver": repr(solver), "steps": solver.steps}


def generator(module: Any, args: Namespace) -> Generate:
    """How the samples of these options are made.

    Raises:
        ValueError: for pictures that do not fit the module, or a module that cannot edit.
    """
    if args.init is None:
        return lambda numbers, seeds, labels: module.generate(seeds, labels)
    pictures = _pictures(Path(args.init), lambda shape: _fitting(module, shape))

    def begin(numbers: Sequence[int]) -> Tensor:
        return pictures[torch.tensor([i % len(pictures) for i in numbers])]

    if args.mask:
        if Path(args.mask).is_dir():
            raise ValueError(f"--mask {args.mask} is a folder; name one picture, for all images.")
        mask = _kept(_pictures(Path(args.mask), lambda _: (1, *pictures.shape[2:])), module)
        return lambda numbers, seeds, labels: module.inpaint(begin(numbers), mask, seeds, labels)
    return lambda numbers, seeds, labels: module.edit(begin(numbers), seeds, labels, args.strength)


def _fitting(module: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    """What a picture of this shape would have to be for the module; in pixels, also of latents."""
    channels, height, width = module.image_shape
    factor = shape[1] // module.codec.encoded_shape(shape)[1]
    channels = getattr(module.codec, "image_channels", channels)
    return channels, factor * height, factor * width


def _kept(mask: Tensor, module: Any) -> Tensor:
    """1 where x0 is kept: where all pixels of it are white."""
    black = (mask <= 127).float()
    return 1 - max_pool2d(black, mask.shape[-1] // module.image_shape[-1])


def _pictures(path: Path, fitting: Callable[[tuple[int, ...]], tuple[int, ...]]) -> Tensor:
    numbered = set(path.glob("*.png")) - {path / name for name in OVERVIEWS}
    files = sorted(numbered) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        raise ValueError(f"{path} is no picture, and no folder of PNG files.")
    found = [read_image(file) for file in files]
    for file, picture in zip(files, found, strict=True):
        shape = tuple(picture.shape)
        try:
            wanted = fitting(shape)
        except ValueError as error:  # of the codec, which does not know the file
            raise ValueError(f"{file}: {error}") from error
        if shape != wanted:
            raise ValueError(
                f"{file} is {shape}, and must be {wanted}, as the model's images are "
                "(channels, height, width; a mask has one channel): resize or convert it."
            )
    return torch.stack(found)
