"""What --init, --strength and --mask make of sampling: images begin at others, or keep parts."""

from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lit_diffusion.metrics.images import OVERVIEWS, read_image
from lit_diffusion.solvers.editing import repainting, shortened

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


def editing_record(module: Any, args: Namespace) -> dict[str, Any]:
    """What differs in `sampling_record` for images that begin at others or keep parts."""
    if args.init is None:
        return {}
    nothing = torch.empty(0)
    if args.mask:
        solver: Any = repainting(module.solver, nothing, nothing)
    else:
        solver = shortened(module.solver, args.strength)
    return {"solver": repr(solver), "steps": solver.steps}


def generator(module: Any, args: Namespace) -> Generate:
    """How the samples of these options are made.

    Raises:
        ValueError: for pictures that do not fit the module, or a module that cannot edit.
    """
    if args.init is None:
        return lambda numbers, seeds, labels: module.generate(seeds, labels)
    pictures = _pictures(Path(args.init), tuple(module.image_shape))

    def begin(numbers: Sequence[int]) -> Tensor:
        return pictures[torch.tensor([i % len(pictures) for i in numbers])]

    if args.mask:
        if Path(args.mask).is_dir():
            raise ValueError(f"--mask {args.mask} is a folder; name one picture, for all images.")
        mask = (_pictures(Path(args.mask), (1, *module.image_shape[1:])) > 127).float()
        return lambda numbers, seeds, labels: module.inpaint(begin(numbers), mask, seeds, labels)
    return lambda numbers, seeds, labels: module.edit(begin(numbers), seeds, labels, args.strength)


def _pictures(path: Path, shape: tuple[int, ...]) -> Tensor:
    numbered = set(path.glob("*.png")) - {path / name for name in OVERVIEWS}
    files = sorted(numbered) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        raise ValueError(f"{path} is no picture, and no folder of PNG files.")
    found = [read_image(file) for file in files]
    for file, picture in zip(files, found, strict=True):
        if picture.shape != shape:
            raise ValueError(
                f"{file} is {tuple(picture.shape)}, and must be {shape}, as the model's images are "
                "(channels, height, width; a mask has one channel): resize or convert it."
            )
    return torch.stack(found)
