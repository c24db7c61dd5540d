"""The command `lit-diffusion`: a table of subcommands, each imported when it is called."""

import os
import select
import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from importlib import import_module

from lit_diffusion import __version__
from lit_diffusion.config.messages import (
    describe_error,
    is_out_of_memory,
    is_user_error,
    suggest,
)
from lit_diffusion.config.shipped import find_shipped_config
from lit_diffusion.signals import record_signals

COMMANDS = {
    "fit": ("cli.fit", "train a model from a config, or resume a run"),
    "validate": ("cli.fit", "loss of a checkpoint on the validation split"),
    "test": (
        "cli.fit",
        "loss and FID of a checkpoint on the test split, else on the validation split",
    ),
    "predict": ("cli.fit", "run a checkpoint on the prediction split"),
    "sample": ("cli.sample", "write images that a checkpoint generates"),
    "evaluate": ("cli.evaluate", "FID, KID, precision, recall and IS of a checkpoint or of images"),
    "analyze": (
        "lab.analysis.command",
        "consistency, loss landscape, interpolation and Hessian of checkpoints",
    ),
    "encode": ("cli.encode", "write latents of a folder of images, to train on"),
    "sweep": (
        "lab.compare.sweep",
        "train every arm of an experiment with every seed, restartable; compare them",
    ),
    "compare": (
        "lab.compare.command",
        "which way to train is fastest, over seeds, and whether that is noise",
    ),
    "convert": ("cli.convert", "take weights to other programs, or bring published ones in"),
    "doctor": (
        "cli.doctor.command",
        "say what would go wrong with a run, before it starts",
    ),
    "plan": ("cli.plan", "memory and communication of a fit whose weights are split over ranks"),
    "train-extractor": ("cli.train_extractor", "train a network for FID on images of one's own"),
    "fetch-weights": ("cli.fetch_weights", "download the network of FID, for use without internet"),
}
"""Name -> (module of lit_diffusion, one line of help). The module's `run` gets all arguments."""

DEBUG = "LIT_DIFFUSION_DEBUG"
MISTAKES = (
    "Early stopping conditioned on metric",
    "EMA holds no averages",
    "Found more than one stateful callback",
)
"""Beginnings of messages of user mistakes that are not a ValueError, TypeError or OSError."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: arguments without the program's name; None for those of the process.

    Returns:
        The exit code: 0 done, 1 failed, 2 user mistake, 75 saved on a signal and to be restarted,
        128 + n stopped by signal n: 129 hangup, 130 Ctrl-C, 141 closed pipe, 143 termination.
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
        print(usage())
        return 0 if args else 2
    command = args[0]
    args = [_use_shipped_config(arg) for arg in args]
    if command == "--version":
        print(f"lit-diffusion {__version__}")
        return 0
    if command not in COMMANDS:
        raise ValueError(suggest(command, COMMANDS, "there is no command"))
    try:
        # A job may be preempted during imports, which take seconds.
        with record_signals() if command in ("fit", "sweep") else nullcontext():
            import_module(f"lit_diffusion.{COMMANDS[command][0]}").run(args)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def _use_shipped_config(arg: str) -> str:
    """An argument with the path of a config of the package, if it names one that is not here."""
    shipped = find_shipped_config(arg)
    if shipped is not None and os.environ.get("LOCAL_RANK", "0") == "0":
        path = shipped.rpartition("=")[2]
        print(f"lit-diffusion: no configs folder here; reads {path}", file=sys.stderr)
    return shipped or arg


def _stdout_is_closed() -> bool:
    """Whether the program that reads the output has ended."""
    poll = select.poll()
    poll.register(sys.stdout, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def usage() -> str:
    """The text of `lit-diffusion --help`."""
    lines = "\n".join(f"  {name:<16}{text}" for name, (_, text) in COMMANDS.items())
    return f"""usage: lit-diffusion COMMAND [options]    (lit-diffusion COMMAND --help says which)

Train diffusion models, score them and sample from them.

{lines}

  lit-diffusion fit --config configs/digits.yaml
  lit-diffusion fit --config configs/digits.yaml --ckpt_path=last --trainer.max_steps=4000
  lit-diffusion sample --checkpoint runs/digits --num 64 --out samples

With --debug, or {DEBUG}=1, a mistake is reported with its traceback."""


def _report(command: str, error: Exception, debug: bool) -> int:
    """Print the message of an error, with its traceback unless a check raised it."""
    on_purpose = is_user_error(error)
    if debug or not on_purpose:
        traceback.print_exception(error)
    message = describe_error(error)
    if len(message) > 3500:
        message = f"{message[:3500]} [...] {message[-500:]}"
    if is_out_of_memory(error):
        message = f"there is not enough memory for what is asked; ask for less ({message})."
    print(f"lit-diffusion {command}: {message}", file=sys.stderr)
    is_mistake = (
        isinstance(error, ValueError | TypeError | OSError | ModuleNotFoundError)
        or type(error).__name__ == "MisconfigurationException"
        or message.startswith(MISTAKES)
    )
    return 2 if on_purpose and is_mistake else 1
