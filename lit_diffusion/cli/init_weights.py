"""`fit --init_weights`: start training from the weights of another run."""

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor

from lit_diffusion.callbacks.trainer_state import strip_compile_prefix
from lit_diffusion.checkpoints.averages import average_names, select_weights
from lit_diffusion.checkpoints.loading import checkpoint_file, model_spec, split_weights_suffix
from lit_diffusion.checkpoints.reading import number_kind, read_checkpoint
from lit_diffusion.cli.changed_settings import differences
from lit_diffusion.interchange.exported import NETWORKS, is_exported, read_exported


def start_from(module: LightningModule, source: str, used: Mapping[str, Any]) -> str:
    """Initialize a module with those weights of `source` that fit it. Return a report for the user.

    Args:
        module: module to initialize.
        source: checkpoint, run folder, exported network or packaged model; the suffix ":raw",
            ":ema", ":ema_<decay>" or ":power_<width>" selects weights of a checkpoint.
        used: arguments of the module in the config. Differences from the source are reported.

    Raises:
        ValueError: if no weight of the source fits, or if a weight that fits is not finite.
    """
    description, state, settings = read_init(source)
    # The checksum of a teacher's file is no weight, and the new run may have another teacher. The
    # extra state of a module may be no tensor.
    state, target = (
        {n: v for n, v in every.items() if isinstance(v, Tensor) and not n.endswith(".sha256")}
        for every in (state, module.state_dict())
    )
    # A shared parameter has several names in a state_dict, but only one average, under the first.
    first_names = {id(parameter): name for name, parameter in module.named_parameters()}
    for name, value in module.state_dict(keep_vars=True).items():
        if name in state and (first := first_names.get(id(value))) in state:
            state[name] = state[first]
    fitting, outcome = match_weights(target, state)
    if not fitting:
        theirs, ours = (", ".join(list(names)[:3]) for names in (state, target))
        raise ValueError(
            f"--init_weights {source}: none of its weights ({theirs}, ...) fits the model, which "
            f"has {ours}, ...; name a file of this architecture."
        )
    for name, _ in module.named_parameters():
        if name in fitting and not fitting[name].isfinite().all():
            raise ValueError(
                f"--init_weights {source}: weights must be finite, but {name} is not, because its "
                "training diverged; name an earlier file."
            )
    module.load_state_dict(fitting, strict=False)
    counts = [
        f"{len(names)} {what}{_list_names(names) if what != 'copied' else ''}"
        for what, names in outcome.items()
        if names
    ]
    text = f"Starting from the {description}: {'; '.join(counts)}."
    if changed := differences(_relevant_settings(settings), _relevant_settings(used)):
        others = [f"{name} {old} for {new}" for name, (old, new) in changed.items()]
        text += f" They were trained with other settings{_list_names(others)}."
    return text


def read_init(source: str) -> tuple[str, dict[str, Tensor], dict[str, Any]]:
    """Read the `source` of `start_from`; return a description, weights by name, and settings.

    Without a suffix, reads the EMA weights if there are any, else the raw weights.
    """
    name, weights = split_weights_suffix(source)
    path = Path(name) if is_exported(name) else checkpoint_file(name)
    if is_exported(path):
        record, state = read_exported(path)
        exported = record.get("weights", "raw")
        if weights not in (None, exported, exported.split("_")[0]):
            fix = f"leave out :{weights}"
            raise ValueError(f"--init_weights {source}: {path} has only {exported} weights; {fix}.")
        state = {f"network.{name}": value for name, value in state.items()}
        return f"{exported} weights of {path}", state, record
    checkpoint = read_checkpoint(path)
    weights = weights or ("ema" if average_names(checkpoint, path) else "raw")
    weights, averages = select_weights(checkpoint, weights, path)
    settings = (model_spec(checkpoint) or {"init_args": {}})["init_args"]
    state = {**strip_compile_prefix(checkpoint["state_dict"]), **averages}
    return f"{weights} weights of {path}", state, settings


def _relevant_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that change the function of a network with the same weights.

    Adds the defaults of network arguments, which `convert import` omits.
    """
    names = ("network", "process", "parameterization")
    meaning = {name: settings[name] for name in names if name in settings}
    network = meaning.get("network")
    if not isinstance(network, dict):  # the network of a user's module may be a name
        return meaning
    if kind := NETWORKS.get(str(network.get("class_path"))):
        defaults = {p.name: p.default for p in inspect.signature(kind).parameters.values()}
        init_args = defaults | network.get("init_args", {})
        meaning["network"] = network | {"init_args": init_args}
    return meaning


def match_weights(
    target: dict[str, Tensor], state: dict[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, list[str]]]:
    """Match the weights `state` of a file with the weights `target` of a module.

    Shapes may differ in axes of length 1.

    Returns:
        The weights that fit, reshaped to the module's shapes, and a dictionary of lists that name
        all weights. Each key, such as "copied", says what happens to the weights in its list.
    """
    shared = [n for n in target if n in state and number_kind(target[n]) == number_kind(state[n])]
    equal = [n for n in shared if target[n].shape == state[n].shape]
    others = [n for n in shared if target[n].shape != state[n].shape]
    reshaped = [n for n in others if target[n].squeeze().shape == state[n].squeeze().shape]
    fitting = {n: state[n].reshape(target[n].shape) for n in equal + reshaped}
    return fitting, {
        "copied": equal,
        "reshaped": reshaped,
        "of a different shape, left as they were": [
            f"{n} {tuple(state[n].shape)} for {tuple(target[n].shape)}"
            for n in others
            if n not in reshaped
        ],
        "dropped because the model does not have them": [n for n in state if n not in shared],
        "new because the file does not have them": [n for n in target if n not in shared],
    }


def _list_names(names: Sequence[str], most: int = 5) -> str:
    more = f", and {len(names) - most} more" if len(names) > most else ""
    return f" ({', '.join(names[:most])}{more})"
