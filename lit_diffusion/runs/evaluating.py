"""Scores of a checkpoint, or of a folder of images, against real images."""

import json
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningDataModule

from lit_diffusion.checkpoints.loading import Loaded, checkpoint_file, instantiate, model_spec
from lit_diffusion.checkpoints.reading import read_checkpoint
from lit_diffusion.metrics.extractors import protocol_by_name
from lit_diffusion.metrics.images import open_images
from lit_diffusion.metrics.reference import (
    HasSplits,
    RealImages,
    Scorer,
    images_of_split,
    measure,
)
from lit_diffusion.metrics.score import image_set, score
from lit_diffusion.metrics.second_look import DISTANCES, View, look_closely
from lit_diffusion.runs.loggers import read_evaluations
from lit_diffusion.runs.sampling import (
    RECORD,
    folder_of_images,
    load_generator,
    usable_device,
    write_samples,
)
from lit_diffusion.seeding import classes_of
from lit_diffusion.system.files import user_cache

SPLITS = ("train", "val", "test")


def evaluate(args: Namespace) -> dict[str, Any]:
    """Make images if need be, and score them: the scores, their floor, and the whole protocol."""
    device = usable_device(args.device)
    loaded = load_generator(args) if args.images is None else None
    protocol = protocol_by_name(args.extractor or protocol_of_run(args.checkpoint))
    protocol.check()
    real, others = real_images(args.reference, args, loaded)
    kept = nullcontext(args.out) if args.out or args.images else tempfile.TemporaryDirectory()
    scorer = Scorer(protocol, protocol.build().to(device), device, args.batch_size)
    with kept as folder:
        made = _samples(args, loaded, folder, len(real))
        fake = image_set(args.images or folder, "fake")
        found = score(fake, real, protocol, batch_size=args.batch_size, device=str(device))
        about = (real, others, len(fake), user_cache(), labels_of(loaded, made))
        floor = measure(scorer, *about)
        samples = look_closely(View("", scorer, floor), *about).begin()
        for images, _ in fake.batches(args.batch_size):
            samples.add(images)
    return found | {
        "fid_floor": floor.floor,
        "floor_sd": floor.floor_sd,
        "floor_images": floor.floor_images,
        "reference": real.name,
        "data": floor.fingerprint,
        "second_look": samples.compute()[1],
        "samples": made,
    }


def protocol_of_run(checkpoint: str | None) -> str:
    """The protocol that the run was scored with while it trained, or its file in the run folder."""
    root = checkpoint_file(checkpoint).parent.parent if checkpoint else None
    records = read_evaluations(root / "evaluations.jsonl") if root else []
    named = [str(record["protocol"]) for record in records if "protocol" in record]
    if not root or not named:
        return "inception-v3-compat"
    own = root / f"{named[-1]}.safetensors"
    return str(own) if own.is_file() else named[-1]


def _reference_of_run(checkpoint: str) -> str:
    """What a run on latents was scored against while it trained."""
    records = read_evaluations(checkpoint_file(checkpoint).parent.parent / "evaluations.jsonl")
    if not records:
        raise ValueError(
            f"{checkpoint} was trained on latents; pass --reference DIR, a folder of real images."
        )
    return str(records[-1]["reference"])


def real_images(
    name: str | None, args: Namespace, loaded: Loaded | None
) -> tuple[RealImages, RealImages | None]:
    """Real images of --reference, and others of the same kind for the floor."""
    if name is not None and name not in SPLITS:
        return RealImages(name, open_images(name)), None
    data = _data(args, loaded)
    if name is None and hasattr(data, "vae_sha256"):
        return real_images(_reference_of_run(args.checkpoint), args, loaded)
    name = name or "val"
    other = "val" if name == "train" else "train"
    return images_of_split(data, name), images_of_split(data, other)


def _data(args: Namespace, loaded: Loaded | None) -> Any:
    """The data module that --checkpoint was trained with."""
    path = checkpoint_file(args.checkpoint)
    checkpoint = read_checkpoint(path, mmap=True) if loaded is None else loaded.checkpoint
    data = data_of(model_spec(checkpoint, "datamodule_hyper_parameters"), args.trust, path)
    if data is None:
        raise ValueError(
            f"{path} names no data with splits to compare with; pass --reference DIR, a folder of "
            "real images."
        )
    return data


def data_of(spec: Any, trust: Sequence[str], path: str | Path, options: Sequence[str] = ()) -> Any:
    """The data module that the file `path` describes, ready; None where it has no splits.

    `options`, as --data.init_args.NAME=VALUE, win over the file.
    """
    data = instantiate(spec, LightningDataModule, trust, path, options) if spec else None
    if data is not None:
        data.prepare_data()
    return data if isinstance(data, HasSplits) else None


def _samples(args: Namespace, loaded: Loaded | None, folder: Any, num: int) -> dict[str, Any]:
    """What is known of the images that are scored, which are made first if need be."""
    if loaded is not None:
        return write_samples(loaded, args, args.num or num, folder_of_images(folder))
    path = Path(args.images) / RECORD
    if not path.is_file():
        return {"images": args.images}
    try:
        return dict(json.loads(path.read_text()))
    except (ValueError, TypeError, RecursionError) as error:
        reason = str(error)[:200]
        raise ValueError(f"{path} is no record of samples: {reason}; remove it.") from error


def labels_of(loaded: Loaded | None, made: dict[str, Any]) -> list[int] | None:
    """Labels of the samples; None where they have none, or it is not known."""
    if loaded is None:
        return None
    seeds = range(*made["seeds"])
    if given := made["labels"]:
        return [given[i % len(given)] for i in range(len(seeds))]
    num_classes: int | None = getattr(loaded.module, "num_classes", None)
    return classes_of(seeds, num_classes) if num_classes else None


def table(record: dict[str, Any]) -> str:
    """The scores of a record, for people."""
    floor = f"{record['fid_floor']:.4g}: {record['floor_images']}"
    look = record["second_look"]
    others = [name for name in DISTANCES if name in look]
    rows = [
        (f"FID {record['num_fake']}", f"{record['fid']:.4g}   (floor {floor})"),
        *((name, f"{look[name]:.4g}   (floor {look[f'{name} floor']:.4g})") for name in others),
        ("KID", f"{record['kid']:.4g} +- {record['kid_std']:.2g}"),
        ("precision", f"{record['precision']:.3f}, in pixels {look['pixel precision']:.3f}"),
        ("recall", f"{record['recall']:.3f}, in pixels {look['pixel recall']:.3f}"),
        *(("memorized", f"{share:.3f}") for share in [look.get("memorized")] if share is not None),
        ("IS", f"{record['inception_score']:.4g} +- {record['inception_score_std']:.2g}"),
        ("protocol", f"{record['protocol']}, {record['num_real']} real ({record['reference']})"),
    ]
    return "\n".join(f"{name:<11}{text}" for name, text in rows)
