"""The command `lit-diffusion`: a table of names, each imported when it is called."""

import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module

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
    "fetch-weights": (
        "lit_diffusion.commands.fetch_weights:run",
        "download the network that FID needs, for machines without internet access",
    ),
}
"""name -> ("module:function", one line of help). The function gets all arguments."""

DEBUG = "LIT_DIFFUSION_DEBUG"
_MISTAKES = (ValueError, TypeError, OSError)
_OURS = ("lit_diffusion", "jsonargparse", "argparse")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: arguments without the program's name; None is those of the process.

    Returns:
        0 done, 1 failed, 2 a mistake in what was asked, 130 interrupted.
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
    getattr(import_module(module), function)(args)
    return 0


def _version() -> str:
    from lit_diffusion import __version__

    return f"lit-diffusion {__version__}"


def _report(command: str, error: Exception, debug: bool) -> int:
    """Tell a mistake in one message, anything else with its traceback."""
    mistake = _is_mistake(error)
    if debug or not mistake:
        traceback.print_exception(error)
    print(f"lit-diffusion {command}: {error}", file=sys.stderr)
    return 2 if mistake else 1


def _is_mistake(error: Exception) -> bool:
    """Whether the user can mend it: raised on purpose by our code or by Lightning's checks."""
    if type(error).__name__ == "MisconfigurationException":
        return True
    return isinstance(error, _MISTAKES) and _raised_by(error) in _OURS


def _raised_by(error: Exception) -> str:
    """Top-level package of the code that raised an error."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    return "" if frame is None else str(frame.tb_frame.f_globals.get("__name__", "")).split(".")[0]
