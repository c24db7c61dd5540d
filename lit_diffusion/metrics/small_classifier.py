"""Define and train a small convolutional network that extracts features of images for FID.

The features must depend on the content of an image and on its quality. Therefore, the network
learns two tasks at once. The first task is to classify clean images, or, if there are no classes,
to match augmented views of the same image. The second task is to detect whether an image is clean,
blurred or noisy. With the first task alone, the features, and thus the FID, would ignore noise. The
head of the second task is discarded after training.
"""

import json
import math
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.seed import isolate_rng
from safetensors.torch import save
from torch import Tensor, nn

from lit_diffusion.files import atomic_write
from lit_diffusion.metrics.images import ImageSet
from lit_diffusion.seeding import fold

MAX_NOISE = 0.2
"""Maximum standard deviation of the noise that the network learns to detect, for x in [-1, 1]."""

LabelledBatch: TypeAlias = tuple[Tensor, Tensor]
"""Images (N, C, H, W) float32 in [-1, 1], and classes (N,) int64."""


class SmallClassifier(nn.Module):
    """Classifier of small images, whose features are the spatial means of its last feature map.

    Each stage is a 3x3 convolution, batch norm and ReLU. A 2x2 max pooling follows every stage
    except the last.

    Args:
        channels: channels of the images, >= 1.
        size: height and width of the images in pixels; an int if they are equal.
        widths: channels of each stage. The last entry is the number of features.
        num_classes: number of classes.

    Example:
        >>> network = SmallClassifier(channels=1, size=8, widths=(4, 6), num_classes=10).eval()
        >>> features = network(torch.zeros(5, 1, 8, 8, dtype=torch.uint8))
        >>> features.shape, network.logits(features).shape
        (torch.Size([5, 6]), torch.Size([5, 10]))
    """

    def __init__(
        self, channels: int, size: int | Sequence[int], widths: Sequence[int], num_classes: int
    ) -> None:
        super().__init__()
        self.channels = channels
        self.size = (size, size) if isinstance(size, int) else tuple(size)
        self.num_features = widths[-1]
        stages: list[nn.Module] = []
        for width_in, width in zip([channels, *widths], widths, strict=False):
            stages += [nn.Conv2d(width_in, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)]
            stages += [nn.ReLU(), nn.MaxPool2d(2)]
        self.stages = nn.Sequential(*stages[:-1])
        self.head = nn.Linear(self.num_features, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Map images uint8 (N, C, H, W) to features (N, num_features) >= 0.

        Raises:
            TypeError: if the images are not uint8.
            ValueError: if the number of channels or the size of the images differs from what the
                network accepts.
        """
        if images.dtype != torch.uint8:
            raise TypeError(f"images must be uint8 in [0, 255], got {images.dtype}.")
        if images.shape[1:] != (self.channels, *self.size):
            raise ValueError(
                f"this extractor takes images of shape {(self.channels, *self.size)}, got "
                f"{tuple(images.shape[1:])}; choose an extractor for images of this shape."
            )
        return self.features(images.float() / 127.5 - 1)

    def features(self, x: Tensor) -> Tensor:
        """Map images float (N, C, H, W) in [-1, 1] to features (N, num_features)."""
        return self.stages(x).mean(dim=(2, 3))

    def logits(self, features: Tensor) -> Tensor:
        """Map features (N, num_features) to logits (N, num_classes)."""
        return self.head(features)


def load_small_classifier(
    state: Mapping[str, Tensor], size: int | Sequence[int]
) -> SmallClassifier:
    """Build a `SmallClassifier` from its state_dict, frozen and in eval mode.

    Args:
        state: state_dict, which determines the channels and widths.
        size: height and width of the images in pixels; an int if they are equal.

    Raises:
        KeyError, RuntimeError: if the state_dict does not come from a `SmallClassifier`.
        ValueError: if a weight is not finite.
    """
    for name, value in state.items():
        if not value.isfinite().all():
            raise ValueError(f"{name} must be finite, and is not")
    convolutions = {int(name.split(".")[1]): v for name, v in state.items() if v.ndim == 4}
    weights = [convolutions[index] for index in sorted(convolutions)]
    num_classes = len(state["head.weight"])
    network = SmallClassifier(weights[0].shape[1], size, [len(w) for w in weights], num_classes)
    network.load_state_dict(state)
    return network.eval().requires_grad_(False)


def train_extractor(
    images: ImageSet,
    path: str | Path,
    num_classes: int | None = None,
    *,
    steps: int = 1500,
    batch_size: int = 128,
    device: str | torch.device = "cpu",
    log: Callable[[str], Any] = print,
) -> SmallClassifier:
    """Train a `SmallClassifier` on images, and write it to a file for `extractors.TrainedCNN`.

    The network learns to classify the images. If there are fewer than two classes, it learns to
    match augmented views of the same image instead. In both cases, it also learns to detect blur
    and noise. Training twice on the same machine gives the same result.

    Args:
        images: training images, all of the same size.
        path: file to write, with the suffix .safetensors.
        num_classes: number of classes; None if the images have no labels.
        steps: number of optimizer steps.
        batch_size: number of images per step.
        device: device to train on.
        log: function that is called with a line of progress about every ten seconds.

    Raises:
        ValueError: if `path` exists, if its suffix is not .safetensors, if steps < 1, if
            batch_size < 2, if there are fewer than two images, or if a label is not in
            0, ..., num_classes - 1.
        OSError: if `path` cannot be written.

    Source: T. Chen et al. 2020, "A Simple Framework for Contrastive Learning of Visual
    Representations", equation 1, for images without classes.
    """
    path = Path(path)
    if path.suffix != ".safetensors" or min(steps, batch_size - 1, len(images) - 1) < 1:
        raise ValueError(
            "an extractor needs a file name that ends in .safetensors, steps >= 1, batch_size >= 2 "
            f"and at least two images, got {path}, {steps}, {batch_size} and {len(images)}."
        )
    if path.exists():
        raise ValueError(f"{path} exists already, and runs may use it; choose another file name.")
    path.parent.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=path.parent).close()  # fails now, not after training
    with isolate_rng():
        torch.manual_seed(fold("train-extractor"))
        generator = torch.Generator().manual_seed(fold("batches of train-extractor"))
        first_batch, _ = next(images.batches(256))
        channels, *size = first_batch.shape[1:]
        classes = num_classes if num_classes and num_classes > 1 else None
        network = SmallClassifier(channels, size, stage_widths(min(size)), classes or 2)
        levels = int(first_batch.flatten().int().bincount().count_nonzero())
        gray_step = 2 / max(1, levels - 1)  # mean distance between gray levels in [-1, 1]
        dither = min(max(gray_step, 4 / 128), 0.2)
        batches = _jittered_batches(images, steps * batch_size, batch_size, classes, generator)
        fit(network.to(device), batches, steps, dither, bool(classes), generator, log)
        record = {
            "name": path.stem,
            "size": size,
            "trained_on": f"{images.name} {images.fingerprint}",
            "told_apart": "classes" if classes else "images",
            "steps": steps,
            "torch": torch.__version__,
        }
    with atomic_write(path) as file:
        file.write(save(network.cpu().state_dict(), {"extractor": json.dumps(record)}))
    return network


def _jittered_batches(
    images: ImageSet, num: int, batch_size: int, classes: int | None, generator: torch.Generator
) -> Iterator[LabelledBatch]:
    index = torch.randint(len(images), (num,), generator=generator).tolist()
    for x, labels in images.batches(batch_size, index):
        if classes and not 0 <= min(labels) <= max(labels) < classes:
            raise ValueError(
                f"labels of {images.name} go from {min(labels)} to {max(labels)} (-1 means no "
                f"label), but num_classes={classes}."
            )
        yield jitter(x.float() / 127.5 - 1, generator), torch.tensor(labels)


def stage_widths(side: int) -> tuple[int, ...]:
    """Choose the widths of the stages of a `SmallClassifier` for images of `side` x `side` pixels.

    If `side` is at least 16, the poolings between the stages halve the side of the feature map
    until it is 4 to 7 pixels. If `side` is 4 to 15, there are two poolings, which reduce it to 1 to
    3 pixels.

    Example:
        >>> stage_widths(8), stage_widths(64)
        ((24, 48, 64), (24, 48, 64, 64, 64))
    """
    halvings = side.bit_length() - 1
    pools = min(halvings, max(2, halvings - 2))
    return (24, 48, *[64] * pools)[: pools + 1]


def fit(
    network: SmallClassifier,
    batches: Iterable[LabelledBatch],
    steps: int,
    dither: float,
    by_class: bool,
    generator: torch.Generator,
    log: Callable[[str], Any],
) -> None:
    """Train with AdamW and a one-cycle learning rate, and leave the network in eval mode.

    Args:
        network: the network to train.
        batches: clean images and their classes, one batch for each step.
        steps: number of optimizer steps.
        dither: maximum standard deviation of the weak noise that is added to all images. This
            noise makes the network ignore invisible differences, such as the spacing of gray levels
            in data with few levels.
        by_class: whether to learn classes, instead of matching views of the same image.
        generator: source of random numbers.
        log: function that is called with a line of progress about every ten seconds.
    """
    device, width = network.head.weight.device, network.num_features
    quality_head = nn.Linear(width, 3)
    projection_head = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 64))
    heads = [quality_head] if by_class else [quality_head, projection_head]
    parameters = [p for part in (network, *heads) for p in part.to(device).parameters()]
    optimizer = torch.optim.AdamW(parameters, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, steps)
    start = last_line = time.monotonic()
    for step, (clean, classes) in enumerate(batches, 1):
        x, kind = (part.to(device) for part in corrupt(clean, dither, generator))
        features = network.features(x)
        if by_class:
            labels, logits = classes.to(device)[kind == 0], network.head(features[kind == 0])
            content_loss = F.cross_entropy(logits, labels, label_smoothing=0.05)
        else:
            pair = torch.cat([clean, jitter(clean, generator)]).to(device)
            content_loss = contrastive_loss(*projection_head(network.features(pair)).chunk(2))
        loss = content_loss + 0.2 * F.cross_entropy(quality_head(features), kind)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        if time.monotonic() - last_line > 10:
            last_line = time.monotonic()
            seconds_left = (last_line - start) / step * (steps - step)
            log(f"step {step} of {steps}, loss {loss.item():.3f}, {seconds_left:.0f} s left")
    network.eval()


def contrastive_loss(a: Tensor, b: Tensor, temperature: float = 0.2) -> Tensor:
    """Compute the NT-Xent loss, a scalar, from embeddings a and b (N, D) of two views of N images.

    Source: T. Chen et al. 2020, equation 1.
    """
    rows = F.normalize(torch.cat([a, b]))
    cosines = (rows @ rows.T / temperature).fill_diagonal_(-math.inf)
    return F.cross_entropy(cosines, torch.arange(len(rows), device=rows.device).roll(len(a)))


def jitter(x: Tensor, generator: torch.Generator) -> Tensor:
    """Rotate, scale and shift images (N, C, H, W) at random.

    The limits are +-10 degrees, +-10 % and +-0.6 pixels.
    """
    rotation, scale, *shift = (2 * torch.rand(4, len(x), generator=generator) - 1).unbind()
    angle, zoom = rotation * torch.pi / 18, 1 + 0.1 * scale
    rows = [angle.cos() * zoom, -angle.sin() * zoom, shift[0] * 1.2 / x.shape[-1]]
    rows += [angle.sin() * zoom, angle.cos() * zoom, shift[1] * 1.2 / x.shape[-2]]
    grid = F.affine_grid(torch.stack(rows, 1).view(-1, 2, 3), list(x.shape), align_corners=False)
    return F.grid_sample(x + 1, grid, align_corners=False) - 1  # pads with black, -1


def corrupt(x: Tensor, dither: float, generator: torch.Generator) -> LabelledBatch:
    """Blur a third of the images, and add noise to another third, to train the quality head.

    First, the function adds weak noise to all images. The standard deviation of this noise is
    random, and at most `dither`. The strength of the blur is also random, and so is the strength of
    the noise that is added to a third of the images.

    Returns:
        The images (N, C, H, W), and their kinds (N,): 0 is clean, 1 is blurred, 2 is noisy.
    """
    kind = torch.arange(len(x)) % 3
    share, strength = torch.rand(2, len(x), 1, 1, 1, generator=generator)
    x = x + dither * share * torch.randn(x.shape, generator=generator)
    strength = 0.6 + 0.4 * strength
    blurred = x.lerp(F.avg_pool2d(x, 3, stride=1, padding=1, count_include_pad=False), strength)
    noisy = x + MAX_NOISE * strength * torch.randn(x.shape, generator=generator)
    stacked = torch.stack([x, blurred, noisy])
    return stacked[kind, torch.arange(len(x))].clamp(-1, 1), kind
