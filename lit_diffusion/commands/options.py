"""Options of the commands that are not the Trainer's."""

import argparse
import re
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """An argument parser that leaves telling a mistake to `cli.main`: one line, no usage."""

    def __init__(self, command: str, description: str = "", add_help: bool = True) -> None:
        super().__init__(
            f"lit-diffusion {command}",
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            add_help=add_help,
        )
        # What begins like a negative number is a value and no option: -1,2 is a list of labels.
        self._negative_number_matcher = re.compile(r"-\.?\d")

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing.

        Raises:
            ValueError: always.
        """
        from lit_diffusion.errors import innermost

        options = [name for action in self._actions for name in action.option_strings]
        raise ValueError(innermost(ValueError(message), [name.lstrip("-") for name in options]))


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
        help="ema (default), ema_<decay> where there are several, or raw: as trained",
    )
    parser.add_argument(
        "--trust",
        action="append",
        default=[],
        metavar="PACKAGE",
        help="package that class paths in the checkpoint may name; may be repeated",
    )


def add_sampling(parser: Parser) -> None:
    """What may differ from how the checkpoint would generate."""
    parser.add_argument(
        "--labels",
        type=integers,
        metavar="0,1,2",
        help="classes, repeated in turn (default: seed modulo the number of classes); -1 is none",
    )
    parser.add_argument("--steps", type=int, help="network evaluations of the solver")
    parser.add_argument("--solver", choices=["ddim", "ddpm", "dpmpp"], help="another solver")
    parser.add_argument(
        "--guidance", type=float, metavar="S", help="scale of classifier-free guidance; 1 is none"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the first image (default 0)")
    parser.add_argument(
        "--batch-size", type=int, default=64, metavar="B", help="images at a time (default 64)"
    )
    parser.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: cuda if there is one)")


def integers(text: str) -> list[int]:
    """Comma-separated integers.

    Raises:
        argparse.ArgumentTypeError: for anything else.

    Example:
        >>> integers("0,1,2")
        [0, 1, 2]
    """
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be integers such as 0,1,2, got {text!r}") from None
