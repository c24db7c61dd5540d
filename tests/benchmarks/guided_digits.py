"""What guidance does to digits.

    guided_digits.py measure RUN WEAKER CLASSIFIER --out FILE.csv [--sets 3]
    guided_digits.py table FILE.csv    as Markdown, mean and spread of the sets

Samples of RUN with the labels of the 1,437 training digits, under each kind of guidance: FID
(digits-cnn) beside these and beside the held-out digits, precision and recall, and the share in
which a support-vector machine, trained on the training digits, recognises the label. All kinds
share the seeds of a set.
"""

import argparse
import csv
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from digits_quality import pixels
from sklearn.svm import SVC
from torch import Tensor

from lit_diffusion.checkpoints.loading import load
from lit_diffusion.data.digits import Digits
from lit_diffusion.files import user_cache
from lit_diffusion.gaussian import FixedSmall
from lit_diffusion.grids import LogSNR
from lit_diffusion.guidance import Autoguidance, ClassifierFree, ClassifierScore, ClassifierShift
from lit_diffusion.metrics.auxiliary_metrics import (
    AuxiliaryMetrics,
    FeatureComparison,
    build_auxiliary_metrics,
)
from lit_diffusion.metrics.extractors import protocol_by_name
from lit_diffusion.metrics.images import open_split
from lit_diffusion.metrics.reference import Scorer, measure_reference
from lit_diffusion.solvers import DDPM

COLUMNS = ("FID", "held-out", "precision", "recall", "recognised")
MIDDLE = (0.3, 5.0)
"""Noise levels sigma / alpha between which guidance with an interval guides."""


def second_look(data: Digits, labels: Tensor) -> AuxiliaryMetrics:
    protocol = protocol_by_name("digits-cnn")
    scorer = Scorer(protocol, protocol.build(), torch.device("cpu"), 480)
    real, others = open_split(data, "train"), open_split(data, "val")
    about = (len(labels), user_cache(), labels.tolist())
    view = FeatureComparison("", scorer, measure_reference(scorer, real, others, *about))
    return build_auxiliary_metrics(view, real, others, *about)


def guidances(weaker: Any, classifier: Any) -> Iterator[tuple[str, Any]]:
    yield "none", None
    for scale in (1.5, 2.0, 3.0, 5.0):
        yield f"classifier-free, {scale:g}", ClassifierFree(scale)
    for scale in (2.0, 3.0, 5.0):
        yield f"classifier-free, {scale:g}, interval", ClassifierFree(scale, interval=MIDDLE)
        yield f"classifier-free, {scale:g}, rescale 0.7", ClassifierFree(scale, rescale=0.7)
    for scale in (1.5, 2.0, 3.0):
        yield f"autoguidance, {scale:g}", Autoguidance(weaker.denoise_for, scale)
    for scale in (1.0, 2.0, 4.0):
        yield f"classifier's score, {scale:g}", ClassifierScore(classifier.gradient(scale))
    yield "none, DDPM in 50 steps", None
    for scale in (1.0, 2.0, 4.0):
        yield f"classifier's shift, {scale:g}, DDPM", ClassifierShift(classifier.gradient(scale))


def scores(
    model: Any, labels: Tensor, seeds: range, look: AuxiliaryMetrics, judge: SVC
) -> list[float]:
    images = torch.cat(
        [model.generate(seeds[i : i + 480], labels[i : i + 480]) for i in range(0, len(seeds), 480)]
    )
    samples = look.accumulator()
    samples.add(images)
    fid, metrics = samples.compute()
    others = (metrics[name] for name in COLUMNS[1:-1])
    return [fid, *others, judge.score(pixels(images), labels)]


def measured(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row a kind of guidance and set."""
    model, weaker, classifier = (
        load(path, weights=args.weights) for path in (args.run, args.weaker, args.classifier)
    )
    data = Digits()
    train = data.dataset("train")
    judge = SVC(C=10).fit(pixels(train.images), train.labels)
    usual, ancestral = model.solver, DDPM(FixedSmall(), 50, LogSNR(noisiest=-10.0))
    look, num = second_look(data, train.labels), len(train.labels)
    for name, guidance in guidances(weaker, classifier):
        model.guidance = guidance
        model.solver = ancestral if "DDPM" in name else usual
        for k in range(args.sets):
            seeds = range(k * num, (k + 1) * num)
            values = scores(model, train.labels, seeds, look, judge)
            yield {"guidance": name, "set": k, **dict(zip(COLUMNS, values, strict=True))}


def print_table(file: Path) -> None:
    kinds: dict[str, list[dict[str, str]]] = {}
    for row in csv.DictReader(file.read_text().splitlines()):
        kinds.setdefault(row["guidance"], []).append(row)
    print(f"| guidance | {' | '.join(COLUMNS)} |\n|---|{'---|' * len(COLUMNS)}")
    for name, sets in kinds.items():
        columns = {key: [float(each[key]) for each in sets] for key in COLUMNS}
        cells = [f"{statistics.fmean(values):.3f}" for values in columns.values()]
        if len(sets) > 1:
            cells[0] += f" +- {statistics.stdev(columns['FID']):.3f}"
        print(f"| {name} | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    measure_reference = commands.add_parser("measure")
    for name in ("run", "weaker", "classifier"):
        measure_reference.add_argument(name, type=Path, help="checkpoint or run folder")
    measure_reference.add_argument("--out", type=Path, required=True)
    measure_reference.add_argument("--weights", default="ema", help="ema (default) or raw")
    measure_reference.add_argument("--sets", type=int, default=3, help="sets of seeds (default 3)")
    commands.add_parser("table").add_argument("file", type=Path)
    args = parser.parse_args()
    if args.command == "table":
        print_table(args.file)
        return
    with args.out.open("w") as file:
        writer = csv.DictWriter(file, ("guidance", "set", *COLUMNS), lineterminator="\n")
        writer.writeheader()
        for row in measured(args):
            writer.writerow(row)
            file.flush()


if __name__ == "__main__":
    main()
