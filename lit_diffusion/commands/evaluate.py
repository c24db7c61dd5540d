"""`lit-diffusion evaluate`: FID, KID, precision, recall and inception score, by torch-fidelity."""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_diffusion.commands.options import Parser, add_checkpoint, add_sampling
from lit_diffusion.commands.sample import (
    RECORD,
    fresh_folder,
    load_generator,
    usable_device,
    write_samples,
)

if TYPE_CHECKING:
    from lit_diffusion.checkpoints import Loaded
    from lit_diffusion.metrics.reference import RealImages, Scorer

_SPLITS = ("train", "val", "test")
_INCEPTION = "inception-v3-compat"
_WITH_IMAGES = (
    "--images",
    "--checkpoint",
    "--trust",
    "--reference",
    "--extractor",
    "--batch-size",
    "--device",
)
"""Options that say something of images that are there; all others are for making some."""


def parser() -> Parser:
    """Options of the command."""
    made = Parser(
        "evaluate",
        """Score a checkpoint, or a folder of images, against real images.

    lit-diffusion evaluate --checkpoint runs/digits
    lit-diffusion evaluate --images samples --checkpoint runs/digits --extractor digits-cnn
    lit-diffusion evaluate --images samples --reference photos --extractor inception-v3-compat

The table goes to the terminal, the record with the whole protocol to the output, as JSON. Scores
are torch-fidelity's on the PNG files. Compare only those of equal numbers of images.""",
    )
    add_checkpoint(made, required=False)
    made.add_argument(
        "--images",
        metavar="DIR",
        help="images to score, of which none are made; --checkpoint beside it names the data only",
    )
    made.add_argument(
        "--reference",
        metavar="R",
        help="train, val (default) or test split of the checkpoint's data, or a folder or .npz",
    )
    made.add_argument(
        "--extractor",
        help=f"FID protocol (default: that of the evaluations of the run that generates, else "
        f"{_INCEPTION})",
    )
    made.add_argument("--num", type=int, help="images to generate (default: as many as are real)")
    made.add_argument("--out", metavar="DIR", help="keep the generated images here")
    add_sampling(made)
    return made


def run(argv: Sequence[str]) -> None:
    """Run the command.

    Args:
        argv: "evaluate", then options.
    """
    args = parser().parse_args(argv[1:])
    _check(args, argv)
    from lit_diffusion.metrics.protocols import protocol_by_name
    from lit_diffusion.metrics.reference import Scorer
    from lit_diffusion.metrics.score import score

    device = usable_device(args.device)
    loaded = load_generator(args) if args.images is None else None
    protocol = protocol_by_name(args.extractor or _protocol_of_run(loaded))
    protocol.check()
    real, others = _reference(args, loaded)
    kept = nullcontext(args.out) if args.out or args.images else tempfile.TemporaryDirectory()
    with kept as folder:
        made = _samples(args, loaded, folder, len(real))
        fake = args.images or folder
        found = score(fake, real, protocol, batch_size=args.batch_size, device=str(device))
    scorer = Scorer(protocol, protocol.build().to(device), device, args.batch_size)
    labels = _labels(loaded, made)
    record = found | _floor(scorer, found["num_fake"], real, others, labels) | {"samples": made}
    print(table(record), file=sys.stderr)
    print(json.dumps(record, indent=1))


def _check(args: argparse.Namespace, argv: Sequence[str]) -> None:
    if args.images is None:
        if args.checkpoint is None:
            raise ValueError("give --checkpoint C, --images DIR, or both.")
        return
    given = dict.fromkeys(arg.split("=")[0] for arg in argv if arg.startswith("--"))
    if making := [name for name in given if name not in _WITH_IMAGES]:
        raise ValueError(
            f"--images scores images as they are; leave out {', '.join(making)}, which would say "
            "how to make some."
        )
    if (args.checkpoint is None) == (args.reference in (None, *_SPLITS)):
        raise ValueError(
            "--images needs either --reference, a folder or an .npz of real images, or "
            "--checkpoint C, whose data are taken."
        )
    if args.batch_size < 1:
        raise ValueError(f"--batch-size must be at least 1, got {args.batch_size}.")


def _samples(
    args: argparse.Namespace, loaded: "Loaded | None", folder: Any, num: int
) -> dict[str, Any]:
    """What is known of the images that are scored, which are made first if need be."""
    if loaded is not None:
        return write_samples(loaded, args, args.num or num, fresh_folder(folder))
    record = Path(args.images) / RECORD
    return _read_record(record) if record.is_file() else {"images": args.images}


def _read_record(path: Path) -> dict[str, Any]:
    """What `sample` wrote beside its images."""
    try:
        found = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {str(error)[:200]}; remove it.") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} is no record of samples; remove it.")
    return found


def _labels(loaded: "Loaded | None", made: dict[str, Any]) -> list[int] | None:
    """Labels of the samples; None where they have none, or it is not known."""
    if loaded is None:
        return None
    seeds, given = range(*made["seeds"]), made["labels"]
    if given:
        return [given[i % len(given)] for i in range(len(seeds))]
    num_classes: int | None = getattr(loaded.module, "num_classes", None)
    return [seed % num_classes for seed in seeds] if num_classes else None


def _protocol_of_run(loaded: "Loaded | None") -> str:
    """The protocol that the run was scored with while it trained."""
    if loaded is None:
        return _INCEPTION
    from lit_diffusion.loggers import read_evaluations

    records = read_evaluations(loaded.path.parent.parent / "evaluations.jsonl")
    told = [str(record["protocol"]) for record in records if "protocol" in record]
    return told[-1] if told else _INCEPTION


def _reference(
    args: argparse.Namespace, loaded: "Loaded | None"
) -> "tuple[RealImages, RealImages | None]":
    """Real images, and others of the same kind for the floor."""
    from lit_diffusion.metrics.images import open_images
    from lit_diffusion.metrics.reference import RealImages

    name = args.reference or "val"
    if name not in _SPLITS:
        return RealImages(name, open_images(name)), None
    data = _data(args, loaded)
    split, other = ("train", "val") if name == "train" else ("val", "train")
    return _split(data, split, name), _split(data, other, other)


def _split(data: Any, split: str, name: str) -> "RealImages":
    from lit_diffusion.metrics.reference import RealImages

    loader = data.in_order(split)
    known = partial(data.fingerprint, split)
    return RealImages(name, loader.dataset, loader.collate_fn, loader.num_workers, known)


def _data(args: argparse.Namespace, loaded: "Loaded | None") -> Any:
    """The data module that --checkpoint was trained with."""
    from lightning.pytorch import LightningDataModule

    from lit_diffusion.checkpoints import checkpoint_file, instantiate, model_spec, read_checkpoint

    path = checkpoint_file(args.checkpoint)
    checkpoint = read_checkpoint(path, mmap=True) if loaded is None else loaded.checkpoint
    spec = model_spec(checkpoint, "datamodule_hyper_parameters")
    data = None if spec is None else instantiate(spec, LightningDataModule, args.trust, path)
    if data is None or not hasattr(data, "in_order"):
        raise ValueError(
            f"{path} names no data with splits to compare with; pass --reference DIR, a folder of "
            "real images."
        )
    data.prepare_data()
    return data


def _floor(
    scorer: "Scorer",
    num: int,
    real: "RealImages",
    others: "RealImages | None",
    labels: list[int] | None,
) -> dict[str, Any]:
    """What real images score in the place of as many samples."""
    from lit_diffusion.metrics.reference import default_cache, measure

    found = measure(scorer, real, others, num, default_cache(), labels)
    return {
        "fid_floor": found.floor,
        "floor_sd": found.floor_sd,
        "floor_images": found.floor_images,
        "reference": real.name,
        "data": found.fingerprint,
    }


def table(record: dict[str, Any]) -> str:
    """The scores of a record, for people."""
    floor = f"{record['fid_floor']:.4g}: {record['floor_images']}"
    rows = [
        (f"FID {record['num_fake']}", f"{record['fid']:.4g}   (floor {floor})"),
        ("KID", f"{record['kid']:.4g} +- {record['kid_std']:.2g}"),
        ("precision", f"{record['precision']:.3f}"),
        ("recall", f"{record['recall']:.3f}"),
        ("IS", f"{record['inception_score']:.4g} +- {record['inception_score_std']:.2g}"),
        ("protocol", f"{record['protocol']}, {record['num_real']} real ({record['reference']})"),
    ]
    return "\n".join(f"{name:<11}{text}" for name, text in rows)
