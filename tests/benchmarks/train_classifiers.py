"""Train the classifiers of the FID protocols `digits-cnn` and `patches-cnn`; write their files.

    python tests/benchmarks/train_classifiers.py [digits-cnn] [patches-cnn] [--out DIR]

Both see the training part of the embedded data only, and learn as
`lit_diffusion.metrics.small_classifier` says. Classes are 0..9 of the digits, and of the patches
which of the 8 x 4 fields of which photograph the crop lies in.

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
from safetensors.torch import save
from sklearn.datasets import load_sample_images
from torch import Tensor

import lit_diffusion.metrics
from lit_diffusion.data.digits import Digits
from lit_diffusion.data.photo_patches import SIZE, TRAIN_ROWS
from lit_diffusion.metrics.small_classifier import (
    ExtractorTask,
    LabelledBatch,
    SmallClassifier,
    fit,
    jitter,
)
from lit_diffusion.seeding import fold

ROWS, COLUMNS = 4, 8


@dataclass(frozen=True)
class Recipe:
    """Where batches come from, and the network they train."""

    draw: Callable[[int, torch.Generator], LabelledBatch]
    network: dict[str, object]
    task: ExtractorTask
    score: Callable[[SmallClassifier], dict[str, float]]


def digits_recipe() -> Recipe:
    train, held_out = (Digits().dataset(split) for split in ("train", "val"))

    def draw(count: int, generator: torch.Generator) -> LabelledBatch:
        rows = torch.randint(len(train), (count,), generator=generator)
        return jitter(train.images[rows].float() / 127.5 - 1, generator), train.labels[rows]

    def score(network: SmallClassifier) -> dict[str, float]:
        return {
            "accuracy_held_out": accuracy(network, held_out.images, held_out.labels),
            "accuracy_train": accuracy(network, train.images, train.labels),
        }

    shape = {"channels": 1, "size": 8, "widths": (32, 64, 64), "num_classes": 10}
    return Recipe(draw, shape, ExtractorTask(steps=1500, noise=0.4, dither=2 / 16), score)


def patches_recipe() -> Recipe:
    photos = torch.stack([torch.tensor(p).permute(2, 0, 1) for p in load_sample_images().images])
    windows = photos[:, :, :TRAIN_ROWS].unfold(2, SIZE, 1).unfold(3, SIZE, 1)
    number, _, rows, columns = windows.shape[:4]

    def draw(count: int, generator: torch.Generator) -> LabelledBatch:
        photo, y, x = (
            torch.randint(n, (count,), generator=generator) for n in (number, rows, columns)
        )
        field = (photo * ROWS + y * ROWS // rows) * COLUMNS + x * COLUMNS // columns
        return windows[photo, :, y, x].float() / 127.5 - 1, field

    def score(network: SmallClassifier) -> dict[str, float]:
        crops, fields = draw(2000, torch.Generator().manual_seed(fold("patches score")))
        crops = ((crops + 1) * 127.5).round().to(torch.uint8)
        return {"accuracy_train": accuracy(network, crops, fields)}

    widths, num_classes = (24, 48, 64, 64), 2 * ROWS * COLUMNS
    shape = {"channels": 3, "size": SIZE, "widths": widths, "num_classes": num_classes}
    return Recipe(draw, shape, ExtractorTask(steps=800, noise=0.2, dither=4 / 128), score)


@torch.no_grad()
def accuracy(network: SmallClassifier, images: Tensor, labels: Tensor) -> float:
    return (network.head(network(images)).argmax(1) == labels).double().mean().item()


def train(name: str, recipe: Recipe, folder: Path) -> dict[str, object]:
    """Train a classifier of the recipe's images, write its weights, and describe them."""
    torch.manual_seed(fold("train", name))
    generator = torch.Generator().manual_seed(fold("batches", name))
    network = SmallClassifier(**recipe.network)
    batches = (recipe.draw(128, generator) for _ in range(recipe.task.steps))
    network = fit(network, batches, recipe.task, generator, print)
    weights = save(network.state_dict())
    (folder / f"{name}.safetensors").write_bytes(weights)
    return {
        "sha256": hashlib.sha256(weights).hexdigest(),
        "network": recipe.network,
        "trained_with_torch": torch.__version__.split("+")[0],
        **{key: round(value, 4) for key, value in recipe.score(network).items()},
    }


if __name__ == "__main__":
    recipes = {"digits-cnn": digits_recipe, "patches-cnn": patches_recipe}
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help=f"which of {', '.join(recipes)}; all by default")
    parser.add_argument("--out", type=Path, default=Path(lit_diffusion.metrics.__path__[0]))
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # sums in another order are other sums
    torch.use_deterministic_algorithms(True)
    record = arguments.out / "classifiers.json"
    records = json.loads(record.read_text()) if record.exists() else {}
    for name in arguments.names or recipes:
        records[name] = train(name, recipes[name](), arguments.out)
        print(name, json.dumps(records[name]), flush=True)
    record.write_text(json.dumps(records, indent=2, sort_keys=True) + "\n")
