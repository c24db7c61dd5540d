"""The command `lit-diffusion`, which imports only the module of the chosen subcommand."""

import os
import select
import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from importlib import import_module
from types import ModuleType

from lit_diffusion import __version__
from lit_diffusion.cli.terminal import RED, paint, paint_help
from lit_diffusion.config.messages import describe_error, is_out_of_memory, is_user_error, suggest
from lit_diffusion.config.shipped import use_shipped_configs
from lit_diffusion.signals import record_signals

COMMANDS = {
    "init": ("cli.init", "write a config and a README to train on a folder of images"),
    "fit": ("cli.fit", "train a model from a config, or resume a run"),
    "sample": ("cli.sample", "generate images from a checkpoint"),
    "evaluate": ("cli.evaluate", "score a checkpoint or a folder: FID, KID, precision, recall, IS"),
    "validate": ("cli.fit", "compute the loss and metrics of a checkpoint on the validation split"),
    "test": ("cli.fit", "compute loss and metrics on the test split, else on the validation split"),
    "predict": ("cli.fit", "run a checkpoint on the prediction split"),
    "doctor": ("cli.doctor.command", "check a config for problems before a long run"),
    "sweep": ("lab.compare.sweep", "train every arm of an experiment with every seed, and compare"),
    "compare": ("lab.compare.command", "compare runs by their steps to a target FID, over seeds"),
    "speedrun": ("lab.compare.speedrun_command", "measure how fast a recipe trains on the digits"),
    "analyze": ("lab.analysis.command", "consistency, interpolation, loss landscape and Hessian"),
    "convert": ("cli.convert", "export weights to other programs, or import published ones"),
    "encode": ("cli.encode", "precompute the latents of a folder of images"),
    "train-extractor": ("cli.train_extractor", "train a small network for FID on your own images"),
    "fetch-weights": ("cli.fetch_weights", "download the weights of a feature extractor for FID"),
    "plan": ("cli.plan", "estimate memory and communication of training with sharded weights"),
    "completion": ("cli.completion", "print a script that completes commands in your shell"),
}
"""Name -> (module of lit_diffusion, one line of help). The module's `run` gets all arguments."""

DEBUG = "LIT_DIFFUSION_DEBUG"
MISTAKES = ("Early stopping conditioned on metric", "EMA holds no averages")
"""Beginnings of error messages that report mistakes of the user, whatever the error's type."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, and return its exit code (see docs/command-line.md).

    The exit code is 0 for success, 1 for a failure, and 2 for a mistake of the user. It is 75 if a
    signal stopped a run that has been saved and should be restarted. It is 128 + n if signal n
    stopped the command.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller, as by >&-
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
    args = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in args or os.environ.get(DEBUG, "") not in ("", "0")
    args = [arg for arg in args if arg != "--debug"]
    try:
        code = _run(args)
        sys.stdout.flush()
    except KeyboardInterrupt as end:
        return 128 + getattr(end, "signal", signal.SIGINT)
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _stdout_is_closed():  # `lit-diffusion ... | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 128 + signal.SIGPIPE
        return _report(args[0] if args else "", error, debug)
    return code


def _run(args: Sequence[str]) -> int:
    """Run one command, and return its exit code unless it raises an error."""
    if not args or args[0] in ("-h", "--help"):
        print(paint_help(usage(), sys.stdout))
        return 0 if args else 2
    command = args[0]
    args, shipped = use_shipped_configs(args)
    if os.environ.get("LOCAL_RANK", "0") == "0":
        for name, path in shipped.items():
            print(f"lit-diffusion reads {path}, because there is no {name} here.", file=sys.stderr)
    if command in ("-V", "--version"):
        print(f"lit-diffusion {__version__}")
        return 0
    if command not in COMMANDS:
        raise ValueError(suggest(command, COMMANDS, "there is no command"))
    try:
        # A job may be preempted during imports, which take seconds.
        with record_signals() if command in ("fit", "sweep", "speedrun") else nullcontext():
            import_command(command).run(args)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def import_command(name: str) -> ModuleType:
    """Import the module of a command."""
    return import_module(f"lit_diffusion.{COMMANDS[name][0]}")


def _stdout_is_closed() -> bool:
    """Whether the program that reads the output has ended."""
    poll = select.poll()
    poll.register(sys.stdout, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def usage() -> str:
    """The text of `lit-diffusion --help`."""
    lines = "\n".join(f"  {name:<17}{text}" for name, (_, text) in COMMANDS.items())
    return f"""usage: lit-diffusion COMMAND [options]

Train diffusion models, sample from them and score them.

commands:
{lines}

options:
  -h, --help       show this help; lit-diffusion COMMAND --help shows a command's help
  -V, --version    show the version
  --debug          show the traceback of an error, as does {DEBUG}=1

examples:
  lit-diffusion fit --config configs/digits.yaml
  lit-diffusion sample --checkpoint runs/digits --num 64 --out samples
  lit-diffusion init flowers --images photos/flowers --size 64"""


def _report(command: str, error: Exception, debug: bool) -> int:
    """Print the message of an error, with a traceback unless a check of this library raised it."""
    on_purpose = is_user_error(error)
    if debug or not on_purpose:
        traceback.print_exception(error)
    message = describe_error(error)
    if len(message) > 3500:
        message = f"{message[:3500]} [...] {message[-500:]}"
    if is_out_of_memory(error):
        message = f"not enough memory; use a smaller batch, image or network ({message})."
    name = paint(f"lit-diffusion {command}:", RED, sys.stderr)
    print(f"{name} {message}", file=sys.stderr)
    is_mistake = (
        isinstance(error, ValueError | TypeError | OSError | ModuleNotFoundError)
        or type(error).__name__ == "MisconfigurationException"
        or message.startswith(MISTAKES)
    )
    return 2 if on_purpose and is_mistake else 1
