"""The command `lit-diffusion`: a table of names, each imported when it is called."""

import os
import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from importlib import import_module

from lit_diffusion import __version__
from lit_diffusion.config.messages import is_meant, is_out_of_memory
from lit_diffusion.signals import record_signals

COMMANDS = {
    "fit": ("lit_diffusion.cli.fit", "train a model from a config, or resume a run"),
    "validate": ("lit_diffusion.cli.fit", "loss of a checkpoint on the validation split"),
    "test": ("lit_diffusion.cli.fit", "loss and FID of a checkpoint on the test split"),
    "predict": ("lit_diffusion.cli.fit", "run a checkpoint on the prediction split"),
    "sample": ("lit_diffusion.cli.sample", "write images that a checkpoint generates"),
    "evaluate": (
        "lit_diffusion.cli.evaluate",
        "FID, KID, precision, recall and IS of a checkpoint or a folder of images",
    ),
    "analyze": (
        "lit_diffusion.lab.analysis.command",
        "consistency, loss landscape, interpolation and Hessian of checkpoints",
    ),
    "encode": ("lit_diffusion.cli.encode", "write latents of a folder of images, to train on"),
    "replay": (
        "lit_diffusion.cli.replay",
        "compute a training step again whose loss or gradient was not finite",
    ),
    "sweep": (
        "lit_diffusion.lab.compare.sweep_command",
        "train every arm of an experiment with every seed, restartable; compare them",
    ),
    "compare": (
        "lit_diffusion.lab.compare.command",
        "which way to train is fastest, over seeds, and whether that is noise",
    ),
    "convert": (
        "lit_diffusion.cli.convert",
        "take weights to other programs, or bring published ones in",
    ),
    "doctor": (
        "lit_diffusion.cli.doctor.command",
        "say what would go wrong with a run, or on this machine, before it starts",
    ),
    "train-extractor": (
        "lit_diffusion.cli.train_extractor",
        "train a network for FID on images of one's own, without a download",
    ),
    "fetch-weights": (
        "lit_diffusion.cli.fetch_weights",
        "download the network of FID, for machines without internet access",
    ),
}
"""name -> (module below lit_diffusion, one line of help). Its `run` gets all arguments."""

DEBUG = "LIT_DIFFUSION_DEBUG"
_MISTAKES = (
    "Early stopping conditioned on metric",
    "EMA holds no averages",
    "Found more than one stateful callback",
)
"""Beginnings of messages that other classes of errors have."""
_LONGEST, _TAIL = 3500, 500
"""Characters of a message that is longer, at its beginning and end."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: arguments without the program's name; None is those of the process.

    Returns:
        0 done, 1 failed, 2 a mistake in what was asked, 75 saved on a signal and to be started
        again, 130 interrupted, 143 terminated, 129 by a terminal that is gone.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in args or os.environ.get(DEBUG, "") not in ("", "0")
    args = [arg for arg in args if arg != "--debug"]
    if not args or args[0] in ("-h", "--help"):
        print(usage())
        return 0 if args else 2
    if args[0] == "--version":
        print(f"lit-diffusion {__version__}")
        return 0
    try:
        return _call(args)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt as end:
        return 128 + getattr(end, "signal", signal.SIGINT)
    except Exception as error:
        return _report(args[0], error, debug)


def usage() -> str:
    """What `lit-diffusion --help` prints."""
    lines = "\n".join(f"  {name:<16}{text}" for name, (_, text) in COMMANDS.items())
    return f"""usage: lit-diffusion COMMAND [options]    (lit-diffusion COMMAND --help says which)

Train diffusion models, score them and sample from them.

{lines}

  lit-diffusion fit --config configs/digits.yaml
  lit-diffusion fit --config configs/digits.yaml --ckpt_path=last
  lit-diffusion sample --checkpoint runs/digits --num 64 --out samples

With --debug, or {DEBUG}=1, a mistake is reported with its traceback."""


def _call(args: list[str]) -> int:
    name = args[0]
    if name not in COMMANDS:
        raise ValueError(f"there is no command '{name}'; there are {', '.join(COMMANDS)}.")
    # A job may be preempted while libraries are imported, which takes seconds.
    with record_signals() if name in ("fit", "sweep") else nullcontext():
        import_module(COMMANDS[name][0]).run(args)
    return 0


def _report(command: str, error: Exception, debug: bool) -> int:
    """Print what was raised on purpose in one message, an accident with its traceback."""
    meant = is_meant(error)
    if debug or not meant:
        traceback.print_exception(error)
    message = str(error) or type(error).__name__
    if len(message) > _LONGEST:
        message = f"{message[:_LONGEST]} [...] {message[-_TAIL:]}"
    if is_out_of_memory(error):
        message = f"there is not enough memory for what is asked; ask for less ({message})."
    print(f"lit-diffusion {command}: {message}", file=sys.stderr)
    mistake = isinstance(error, ValueError | TypeError | OSError | ModuleNotFoundError)
    mistake = mistake or type(error).__name__ == "MisconfigurationException"
    mistake = mistake or message.startswith(_MISTAKES)
    return 2 if meant and mistake else 1
