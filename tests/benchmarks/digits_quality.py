"""How good the digits of a run are: digits_quality.py runs/digits [--out FILE.json]

- recognised: share of 200 labelled samples to which a support-vector machine, trained on the 1,437
  training digits, gives their label (and its share of the 360 held-out digits).
- FID (digits-cnn) of 360 samples with the labels of the held-out digits against these: mean and
  standard deviation over 10 batches of seeds; beside it that of 360 real training digits with the
  same labels, over 10 draws, and over 100, whose mean is known better.
- memorising: r = d(sample, nearest training image) / d(that image, its own nearest neighbour);
  shares of the 3,600 samples with r < 0.5 and r < 1, beside those of the held-out digits.
"""

import argparse
import json
import statistics
from pathlib import Path

import torch
from sklearn.svm import SVC
from torch import Tensor

from lit_diffusion.checkpoints.loading import load
from lit_diffusion.data.digits import Digits
from lit_diffusion.metrics.extractors import protocol_by_name
from lit_diffusion.metrics.frechet import FrechetDistance

BATCHES = 10
MORE = 100


def split(data: Digits, name: str) -> tuple[Tensor, Tensor]:
    batches = list(data.in_order(name))
    return torch.cat([b[0] for b in batches]), torch.cat([b[1] for b in batches])


def pixels(images: Tensor) -> Tensor:
    return images.flatten(1).float() / 255


def fid(extractor: torch.nn.Module, fake: Tensor, real: Tensor) -> float:
    metric = FrechetDistance(extractor.num_features)
    metric.update(extractor(fake), real=False)
    metric.update(extractor(real), real=True)
    return metric.compute().item()


def draw_with_labels(train: tuple[Tensor, Tensor], labels: Tensor, seed: int) -> Tensor:
    """As many training images of each class as `labels` has."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for label in labels.unique().tolist():
        candidates = (train[1] == label).nonzero().flatten()
        order = torch.randperm(len(candidates), generator=generator)
        rows.append(candidates[order[: int((labels == label).sum())]])
    return train[0][torch.cat(rows)]


def closeness(images: Tensor, train: Tensor) -> tuple[float, float]:
    """Shares of images with r < 0.5 and r < 1."""
    gap = torch.cdist(pixels(train), pixels(train)).fill_diagonal_(torch.inf).min(1).values
    distance, nearest = torch.cdist(pixels(images), pixels(train)).min(1)
    r = distance / gap[nearest]
    return (r < 0.5).double().mean().item(), (r < 1).double().mean().item()


def spread(values: list[float]) -> dict[str, float]:
    return {"mean": statistics.mean(values), "sd": statistics.stdev(values)}


def measure(checkpoint: Path) -> dict[str, object]:
    data = Digits()
    train, held_out = split(data, "train"), split(data, "val")
    judge = SVC(C=10).fit(pixels(train[0]), train[1])
    extractor = protocol_by_name("digits-cnn").build()
    model = load(checkpoint, weights="ema")
    labels = torch.arange(200) % 10
    samples = model.generate(range(200), labels)
    batches = [
        model.generate(range(1000 * k, 1000 * k + len(held_out[1])), held_out[1])
        for k in range(1, BATCHES + 1)
    ]
    real = [draw_with_labels(train, held_out[1], seed) for seed in range(MORE)]
    fake_fid = spread([fid(extractor, batch, held_out[0]) for batch in batches])
    real_fids = [fid(extractor, batch, held_out[0]) for batch in real]
    real_fid, better = spread(real_fids[:BATCHES]), spread(real_fids)
    half, one = closeness(torch.cat(batches), train[0])
    half_real, one_real = closeness(held_out[0], train[0])
    return {
        "recognised": judge.score(pixels(samples), labels),
        "judge_on_held_out": judge.score(pixels(held_out[0]), held_out[1]),
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path, help="checkpoint or run folder")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    args = parser.parse_args()
    figures = json.dumps(measure(args.checkpoint), indent=2)
    print(figures)
    if args.out:
        args.out.write_text(figures + "\n")


if __name__ == "__main__":
    main()
