"""Print help for `lit-diffusion fit | validate | test | predict`, and check the command line.

The checks do not import torch or Lightning, because that takes seconds. `cli.fitting` imports them
after the checks.
"""

import ast
import os
import re
import sys
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from lit_diffusion.cli.options import import_heavy
from lit_diffusion.cli.run_folder import Request, read_command_line, read_config, refuse_mixing
from lit_diffusion.cli.terminal import paint_help
from lit_diffusion.config.messages import explain_parse_error
from lit_diffusion.files import check_regular

OPTIONS = (
    *("help", "config", "print_config", "seed_everything", "tuned_on", "init_weights", "ckpt_path"),
    *("model", "data", "trainer", "verbose", "return_predictions", "weights_only", "trust"),
    "float32_precision",
)
"""Names of the options, up to the first dot."""

_SETTINGS = """options:
  --config FILE           YAML; repeat it to merge files: later ones override
  --model.NAME=VALUE      argument of the model: --model.network.dropout=0.1
  --data.NAME=VALUE       argument of the data: --data.batch_size=64
  --trainer.NAME=VALUE    argument of Lightning's Trainer"""

_LAST = """
  --trust PACKAGE         package that class paths may import; may be repeated
  --print_config          print the merged config and exit
  --model.help=CLASS      show the arguments of a class; also --data.help=CLASS
  --help all              show every setting with its type and default"""

_OF_CHECKPOINT = f"""
Without --config, the config of the run is used.

{_SETTINGS}
  --ckpt_path FILE        the checkpoint{_LAST}"""

HELP = {
    "fit": f"""Train a model, or resume a run.

    lit-diffusion fit --config configs/digits.yaml

{_SETTINGS}: max_steps, devices,
                          precision, default_root_dir (the run folder), ...
  --trainer.callbacks.EMA.decays=[0.999]  argument of a callback
  --trainer.callbacks.EMA=null            remove it; callbacks+=EMA adds one
  --ckpt_path PATH        resume from this file, or last: the run's last.ckpt;
                          last-or-none starts anew if there is no last.ckpt
  --init_weights PATH     start from weights: CKPT, CKPT:raw, export, digits
  --float32_precision P   on a GPU: tf32 (10-bit mantissa, faster), ieee (23)
  --seed_everything N     seed (default 0){_LAST}""",
    "validate": f"""Compute the loss and metrics of a checkpoint on the validation split.

    lit-diffusion validate --ckpt_path runs/digits/checkpoints/last.ckpt
{_OF_CHECKPOINT}""",
    "test": f"""Compute loss and metrics on the test split or, without one, the validation split.

    lit-diffusion test --ckpt_path runs/digits/checkpoints/last.ckpt
{_OF_CHECKPOINT}""",
    "predict": f"""Run a checkpoint on the prediction split of its data.

    lit-diffusion predict --ckpt_path runs/digits/checkpoints/last.ckpt \\
        --trainer.callbacks+=PACKAGE.A_BASE_PREDICTION_WRITER --trust PACKAGE

To write images, use `lit-diffusion sample`.
{_OF_CHECKPOINT}""",
}
"""Help of each command. The help of `fit` fits a terminal of 24 lines."""


def run(argv: Sequence[str]) -> None:
    """Run a command line whose first word is fit, validate, test or predict."""
    command, *options = argv
    if {"-h", "--help", "--help=all"} & set(options):
        if options[-1] not in ("all", "--help=all"):
            needed = "--config" if command == "fit" else "--ckpt_path"
            text = f"usage: lit-diffusion {command} {needed} FILE [options]\n\n{HELP[command]}"
            print(paint_help(text, sys.stdout))
            return
        options = ["--help"]
    _refuse_wrong_options(options)
    request = read_command_line([command, *options])
    if not any(re.match(r"--(print_config|help$|\S+\.help)", option) for option in options):
        _refuse_incomplete(request)
    with import_heavy():
        from lit_diffusion.cli.fitting import run_request

    run_request(request)


def _refuse_wrong_options(options: Sequence[str]) -> None:
    """Raise ValueError for an unknown option, or a word that belongs to no option."""
    takes_value = False
    for option in options:
        is_name = option.startswith("--") or (option.startswith("-c") and not takes_value)
        if not is_name and not takes_value:
            error = ValueError(f"unrecognized arguments: {option}")
            raise ValueError(explain_parse_error(error, OPTIONS))
        takes_value = is_name and "=" not in option and (option[1] == "-" or option == "-c")
        first, *rest = option.split("=")[0].rstrip("+").lstrip("-").split(".")
        if not option.startswith("--") or (first in OPTIONS and not (first == "trainer" and rest)):
            continue
        name = ".".join([first, *rest[:1]])
        names = [*OPTIONS, *(f"trainer.{argument}" for argument in trainer_arguments())]
        if name not in names:
            error = ValueError(f"unrecognized arguments: --{name}")
            raise ValueError(explain_parse_error(error, names))


@cache
def trainer_arguments() -> list[str]:
    """Return the names of the arguments of Lightning's Trainer, read from its source file."""
    lightning = find_spec("lightning")
    assert lightning is not None
    source = Path(str(lightning.origin)).with_name("pytorch") / "trainer" / "trainer.py"
    nodes = ast.walk(ast.parse(check_regular(source).read_text()))
    functions = (node for node in nodes if isinstance(node, ast.FunctionDef))
    arguments = next(each.args for each in functions if each.name == "__init__")
    return [each.arg for each in (*arguments.args[1:], *arguments.kwonlyargs)]


def missing_model(request: Request) -> ValueError:
    """The error for a command line whose configs and checkpoint name no model."""
    files = [*request.configs, *([str(request.checkpoint)] if request.checkpoint else [])]
    if not files:
        return ValueError("needs --config FILE, such as --config configs/digits.yaml.")
    fix = "add a --config that does, such as configs/digits.yaml"
    return ValueError(f"{', '.join(files)} names no model; {fix}.")


def _refuse_incomplete(request: Request) -> None:
    """Raise an error if config, model or checkpoint is missing, or the folder has another run."""
    for config in request.configs:
        if not os.path.exists(config):
            if ":" in config:  # YAML instead of a file, for jsonargparse to read
                return
            raise FileNotFoundError(f"--config: there is no file {config}.")
    settings = [read_config(config) for config in request.configs]
    names = {name for each in settings for name, value in each.items() if value is not None}
    names |= {re.split(r"[.=]", option)[0].lstrip("-") for option in request.options}
    if request.command != "fit" and "ckpt_path" not in names:
        raise ValueError(
            "needs --ckpt_path FILE, such as --ckpt_path runs/digits/checkpoints/last.ckpt; "
            "--ckpt_path=null is the untrained model of --config."
        )
    if request.checkpoint is None and "model" not in names:
        raise missing_model(request)
    # `fitting` repeats this check with the whole config. Processes with a rank skip it here: one
    # that starts late would find files of its own run.
    ranks = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")
    is_alone = not any(rank in os.environ for rank in ranks)
    may_be_dry = "fast_dev_run" in str((request.options, settings))
    if request.command == "fit" and is_alone and not (may_be_dry or request.repeated):
        refuse_mixing(request)
