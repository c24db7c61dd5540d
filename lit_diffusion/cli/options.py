"""The parser and the options that several commands share.

Functions import torch only when they need it, because the import takes seconds.
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
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from lit_diffusion.cli.terminal import paint_help
from lit_diffusion.config.messages import explain_parse_error
from lit_diffusion.pretrained import find_model, list_models

if TYPE_CHECKING:
    import torch

STRENGTH = 0.6
"""Default of --strength."""

SPLITS = ("train", "val", "test")
"""Splits of a data module that --reference may name."""

FLOAT32_PRECISIONS = ("ieee", "tf32")
FLOAT32_PRECISION_HELP = """precision of float32 products on a GPU: ieee, or tf32, which is faster,
        with a mantissa of 10 bits (default of torch: ieee for matrices, tf32 for convolutions)"""


class Parser(argparse.ArgumentParser):
    """An argument parser that reports a wrong option as a ValueError with one line of text.

    `--help` lists the options that were added by `add_argument`. `--help all` also lists the
    options that were added by `add_rare`. The lines of the description are not rewrapped.
    """

    def __init__(self, command: str, description: str = "", add_help: bool = True) -> None:
        super().__init__(
            f"lit-diffusion {command}",
            description=description,
            formatter_class=partial(
                argparse.RawDescriptionHelpFormatter, max_help_position=27, width=100
            ),
            allow_abbrev=False,
            add_help=False,
        )
        self.actions: list[argparse.Action] = []
        self.rare: list[argparse.Action] = []
        # Shells leave the ~ of --option=~/path alone.
        self.register("type", None, os.path.expanduser)
        if add_help:
            add, default = self.add_argument, argparse.SUPPRESS
            text = "show this help"
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

    @property
    def option_names(self) -> list[str]:
        """Names of all options, such as "--num"."""
        names = [name for action in self.actions for name in action.option_strings]
        return [name for name in names if name.startswith("--")]

    def parse_known_args(self, args: Any, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parse as argparse does; names of options may have - or _."""
        spellings = {name.replace("-", "_"): name for name in self.option_names}
        words = []
        for word in args:
            name, equals, value = word.partition("=")
            words.append(f"{spellings.get(name.replace('-', '_'), name)}{equals}{value}")
        return super().parse_known_args(words, namespace)

    def parse_prefixed(
        self, argv: Sequence[str], *prefixes: str
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse `argv`, and also return unknown options whose names begin with one of the prefixes.

        An unknown option without one of the prefixes raises an error. If a required option is
        missing as well, the error is about the unknown option.
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

    def print_help(self, file: Any = None) -> None:
        """Print the help, with required arguments alone in its first line."""
        needed = [a for a in self.actions if a.required]
        words = [f"{a.option_strings[-1]} {a.metavar}" for a in needed if a.option_strings]
        words += [str(a.metavar) for a in needed if not a.option_strings]
        self.usage = " ".join([self.prog, *words, "[options]"])
        print(paint_help(self.format_help(), sys.stdout), end="")

    def error(self, message: str) -> NoReturn:
        """Raise a ValueError instead of printing the usage."""
        options = [name.removeprefix("--") for name in self.option_names]
        raise ValueError(explain_parse_error(ValueError(message), options))


class _Help(argparse.Action):
    """Prints the help, without rare options unless the value is "all"."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        if parser.rare and values != "all":
            for action in parser.rare:
                action.help = argparse.SUPPRESS
            parser.epilog = f"`{parser.prog} --help all` lists every option."
        parser.print_help()
        parser.exit()


@dataclass(frozen=True)
class SamplingOptions:
    """How to generate images: the options of `add_checkpoint` and `add_sampling`.

    An option that is None leaves the setting of the checkpoint unchanged. `solver_options` are
    strings of the form "--solver.NAME=VALUE". If `checkpoint` is None, no images are generated, and
    `batch_size` is the batch size for reading existing images. Options that exclude each other
    raise a ValueError.
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
        for pair in (("labels", "prompt"), ("weaker", "classifier"), ("mask", "strength")):
            if all(getattr(self, name) is not None for name in pair):
                raise ValueError(f"--{' and --'.join(pair)} exclude each other; leave one out.")
        if self.steps is not None and any("--solver.steps" in o for o in self.solver_options):
            raise ValueError("--steps and --solver.steps set the same number; leave one out.")
        self._check_guidance()
        if self.init is None and (self.mask or self.strength is not None):
            raise ValueError("--mask and --strength need --init, an image or a folder of images.")
        if self.mask and (self.solver or self.solver_options):
            raise ValueError(
                "--mask uses RePaint with the steps and times of the checkpoint's own solver; "
                "leave out --solver, and set --steps if needed."
            )

    def _check_guidance(self) -> None:
        if self.guidance_rescale and (self.weaker or self.classifier):
            raise ValueError("--guidance_rescale applies to classifier-free guidance; omit it.")
        if self.guidance_interval and self.classifier:
            raise ValueError("--guidance_interval applies to --guidance and --weaker; omit it.")
        has_scale = self.guidance is not None or self.weaker or self.classifier
        if self.changes_guidance and not has_scale:
            raise ValueError(
                "--guidance_interval and --guidance_rescale need --guidance S; add it."
            )

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
    """Context manager that hides the objects of imported modules from the garbage collector.

    Importing torch and Lightning creates 600,000 objects, most of which live until the process
    ends. Visiting these objects in garbage collections would take a third of the CPU time of
    `sample --num 1`.
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
    """Raise ModuleNotFoundError if a package of the extra [lab] is not installed."""
    try:
        import markdown_it  # noqa: F401
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{error.name} is not installed; run pip install 'lit-diffusion[lab]', or "
            "pip install -e '.[lab]' in a checkout."
        ) from error


def check_exists(what: str, *paths: str | None) -> None:
    """Raise FileNotFoundError if a path does not exist; the message calls it `what`."""
    for path in paths:
        if path is not None and not os.path.exists(path):
            here = "" if os.path.isabs(path) else f" (here: {os.getcwd()})"
            raise FileNotFoundError(f"There is no {what} {path}{here}; check the path.")


def check_checkpoints(*paths: str | None) -> None:
    """Raise FileNotFoundError if a path is neither a checkpoint nor a packaged model."""
    try:
        check_exists("run folder or checkpoint", *(p for p in paths if p and not find_model(p)))
    except FileNotFoundError as error:
        text = f"{str(error).rstrip('.')}, or name a packaged model: {', '.join(list_models())}."
        raise FileNotFoundError(text) from None


def parse_sampling(parser: Parser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse the options of `add_sampling`. Options --solver.NAME become `solver_options`."""
    args, others = parser.parse_prefixed(argv, "--solver.")
    args.solver_options = tuple(others)
    if args.init and not args.mask and args.strength is None:
        args.strength = STRENGTH
    return args


def sampling_options(args: argparse.Namespace) -> SamplingOptions:
    """The `SamplingOptions` in the result of `parse_sampling`."""
    return SamplingOptions(
        **{each.name: getattr(args, each.name) for each in fields(SamplingOptions)}
    )


def add_checkpoint(parser: Parser, required: bool) -> None:
    """Add --checkpoint, --weights and --trust."""
    add = parser.add_argument
    text = f"""checkpoint file; run folder, whose checkpoints/last.ckpt is read; exported folder;
        or packaged model: {", ".join(list_models())}"""
    add("--checkpoint", required=required, type=_checkpoint, metavar="C", help=text)
    text = """ema: EMA weights (default); ema_<decay> or power_<width>: one of several averages;
        raw: the trained weights, without averaging"""
    add("--weights", default="ema", metavar="W", help=text)
    add_trust(parser, "the checkpoint")


def _checkpoint(text: str) -> str:
    """A checkpoint without the slash that a shell adds to the name of a folder."""
    return os.path.expanduser(text).rstrip("/") or text


def add_trust(parser: Parser, file: str) -> None:
    """Add --trust, for the packages and folders that `file` names."""
    text = f"""package that class paths in {file} may import, or folder, ending in /, that its codec
        may read; repeat it for several"""
    parser.add_rare("--trust", action="append", default=[], metavar="NAME", help=text)


def add_data(parser: Parser) -> None:
    """Add --data, configs that name the data to read."""
    text = """config whose data are read instead of the run's data; needed for a checkpoint
        outside of a run folder; repeat it to merge several"""
    parser.add_rare("--data", action="append", metavar="CONFIG", help=text)


def add_device(parser: Parser) -> None:
    """Add --device."""
    text = "cpu, cuda, cuda:1, ... (default: cuda, else cpu)"
    parser.add_argument("--device", metavar="D", help=text)


def add_sampling(parser: Parser) -> None:
    """Add options that change how the checkpoint generates images."""
    add, rare = parser.add_argument, parser.add_rare
    text = """numbers or names of classes, repeated in turn; -1 is no class (default: seed modulo
        the number of classes)"""
    add("--labels", metavar="0,1,2", help=text)
    text = """text that the images show, for a model with text conditioning; '' is no text; repeat
        the option for several texts, used in turn"""
    add("--prompt", action="append", type=str, metavar="TEXT", help=text)
    text = "solver steps (default: as in the checkpoint); a step of Heun calls the network twice"
    add("--steps", type=integer, metavar="N", help=text)
    text = """solver: DDIM, DDPM, DPMSolverPP, Euler, Heun, UniPC, ..., or a class path; set its
        arguments by --solver.NAME=VALUE"""
    add("--solver", metavar="S", help=text)
    text = "scale of classifier-free guidance; 1 is unguided (default: as in the checkpoint)"
    add("--guidance", type=number, metavar="S", help=text)
    text = "guide only between these noise levels sigma / alpha (default: everywhere)"
    rare("--guidance_interval", type=_two_numbers, metavar="LOW,HIGH", help=text)
    text = "0 to 1: how far guided images get the contrast of unguided ones (default 0, usual 0.7)"
    rare("--guidance_rescale", type=number, default=0.0, metavar="R", help=text)
    text = "autoguidance by a weaker checkpoint with --guidance S (default 2); W as for --weights"
    rare("--weaker", metavar="C[:W]", help=text)
    text = "guide by the checkpoint of a NoisyClassifier with --guidance S (default 1)"
    rare("--classifier", metavar="C[:W]", help=text)
    text = "image, or folder of PNG files, to start from instead of noise"
    add("--init", metavar="P", help=text)
    text = f"fraction of solver steps applied to --init, in (0, 1] (default {STRENGTH})"
    rare("--strength", type=number, metavar="R", help=text)
    text = "grayscale image: where it is lighter than half, --init is kept; the rest is filled in"
    rare("--mask", metavar="PNG", help=text)
    text = "seed of the first image; each further image has the next seed (default 0)"
    add("--seed", type=integer, default=0, metavar="N", help=text)
    text = "images per batch (default 64)"
    rare("--batch-size", type=integer, default=64, metavar="B", help=text)
    add_device(parser)
    rare("--float32_precision", choices=FLOAT32_PRECISIONS, help=FLOAT32_PRECISION_HELP)


def integer(text: str) -> int:
    """Parse an integer of 64 bits, which torch and NumPy can hold."""
    value = int(text)
    if not -(2**63) <= value < 2**63:
        raise argparse.ArgumentTypeError(f"must be an integer of 64 bits, got {text}")
    return value


def number(text: str) -> float:
    """Parse a finite number."""
    value = float(text)
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"must be a finite number, got {text}")
    return value


def integers(text: str) -> list[int]:
    """Parse comma-separated integers."""
    try:
        return [integer(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be integers such as 0,1,2, got {text!r}") from None


def numbers(text: str) -> list[float]:
    """Parse comma-separated numbers."""
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
    """Set the precision of float32 matrix products and convolutions on CUDA. None changes nothing.

    "ieee" has a mantissa of 23 bits, and "tf32", which is faster, 10 bits.
    """
    import torch

    if name is not None:
        torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
        torch.backends.cudnn.allow_tf32 = name == "tf32"


def usable_device(name: str | None) -> "torch.device":
    """Return the device that --device names; ValueError if it is not available.

    None means the GPU of this process of torchrun (LOCAL_RANK) or of this task of srun
    (SLURM_LOCALID), the first GPU without these, or the CPU if there is no GPU.
    """
    import torch

    if name is None:
        number = os.environ.get("LOCAL_RANK")
        if not number:  # modulo, because srun may show each task only its own GPU
            task = int(os.environ.get("SLURM_LOCALID") or 0)
            number = str(task % max(1, torch.cuda.device_count()))
        name = f"cuda:{number}" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.empty(0, device=name).device
    except (RuntimeError, AssertionError, ImportError) as error:  # depends on how torch was built
        reason = str(error).split("\n")[0].rstrip(".")
        if isinstance(error, NotImplementedError):  # a message of 1,500 characters
            reason = "torch was built without it"
        fix = "try --device cpu"
        raise ValueError(f"--device {name} cannot be used here: {reason}; {fix}.") from error
    if device.type == "meta":
        raise ValueError("--device meta cannot compute; use cpu, cuda or cuda:1.")
    return device
