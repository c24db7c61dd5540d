"""Modules with the weights of a checkpoint."""

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

from lit_diffusion.checkpoints.averages import chosen_weights, known_weights, power_averages
from lit_diffusion.checkpoints.content import kind_of, no_larger_than, uncompiled
from lit_diffusion.checkpoints.reading import Checkpoint, first_line, holds_parts, read_checkpoint
from lit_diffusion.checkpoints.snapshots import FOLDER, reconstructed
from lit_diffusion.config.messages import innermost
from lit_diffusion.config.trust import trusting


class Loaded(NamedTuple):
    """A module in eval mode, and the file it is from: path, optimizer steps, weights and content.

    `weights` are those that the module holds: "raw", "ema_<decay>" or "power_<width>".
    """

    module: LightningModule
    path: Path
    step: int
    weights: str
    checkpoint: Checkpoint


def load(
    path: str | Path,
    weights: str = "ema",
    *,
    module: LightningModule | None = None,
    trust: Iterable[str] = (),
) -> Any:
    """A module with the weights of a checkpoint, in eval mode on the CPU, ready for `generate`.

    Args:
        path: file, or run folder: then its checkpoints/last.ckpt.
        weights: "ema" for the average (of several, the first), "ema_<decay>" for a certain one,
            "power_<width>" for one of PowerEMA or any that its snapshots give, "raw" for the
            weights as trained.
        module: filled in place of one built from the class paths in the file; for modules that were
            not made from YAML.
        trust: packages besides `settings.trust.TRUSTED` that those class paths may name.

    Raises:
        FileNotFoundError: where there is no file.
        ValueError: where the file is damaged, of another architecture, holds code, or not those
            weights.

    Example:
        >>> images = load("runs/digits", weights="ema").generate(range(64))  # doctest: +SKIP
    """
    return load_with_record(path, weights, module=module, trust=trust).module


def load_with_record(
    path: str | Path,
    weights: str = "ema",
    *,
    module: LightningModule | None = None,
    trust: Iterable[str] = (),
) -> Loaded:
    """As `load`, with what was loaded."""
    path = checkpoint_file(path)
    checkpoint = read_checkpoint(path)
    if module is None:
        with no_larger_than(checkpoint["state_dict"]):
            module = build(checkpoint, path, trust)
    module.on_load_checkpoint(checkpoint)  # as Lightning does; may refuse it
    step = int(checkpoint.get("global_step", 0))
    name, averages = named_weights(checkpoint, weights, path)
    averages = dict(averages) | _aliases(module, averages)
    load_state(module, {**uncompiled(checkpoint["state_dict"]), **averages}, path)
    rank_zero_info(f"Loaded {name} weights of step {step} from {path}.")
    return Loaded(module.eval(), path, step, name, checkpoint)


def path_and_weights(source: str) -> tuple[str, str | None]:
    """What "CKPT:ema_0.99", ":ema", ":raw" or ":power_0.05" names; weights None of "CKPT" alone.

    Example:
        >>> path_and_weights("runs/digits:ema_0.99"), path_and_weights("runs/digits")
        (('runs/digits', 'ema_0.99'), ('runs/digits', None))
    """
    match = re.fullmatch(r"(.+):(raw|(?:ema|power)(?:_[\w.+-]+)?)", source)
    return (match[1], match[2]) if match else (source, None)


def named_weights(
    checkpoint: Checkpoint, weights: str, path: Path
) -> tuple[str, dict[str, Tensor]]:
    """The averages of this name in the checkpoint, or those that its run's snapshots make."""
    kind, _, number = weights.partition("_")
    steps, averages, taken = power_averages(checkpoint, path) if kind == "power" else (0, {}, {})
    if averages:
        weights = f"power_{_width(weights, number):g}"
        if weights not in known_weights(checkpoint, path):
            folder = path.parent.parent / FOLDER
            return weights, reconstructed(folder, float(number), steps, averages, taken)
    return chosen_weights(checkpoint, weights, path)


def _width(weights: str, number: str) -> float:
    try:
        return float(number)
    except ValueError:
        raise ValueError(f"weights must be power_<width>, got {weights!r}.") from None


def _aliases(module: LightningModule, averages: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The averages by all names of a tensor that has several; they are saved by the first."""
    own = module.state_dict(keep_vars=True)
    values = {id(own[name]): value for name, value in averages.items() if name in own}
    return {name: values[id(value)] for name, value in own.items() if id(value) in values}


def checkpoint_file(path: str | Path) -> Path:
    """`path` itself, or checkpoints/last.ckpt of a run folder."""
    path = Path(path)
    run_folder = path.is_dir() and not holds_parts(path)
    return path / "checkpoints" / "last.ckpt" if run_folder else path


def build(checkpoint: Checkpoint, path: str | Path, trust: Iterable[str] = ()) -> LightningModule:
    """The module that a checkpoint's class paths describe, freshly initialised."""
    spec = model_spec(checkpoint)
    if spec is None:
        raise ValueError(
            f"{path} does not say how its module was built, as it was made in Python; "
            "build it and call load(path, module=...)."
        )
    built: LightningModule = instantiate(spec, LightningModule, trust, path)
    return built


def instantiate(
    spec: dict[str, Any],
    base: type,
    trust: Iterable[str],
    path: str | Path,
    options: Sequence[str] = (),
) -> Any:
    """The object of type `base` that the class path and arguments in the file `path` describe.

    `options` are arguments of a command line, as --data.init_args.NAME=VALUE, that win over these.
    """
    register_unresolvable_import_paths(torch)
    parser = ArgumentParser(exit_on_error=False)
    key = options[0].lstrip("-").split(".")[0] if options else "object"
    with trusting(trust):
        parser.add_subclass_arguments(base, key, fail_untyped=False, required=True)
        try:
            if options:
                given = parser.parse_args([f"--{key}={json.dumps(spec)}", *options])
            else:
                given = parser.parse_object({key: spec})
            return parser.instantiate(given)[key]
        except (ArgumentError, ValueError) as error:
            raise ValueError(f"{path}: {innermost(error)}") from error
        except Exception as error:  # what a constructor says of arguments that it cannot take
            cause = f"{type(error).__name__}: {first_line(error)}"
            raise ValueError(f"{path}: {spec['class_path']} cannot be built: {cause}.") from error


def model_spec(checkpoint: Checkpoint, key: str = "hyper_parameters") -> dict[str, Any] | None:
    """Class path and arguments of the module (by another key, of the data), or None."""
    saved = dict(checkpoint.get(key) or {})
    class_path = saved.pop("_class_path", None)
    saved.pop("_instantiator", None)
    return None if class_path is None else {"class_path": class_path, "init_args": saved}


def class_names_in(checkpoint: Checkpoint) -> list[str]:
    """Names of the labels 0, 1, ... of the data that a model was trained on; [] if not known."""
    spec = model_spec(checkpoint, "datamodule_hyper_parameters") or {"class_path": ""}
    state = checkpoint.get(spec["class_path"].rpartition(".")[2])
    names = state.get("class_names") if isinstance(state, dict) else None
    return [str(name) for name in names] if isinstance(names, list) else []


def load_state(module: LightningModule, state: Mapping[str, Tensor], path: str | Path) -> None:
    """Copy the weights `state` of the file `path` into `module`, or name the first that differ."""
    if differences := misfits(module, state):
        more = f" and {len(differences) - 3} more" if len(differences) > 3 else ""
        raise ValueError(
            f"{path} is of another architecture: {'; '.join(differences[:3])}{more}. "
            "Use the config that it was trained with."
        )
    module.load_state_dict(state)


def misfits(module: LightningModule, state: Mapping[str, Tensor]) -> list[str]:
    """How `state` differs from what `module` expects, one phrase a tensor."""
    own = module.state_dict()
    missing = [f"the file lacks {name}" for name in own if name not in state]
    shapes = [
        f"{name} is {tuple(state[name].shape)} in the file, {tuple(value.shape)} in the module"
        for name, value in own.items()
        if name in state and getattr(value, "shape", None) != getattr(state[name], "shape", None)
    ]
    unknown = [f"the module lacks {name}" for name in state if name not in own]
    return shapes + missing + unknown + wrong_types(module, state)


def wrong_types(module: LightningModule, state: Mapping[str, Any]) -> list[str]:
    """Weights in `state` that torch would cast, and lose, into those of `module`."""
    return [
        f"{name} is {saved.dtype} in the file, {expected.dtype} in the module"
        for name, expected in module.state_dict().items()
        if isinstance(saved := state.get(name), Tensor) and isinstance(expected, Tensor)
        if kind_of(saved) != kind_of(expected)
    ]
