"""Loading modules with the weights of a checkpoint."""

import json
import re
from argparse import ArgumentError
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jsonargparse import ArgumentParser, register_unresolvable_import_paths
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lit_diffusion.checkpoints.averages import select_weights
from lit_diffusion.checkpoints.reading import (
    Checkpoint,
    first_line,
    is_distributed_checkpoint,
    limit_parameters,
    number_kind,
    read_checkpoint,
    strip_compile_prefix,
)
from lit_diffusion.config.messages import explain_parse_error
from lit_diffusion.config.trust import allow_class_paths


class LoadedModule(NamedTuple):
    """A module in eval mode, and the checkpoint that it was loaded from."""

    module: LightningModule
    path: Path
    step: int  # optimizer steps
    weights: str  # that the module has: "raw", "ema_<decay>" or "power_<width>"
    checkpoint: Checkpoint


def load(
    path: str | Path,
    weights: str = "ema",
    *,
    module: LightningModule | None = None,
    trust: Iterable[str] = (),
) -> Any:
    """Load a module with the weights of a checkpoint, in eval mode on the CPU.

    Args:
        path: of the file, or of a run folder: then its checkpoints/last.ckpt.
        weights: "ema" for the average (the first of several), "ema_<decay>" for a certain one,
            "power_<width>" for one of PowerEMA or any that its snapshots give, "raw" for the
            weights as trained.
        module: receives the weights in place of one built from the class paths in the file; for
            modules that were not made from YAML.
        trust: packages besides `config.trust.TRUSTED` that those class paths may name.

    Returns:
        The module; a DiffusionModule is ready for `generate`.

    Raises:
        FileNotFoundError: if there is no file.
        ValueError: if the file is damaged, of another architecture, holds code, or not those
            weights.

    Example:
        >>> images = load("runs/digits", weights="ema").generate(range(64))  # doctest: +SKIP
    """
    return load_module(path, weights, module=module, trust=trust).module


def load_module(
    path: str | Path,
    weights: str = "ema",
    *,
    module: LightningModule | None = None,
    trust: Iterable[str] = (),
) -> LoadedModule:
    """Load a module together with its checkpoint; the arguments are those of `load`."""
    path = checkpoint_file(path)
    checkpoint = read_checkpoint(path)
    if module is None:
        with limit_parameters(checkpoint["state_dict"]):
            module = build_module(checkpoint, path, trust)
    module.on_load_checkpoint(checkpoint)  # as Lightning does; may refuse it
    step = int(checkpoint.get("global_step", 0))
    name, averages = select_weights(checkpoint, weights, path)
    # A shared parameter has one average, under its first name, and several names in a state_dict.
    parameters = module.state_dict(keep_vars=True)
    by_identity = {id(parameters[n]): value for n, value in averages.items() if n in parameters}
    shared = {n: by_identity[id(p)] for n, p in parameters.items() if id(p) in by_identity}
    state = strip_compile_prefix(checkpoint["state_dict"])
    load_state(module, {**state, **averages, **shared}, path)
    rank_zero_info(f"Loaded {name} weights of step {step} from {path}.")
    return LoadedModule(module.eval(), path, step, name, checkpoint)


def split_weights_suffix(source: str) -> tuple[str, str | None]:
    """Split "CKPT:ema_0.99" (or ":ema", ":raw", ":power_0.05") into path and name of weights.

    Example:
        >>> split_weights_suffix("runs/digits:ema_0.99"), split_weights_suffix("runs/digits")
        (('runs/digits', 'ema_0.99'), ('runs/digits', None))
    """
    match = re.fullmatch(r"(.+):(raw|(?:ema|power)(?:_[\w.+-]+)?)", source)
    return (match[1], match[2]) if match else (source, None)


def checkpoint_file(path: str | Path) -> Path:
    """`path` itself if it is a file, checkpoints/last.ckpt of a run folder."""
    path = Path(path)
    is_run_folder = path.is_dir() and not is_distributed_checkpoint(path)
    return path / "checkpoints" / "last.ckpt" if is_run_folder else path


def build_module(
    checkpoint: Checkpoint, path: str | Path, trust: Iterable[str] = ()
) -> LightningModule:
    """Build the module that the class paths of the checkpoint at `path` describe, with new weights.

    Raises:
        ValueError: if the checkpoint has no class paths, or they cannot be built.
    """
    spec = model_spec(checkpoint)
    if spec is None:
        raise ValueError(
            f"{path} does not say how its module was built, as it was made in Python; "
            "build it and call load(path, module=...)."
        )
    module: LightningModule = instantiate(spec, LightningModule, trust, path)
    return module


def instantiate(
    spec: dict[str, Any],
    base: type,
    trust: Iterable[str],
    path: str | Path,
    options: Sequence[str] = (),
) -> Any:
    """Build the object that a class path and its arguments in a file describe.

    Args:
        spec: "class_path" and "init_args".
        base: class that the object must be an instance of.
        trust: packages besides `config.trust.TRUSTED` that class paths may name.
        path: of the file, for messages.
        options: arguments such as --data.init_args.NAME=VALUE, which override the file.

    Raises:
        ValueError: if the spec is wrong, or the class raises an error.
    """
    register_unresolvable_import_paths(torch)
    parser = ArgumentParser(exit_on_error=False)
    key = options[0].lstrip("-").split(".")[0] if options else "object"
    with allow_class_paths(trust):
        parser.add_subclass_arguments(base, key, fail_untyped=False, required=True)
        try:
            if options:
                config = parser.parse_args([f"--{key}={json.dumps(spec)}", *options])
            else:
                config = parser.parse_object({key: spec})
            return parser.instantiate(config)[key]
        except (ArgumentError, ValueError) as error:
            raise ValueError(f"{path}: {explain_parse_error(error)}") from error
        except Exception as error:  # a constructor may raise anything
            cause = f"{type(error).__name__}: {first_line(error)}"
            raise ValueError(f"{path}: {spec['class_path']} cannot be built: {cause}.") from error


def model_spec(checkpoint: Checkpoint, key: str = "hyper_parameters") -> dict[str, Any] | None:
    """Get "class_path" and "init_args" of the module in a checkpoint, or None.

    With the key "datamodule_hyper_parameters" they are those of the data module.
    """
    init_args = dict(checkpoint.get(key) or {})
    class_path = init_args.pop("_class_path", None)
    init_args.pop("_instantiator", None)
    return None if class_path is None else {"class_path": class_path, "init_args": init_args}


def read_class_names(checkpoint: Checkpoint) -> list[str]:
    """Names of the labels 0, 1, ... that a model was trained on; empty if not known."""
    spec = model_spec(checkpoint, "datamodule_hyper_parameters") or {"class_path": ""}
    state = checkpoint.get(spec["class_path"].rpartition(".")[2])
    names = state.get("class_names") if isinstance(state, dict) else None
    return [str(name) for name in names] if isinstance(names, list) else []


def load_state(module: LightningModule, state: Mapping[str, Tensor], path: str | Path) -> None:
    """Copy the weights `state` of the file `path` into `module`.

    Raises:
        ValueError: if they do not fit; names the first three differences.
    """
    refuse_other_dtypes(module, state, path)
    try:
        module.load_state_dict(state)
    except RuntimeError as error:
        raise ValueError(
            f"{path} is of another architecture: {list_mismatches(error)} "
            "Use the config that it was trained with."
        ) from error


def list_mismatches(error: RuntimeError) -> str:
    """The first three differences that `load_state_dict` names, each on a line, as one line."""
    return " ".join(line.strip()[:200] for line in str(error).split("\n")[1:4])


def refuse_other_dtypes(
    module: LightningModule, state: Mapping[str, Any], path: str | Path | None
) -> None:
    """Refuse weights whose kind of numbers torch would silently cast to that of `module`."""
    for name, expected in module.state_dict().items():
        value = state.get(name)
        both = isinstance(value, Tensor) and isinstance(expected, Tensor)
        if both and number_kind(value) != number_kind(expected):
            raise ValueError(
                f"{path} is of another architecture: {name} is {value.dtype} in the file, "
                f"{expected.dtype} in the module. Use the config that it was trained with."
            )
