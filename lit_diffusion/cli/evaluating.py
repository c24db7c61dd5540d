"""Scores of a checkpoint, or of a folder of images, against real images."""

import json
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningDataModule

from lit_diffusion.checkpoints.loading import Loaded, checkpoint_file, instantiate
from lit_diffusion.cli.loggers import read_evaluations
from lit_diffusion.cli.run_folder import latest_config, read_config, run_of
from lit_diffusion.cli.sampling import (
    RECORD,
    folder_of_images,
    load_generator,
    usable_device,
    write_samples,
)
from lit_diffusion.files import user_cache
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
from lit_diffusion.seeding import classes_of

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
    root = run_around(checkpoint) if checkpoint else None
    records = read_evaluations(root / "evaluations.jsonl") if root else []
    named = [str(record["protocol"]) for record in records if "protocol" in record]
    if not root or not named:
        return "inception-v3-compat"
    own = root / f"{named[-1]}.safetensors"
    return str(own) if own.is_file() else named[-1]


def run_around(checkpoint: str | Path) -> Path | None:
    """The run folder that the user named, or whose checkpoint; None for a file elsewhere."""
    return run_of(checkpoint_file(checkpoint).absolute())


def _reference_of_run(checkpoint: str | None) -> str:
    """What a run on latents was scored against while it trained."""
    root = run_around(checkpoint) if checkpoint else None
    records = read_evaluations(root / "evaluations.jsonl") if root else []
    if not records:
        raise ValueError(
            f"{checkpoint or 'the model'} was trained on latents; pass --reference DIR, a folder "
            "of real images."
        )
    return str(records[-1]["reference"])


def real_images(
    name: str | None, args: Namespace, loaded: Loaded | None
) -> tuple[RealImages, RealImages | None]:
    """Real images of --reference, and others of the same kind for the floor."""
    if name is not None and name not in SPLITS:
        return RealImages(name, open_images(name)), None
    data = data_for(args.checkpoint, args)
    if data is None:
        raise ValueError(
            f"{args.data or args.checkpoint} names no data with splits to compare with; pass "
            "--reference DIR, a folder of real images."
        )
    if name is None and hasattr(data, "vae_sha256"):
        return real_images(_reference_of_run(args.checkpoint), args, loaded)
    name = name or "val"
    other = "val" if name == "train" else "train"
    return images_of_split(data, name), images_of_split(data, other)


def data_for(checkpoint: str | Path | None, args: Namespace) -> Any:
    """The data module that `data_settings` names, ready; None where there is none with splits."""
    settings, config = data_settings(checkpoint, args.data)
    return data_of(settings, args.trust, config)


def data_settings(checkpoint: str | Path | None, config: str | None) -> tuple[Any, Path]:
    """What the user's `config`, or else that of the run folder of a checkpoint, has under data:.

    With it comes the path of the config. A data module reads any path or bucket that it is given,
    so what a checkpoint itself says of its data is not asked.

    Raises:
        FileNotFoundError: where there is no such config.
        ValueError: where the checkpoint is in no run folder with a config, and none was given.
    """
    root = run_around(checkpoint) if checkpoint else None
    file = Path(config) if config else latest_config(root) if root else None
    if file is None and checkpoint and not checkpoint_file(checkpoint).exists():
        raise FileNotFoundError(f"There is no checkpoint at {checkpoint_file(checkpoint)}.")
    if file is None:
        raise ValueError(
            f"{checkpoint} is in no run folder with a config.yaml, and the data that a checkpoint "
            "itself names are not opened: pass --data CONFIG, a config whose data: to read."
        )
    if not file.exists():
        raise FileNotFoundError(f"There is no config {file}.")
    return read_config(file).get("data"), file


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
