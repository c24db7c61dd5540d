"""`lit-diffusion fit | validate | test | predict`: help, and what can be judged at once.

torch and Lightning are imported after that, with `cli.fitting`, as they take seconds.
"""

import ast
import os
import re
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from lit_diffusion.cli.options import import_heavy
from lit_diffusion.cli.run_folder import Request, read_command_line, read_config, refuse_mixing
from lit_diffusion.config.messages import explain_parse_error
from lit_diffusion.files import check_regular

OPTIONS = (
    *("help", "config", "print_config", "seed_everything", "tuned_on", "init_weights", "ckpt_path"),
    *("model", "data", "trainer", "verbose", "return_predictions", "weights_only", "trust"),
    "float32_precision",
)
"""Names of the options, without what follows a dot."""

_COMMON = """options:
  --config FILE             YAML; repeat it to add others, as `callbacks+:` adds callbacks
  --model.NAME=VALUE        argument of the model; of a part: --model.network.NAME=VALUE
  --data.NAME=VALUE         argument of the data
  --trainer.NAME=VALUE      argument of Lightning's Trainer"""

_LAST = """
  --trust PACKAGE           let class paths import this package; may be repeated
  --print_config            print the resulting config, run nothing
  --model.help=CLASS        arguments of a class; so --data.help, --trainer.callbacks.help=EMA
  --help all                every option, with its type and default
  --debug                   report a mistake with its traceback"""

_OF_CHECKPOINT = f"""
The config is that of the checkpoint's run folder, unless --config gives another.

{_COMMON}
  --ckpt_path FILE          the checkpoint{_LAST}"""

HELP = {
    "fit": f"""Train a model, or resume a run.

    lit-diffusion fit --config configs/digits.yaml
    lit-diffusion fit --config configs/digits.yaml --config configs/arms/NAME.yaml
    lit-diffusion fit --config configs/digits.yaml --ckpt_path=last --trainer.max_steps=4000

A config names the model, data, trainer and callbacks; later configs and options win over earlier
ones, and all of them over a checkpoint. Everything goes to runs/<name of the first config>, or to
--trainer.default_root_dir.

{_COMMON}
      max_steps=N           optimizer steps; max_epochs=N, max_time=00:08:00:00 also end a run
      default_root_dir=DIR  the run folder
      devices=N             GPUs; num_nodes=N, strategy=ddp for several machines
      precision=bf16-mixed  16-mixed, bf16-mixed, 32-true, ...
      fast_dev_run=true     one batch of each kind, nothing written
  --trainer.callbacks.EMA.decays=[0.999]
                            argument of a callback of the config; ....EMA=null leaves it out
  --trainer.callbacks+=EMA  add a callback
  --ckpt_path PATH          resume from a checkpoint; last: that of the run folder;
                            last-or-none: start if there is none
  --init_weights PATH       start a new run from the weights of another: CKPT, CKPT:raw, CKPT:ema
  --float32_precision tf32  faster float32 on a GPU, by 10 bits instead of 23; ieee
  --seed_everything N       seed (default 0){_LAST}""",
    "validate": f"""Loss and callbacks' metrics of a checkpoint on the validation split.

    lit-diffusion validate --ckpt_path runs/digits/checkpoints/last.ckpt
{_OF_CHECKPOINT}""",
    "test": f"""Loss and callbacks' metrics of a checkpoint on the test split, if the data have one.

    lit-diffusion test --ckpt_path runs/digits/checkpoints/last.ckpt
{_OF_CHECKPOINT}""",
    "predict": f"""Run a checkpoint on the prediction split of its data.

    lit-diffusion predict --ckpt_path runs/digits/checkpoints/last.ckpt \\
        --trainer.callbacks+=PACKAGE.A_BASE_PREDICTION_WRITER --trust PACKAGE

To write images, use `lit-diffusion sample`.
{_OF_CHECKPOINT}""",
}
"""One screen for each command: what people set."""


def run(argv: Sequence[str]) -> None:
    """Run a command line whose first word is fit, validate, test or predict.

    Raises:
        ValueError: for a wrong option or config, a run folder that contains another run, or a
            checkpoint that does not fit.
    """
    command, *options = argv
    if {"-h", "--help", "--help=all"} & set(options):
        if options[-1] not in ("all", "--help=all"):
            needed = "--config" if command == "fit" else "--ckpt_path"
            print(f"usage: lit-diffusion {command} {needed} FILE [options]\n\n{HELP[command]}")
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
    """Raise ValueError for an option that does not exist, or a word that belongs to no option."""
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
    """Names of the arguments of Lightning's Trainer, from its source, as its import is slow."""
    package = find_spec("lightning")
    assert package is not None
    assert package.submodule_search_locations is not None
    source = Path(package.submodule_search_locations[0], "pytorch", "trainer", "trainer.py")
    nodes = ast.walk(ast.parse(check_regular(source).read_text()))
    functions = (node for node in nodes if isinstance(node, ast.FunctionDef))
    arguments = next(each.args for each in functions if each.name == "__init__")
    return [each.arg for each in (*arguments.args[1:], *arguments.kwonlyargs)]


def missing_model(request: Request) -> ValueError:
    """The error for a command line whose configs and checkpoint name no model."""
    files = [*request.configs, *([str(request.checkpoint)] if request.checkpoint else [])]
    if not files:
        return ValueError("needs --config FILE, such as --config configs/digits.yaml.")
    fix = "name another --config that does, such as configs/digits.yaml"
    return ValueError(f"{', '.join(files)} names no model; {fix}.")


def _refuse_incomplete(request: Request) -> None:
    """Raise an error for a missing config, model or checkpoint, or the folder of another run."""
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
    # `fitting` does this again with the whole config. Other processes of a run may start late.
    ranks = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")
    is_alone = not any(rank in os.environ for rank in ranks)
    may_be_dry = "fast_dev_run" in str((request.options, settings))
    if request.command == "fit" and is_alone and not (may_be_dry or request.repeated):
        refuse_mixing(request)
