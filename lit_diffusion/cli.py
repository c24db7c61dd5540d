"""The command `lit-diffusion`: a table of names, each imported when it is called."""

import linecache
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from importlib import import_module

from lit_diffusion.signals import noting

COMMANDS = {
    "fit": ("lit_diffusion.commands.run:run", "train a model from a config, or resume a run"),
    "validate": ("lit_diffusion.commands.run:run", "loss of a checkpoint on the validation split"),
    "test": ("lit_diffusion.commands.run:run", "loss and FID of a checkpoint on the test split"),
    "predict": ("lit_diffusion.commands.run:run", "run a checkpoint on the prediction split"),
    "sample": ("lit_diffusion.commands.sample:run", "write images that a checkpoint generates"),
    "evaluate": (
        "lit_diffusion.commands.evaluate:run",
        "FID, KID, precision, recall and IS of a checkpoint or a folder of images",
    ),
    "replay": (
        "lit_diffusion.commands.replay:run",
        "compute a training step again whose loss or gradient was not finite",
    ),
    "sweep": (
        "lit_diffusion.commands.sweep:run",
        "train every arm of an experiment with every seed, restartable, and compare them",
    ),
    "compare": (
        "lit_diffusion.commands.compare:run",
        "which of several ways to train is fastest, over seeds, and whether that is noise",
    ),
    "doctor": (
        "lit_diffusion.commands.doctor:run",
        "say what would go wrong with a run, or on this machine, before it is started",
    ),
    "fetch-weights": (
        "lit_diffusion.commands.fetch_weights:run",
        "download the network that FID needs, for machines without internet access",
    ),
}
"""name -> ("module:function", one line of help). The function gets all arguments."""

DEBUG = "LIT_DIFFUSION_DEBUG"
_LONGEST, _TAIL = 4000, 500
"""Characters of a message, and those of its end when it is longer."""

_MISTAKES = (ValueError, TypeError, OSError)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: arguments without the program's name; None is those of the process.

    Returns:
        0 done, 1 failed, 2 a mistake in what was asked, 75 saved on a signal and to be started
        again, 130 interrupted, 143 terminated.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in args or os.environ.get(DEBUG, "") not in ("", "0")
    args = [arg for arg in args if arg != "--debug"]
    if not args or args[0] in ("-h", "--help"):
        print(usage())
        return 0 if args else 2
    if args[0] == "--version":
        print(_version())
        return 0
    try:
        return _call(args)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        return _report(args[0], error, debug)


def usage() -> str:
    """What `lit-diffusion --help` prints."""
    lines = [f"  {name:<15}{text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: lit-diffusion COMMAND [options]    (lit-diffusion COMMAND --help says which)",
            "",
            "Train diffusion models, score them and sample from them.",
            "",
            *lines,
            "",
            "  lit-diffusion fit --config configs/digits.yaml",
            "  lit-diffusion fit --config configs/digits.yaml --ckpt_path=last",
            "  lit-diffusion sample --checkpoint runs/digits --num 64 --out samples",
            "",
            f"With --debug, or {DEBUG}=1, a mistake is reported with its traceback.",
        ]
    )


def _call(args: list[str]) -> int:
    name = args[0]
    if name not in COMMANDS:
        raise ValueError(f"there is no command '{name}'; there are {', '.join(COMMANDS)}.")
    module, function = COMMANDS[name][0].split(":")
    # A job may be preempted while libraries are imported, which takes seconds.
    with noting() if name in ("fit", "sweep") else nullcontext():
        getattr(import_module(module), function)(args)
    return 0


def _version() -> str:
    from lit_diffusion import __version__

    return f"lit-diffusion {__version__}"


def _report(command: str, error: Exception, debug: bool) -> int:
    """Tell what was raised on purpose in one message, an accident with its traceback."""
    meant = is_meant(error)
    if debug or not meant:
        traceback.print_exception(error)
    message = _shortened(str(error)) or type(error).__name__
    if _is_out_of_memory(error):
        message = f"there is not enough memory for what is asked; ask for less ({message})."
    print(f"lit-diffusion {command}: {message}", file=sys.stderr)
    return 2 if meant and _is_mistake(error) else 1


def _shortened(message: str) -> str:
    """A message without the middle of what somebody wrote a book into."""
    if len(message) <= _LONGEST:
        return message
    left_out = len(message) - _LONGEST
    return f"{message[: -_TAIL - left_out]} [... {left_out:,} characters ...] {message[-_TAIL:]}"


def _is_out_of_memory(error: BaseException) -> bool:
    named = {kind.__name__ for kind in type(error).__mro__} & {"MemoryError", "OutOfMemoryError"}
    return bool(named) or "DefaultCPUAllocator: can't allocate memory" in str(error)


def _is_mistake(error: Exception) -> bool:
    return isinstance(error, _MISTAKES) or type(error).__name__ == "MisconfigurationException"


def is_meant(
    error: BaseException, packages: Sequence[str] = ("lit_diffusion", "lightning")
) -> bool:
    """Whether an error is the message of a check, by us or Lightning, and not an accident in code.

    A check ends in a `raise` statement; an accident in whatever statement it befell. What the
    system says of a file, with its name, or of memory, is as good as a check.

    Args:
        error: that was raised.
        packages: whose checks count.
    """
    if _is_out_of_memory(error):
        return True
    if type(error).__name__ == "MisconfigurationException":
        return True
    if isinstance(error, OSError) and error.filename is not None:
        return True
    tb = error.__traceback__
    while tb is not None and tb.tb_next is not None:
        tb = tb.tb_next
    if tb is None:
        return False
    line = linecache.getline(tb.tb_frame.f_code.co_filename, tb.tb_lineno).strip()
    package = str(tb.tb_frame.f_globals.get("__name__")).split(".")[0]
    return package in packages and line.startswith("raise ")
