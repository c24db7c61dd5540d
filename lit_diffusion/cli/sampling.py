"""Write generated images into a folder: PNG files, grid.png, and their record samples.json."""

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchvision.transforms.functional import to_pil_image

from lit_diffusion.callbacks.progress import format_speed
from lit_diffusion.callbacks.sample_grid import class_captions, image_grid
from lit_diffusion.callbacks.trainer_state import is_count
from lit_diffusion.cli.generator import ImageGenerator
from lit_diffusion.cli.trajectory import write_trajectory
from lit_diffusion.files import atomic_write, atomic_write_text, check_regular
from lit_diffusion.metrics.images import read_image
from lit_diffusion.signals import defer_signals, print_error

RECORD = "samples.json"


def image_folder(path: str | Path) -> Path:
    """Create a folder for images; ValueError if it has images of a completed command."""
    folder = Path(path)
    if folder.is_file():
        raise ValueError(f"--out {folder} is a file; name a folder.")
    if any(folder.glob("*.png")) and not unfinished_record(folder):
        raise ValueError(f"--out {folder} already has images; choose another folder, or empty it.")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def unfinished_record(folder: Path) -> dict[str, Any]:
    """The content of samples.json of an interrupted command; {} without one."""
    with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        record = json.loads(check_regular(folder / RECORD).read_text())
        is_unfinished = record["of"] != record["num"] or not (folder / "grid.png").exists()
        if is_count(record["num"]) and is_count(record["of"]) and is_unfinished:
            return dict(record)
    return {}


def write_samples(
    generator: ImageGenerator, num: int, folder: Path, trajectory: bool = False
) -> dict[str, Any]:
    """Generate the missing images of a folder, and return the content of samples.json.

    samples.json is updated after each batch, so that an interrupted command can continue later.

    Args:
        generator: generates the images.
        num: number of images in the complete folder.
        folder: folder to write, created by `image_folder`.
        trajectory: whether to write the trajectories of the first images as well.
    """
    if num < 1:
        raise ValueError(f"--num must be at least 1, got {num}.")
    before = unfinished_record(folder)
    first = before.get("num", 0)
    record = generator.record(first, num)
    if before and (first or any(folder.glob("*.png"))) and before != json.loads(json_text(record)):
        raise ValueError(
            f"--out {folder} has {first} of {before['of']} images of another command, which was "
            f"stopped (see {RECORD}). Repeat that command, choose another folder, or empty it."
        )
    atomic_write_text(folder / RECORD, json_text(record))  # before any image
    if trajectory:
        write_trajectory(generator, num, folder)
    start = last_print = time.monotonic()
    batch_size = generator.options.batch_size
    for begin in range(first, num, batch_size):
        end = min(begin + batch_size, num)
        images = generator.generate(range(begin, end))
        with defer_signals():
            for i, image in enumerate(images, begin):
                to_pil_image(image).save(folder / f"{i:06d}.png")
            record = generator.record(end, num)
            atomic_write_text(folder / RECORD, json_text(record))
        if time.monotonic() - last_print > 10 and end < num:
            last_print = time.monotonic()
            rate = format_speed("image", end - first, num - end, last_print - start)
            print_error("  ".join([f"{end} of {num} images", *rate]))
    images = read_samples(folder, min(num, 256))
    names, labels = generator.class_names, generator.image_labels(len(images))
    captions = class_captions(labels, names, len(images)) if names and labels else None
    grid = to_pil_image(image_grid(images, captions))
    with defer_signals(), atomic_write(folder / "grid.png") as file:
        grid.save(file, "PNG")
    return record


def json_text(record: dict[str, Any]) -> str:
    """Format a record as the text of a JSON file."""
    return json.dumps(record, indent=1) + "\n"


def read_samples(folder: Path, num: int) -> Tensor:
    """The first images of a folder, (num, C, H, W) uint8."""
    return torch.stack([read_image(folder / f"{i:06d}.png") for i in range(num)])
