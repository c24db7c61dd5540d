"""Train the classifiers of the FID protocols `digits-cnn` and `patches-cnn`; write their files.

    python tests/benchmarks/train_classifiers.py [digits-cnn] [patches-cnn] [--out DIR]

Both see the training part of the embedded data only. The features must know two things: what an
image shows, and how clean it is. So a network learns two tasks at once: the class of the clean
image (digits: 0..9; patches: which of the 8 x 4 fields of which photograph the crop lies in), and,
through a second head that is not kept, whether the image was visibly blurred, made visibly noisy or
left alone: labels alone teach a network to overlook noise, and FID would overlook it with it. What
nobody sees it may overlook, so all images get noise of up to one grey step: the digits have 17
levels, which fakes have no reason to hit.

Deterministic on one machine and one version of torch; takes half a minute for digits, three minutes
for patches on one core.
"""

import argparse
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save
from sklearn.datasets import load_sample_images
from torch import Tensor, nn

import lit_diffusion.metrics
from lit_diffusion.data.digits import Digits
from lit_diffusion.data.photo_patches import SIZE, TRAIN_ROWS
from lit_diffusion.metrics.classifier import SmallClassifier
from lit_diffusion.seeding import fold

ROWS, COLUMNS = 4, 8

Batch = tuple[Tensor, Tensor]
"""Images (N, C, H, W) float32 in [-1, 1], classes (N,) int64."""


@dataclass(frozen=True)
class Task:
    """Where batches come from, and the network they train."""

    draw: Callable[[int, torch.Generator], Batch]
    network: dict[str, object]
    steps: int
    noise: float
    dither: float
    score: Callable[[SmallClassifier], dict[str, float]]


def digits_task() -> Task:
    data = Digits()
    images, labels = (
        torch.as_tensor(v) for v in data.dataset("train").fetch([0] * 1437, range(1437))[:2]
    )
    held_out, truth = data.dataset("val").fetch([0] * 360, range(360))[:2]

    def draw(count: int, generator: torch.Generator) -> Batch:
        chosen = torch.randint(len(images), (count,), generator=generator)
        return jitter(images[chosen].float() / 127.5 - 1, generator), labels[chosen]

    def score(network: SmallClassifier) -> dict[str, float]:
        return {
            "accuracy_held_out": accuracy(network, held_out, truth),
            "accuracy_train": accuracy(network, images, labels),
        }

    shape = {"channels": 1, "size": 8, "widths": (32, 64, 64), "num_classes": 10}
    return Task(draw, shape, steps=1500, noise=0.4, dither=2 / 16, score=score)


def patches_task() -> Task:
    photos = torch.stack([torch.tensor(p).permute(2, 0, 1) for p in load_sample_images().images])
    photos = photos[:, :, :TRAIN_ROWS]
    windows = photos.unfold(2, SIZE, 1).unfold(3, SIZE, 1)
    number, _, rows, columns = windows.shape[:4]

    def draw(count: int, generator: torch.Generator) -> Batch:
        photo, y, x = (
            torch.randint(n, (count,), generator=generator) for n in (number, rows, columns)
        )
        field = (photo * ROWS + y * ROWS // rows) * COLUMNS + x * COLUMNS // columns
        return windows[photo, :, y, x].float() / 127.5 - 1, field

    def score(network: SmallClassifier) -> dict[str, float]:
        crops, fields = draw(2000, torch.Generator().manual_seed(fold("patches score")))
        return {
            "accuracy_train": accuracy(
                network, ((crops + 1) * 127.5).round().to(torch.uint8), fields
            )
        }

    shape = {
        "channels": 3,
        "size": SIZE,
        "widths": (24, 48, 64, 64),
        "num_classes": 2 * ROWS * COLUMNS,
    }
    return Task(draw, shape, steps=800, noise=0.2, dither=4 / 128, score=score)


def jitter(x: Tensor, generator: torch.Generator) -> Tensor:
    """Rotated, scaled and shifted a little: +-10 degrees, +-10 %, +-0.6 pixels."""
    turn, scale, *shift = (2 * torch.rand(4, len(x), generator=generator) - 1).unbind()
    angle, zoom = turn * torch.pi / 18, 1 + 0.1 * scale
    rows = [angle.cos() * zoom, -angle.sin() * zoom, shift[0] * 1.2 / x.shape[-1]]
    rows += [angle.sin() * zoom, angle.cos() * zoom, shift[1] * 1.2 / x.shape[-1]]
    grid = F.affine_grid(torch.stack(rows, 1).view(-1, 2, 3), list(x.shape), align_corners=False)
    return F.grid_sample(x + 1, grid, align_corners=False) - 1  # outside the image is black, -1


def distort(x: Tensor, task: Task, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A third blurred, a third noisy, of random strength; all with a little noise. And which."""
    kind = torch.arange(len(x)) % 3
    dither, strength = torch.rand(2, len(x), 1, 1, 1, generator=generator)
    x = x + task.dither * dither * torch.randn(x.shape, generator=generator)
    strength = 0.6 + 0.4 * strength
    blurred = x.lerp(F.avg_pool2d(x, 3, stride=1, padding=1, count_include_pad=False), strength)
    noisy = x + task.noise * strength * torch.randn(x.shape, generator=generator)
    stacked = torch.stack([x, blurred, noisy])
    return stacked[kind, torch.arange(len(x))].clamp(-1, 1), kind


def train(name: str, task: Task, batch: int = 128) -> SmallClassifier:
    """AdamW with one cycle of the learning rate."""
    torch.manual_seed(fold("train", name))
    generator = torch.Generator().manual_seed(fold("batches", name))
    network = SmallClassifier(**task.network)
    quality = nn.Linear(network.num_features, 3)
    parameters = [*network.parameters(), *quality.parameters()]
    optimizer = torch.optim.AdamW(parameters, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, task.steps)
    for _ in range(task.steps):
        clean, classes = task.draw(batch, generator)
        x, kind = distort(clean, task, generator)
        features = network.features(x)
        named = F.cross_entropy(
            network.head(features[kind == 0]), classes[kind == 0], label_smoothing=0.05
        )
        loss = named + 0.2 * F.cross_entropy(quality(features), kind)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return network.eval()


@torch.no_grad()
def accuracy(network: SmallClassifier, images: Tensor, labels: Tensor) -> float:
    return (network.head(network(images)).argmax(1) == labels).double().mean().item()


def write(name: str, network: SmallClassifier, task: Task, folder: Path) -> dict[str, object]:
    """The weights, and what is said about them beside."""
    path = folder / f"{name}.safetensors"
    path.write_bytes(save(network.state_dict()))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    scores = {key: round(value, 4) for key, value in task.score(network).items()}
    return {
        "sha256": digest,
        "network": task.network,
        "trained_with_torch": torch.__version__.split("+")[0],
    } | scores


def main() -> None:
    tasks = {"digits-cnn": digits_task, "patches-cnn": patches_task}
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help=f"which of {', '.join(tasks)}; all by default")
    parser.add_argument("--out", type=Path, default=Path(lit_diffusion.metrics.__path__[0]))
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # sums in another order are other sums
    torch.use_deterministic_algorithms(True)
    record = arguments.out / "classifiers.json"
    known = json.loads(record.read_text()) if record.exists() else {}
    for name in arguments.names or tasks:
        task = tasks[name]()
        known[name] = write(name, train(name, task), task, arguments.out)
        print(name, json.dumps(known[name]), flush=True)
    record.write_text(json.dumps(known, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
