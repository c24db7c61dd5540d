"""Score a checkpoint, or a folder of images, against real images."""

import json
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from lit_diffusion.checkpoints.averages import average_names, read_power_averages
from lit_diffusion.checkpoints.loading import checkpoint_file
from lit_diffusion.checkpoints.reading import read_checkpoint
from lit_diffusion.cli.generator import load_generator
from lit_diffusion.cli.options import SamplingOptions, require_lab, usable_device
from lit_diffusion.cli.run_data import protocol_of_run, real_images
from lit_diffusion.cli.run_folder import run_of
from lit_diffusion.cli.sampling import RECORD, image_folder, write_samples
from lit_diffusion.files import atomic_write, checked_read, user_cache, walk_files
from lit_diffusion.metrics.auxiliary_metrics import (
    DISTANCES,
    MAX_NEIGHBORS,
    FeatureComparison,
    build_auxiliary_metrics,
)
from lit_diffusion.metrics.evaluation_record import (
    EMA_CURVE,
    FIDRecord,
    finite_or_none,
    write_evaluation,
)
from lit_diffusion.metrics.extractors import protocol_by_name
from lit_diffusion.metrics.images import IMAGE_SUFFIXES, as_image_set, evenly_spaced
from lit_diffusion.metrics.reference import Scorer, measure_reference
from lit_diffusion.metrics.score import extract_features, score_features
from lit_diffusion.signals import print_error


@dataclass(frozen=True)
class EvaluationOptions:
    """Options of `lit-diffusion evaluate`: images to score, real images, and FID protocol."""

    sampling: SamplingOptions  # generation; the run of its checkpoint has the data and protocol
    images: str | None = None  # folder of images to score; None generates images
    num: int | None = None  # number of images to generate; None for the number of real images
    out: str | None = None  # folder for the generated images; None for a temporary one
    reference: str | None = None  # real images: argument of `real_images`
    data: Sequence[str] | None = None  # configs with the data, instead of the run's config
    extractor: str | None = None  # FID protocol; None for the run's protocol


def evaluate(options: EvaluationOptions) -> dict[str, Any]:
    """Generate images, unless a folder of images is passed, and score them.

    Returns:
        A record for JSON: the scores of `score_features`, an FID that is computed with real images
        instead of samples (`fid_floor`), auxiliary metrics, and how the images were generated.
    """
    sampling = options.sampling
    device = usable_device(sampling.device)
    generator = load_generator(sampling) if options.images is None else None
    protocol = protocol_by_name(options.extractor or protocol_of_run(sampling.checkpoint))
    scorer = Scorer(protocol, protocol.build().to(device), device, sampling.batch_size)
    real, others = real_images(options.reference, sampling.checkpoint, options.data, sampling.trust)
    image_dir = options.images or options.out
    with nullcontext(image_dir) if image_dir else tempfile.TemporaryDirectory() as folder:
        if generator is None:
            samples, labels = _read_samples_record(Path(folder)), None
        else:
            num = len(real) if options.num is None else options.num
            samples = write_samples(generator, num, _folder_of_samples(folder))
            labels = generator.image_labels(samples["num"])
        fake = as_image_set(folder, "fake")
        compared = (real, others, len(fake), user_cache(), labels)
        real_features = extract_features(scorer, real)
        floor = measure_reference(scorer, *compared, real_features)
        subset = real_features[evenly_spaced(len(real), MAX_NEIGHBORS)]
        comparison = FeatureComparison("", scorer, floor, subset)
        auxiliary = build_auxiliary_metrics(comparison, *compared).accumulator()
        batches = fake.batches(sampling.batch_size)
        fake_features = torch.cat([auxiliary.add(images).cpu() for images, _ in batches])
    return score_features(scorer, fake_features, real_features) | {
        "fid_floor": floor.floor,
        "floor_sd": floor.floor_sd,
        "floor_images": floor.floor_images,
        "reference": real.name,
        "data": floor.fingerprint,
        "second_look": auxiliary.compute()[1],
        "samples": samples,
    }


def _folder_of_samples(path: str) -> Path:
    """Create a folder for images to score; ValueError if it or a subfolder has other images."""
    folder = image_folder(path)
    for file in map(Path, walk_files(folder)):
        is_generated = file.parent == folder and file.suffix == ".png"  # as `image_folder` checks
        if file.suffix.lower() in IMAGE_SUFFIXES and not is_generated:
            raise ValueError(
                f"--out {folder} has other images, such as {file}, which would be scored as well; "
                "choose another folder."
            )
    return folder


def _read_samples_record(folder: Path) -> dict[str, Any]:
    """The content of samples.json in a folder of images. Without the file, the folder's name."""
    path = folder / RECORD
    if not path.exists():
        return {"images": str(folder)}
    with checked_read(path, "record of samples", "remove it") as file:
        return dict(json.loads(file.read_text()))


def table(record: Mapping[str, Any]) -> str:
    """Format the scores of a record as lines of text."""
    auxiliary = record["second_look"]
    floor = f"{record['fid_floor']:.4g}: {record['floor_images']}"
    name = record["metric"].upper().replace("_", "-")
    rows = {f"{name} {record['num_fake']}": f"{record['fid']:.4g}   (floor {floor})"}
    for name in DISTANCES:
        if name in auxiliary:
            floor = f"{auxiliary[f'{name} floor']:.4g}"
            rows[name] = f"{auxiliary[name]:.4g}   (floor {floor})"
    rows["KID"] = f"{record['kid']:.4g} +- {record['kid_std']:.2g}"
    for name in ("precision", "recall"):
        rows[name] = f"{record[name]:.3f}, in pixels {auxiliary[f'pixel {name}']:.3f}"
    if auxiliary.get("memorized") is not None:
        rows["memorized"] = f"{auxiliary['memorized']:.3f}"
    if "inception_score" in record:
        rows["IS"] = f"{record['inception_score']:.4g} +- {record['inception_score_std']:.2g}"
    rows["protocol"] = f"{record['protocol']}, {record['num_real']} real ({record['reference']})"
    width = max(11, *(len(name) + 1 for name in rows))
    return "\n".join(f"{name:<{width}}{text}" for name, text in rows.items())


# FID by the width of the average (--ema)


def score_widths(options: EvaluationOptions, widths: Sequence[float]) -> dict[str, Any]:
    """Score EMA weights of several relative widths on the same seeds, and plot FID against width.

    As soon as a width is scored, its record is appended to ema-curve.jsonl in the run folder. The
    command `lit-diffusion compare` reads this file.

    Returns:
        A record for JSON: the records by width, the best width, and the paths of the figure and of
        ema-curve.jsonl.

    Raises:
        ValueError: if --out or --weights is set, or if a width cannot be reconstructed from the
            run, or from the run of --weaker. The error is raised before any width is scored.
    """
    sampling = options.sampling
    if options.out:
        raise ValueError("--ema deletes the samples of each width; leave out --out.")
    if sampling.weights != "ema":
        raise ValueError(f"--ema selects the weights; leave out --weights {sampling.weights}.")
    assert sampling.checkpoint is not None
    file = checkpoint_file(sampling.checkpoint)
    checkpoint = read_checkpoint(file)
    if not read_power_averages(checkpoint, file)[1]:
        raise ValueError(
            f"--ema needs averages of PowerEMA, but {file} has none; train with PowerEMA, or "
            f"score --weights {' or '.join(['raw', *average_names(checkpoint, file)])}."
        )
    weights = {width: f"power_{width:g}" for width in sorted(set(widths))}
    for name in weights.values():
        load_generator(replace(sampling, weights=name, device="cpu"))
    require_lab()
    root = run_of(file) or file.parent
    records: dict[float, dict[str, Any]] = {}
    for width, name in weights.items():
        records[width] = evaluate(replace(options, sampling=replace(sampling, weights=name)))
        write_evaluation(root / EMA_CURVE, _as_evaluation(records[width]))
        print_error(f"width {width:g}: FID {records[width]['fid']:.4g}")
    figure = root / "ema-curve.png"
    _draw_curve(records, figure)
    return {
        "best": min(records, key=lambda width: float(records[width]["fid"])),
        "figure": str(figure),
        "records": str(root / EMA_CURVE),
        "widths": records,
    }


def _as_evaluation(record: Mapping[str, Any]) -> FIDRecord:
    """Convert a record of `evaluate` to the format of `FIDEvaluation`."""
    samples = record["samples"]
    distance = f"{record['metric']}_{record['num_fake']}"
    values = {
        **record,
        **samples,
        "metric": f"{record['reference']}/{distance}_{samples['weights']}",
        "value": finite_or_none(record["fid"]),
        "images": None,
        "labels": ",".join(map(str, samples["labels"])) if samples["labels"] else None,
        "floor": record["fid_floor"],
        "non_finite": 0,
        "non_finite_seeds": [],
        "seconds": {},
    }
    for name in ("prompts", "init", "strength", "mask", "guided_by"):
        if name in samples:
            values["sampling"] = values["sampling"] | {name: samples[name]}
    return FIDRecord(**{f.name: values[f.name] for f in fields(FIDRecord) if f.name in values})


def _draw_curve(records: Mapping[float, Mapping[str, Any]], path: Path) -> None:
    """Plot FID against width, on a logarithmic axis.

    The FID of real images is in the title, because a line for it would flatten the curve.
    """
    from matplotlib.figure import Figure

    widths, fids = list(records), [record["fid"] for record in records.values()]
    first = records[widths[0]]
    figure = Figure(figsize=(5, 3.5), layout="constrained")
    axes = figure.add_subplot(xscale="log")
    axes.set_title(f"{first['floor_images']}: FID {first['fid_floor']:.3g}", fontsize="small")
    axes.plot(widths, fids, marker="o")
    axes.set(xlabel="relative width of the average")
    axes.set(ylabel=f"FID of {first['num_fake']} images by {first['protocol']}")
    axes.set_xticks(widths, [f"{width:g}" for width in widths])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    with atomic_write(path) as file:
        figure.savefig(file, format="png", dpi=120)
