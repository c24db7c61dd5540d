"""Whether samples show what they were asked for: described_digits.py runs/digits-described

- class: a support-vector machine, trained on the 1,437 training digits, gives the sample its name.
- ink, slant: as measured on the training digits, in the third that the words say.
- all: the three at once.

Shares by description, of 20 samples each, seeds 0, 1, ...; over the descriptions that training
images have, over those that none has, and over all of them; beside these, the same samples told
nothing (what chance gives) and the 360 held-out digits, whose ink and slant are right by definition
(the ceiling).
"""

import argparse
import json
from pathlib import Path

import torch
from digits_quality import digit_judge, pixels
from sklearn.svm import SVC
from torch import Tensor

from lit_diffusion.checkpoints.loading import load
from lit_diffusion.data.digits import DESCRIPTIONS, Digits, DigitWords, number_descriptions
from lit_diffusion.guidance import ClassifierFree

PARTS = ("class", "ink", "slant", "all")
EACH = 20


def recognised(judge: SVC, images: Tensor, wanted: Tensor) -> Tensor:
    """(N, 4) bool by PARTS, of images (N, 1, 8, 8) and numbers in DESCRIPTIONS (N,)."""
    numbers = number_descriptions(images, torch.from_numpy(judge.predict(pixels(images))))
    parts = [
        numbers // 9 == wanted // 9,
        numbers % 9 // 3 == wanted % 9 // 3,
        numbers % 3 == wanted % 3,
    ]
    return torch.stack([*parts, numbers == wanted], dim=1)


def samples(model: torch.nn.Module, with_words: bool) -> tuple[Tensor, Tensor]:
    """Images of every description `EACH` times, and its number; seeds 0, 1, ..."""
    seeds, words = range(len(DESCRIPTIONS) * EACH), DigitWords()
    condition = words.for_seeds(seeds)
    condition = condition if with_words else words.null(condition)
    starts = range(0, len(seeds), 500)
    batches = [model.generate(seeds[i : i + 500], condition[i : i + 500]) for i in starts]
    return torch.cat(batches), torch.tensor(seeds) % len(DESCRIPTIONS)


def measure(checkpoint: Path, guidance: float | None) -> dict[str, object]:
    data = Digits()
    train, val = data.dataset("train"), data.dataset("val")
    judge = digit_judge()
    counts = number_descriptions(train.images, train.labels).bincount(minlength=len(DESCRIPTIONS))
    model = load(checkpoint)
    model.guidance = None if guidance is None else ClassifierFree(guidance)
    images, wanted = samples(model, with_words=True)
    right = recognised(judge, images, wanted)
    model.guidance = None
    by_chance = recognised(judge, *samples(model, with_words=False))
    held_out = recognised(judge, val.images, number_descriptions(val.images, val.labels))
    is_trained = counts[wanted] > 0
    rows = {
        "descriptions with training images": right[is_trained],
        "descriptions without": right[~is_trained],
        "all descriptions": right,
        "the same samples told nothing": by_chance,
        "held-out digits": held_out,
    }
    by_description = {
        f"{text} ({counts[i]} training images)": right[wanted == i]
        for i, text in enumerate(DESCRIPTIONS)
    }
    shares = {
        name: dict(zip(PARTS, is_right.double().mean(0).tolist(), strict=True))
        for name, is_right in (rows | by_description).items()
    }
    return {"each": EACH, "guidance": guidance, **shares}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path, help="checkpoint or run folder")
    parser.add_argument("--guidance", type=float, help="scale of classifier-free guidance")
    parser.add_argument("--out", type=Path, help="JSON file for the shares")
    args = parser.parse_args()
    figures = measure(args.checkpoint, args.guidance)
    print(f"{'':>55}" + "".join(f"{part:>8}" for part in PARTS))
    for name, row in figures.items():
        if isinstance(row, dict):
            print(f"{name:>55}" + "".join(f"{row[part]:>8.1%}" for part in PARTS))
    if args.out:
        args.out.write_text(json.dumps(figures, indent=2) + "\n")
