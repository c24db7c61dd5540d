"""What guidance does to digits.

    guided_digits.py measure RUN WEAKER CLASSIFIER --out FILE.csv
    guided_digits.py table FILE.csv    as Markdown, mean and spread of the sets

Samples of RUN with the labels of the 1,437 training digits, under each kind of guidance: FID
(digits-cnn) beside these and beside the held-out digits, precision and recall, and the share in
which a support-vector machine, trained on the training digits, recognises the label. All kinds
share the seeds of a set.
"""

import argparse
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from csv_tables import Row, group_rows, print_table, read_rows, write_rows
from digits_quality import digit_judge, pixels
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


def build_metrics(data: Digits, labels: Tensor) -> AuxiliaryMetrics:
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


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """A row a kind of guidance and set."""
    paths = (args.run, args.weaker, args.classifier)
    model, weaker, classifier = map(load, paths)
    data, judge = Digits(), digit_judge()
    labels = data.dataset("train").labels
    usual, ancestral = model.solver, DDPM(FixedSmall(), 50, LogSNR(noisiest=-10.0))
    metrics, num = build_metrics(data, labels), len(labels)
    for name, guidance in guidances(weaker, classifier):
        model.guidance = guidance
        model.solver = ancestral if "DDPM" in name else usual
        for k in range(3):
            seeds = range(k * num, (k + 1) * num)
            parts = [slice(i, i + 480) for i in range(0, num, 480)]
            images = torch.cat([model.generate(seeds[part], labels[part]) for part in parts])
            samples = metrics.accumulator()
            samples.add(images)
            fid, others = samples.compute()
            scores = [fid, *(others[key] for key in COLUMNS[1:-1])]
            scores.append(judge.score(pixels(images), labels))
            yield {"guidance": name, "set": k, **dict(zip(COLUMNS, scores, strict=True))}


def rows_of_table(file: Path) -> Iterator[list[str]]:
    for (name,), sets in group_rows(read_rows(file), "guidance").items():
        columns = {key: [float(each[key]) for each in sets] for key in COLUMNS}
        cells = [f"{statistics.fmean(values):.3f}" for values in columns.values()]
        if len(sets) > 1:
            cells[0] += f" +- {statistics.stdev(columns['FID']):.3f}"
        yield [name, *cells]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("measure")
    for name in ("run", "weaker", "classifier"):
        command.add_argument(name, type=Path, help="checkpoint or run folder")
    command.add_argument("--out", type=Path, required=True)
    commands.add_parser("table").add_argument("file", type=Path)
    args = parser.parse_args()
    if args.command == "table":
        print_table(["guidance", *COLUMNS], rows_of_table(args.file))
    else:
        write_rows(args.out, measure(args))
