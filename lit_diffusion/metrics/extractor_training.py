"""Trains the small networks whose features FID compares.

The features must know two things: what an image shows, and how clean it is. So a network learns two
tasks at once: the class of a clean image, or without classes which image it is a view of; and,
through a second head that is not kept, whether an image was visibly blurred, made visibly noisy or
left alone. Labels alone teach a network to overlook noise, and FID would overlook it with it.
"""

import json
import math
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.seed import isolate_rng
from safetensors.torch import save
from torch import Tensor, nn

from lit_diffusion.files import atomic_write
from lit_diffusion.metrics.classifier import SmallClassifier
from lit_diffusion.metrics.reference import RealImages
from lit_diffusion.seeding import fold

Batch: TypeAlias = tuple[Tensor, Tensor]
"""Images (N, C, H, W) float32 in [-1, 1], classes (N,) int64."""


def train_extractor(
    images: RealImages,
    path: str | Path,
    num_classes: int | None = None,
    *,
    steps: int = 1500,
    batch_size: int = 128,
    device: str | torch.device = "cpu",
    say: Callable[[str], Any] = print,
) -> SmallClassifier:
    """Train a `SmallClassifier` on images, and write it to a file for `extractors.TrainedCNN`.

    It learns their classes, or without two of them to tell views of one image from those of others.
    The same call gives the same network on one machine.

    Args:
        images: to train on, all of one size.
        path: of the file, which ends in .safetensors.
        num_classes: of the images' labels; None without labels.
        steps: of the optimizer.
        batch_size: images a step.
        device: that trains.
        say: takes a line about every ten seconds.

    Raises:
        ValueError: for a `path` of another ending or that is there already, no steps, fewer than
            two images, or labels that are no classes.
        OSError: where `path` cannot be written.

    Source: T. Chen et al. 2020, "A Simple Framework for Contrastive Learning of Visual
    Representations", equation 1, for images without classes.
    """
    path = Path(path)
    _refuse(path, steps, batch_size, len(images))
    with isolate_rng():
        torch.manual_seed(fold("train-extractor"))
        generator = torch.Generator().manual_seed(fold("batches of train-extractor"))
        first, _ = next(images.batches(256))
        channels, *size = first.shape[1:]
        classes = num_classes if num_classes and num_classes > 1 else None
        network = SmallClassifier(channels, size, stage_widths(min(size)), classes or 2)
        levels = int(first.flatten().int().bincount().count_nonzero())
        grey_step = 2 / max(1, levels - 1)  # of what the images use of [-1, 1]
        task = Task(steps, 0.2, min(max(grey_step, 4 / 128), 0.2), by_class=bool(classes))
        batches = _batches(images, steps * batch_size, batch_size, classes, generator)
        train(network.to(device), batches, task, generator, say)
        record = {
            "name": path.stem,
            "size": size,
            "trained_on": f"{images.name} {images.fingerprint()}",
            "told_apart": "classes" if classes else "images",
            "steps": steps,
            "torch": torch.__version__,
        }
    with atomic_write(path) as file:
        file.write(save(network.cpu().state_dict(), {"extractor": json.dumps(record)}))
    return network


def _refuse(path: Path, steps: int, batch_size: int, num: int) -> None:
    if path.suffix != ".safetensors" or min(steps, batch_size - 1, num - 1) < 1:
        raise ValueError(
            "an extractor needs a file name that ends in .safetensors, steps >= 1, batch_size >= 2 "
            f"and two images, got {path}, {steps}, {batch_size} and {num}."
        )
    if path.exists():
        raise ValueError(f"{path} is there already, and runs may go by it; name another file.")
    path.parent.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=path.parent).close()  # rather than fail when all is trained


def _batches(
    images: RealImages, num: int, batch_size: int, classes: int | None, generator: torch.Generator
) -> Iterator[Batch]:
    chosen = torch.randint(len(images), (num,), generator=generator).tolist()
    for x, labels in images.batches(batch_size, chosen):
        if classes and not 0 <= min(labels) <= max(labels) < classes:
            raise ValueError(
                f"labels of {images.name} go from {min(labels)} to {max(labels)} (-1 is none), "
                f"and the data module says num_classes={classes}."
            )
        yield jitter(x.float() / 127.5 - 1, generator), torch.tensor(labels)


def stage_widths(side: int) -> tuple[int, ...]:
    """Of a `SmallClassifier`, so that of `side` pixels 4 to 7 are left after the last pooling.

    Example:
        >>> stage_widths(8), stage_widths(64)
        ((24, 48, 64), (24, 48, 64, 64, 64))
    """
    halvings = side.bit_length() - 1
    pools = min(halvings, max(2, halvings - 2))
    return (24, 48, *[64] * pools)[: pools + 1]


@dataclass(frozen=True)
class Task:
    """What a network learns.

    Args:
        steps: of the optimizer.
        noise: standard deviation of visible noise at its strongest, in images of [-1, 1].
        dither: of noise in all images. What nobody sees, a network may overlook: data of a few
            levels have steps that samples have no reason to hit.
        by_class: whether images are told apart by their classes, rather than each from all others.
    """

    steps: int
    noise: float
    dither: float
    by_class: bool = True


def train(
    network: SmallClassifier,
    batches: Iterable[Batch],
    task: Task,
    generator: torch.Generator,
    say: Callable[[str], Any] = print,
) -> SmallClassifier:
    """Train by AdamW with one cycle of the learning rate; the network in eval mode."""
    device, features = network.head.weight.device, network.num_features
    quality = nn.Linear(features, 3)
    views = nn.Sequential(nn.Linear(features, features), nn.ReLU(), nn.Linear(features, 64))
    heads = [quality] if task.by_class else [quality, views]
    parameters = [p for part in (network, *heads) for p in part.to(device).parameters()]
    optimizer = torch.optim.AdamW(parameters, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, task.steps)
    last_sign = began = time.monotonic()
    for step, (clean, classes) in enumerate(batches, 1):
        x, kind = (part.to(device) for part in distort(clean, task, generator))
        found = network.features(x)
        if task.by_class:
            own = classes.to(device)[kind == 0]
            named = F.cross_entropy(network.head(found[kind == 0]), own, label_smoothing=0.05)
        else:
            pair = torch.cat([clean, jitter(clean, generator)]).to(device)
            named = contrast(*views(network.features(pair)).chunk(2))
        loss = named + 0.2 * F.cross_entropy(quality(found), kind)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        if time.monotonic() - last_sign > 10:
            last_sign = time.monotonic()
            left = (last_sign - began) / step * (task.steps - step)
            say(f"step {step} of {task.steps}, loss {loss.item():.3f}, {left:.0f} s left")
    return network.eval()


def contrast(one: Tensor, other: Tensor, temperature: float = 0.2) -> Tensor:
    """Cross-entropy of finding each row's partner, (), of (N, D) and (N, D), by their cosines.

    Source: Chen et al. 2020, equation 1.
    """
    rows = F.normalize(torch.cat([one, other]))
    cosines = (rows @ rows.T / temperature).fill_diagonal_(-math.inf)
    return F.cross_entropy(cosines, torch.arange(len(rows), device=rows.device).roll(len(one)))


def jitter(x: Tensor, generator: torch.Generator) -> Tensor:
    """Rotated, scaled and shifted a little: +-10 degrees, +-10 %, +-0.6 pixels."""
    turn, scale, *shift = (2 * torch.rand(4, len(x), generator=generator) - 1).unbind()
    angle, zoom = turn * torch.pi / 18, 1 + 0.1 * scale
    rows = [angle.cos() * zoom, -angle.sin() * zoom, shift[0] * 1.2 / x.shape[-1]]
    rows += [angle.sin() * zoom, angle.cos() * zoom, shift[1] * 1.2 / x.shape[-2]]
    grid = F.affine_grid(torch.stack(rows, 1).view(-1, 2, 3), list(x.shape), align_corners=False)
    return F.grid_sample(x + 1, grid, align_corners=False) - 1  # outside the image is black, -1


def distort(x: Tensor, task: Task, generator: torch.Generator) -> Batch:
    """A third blurred, a third noisy, of random strength; all with a little noise. And which."""
    kind = torch.arange(len(x)) % 3
    dither, strength = torch.rand(2, len(x), 1, 1, 1, generator=generator)
    x = x + task.dither * dither * torch.randn(x.shape, generator=generator)
    strength = 0.6 + 0.4 * strength
    blurred = x.lerp(F.avg_pool2d(x, 3, stride=1, padding=1, count_include_pad=False), strength)
    noisy = x + task.noise * strength * torch.randn(x.shape, generator=generator)
    stacked = torch.stack([x, blurred, noisy])
    return stacked[kind, torch.arange(len(x))].clamp(-1, 1), kind
