"""`lit-diffusion evaluate`: FID, KID, precision, recall and inception score, by torch-fidelity."""

import json
import sys
from collections.abc import Sequence

from lit_diffusion.cli.options import (
    add_checkpoint,
    add_data,
    add_sampling,
    numbers,
    parse_sampling,
)
from lit_diffusion.cli.parser import Parser

_WITH_IMAGES = (
    "--images",
    "--checkpoint",
    "--trust",
    "--data",
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
        help="images to score, of which none are made; --checkpoint or --data beside it names the "
        "data",
    )
    made.add_argument(
        "--reference",
        metavar="R",
        help="train, val (default) or test split of the run's data, or a folder or .npz; of "
        "latents what the run was scored against",
    )
    add_data(made)
    made.add_argument(
        "--extractor",
        help="FID protocol (default: that of the evaluations of the run that generates, else "
        "inception-v3-compat)",
    )
    made.add_argument("--num", type=int, help="images to generate (default: as many as are real)")
    made.add_argument("--out", metavar="DIR", help="keep the generated images here")
    made.add_argument(
        "--ema",
        type=numbers,
        metavar="0.02,0.05,0.1",
        help="score averages of these relative widths, of a run with PowerEMA, on the same seeds",
    )
    add_sampling(made)
    return made


def run(argv: Sequence[str]) -> None:
    """Run the command: "evaluate", then options."""
    args = parse_sampling(parser(), argv[1:])
    from lit_diffusion.cli.evaluating import SPLITS, evaluate, table

    if args.images is not None:
        _refuse_making(argv)
        named = args.checkpoint is not None or args.data is not None
        if named != (args.reference in (None, *SPLITS)):
            raise ValueError(
                "--images needs either --reference, a folder or an .npz of real images, or "
                "--checkpoint C or --data CONFIG, whose data are taken."
            )
    elif args.checkpoint is None:
        raise ValueError("give --checkpoint C, --images DIR, or both.")
    if args.ema:
        from lit_diffusion.cli.ema_curve import score_widths

        print(json.dumps(score_widths(args, args.ema), indent=1))
        return
    record = evaluate(args)
    print(table(record), file=sys.stderr)
    print(json.dumps(record, indent=1))


def _refuse_making(argv: Sequence[str]) -> None:
    given = dict.fromkeys(arg.split("=")[0] for arg in argv if arg.startswith("--"))
    if making := [name for name in given if name not in _WITH_IMAGES]:
        raise ValueError(
            f"--images scores images as they are; leave out {', '.join(making)}, which would say "
            "how to make some."
        )
