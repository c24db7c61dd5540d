"""Options of the commands that are not the Trainer's."""

import argparse
from collections.abc import Sequence

from lit_diffusion.cli.parser import Parser


def add_checkpoint(parser: Parser, required: bool) -> None:
    """--checkpoint and what says how to read it."""
    parser.add_argument(
        "--checkpoint",
        required=required,
        metavar="C",
        help="checkpoint file, or run folder: its checkpoints/last.ckpt",
    )
    parser.add_argument(
        "--weights",
        default="ema",
        help="ema (default), ema_<decay> or power_<width> for a certain one, or raw: as trained",
    )
    add_trust(parser, "the checkpoint")


def add_trust(parser: Parser, file: str) -> None:
    """--trust, for class paths in a file."""
    parser.add_argument(
        "--trust",
        action="append",
        default=[],
        metavar="PACKAGE",
        help=f"package that class paths in {file} may name; may be repeated",
    )


def add_data(parser: Parser) -> None:
    """--data, the user's word on what data are read."""
    parser.add_argument(
        "--data",
        metavar="CONFIG",
        help="config whose data: is read, in place of that of the run folder of the checkpoint; a "
        "checkpoint elsewhere needs it",
    )


def add_sampling(parser: Parser) -> None:
    """What may differ from how the checkpoint would generate."""
    parser.add_argument(
        "--labels",
        metavar="0,1,2",
        help="classes, or their names, repeated in turn (default: seed modulo the number of "
        "classes); -1 is none",
    )
    parser.add_argument(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="what the images show, of a model of texts; may be repeated, for texts in turn, and "
        "'' is none",
    )
    parser.add_argument("--steps", type=int, help="of the solver (Heun: two evaluations each)")
    parser.add_argument(
        "--solver",
        metavar="S",
        help="another solver: DDIM, DDPM, DPMSolverPP, Euler, Heun, UniPC, ..., or a class path, "
        "with arguments as in YAML or by --solver.NAME=VALUE",
    )
    _add_guidance(parser)
    parser.add_argument(
        "--init",
        metavar="P",
        help="picture, or folder of PNG files, to begin at or to keep parts of",
    )
    parser.add_argument(
        "--strength",
        type=float,
        help="share of the solver's steps that are taken from there (default 0.6)",
    )
    parser.add_argument(
        "--mask",
        metavar="PNG",
        help="grey picture, lighter than half where --init is kept; the rest is made to fit",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the first image (default 0)")
    parser.add_argument(
        "--batch-size", type=int, default=64, metavar="B", help="images at a time (default 64)"
    )
    parser.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: cuda if there is one)")


def _add_guidance(parser: Parser) -> None:
    parser.add_argument(
        "--guidance", type=float, metavar="S", help="scale of classifier-free guidance; 1 is none"
    )
    parser.add_argument(
        "--guidance_interval",
        type=_two_levels,
        metavar="LOW,HIGH",
        help="noise levels sigma / alpha that are guided (default all)",
    )
    parser.add_argument(
        "--guidance_rescale",
        type=float,
        default=0.0,
        metavar="R",
        help="0 to 1: how far guided images get the contrast of others (default 0; 0.7 is usual)",
    )
    parser.add_argument(
        "--weaker",
        metavar="C[:W]",
        help="checkpoint to guide away from, by --guidance S (default 2); W as for --weights",
    )
    parser.add_argument(
        "--classifier",
        metavar="C[:W]",
        help="checkpoint of a NoisyClassifier to guide by, with --guidance S (default 1)",
    )


def parse_sampling(parser: Parser, options: Sequence[str]) -> argparse.Namespace:
    """The options, of which --solver.NAME are left as they are, in `solver_options`."""
    args, others = parser.parse_known_args(options)
    if wrong := [o for o in others if o.startswith("--") and not o.startswith("--solver.")]:
        parser.error(f"unrecognized arguments: {' '.join(wrong)}")
    if others and not others[0].startswith("--"):
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    if args.steps is not None and any(o.startswith("--solver.steps") for o in others):
        raise ValueError("give --steps or --solver.steps, not both.")
    if args.batch_size < 1:
        raise ValueError(f"--batch-size must be at least 1, got {args.batch_size}.")
    args.solver_options = others
    return args


def integers(text: str) -> list[int]:
    """Comma-separated integers."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be integers such as 0,1,2, got {text!r}") from None


def numbers(text: str) -> list[float]:
    """Comma-separated numbers."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        told = f"must be numbers such as 0.05,0.1, got {text!r}"
        raise argparse.ArgumentTypeError(told) from None


def _two_levels(text: str) -> tuple[float, float]:
    found = numbers(text)
    if len(found) != 2:
        raise argparse.ArgumentTypeError(f"must be two numbers, LOW,HIGH, got {text!r}")
    return found[0], found[1]
