"""`fit --init_weights`: a training that begins with the weights of another."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor

from lit_diffusion.checkpoints.averages import find_averages
from lit_diffusion.checkpoints.loading import (
    checkpoint_file,
    model_spec,
    select_weights,
    split_weights_suffix,
)
from lit_diffusion.checkpoints.reading import number_kind, read_checkpoint, strip_compile_prefix
from lit_diffusion.cli.changed_settings import differences
from lit_diffusion.interchange.exported import NETWORKS, is_exported, read_exported

_NAMES = 5  # of weights that are said, of each sort
_MEANING = ("network", "process", "parameterization")
"""Settings that say what weights of the same names and shapes mean, as `split_heads_first` does."""


@dataclass(frozen=True)
class Outcome:
    """What became of the weights of a file, by name.

    Attributes:
        kept: in the module now.
        reshaped: likewise, with axes of length 1 added or left out.
        left: of another shape than the module's, which begin as they are initialised.
        dropped: in the file alone.
        new: in the module alone.
    """

    kept: Sequence[str]
    reshaped: Sequence[str]
    left: Sequence[str]
    dropped: Sequence[str]
    new: Sequence[str]

    def __str__(self) -> str:
        sorts = {
            "kept": (self.kept, False),
            "reshaped": (self.reshaped, True),
            "of another shape, left as they were": (self.left, True),
            "dropped, as the model has none such": (self.dropped, True),
            "new, as the file has none such": (self.new, True),
        }
        return "; ".join(
            f"{len(names)} {sort}{_listed(names) if said else ''}"
            for sort, (names, said) in sorts.items()
            if names
        )


def read_init(source: str) -> tuple[str, dict[str, Tensor], dict[str, Any]]:
    """What --init_weights names, in words; its weights by a module's names; and its settings.

    Args:
        source: checkpoint, run folder or exported network; with ":raw", ":ema", ":ema_<decay>" or
            ":power_<width>" a choice of a checkpoint's weights, whose default is the average if
            there is one.
    """
    named_path, weights = split_weights_suffix(source)
    path = Path(named_path)
    if is_exported(path):
        record, state = read_exported(path)
        named = record.get("weights", "raw")
        if weights not in (None, named, named.split("_")[0]):
            raise ValueError(f"--init_weights {source}: {path} holds {named} weights alone.")
        return f"{named} weights of {path}", {f"network.{n}": v for n, v in state.items()}, record
    path = checkpoint_file(path)
    checkpoint = read_checkpoint(path)
    weights = weights or ("ema" if find_averages(checkpoint, path) else "raw")
    name, averages = select_weights(checkpoint, weights, path)
    settings = (model_spec(checkpoint) or {"init_args": {}})["init_args"]
    weights_of = {**strip_compile_prefix(checkpoint["state_dict"]), **averages}
    return f"{name} weights of {path}", weights_of, settings


def start_from(module: LightningModule, source: str, used: Mapping[str, Any]) -> str:
    """Copy what fits of --init_weights into a module; what became of it, in a line.

    Args:
        module: begins with the weights.
        source: as of `read_init`.
        used: arguments of the module, as a config has them.

    Raises:
        FileNotFoundError: where there is nothing of that name.
        ValueError: where nothing of it fits.
    """
    said, state, settings = read_init(source)
    outcome, fitting = match_weights(module.state_dict(), state)
    if not fitting:
        theirs, ours = (", ".join(list(names)[:3]) for names in (state, module.state_dict()))
        raise ValueError(
            f"--init_weights {source}: none of its weights ({theirs}, ...) fits the model, whose "
            f"are {ours}, ...; name a file of this architecture."
        )
    module.load_state_dict(fitting, strict=False)
    changed = differences(_meaning(settings), _meaning(used))
    others = [f"{name} {old} for {new}" for name, (old, new) in changed.items()]
    told = f" They were trained with other settings{_listed(others)}." if others else ""
    return f"Starting from the {said}: {outcome}.{told}"


def _meaning(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What weights were made for, with the defaults of a network that `convert import` found."""
    found = {name: settings[name] for name in _MEANING if name in settings}
    kind = NETWORKS.get(str((found.get("network") or {}).get("class_path")))
    if kind is not None:
        defaults = {p.name: p.default for p in inspect.signature(kind).parameters.values()}
        given = found["network"].get("init_args", {})
        found["network"] = found["network"] | {"init_args": defaults | given}
    return found


def match_weights(
    own: dict[str, Tensor], state: dict[str, Tensor]
) -> tuple[Outcome, dict[str, Tensor]]:
    """Sort the weights `state` for a module whose are `own`; those that fit, in its shapes."""
    both = [
        name for name in own if name in state and number_kind(own[name]) == number_kind(state[name])
    ]
    kept = [name for name in both if own[name].shape == state[name].shape]
    alike = [
        n for n in both if n not in kept and own[n].squeeze().shape == state[n].squeeze().shape
    ]
    outcome = Outcome(
        kept,
        alike,
        left=[
            f"{n} {_shape(state[n])} for {_shape(own[n])}" for n in both if n not in kept + alike
        ],
        dropped=[name for name in state if name not in both],
        new=[name for name in own if name not in both],
    )
    return outcome, {name: state[name].reshape(own[name].shape) for name in kept + alike}


def _shape(tensor: Tensor) -> str:
    return str(tuple(tensor.shape))


def _listed(names: Sequence[str]) -> str:
    more = f", and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
    return f" ({', '.join(names[:_NAMES])}{more})"
