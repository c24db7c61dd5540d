"""How good the digits of a run are: digits_quality.py runs/digits [--out FILE.json]

- recognised: share of 200 labelled samples to which a support-vector machine, trained on the 1,437
  training digits, gives their label (and its share of the 360 held-out digits).
- FID (digits-cnn) of 360 samples with the labels of the held-out digits against these: mean and
  standard deviation over 10 batches of seeds; beside it that of 360 real training digits with the
  same labels, over 10 draws and over 100.
- memorising: r = d(sample, nearest training image) / d(that image, its own nearest neighbour);
  shares of the 3,600 samples with r < 0.5 and r < 1, beside those of the held-out digits.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from sklearn.svm import SVC
from torch import Tensor

from lit_diffusion.checkpoints.loading import load
from lit_diffusion.data.digits import Digits
from lit_diffusion.metrics.extractors import protocol_by_name
from lit_diffusion.metrics.frechet import FrechetDistance

BATCHES = 10
MORE = 100


def pixels(images: Tensor) -> Tensor:
    return images.flatten(1).float() / 255


def digit_judge() -> SVC:
    """Names digits by `pixels`, as trained on the training digits."""
    train = Digits().dataset("train")
    return SVC(C=10).fit(pixels(train.images), train.labels)


def draw_with_labels(train: Any, labels: Tensor, seed: int) -> Tensor:
    """As many training images of each class as `labels` has."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for label in labels.unique().tolist():
        candidates = (train.labels == label).nonzero().flatten()
        order = torch.randperm(len(candidates), generator=generator)
        rows.append(candidates[order[: int((labels == label).sum())]])
    return train.images[torch.cat(rows)]


def closeness(images: Tensor, train: Tensor) -> tuple[float, float]:
    """Shares of images with r < 0.5 and r < 1."""
    gap = torch.cdist(pixels(train), pixels(train)).fill_diagonal_(torch.inf).min(1).values
    distance, nearest = torch.cdist(pixels(images), pixels(train)).min(1)
    r = distance / gap[nearest]
    return (r < 0.5).double().mean().item(), (r < 1).double().mean().item()


def measure(checkpoint: Path) -> dict[str, object]:
    train, held_out = (Digits().dataset(split) for split in ("train", "val"))
    judge = digit_judge()
    extractor = protocol_by_name("digits-cnn").build()
    model = load(checkpoint, weights="ema")
    num = len(held_out.labels)

    def fids(batches: list[Tensor]) -> dict[str, float]:
        values = []
        for batch in batches:
            metric = FrechetDistance(extractor.num_features)
            metric.update(extractor(batch), real=False)
            metric.update(extractor(held_out.images), real=True)
            values.append(metric.compute().item())
        return {"mean": statistics.mean(values), "sd": statistics.stdev(values)}

    labels = torch.arange(200) % 10
    samples = model.generate(range(200), labels)
    starts = [1000 * k for k in range(1, BATCHES + 1)]
    batches = [model.generate(range(k, k + num), held_out.labels) for k in starts]
    real = [draw_with_labels(train, held_out.labels, seed) for seed in range(MORE)]
    fake_fid, real_fid, better = fids(batches), fids(real[:BATCHES]), fids(real)
    half, one = closeness(torch.cat(batches), train.images)
    half_real, one_real = closeness(held_out.images, train.images)
    return {
        "recognised": judge.score(pixels(samples), labels),
        "judge_on_held_out": judge.score(pixels(held_out.images), held_out.labels),
        "fid_360": fake_fid,
        "fid_360_real": real_fid,
        "fid_ratio": fake_fid["mean"] / real_fid["mean"],
        "fid_360_real_of_100_draws": better,
        "fid_ratio_of_100_draws": fake_fid["mean"] / better["mean"],
        "share_r_below_half": half,
        "share_r_below_one": one,
        "held_out_r_below_half": half_real,
        "held_out_r_below_one": one_real,
        "sampling": model.sampling_record(),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path, help="checkpoint or run folder")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    args = parser.parse_args()
    figures = json.dumps(measure(args.checkpoint), indent=2)
    print(figures)
    if args.out:
        args.out.write_text(figures + "\n")
