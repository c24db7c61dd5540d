"""The parser and the options that several commands share.

Heavy imports are inside functions, so that `--help` of every command is fast.
"""

import argparse
import gc
import math
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NoReturn

from lit_diffusion.config.messages import explain_parse_error

if TYPE_CHECKING:
    import torch

STRENGTH = 0.6
"""Default of --strength."""

SPLITS = ("train", "val", "test")
"""Splits of a data module that --reference may name."""


FLOAT32_PRECISIONS = ("ieee", "tf32")
FLOAT32_PRECISION_HELP = """on a GPU, float32 in matrix products and convolutions: ieee, or faster
        tf32 of 10 bits (default: ieee in products, tf32 in convolutions, as in torch)"""


class Parser(argparse.ArgumentParser):
    """An argument parser that raises a ValueError of one line, for `cli.main` to print.

    Options of `add_rare` are listed by `--help all` alone.
    """

    def __init__(self, command: str, description: str = "", add_help: bool = True) -> None:
        super().__init__(
            f"lit-diffusion {command}",
            description=description,
            formatter_class=_HelpFormatter,
            allow_abbrev=False,
            add_help=False,
        )
        self.actions: list[argparse.Action] = []
        self.rare: list[argparse.Action] = []
        # Shells leave the ~ of --option=~/path alone.
        self.register("type", None, os.path.expanduser)
        if add_help:
            add, default = self.add_argument, argparse.SUPPRESS
            text = "show this and exit"
            add("-h", "--help", nargs="?", metavar="all", action=_Help, default=default, help=text)
        # An argument that starts like a negative number is a value: -1,2 is a list of labels.
        self._negative_number_matcher = re.compile(r"-\.?\d")

    def add_argument(self, *args: Any, **kwargs: Any) -> argparse.Action:
        """Add an option or positional argument, as argparse does."""
        self.actions.append(super().add_argument(*args, **kwargs))
        return self.actions[-1]

    def add_rare(self, *names: str, **kwargs: Any) -> None:
        """Add an option that few users need, with the arguments of `add_argument`."""
        self.rare.append(self.add_argument(*names, **kwargs))

    def parse_known_args(self, args: Any, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parse as argparse does; - and _ are alike in the names of options."""
        options = [name for action in self.actions for name in action.option_strings]
        spellings = {name.replace("-", "_"): name for name in options if name[:2] == "--"}
        words = []
        for word in args:
            name, equals, value = word.partition("=")
            words.append(f"{spellings.get(name.replace('-', '_'), name)}{equals}{value}")
        return super().parse_known_args(words, namespace)

    def parse_prefixed(
        self, argv: Sequence[str], *prefixes: str
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse `argv`, and collect the options NAME=VALUE or NAME VALUE with one of the prefixes.

        An unknown option or word is reported before a missing option.
        """
        missing: ValueError | None = None
        try:
            args, others = self.parse_known_args(argv)
        except ValueError as error:
            missing = error
            for action in self.actions:
                action.required = False
            args, others = self.parse_known_args(argv)  # raises if nothing is missing
        wrong = [o for o in others if o.startswith("--") and not f"{o}=".startswith(prefixes)]
        if wrong or (others and not others[0].startswith("--")):
            self.error(f"unrecognized arguments: {' '.join(wrong or others)}")
        if missing is not None:
            raise missing
        return args, others

    def parse_args(self, args: Any, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parse the options of this parser, and no others."""
        return self.parse_prefixed(args)[0]

    def error(self, message: str) -> NoReturn:
        """Raise a ValueError instead of printing the usage."""
        options = re.findall(r"--([\w.-]+)", self.format_usage())
        raise ValueError(explain_parse_error(ValueError(message), options))


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Preserves the lines of the description; 100 columns wide."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=27, width=100)


class _Help(argparse.Action):
    """Prints the help, without rare options unless the value is "all"."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        if parser.rare and values != "all":
            for action in parser.rare:
                action.help = argparse.SUPPRESS
            parser.epilog = f"{len(parser.rare)} more options: {parser.prog} --help all"
        parser.print_help()
        parser.exit()


@dataclass(frozen=True)
class SamplingOptions:
    """How to generate images: the options of `add_checkpoint` and `add_sampling`.

    None uses the setting of the checkpoint. `solver_options` are options --solver.NAME=VALUE.
    Without a checkpoint, existing images are read in batches of `batch_size`.

    Raises:
        ValueError: for options that exclude each other.
    """

    checkpoint: str | None
    weights: str = "ema"
    trust: Sequence[str] = ()
    labels: str | None = None
    prompt: Sequence[str] | None = None
    steps: int | None = None
    solver: str | None = None
    solver_options: Sequence[str] = ()
    guidance: float | None = None
    guidance_interval: tuple[float, float] | None = None
    guidance_rescale: float = 0.0
    weaker: str | None = None
    classifier: str | None = None
    init: str | None = None
    strength: float | None = None
    mask: str | None = None
    seed: int = 0
    batch_size: int = 64
    device: str | None = None
    float32_precision: str | None = None

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"--batch-size must be at least 1, got {self.batch_size}.")
        if self.prompt and self.labels is not None:
            raise ValueError("give --labels or --prompt, not both.")
        if self.steps is not None and any("--solver.steps" in o for o in self.solver_options):
            raise ValueError("give --steps or --solver.steps, not both.")
        self._check_guidance()
        if self.init is None and (self.mask or self.strength is not None):
            raise ValueError("--mask and --strength need --init, an image or a folder of them.")
        if self.mask and self.strength is not None:
            raise ValueError("give --strength, or --mask, not both.")
        if self.mask and (self.solver or self.solver_options):
            raise ValueError(
                "--mask fills in by RePaint, on the steps and times of the checkpoint's own "
                "solver; leave out --solver. --steps may be given."
            )

    def _check_guidance(self) -> None:
        if self.weaker and self.classifier:
            raise ValueError("give --weaker or --classifier, not both.")
        if self.guidance_rescale and (self.weaker or self.classifier):
            raise ValueError("--guidance_rescale goes with classifier-free --guidance alone.")
        if self.guidance_interval and self.classifier:
            raise ValueError("--guidance_interval goes with --guidance or --weaker.")
        has_scale = self.guidance is not None or self.weaker or self.classifier
        if self.changes_guidance and not has_scale:
            raise ValueError("--guidance_interval and --guidance_rescale need --guidance S.")

    @property
    def changes_solver(self) -> bool:
        """Whether the options change the checkpoint's solver."""
        return bool(self.solver or self.solver_options) or self.steps is not None

    @property
    def changes_guidance(self) -> bool:
        """Whether the options change the checkpoint's guidance."""
        options = (self.guidance, self.guidance_interval, self.weaker, self.classifier)
        return bool(self.guidance_rescale) or any(option is not None for option in options)


@contextmanager
def import_heavy() -> Iterator[None]:
    """Context for the imports of torch and Lightning: the garbage collector never visits them.

    They create 600,000 objects, most of which live until the process ends. Collections among them,
    in the context and at exit, would be a third of the CPU time of `sample --num 1`.
    """
    if "torch" in sys.modules:  # the command was called from Python, whose objects may be garbage
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def require_lab() -> None:
    """Check that the packages of the extra [lab] are installed.

    Raises:
        ModuleNotFoundError: if one of them is not.
    """
    try:
        import markdown_it  # noqa: F401
        import matplotlib  # noqa: F401
        import scipy  # noqa: F401
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{error.name} is not installed; in lit-diffusion's folder: pip install -e '.[lab]'"
        ) from error


def check_exists(what: str, *paths: str | None) -> None:
    """Check that the paths of an option exist, before torch is imported.

    Raises:
        FileNotFoundError: if one does not; `what` it should be is in the message.
    """
    for path in paths:
        if path is not None and not os.path.exists(path):
            here = "" if os.path.isabs(path) else f" (here: {os.getcwd()})"
            raise FileNotFoundError(f"There is no {what} {path}{here}; check the path.")


def parse_sampling(parser: Parser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse with a parser that has `add_sampling`; collects --solver.NAME in `solver_options`."""
    args, others = parser.parse_prefixed(argv, "--solver.")
    args.solver_options = tuple(others)
    return args


def sampling_options(args: argparse.Namespace) -> SamplingOptions:
    """Convert the result of `parse_sampling` to `SamplingOptions`."""
    values: dict[str, Any] = {
        each.name: getattr(args, each.name) for each in fields(SamplingOptions)
    }
    if args.init and not args.mask and args.strength is None:
        values["strength"] = STRENGTH
    return SamplingOptions(**values)


def add_checkpoint(parser: Parser, required: bool) -> None:
    """Add --checkpoint, --weights and --trust."""
    add = parser.add_argument
    text = "checkpoint file, or run folder: its checkpoints/last.ckpt"
    add("--checkpoint", required=required, metavar="C", help=text)
    text = """ema: the average (default); ema_<decay> or power_<width>: one of several averages;
        raw: the weights as trained"""
    add("--weights", default="ema", metavar="W", help=text)
    add_trust(parser, "the checkpoint")


def add_trust(parser: Parser, file: str) -> None:
    """Add --trust, for what `file` names."""
    text = f"""package whose code class paths in {file} may import, or folder, with a /, that its
        codec may read; may be repeated"""
    parser.add_rare("--trust", action="append", default=[], metavar="NAME", help=text)


def add_data(parser: Parser) -> None:
    """Add --data, configs that name the data to read."""
    text = """config whose data: is read, in place of the config of the checkpoint's run folder;
        needed for a checkpoint that is in no run folder; may be repeated, as --config of fit"""
    parser.add_rare("--data", action="append", metavar="CONFIG", help=text)


def add_device(parser: Parser) -> None:
    """Add --device."""
    parser.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: cuda if there is one)")


def add_sampling(parser: Parser) -> None:
    """Add options that change how the checkpoint generates images."""
    add = parser.add_argument
    text = """classes by number or name, repeated in turn; -1 is no class (default: seed modulo the
        number of classes)"""
    add("--labels", metavar="0,1,2", help=text)
    text = """text that the images show, for a model of texts; repeat the option for several in
        turn; '' is no text"""
    add("--prompt", action="append", type=str, metavar="TEXT", help=text)
    text = (
        "number of solver steps (default: as in the checkpoint); Heun has two evaluations in each"
    )
    add("--steps", type=integer, metavar="N", help=text)
    text = """another solver: DDIM, DDPM, DPMSolverPP, Euler, Heun, UniPC, ..., or a class path; its
        arguments as YAML, or as --solver.NAME=VALUE"""
    add("--solver", metavar="S", help=text)
    text = "scale of classifier-free guidance; 1 is unguided (default: as in the checkpoint)"
    add("--guidance", type=number, metavar="S", help=text)
    text = "guide only between these noise levels sigma / alpha (default: at all)"
    parser.add_rare("--guidance_interval", type=_two_numbers, metavar="LOW,HIGH", help=text)
    text = "0 to 1: how far guided images get the contrast of unguided ones (default 0; usual 0.7)"
    parser.add_rare("--guidance_rescale", type=number, default=0.0, metavar="R", help=text)
    text = "guide away from this weaker checkpoint, by --guidance S (default 2); W as for --weights"
    parser.add_rare("--weaker", metavar="C[:W]", help=text)
    text = "guide by this checkpoint of a NoisyClassifier, with --guidance S (default 1)"
    parser.add_rare("--classifier", metavar="C[:W]", help=text)
    text = "image, or folder of PNG files, to start from instead of noise"
    add("--init", metavar="P", help=text)
    text = f"share of the solver's steps taken from --init: above 0, at most 1 (default {STRENGTH})"
    parser.add_rare("--strength", type=number, metavar="R", help=text)
    text = "grey image, lighter than half where --init is kept; the rest is generated to fit"
    parser.add_rare("--mask", metavar="PNG", help=text)
    text = "seed of the first image, then one more each (default 0)"
    add("--seed", type=integer, default=0, help=text)
    text = "images at a time (default 64)"
    parser.add_rare("--batch-size", type=integer, default=64, metavar="B", help=text)
    add_device(parser)
    parser.add_rare("--float32_precision", choices=FLOAT32_PRECISIONS, help=FLOAT32_PRECISION_HELP)


def integer(text: str) -> int:
    """An integer that torch and numpy can hold."""
    value = int(text)
    if not -(2**63) <= value < 2**63:
        raise argparse.ArgumentTypeError(f"must be an integer of 64 bits, got {text}")
    return value


def number(text: str) -> float:
    """A finite number."""
    value = float(text)
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"must be a finite number, got {text}")
    return value


def integers(text: str) -> list[int]:
    """Comma-separated integers."""
    try:
        return [integer(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be integers such as 0,1,2, got {text!r}") from None


def numbers(text: str) -> list[float]:
    """Comma-separated numbers."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        message = f"must be numbers such as 0.05,0.1, got {text!r}"
        raise argparse.ArgumentTypeError(message) from None


def _two_numbers(text: str) -> tuple[float, float]:
    values = numbers(text)
    if len(values) != 2:
        raise argparse.ArgumentTypeError(f"must be two numbers, LOW,HIGH, got {text!r}")
    return values[0], values[1]


def set_float32_precision(name: str | None) -> None:
    """Set how CUDA computes matrix products and convolutions of float32; None changes nothing.

    Args:
        name: "ieee", or "tf32", which is faster and has 10 bits of precision instead of 23.
    """
    import torch

    if name is not None:
        torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
        torch.backends.cudnn.allow_tf32 = name == "tf32"


def usable_device(name: str | None) -> "torch.device":
    """The device of --device, after a check that this machine has it.

    Args:
        name: "cpu", "cuda", "cuda:1", ...; None for the GPU of this process, else the CPU.

    Raises:
        ValueError: if the device is not available.
    """
    import torch

    if name is None:
        gpu = f"cuda:{os.environ.get('LOCAL_RANK') or 0}"  # torchrun starts a process for each GPU
        name = gpu if torch.cuda.is_available() else "cpu"
    try:
        device = torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:  # AssertionError: torch built without CUDA
        reason = str(error).split("\n")[0].rstrip(".")
        raise ValueError(f"--device {name} cannot be used here: {reason}.") from error
    if device.type == "meta":
        raise ValueError("--device meta holds no numbers; use cpu, cuda or cuda:1.")
    return device
