"""FID by the width of the average: each scored on the same seeds."""

from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lit_diffusion.checkpoints.loading import checkpoint_file
from lit_diffusion.runs.evaluating import evaluate
from lit_diffusion.system.files import whole_file
from lit_diffusion.system.signals import print_error


def score_widths(args: Namespace, widths: Sequence[float]) -> dict[str, Any]:
    """Records by width, best first, and where the curve is drawn.

    Raises:
        ValueError: with --images or --out, which hold the samples of one average.
    """
    if args.images or args.out:
        raise ValueError("--ema makes samples for each width; leave out --images and --out.")
    records = {}
    for width in sorted(set(widths)):
        args.weights = f"power_{width:g}"
        records[width] = evaluate(args)
        print_error(f"width {width:g}: FID {records[width]['fid']:.4g}")
    fids = {width: record["fid"] for width, record in records.items()}
    path = checkpoint_file(args.checkpoint).parent.parent / "ema-curve.png"
    draw(fids, path)
    return {
        "best": min(fids, key=lambda width: fids[width]),
        "figure": str(path),
        "widths": records,
    }


def draw(fids: Mapping[float, float], path: Path) -> None:
    """A curve of FID over width, on logarithmic axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 3.5), layout="constrained")
    axes = figure.add_subplot(xscale="log", yscale="log")
    axes.plot(list(fids), list(fids.values()), marker="o")
    axes.set(xlabel="relative width of the average", ylabel="FID")
    axes.set_xticks(list(fids), [f"{width:g}" for width in fids])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    with whole_file(path) as file:
        figure.savefig(file, format="png", dpi=120)
