"""FID by the width of the average: each scored on the same seeds."""

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from lit_diffusion.checkpoints.averages import known_weights, power_averages
from lit_diffusion.checkpoints.loading import checkpoint_file, named_weights
from lit_diffusion.checkpoints.reading import read_checkpoint
from lit_diffusion.cli.evaluating import evaluate
from lit_diffusion.cli.run_folder import run_of
from lit_diffusion.files import atomic_write
from lit_diffusion.metrics.record import EMA_CURVE, FIDRecord, finite_or_none, write_evaluation
from lit_diffusion.signals import print_error

_EXTRAS = ("prompts", "init", "strength", "mask", "guided_by")
"""What samples.json may tell of how samples were made, besides their solver and guidance."""


def score_widths(args: Namespace, widths: Sequence[float]) -> dict[str, Any]:
    """Records by width, the best width, and where the curve is drawn.

    Each record is also kept in the run folder, for `compare`, as soon as it is there.

    Raises:
        ValueError: with --images or --out, which hold the samples of one average, or --weights;
            and before the first is scored, for a width that the run cannot give.
    """
    if args.images or args.out:
        raise ValueError("--ema makes samples for each width; leave out --images and --out.")
    if args.weights != "ema":
        raise ValueError(f"--ema names the averages; leave out --weights {args.weights}.")
    file = checkpoint_file(args.checkpoint)
    names = {width: f"power_{width:g}" for width in sorted(set(widths))}
    checkpoint = read_checkpoint(file)
    if not power_averages(checkpoint, file)[1]:
        raise ValueError(
            f"--ema needs averages by PowerEMA, of which {file} has none; train with PowerEMA, or "
            f"score --weights {' or '.join(['raw', *known_weights(checkpoint, file)])}."
        )
    for name in names.values():
        named_weights(checkpoint, name, file)
    run = run_of(file) or file.parent
    records: dict[float, dict[str, Any]] = {}
    for width, name in names.items():
        records[width] = evaluate(Namespace(**{**vars(args), "weights": name}))
        write_evaluation(run / EMA_CURVE, as_evaluation(records[width]))
        print_error(f"width {width:g}: FID {records[width]['fid']:.4g}")
    draw(records, run / "ema-curve.png")
    fids = {width: record["fid"] for width, record in records.items()}
    return {
        "best": min(fids, key=lambda width: fids[width]),
        "figure": str(run / "ema-curve.png"),
        "records": str(run / EMA_CURVE),
        "widths": records,
    }


def as_evaluation(found: Mapping[str, Any]) -> FIDRecord:
    """A record of `evaluate` as `FIDEvaluation` writes them."""
    made = found["samples"]
    labels = ",".join(map(str, made["labels"])) if made["labels"] else None
    told = {
        **found,
        **made,
        "metric": f"{found['reference']}/fid_{found['num_fake']}_{made['weights']}",
        "value": finite_or_none(found["fid"]),
        "images": None,
        "labels": labels,
        "sampling": made["sampling"] | {name: made[name] for name in _EXTRAS if name in made},
        "floor": found["fid_floor"],
        "non_finite": 0,
        "non_finite_seeds": [],
        "seconds": {},
    }
    return FIDRecord(**{f.name: told[f.name] for f in fields(FIDRecord) if f.name in told})


def draw(records: Mapping[float, Mapping[str, Any]], path: Path) -> None:
    """A curve of FID over width, which is on a logarithmic axis; its title has that of real images.

    On one axis with the curve, the latter would make it flat.
    """
    from matplotlib.figure import Figure

    widths, fids = list(records), [record["fid"] for record in records.values()]
    how = records[widths[0]]
    title = f"{how['floor_images']}: FID {how['fid_floor']:.3g}"
    figure = Figure(figsize=(5, 3.5), layout="constrained")
    axes = figure.add_subplot(xscale="log")
    axes.set_title(title, fontsize="small")
    axes.plot(widths, fids, marker="o")
    axes.set(xlabel="relative width of the average")
    axes.set(ylabel=f"FID of {how['num_fake']} images by {how['protocol']}")
    axes.set_xticks(widths, [f"{width:g}" for width in widths])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    with atomic_write(path) as file:
        figure.savefig(file, format="png", dpi=120)
