"""`lit-diffusion evaluate`: compute FID, KID, precision, recall and IS with torch-fidelity."""

import json
import sys
from collections.abc import Sequence

from lit_diffusion.cli import options
from lit_diffusion.cli.options import SPLITS, Parser, integer, numbers
from lit_diffusion.signals import raise_on_signals

WITH_IMAGES = {
    *("--images", "--checkpoint", "--trust", "--data", "--reference", "--extractor"),
    *("--batch-size", "--device"),
}
"""Options that may be combined with --images. All others say how to generate images."""


def build_parser() -> Parser:
    """Build the argument parser of the command."""
    parser = Parser(
        "evaluate",
        """Score a checkpoint, or a folder of images, against real images.

    lit-diffusion evaluate --checkpoint runs/digits
    lit-diffusion evaluate --images samples --checkpoint runs/digits --extractor digits-cnn
    lit-diffusion evaluate --images samples --reference photos --extractor inception-v3-compat

A table is printed to stderr, and the record with all settings to stdout as JSON. torch-fidelity
computes the scores from PNG files. Compare only scores of equal numbers of images.""",
    )
    options.add_checkpoint(parser, required=False)
    add = parser.add_argument
    text = """folder of images to score instead of generated ones; --reference, --checkpoint or
        --data then says what the real images are"""
    add("--images", metavar="DIR", help=text)
    text = """real images: train, val (default) or test split of the data of the run, a folder, or
        an .npz; for latents, the default is the reference of the run's FID"""
    add("--reference", metavar="R", help=text)
    options.add_data(parser)
    text = """network of the FID: inception-v3-compat, dinov2-vit-l-14, clip-vit-b-32, digits-cnn,
        patches-cnn, or a file written by `train-extractor` (default: the run's network, else
        inception-v3-compat)"""
    add("--extractor", metavar="NAME", help=text)
    text = "number of images to generate (default: as many as there are real images)"
    add("--num", type=integer, metavar="N", help=text)
    add("--out", metavar="DIR", help="folder for the generated images (default: they are deleted)")
    text = "score EMA weights of these relative widths on the same seeds; needs PowerEMA in the run"
    add("--ema", type=numbers, metavar="0.02,0.05,0.1", help=text)
    options.add_sampling(parser)
    return parser


def run(argv: Sequence[str]) -> None:
    """Run the command: "evaluate", then options."""
    args = options.parse_sampling(build_parser(), argv[1:])
    if args.images is not None:
        passed = dict.fromkeys(arg.split("=")[0] for arg in argv if arg.startswith("--"))
        if generating := [name for name in passed if name.replace("_", "-") not in WITH_IMAGES]:
            raise ValueError(
                f"--images scores existing images; leave out {', '.join(generating)}, which set "
                "how images are generated."
            )
        names_data = args.checkpoint is not None or args.data is not None
        if names_data != (args.reference in (None, *SPLITS)):
            raise ValueError(
                "--images needs real images: add --reference with a folder or an .npz, or add "
                "--checkpoint C or --data CONFIG, whose data are used."
            )
    elif args.checkpoint is None:
        raise ValueError("needs images to score: add --checkpoint C, --images DIR, or both.")
    options.check_checkpoints(args.checkpoint)
    options.check_exists("config", *(args.data or ()))
    with options.import_heavy():
        from lit_diffusion.cli.evaluating import EvaluationOptions, evaluate, score_widths, table

    sampling = options.sampling_options(args)
    names = ("images", "num", "out", "reference", "data", "extractor")
    evaluation = EvaluationOptions(sampling, **{name: getattr(args, name) for name in names})
    with raise_on_signals():  # so that the temporary folder is deleted
        if args.ema:
            print(json.dumps(score_widths(evaluation, args.ema), indent=1))
            return
        record = evaluate(evaluation)
    print(table(record), file=sys.stderr)
    print(json.dumps(record, indent=1))
