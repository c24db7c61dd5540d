"""`lit-diffusion evaluate`: FID, KID, precision, recall and inception score, by torch-fidelity."""

import json
import sys
from collections.abc import Sequence

from lit_diffusion.cli.options import (
    SPLITS,
    Parser,
    add_checkpoint,
    add_data,
    add_sampling,
    check_checkpoints,
    check_exists,
    import_heavy,
    integer,
    numbers,
    parse_sampling,
    sampling_options,
)

WITH_IMAGES = {
    *("--images", "--checkpoint", "--trust", "--data", "--reference", "--extractor"),
    *("--batch-size", "--device"),
}
"""Options that may be combined with --images; all others configure the generation of images."""


def build_parser() -> Parser:
    """Options of the command."""
    parser = Parser(
        "evaluate",
        """Score a checkpoint, or a folder of images, against real images.

    lit-diffusion evaluate --checkpoint runs/digits
    lit-diffusion evaluate --images samples --checkpoint runs/digits --extractor digits-cnn
    lit-diffusion evaluate --images samples --reference photos --extractor inception-v3-compat

A table goes to the terminal (stderr), the record with the whole protocol to the output, as JSON.
Scores are torch-fidelity's on the PNG files. Compare only those of equal numbers of images.""",
    )
    add_checkpoint(parser, required=False)
    add = parser.add_argument
    text = """folder of images to score, instead of generating some; --checkpoint or --data
        beside it names the real data"""
    add("--images", metavar="DIR", help=text)
    text = """real images: train, val (default) or test split of the run's data, or a folder or
        .npz; for latents the default is what the run was scored against"""
    add("--reference", metavar="R", help=text)
    add_data(parser)
    text = """FID protocol: inception-v3-compat, digits-cnn, ... or a file of `train-extractor`
        (default: that of the run's evaluations or config, else inception-v3-compat)"""
    add("--extractor", metavar="NAME", help=text)
    text = "number of images to generate (default: as many as real images)"
    add("--num", type=integer, metavar="N", help=text)
    add("--out", metavar="DIR", help="folder that keeps the generated images (default: none)")
    text = "score averages of these relative widths, on the same seeds; for a run with PowerEMA"
    add("--ema", type=numbers, metavar="0.02,0.05,0.1", help=text)
    add_sampling(parser)
    return parser


def run(argv: Sequence[str]) -> None:
    """Run the command: "evaluate", then options."""
    args = parse_sampling(build_parser(), argv[1:])
    if args.images is not None:
        passed = dict.fromkeys(arg.split("=")[0] for arg in argv if arg.startswith("--"))
        if generating := [name for name in passed if name.replace("_", "-") not in WITH_IMAGES]:
            raise ValueError(
                f"--images scores images as they are; leave out {', '.join(generating)}, which "
                "would say how to generate some."
            )
        names_data = args.checkpoint is not None or args.data is not None
        if names_data != (args.reference in (None, *SPLITS)):
            raise ValueError(
                "--images needs either --reference, a folder or an .npz of real images, or "
                "--checkpoint C or --data CONFIG, whose data are taken."
            )
    elif args.checkpoint is None:
        raise ValueError("give --checkpoint C, --images DIR, or both.")
    check_checkpoints(args.checkpoint)
    check_exists("config", *(args.data or ()))
    with import_heavy():
        from lit_diffusion.cli.evaluating import EvaluationOptions, evaluate, score_widths, table

    names = ("images", "num", "out", "reference", "data", "extractor")
    options = EvaluationOptions(sampling_options(args), **{n: getattr(args, n) for n in names})
    if args.ema:
        print(json.dumps(score_widths(options, args.ema), indent=1))
        return
    record = evaluate(options)
    print(table(record), file=sys.stderr)
    print(json.dumps(record, indent=1))
