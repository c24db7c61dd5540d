"""`lit-diffusion sample`: images from a checkpoint, as PNG."""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_diffusion.commands.options import Parser, add_checkpoint, add_sampling

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from lit_diffusion.checkpoints import Loaded

GRID = "grid.png"
RECORD = "samples.json"
_GRID_IMAGES = 256
_GRID_PIXELS = 512


def parser() -> Parser:
    """Options of the command."""
    made = Parser(
        "sample",
        """Write images that a checkpoint generates.

    lit-diffusion sample --checkpoint runs/digits --num 64 --out samples
    lit-diffusion sample --checkpoint runs/digits/checkpoints/best-fid.ckpt --out sevens \\
        --labels 7 --guidance 2

Image i has the seed SEED + i and is the same in any batch and on any device. OUT gets 000000.png,
000001.png, ... at their own size, grid.png with the first of them, and samples.json, which says how
they were made.""",
    )
    add_checkpoint(made, required=True)
    made.add_argument("--num", type=int, default=64, help="number of images (default 64)")
    made.add_argument("--out", required=True, metavar="DIR", help="folder for the images")
    add_sampling(made)
    return made


def run(argv: Sequence[str]) -> None:
    """Run the command.

    Args:
        argv: "sample", then options.
    """
    args = parser().parse_args(argv[1:])
    out = fresh_folder(args.out)
    loaded = load_generator(args)
    record = write_samples(loaded, args, args.num, out)
    print(f"{args.num} images in {out}, from {record['weights']} weights of {loaded.path}.")


def fresh_folder(path: str) -> Path:
    """A folder without images, made if need be, so that those of two calls are never mixed.

    Raises:
        ValueError: where it holds images, or is a file.
    """
    out = Path(path)
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is a file; name a folder.")
    if next(out.glob("*.png"), None) is not None:
        raise ValueError(f"--out {out} already holds images; choose another folder or empty it.")
    out.mkdir(parents=True, exist_ok=True)
    return out


def load_generator(args: argparse.Namespace) -> "Loaded":
    """The module of --checkpoint on its device, generating as the options say.

    Raises:
        ValueError: where the options do not fit the module.
    """
    from lit_diffusion.checkpoints import load_with_record

    if args.batch_size < 1:
        raise ValueError(f"--batch-size must be at least 1, got {args.batch_size}.")
    device = usable_device(args.device)
    loaded = load_with_record(args.checkpoint, args.weights, trust=args.trust)
    if not hasattr(loaded.module, "generate"):
        raise ValueError(f"{type(loaded.module).__name__} in {loaded.path} cannot generate images.")
    _change_sampling(loaded.module, args)
    _check_labels(args.labels, getattr(loaded.module, "num_classes", None))
    loaded.module.to(device)
    return loaded


def usable_device(name: str | None) -> "torch.device":
    """The device of --device; without, the GPU if there is one.

    Raises:
        ValueError: for one that this machine does not have.
    """
    import torch

    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built with CUDA
        reason = str(error).split("\n")[0].rstrip(".")
        raise ValueError(f"--device {name} cannot be used here: {reason}.") from error


def _change_sampling(module: Any, args: argparse.Namespace) -> None:
    changes = (args.steps, args.solver, args.guidance)
    if any(change is not None for change in changes) and not hasattr(module, "solver"):
        raise ValueError(f"{type(module).__name__} takes no --steps, --solver or --guidance.")
    if args.steps is not None or args.solver is not None:
        module.solver = _solver(module, args.solver, args.steps)
    if args.guidance is not None:
        from lit_diffusion.guidance import ClassifierFree

        if module.num_classes is None or module.label_dropout == 0:
            raise ValueError(
                "--guidance needs a model with classes that was trained with label_dropout, got "
                f"num_classes={module.num_classes} and label_dropout={module.label_dropout}."
            )
        module.guidance = None if args.guidance == 1 else ClassifierFree(args.guidance)


def _solver(module: Any, name: str | None, steps: int | None) -> Any:
    """The module's solver with other steps, or another one with its steps and clipping."""
    from lit_diffusion.gaussian import FixedSmall, LearnedRange
    from lit_diffusion.solvers import DDIM, DDPM, DPMSolverPP

    own = module.solver
    kinds = {"ddim": DDIM, "ddpm": DDPM, "dpmpp": DPMSolverPP}
    wanted = {"steps": own.steps if steps is None else steps}
    if name is None or isinstance(own, kinds[name]):
        return replace(own, **wanted)
    if name == "ddpm":
        wanted["variance"] = LearnedRange() if module.loss.output_factor == 2 else FixedSmall()
    return kinds[name](clip=own.clip, **wanted)


def _check_labels(labels: list[int] | None, num_classes: int | None) -> None:
    if labels is None:
        return
    if num_classes is None:
        raise ValueError("--labels needs a model with classes, and this one has none.")
    for label in labels:
        if not -1 <= label < num_classes:
            raise ValueError(f"--labels must be in 0..{num_classes - 1}, or -1, got {label}.")


def write_samples(
    loaded: "Loaded", args: argparse.Namespace, num: int, out: Path
) -> dict[str, Any]:
    """Generate images into a folder.

    Args:
        loaded: a module and where it is from.
        args: of `add_sampling`.
        num: number of images, >= 1.
        out: folder.

    Returns:
        What samples.json holds.
    """
    import torch

    if num < 1:
        raise ValueError(f"--num must be at least 1, got {num}.")
    shown: list[Tensor] = []
    for first, images in _generate(loaded.module, args, num):
        for i, image in enumerate(images):
            _write(image, out / f"{first + i:06d}.png")
        shown += images[: max(_GRID_IMAGES - first, 0)]
    _write(_grid(torch.stack(shown)), out / GRID)
    record = {
        "checkpoint": str(loaded.path),
        "step": loaded.step,
        "weights": loaded.weights,
        "num": num,
        "seeds": [args.seed, args.seed + num],
        "labels": args.labels,
        "sampling": _described(loaded.module),
    }
    (out / RECORD).write_text(json.dumps(record, indent=1) + "\n")
    return record


def _described(module: Any) -> dict[str, Any]:
    return dict(module.sampling_record()) if hasattr(module, "sampling_record") else {}


def _generate(module: Any, args: argparse.Namespace, num: int) -> "Iterator[tuple[int, Tensor]]":
    """(number of the first, images uint8 (B, C, H, W) on the CPU), with a sign of life."""
    import torch

    told = time.monotonic()
    for first in range(0, num, args.batch_size):
        numbers = range(first, min(first + args.batch_size, num))
        labels = None
        if args.labels is not None:
            labels = torch.tensor([args.labels[i % len(args.labels)] for i in numbers])
        yield first, module.generate([args.seed + i for i in numbers], labels).cpu()
        if time.monotonic() - told > 10 and numbers[-1] + 1 < num:
            told = time.monotonic()
            print(f"{numbers[-1] + 1} of {num} images", file=sys.stderr, flush=True)


def _write(image: "Tensor", path: Path) -> None:
    """An image uint8 (C, H, W) as PNG."""
    from PIL import Image

    pixels = image.permute(1, 2, 0).numpy()
    Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels).save(path)


def _grid(images: "Tensor") -> "Tensor":
    """Images uint8 (N, C, H, W) in rows, with a white line between; small ones enlarged."""
    import torch

    columns = max(1, round(len(images) ** 0.5))
    rows = -(-len(images) // columns)
    scale = max(1, _GRID_PIXELS // (columns * images.shape[-1]))
    images = images.repeat_interleave(scale, 2).repeat_interleave(scale, 3)
    n, c, h, w = images.shape
    cells = torch.full((rows * columns, c, h + 1, w + 1), 255, dtype=torch.uint8)
    cells[:n, :, :h, :w] = images
    grid = cells.view(rows, columns, c, h + 1, w + 1).permute(2, 0, 3, 1, 4)
    return grid.reshape(c, rows * (h + 1), columns * (w + 1))[:, :-1, :-1]
