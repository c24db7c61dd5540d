"""What a checkpoint must be before anything in it is used.

`torch.load(weights_only=True)` runs no code, but it ignores the checksums that `torch.save` wrote,
believes any size, and takes any structure.
"""

import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

_BY_NAME = ("state_dict", "hyper_parameters", "datamodule_hyper_parameters", "callbacks", "loops")
_IN_ORDER = ("optimizer_states", "lr_schedulers")
_COUNTED = ("global_step", "epoch")
_RESTORED = ("callbacks", "epoch", "global_step", "loops", "lr_schedulers", "optimizer_states")


def check_archive(path: Path) -> None:
    """Refuse a file of `torch.save` of which a bit has changed, or that would unpack to more.

    Reads the whole file, about as fast as a disk does. Files of other formats are let through.

    Raises:
        ValueError: says what is wrong, without the file's name; so does zipfile.BadZipFile.
    """
    if not zipfile.is_zipfile(path):
        return
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        inside = sum(member.file_size for member in members)
        stored = all(member.compress_type == zipfile.ZIP_STORED for member in members)
        if not stored or inside > path.stat().st_size:
            raise ValueError(f"it would unpack to {inside:,} bytes: torch.save compresses nothing")
        if (broken := archive.testzip()) is not None:
            raise ValueError(
                f"the checksum of {broken} is wrong, or was left out by "
                "torch.serialization.set_crc32_options(False); then save it again with True"
            )


def check_content(checkpoint: Any) -> None:
    """Refuse what is no checkpoint, or of which a part is something else."""
    if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
        raise ValueError("it has no 'state_dict'")
    for name in (*_BY_NAME, *_IN_ORDER, *_COUNTED):
        if name in checkpoint and not _is_part(name, checkpoint[name]):
            raise ValueError(f"its '{name}' is {_described(checkpoint[name])}, as no run saves it")
    for name in ("hyper_parameters", "datamodule_hyper_parameters"):
        if "_class_path" in checkpoint.get(name, {}) and not is_plain(checkpoint[name]):
            raise ValueError(f"its '{name}' must be plain builtins, and hold others")
    _check_progress(checkpoint.get("loops", {}))
    for name, value in checkpoint["state_dict"].items():
        if not (is_dense(value) or name.endswith("_extra_state")):
            raise ValueError(f"its weight {name} is no dense tensor, but {_described(value)}")


def check_resumable(checkpoint: Mapping[str, Any], path: Path) -> None:
    """Refuse to go on from a file that holds weights only: parts of a run would begin anew."""
    if lacking := [name for name in _RESTORED if name not in checkpoint]:
        raise ValueError(
            f"{path} holds no {', '.join(lacking)}, so no run can be resumed from it; resume from "
            "a checkpoint that was saved in training, with more than the weights."
        )


def is_plain(value: Any) -> bool:
    """Whether a value is None, bool, int, float, str, or dicts, lists and tuples of such.

    Example:
        >>> is_plain({"steps": [1, 2.5, None]}), is_plain({"steps": torch.zeros(2)})
        (True, False)
    """
    if isinstance(value, dict):
        return type(value) is dict and all(is_plain(v) for pair in value.items() for v in pair)
    if isinstance(value, list | tuple):
        return type(value) in (list, tuple) and all(is_plain(v) for v in value)
    return value is None or type(value) in (bool, int, float, str)


def is_count(value: Any) -> bool:
    """Whether a value is an integer >= 0 that fits into 64 bits.

    Example:
        >>> is_count(3), is_count(True), is_count(-1), is_count(2**63)
        (True, False, False, False)
    """
    return type(value) is int and 0 <= value < 2**63


def is_dense(value: Any) -> bool:
    """Whether a value is a tensor whose numbers can be copied into a parameter.

    Example:
        >>> is_dense(torch.zeros(2)), is_dense(torch.zeros(2).to_sparse()), is_dense(0.5)
        (True, False, False)
    """
    return (
        isinstance(value, Tensor)
        and value.layout is torch.strided
        and not (value.is_nested or value.is_quantized or value.is_meta)
    )


def kind_of(tensor: Tensor) -> tuple[bool, bool, bool]:
    """Of numbers: torch casts those of one kind into another, and loses some."""
    return tensor.is_floating_point(), tensor.is_complex(), tensor.dtype is torch.bool


def uncompiled(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`state` by the names that its module has without torch.compile."""
    return {name.replace("_orig_mod.", ""): value for name, value in state.items()}


@contextmanager
def no_larger_than(state: Mapping[str, Any]) -> Iterator[None]:
    """Context in which no module is built with far more parameters than a file has weights for.

    A file says how its network is built, and might ask for more than the machine has. Parameters
    are counted before they are filled.

    Raises:
        ValueError: by the parameter that is too much for `state`, the weights in the file.
    """
    tensors = [value for value in state.values() if isinstance(value, Tensor)]
    # Parametrizations and replaced layers register more than once.
    most_tensors = 1000 + 4 * len(tensors)
    most_numbers = 10**6 + 4 * sum(value.numel() for value in tensors)
    numbers = count = 0

    def look(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        nonlocal count, numbers
        count, numbers = count + 1, numbers + (0 if parameter is None else parameter.numel())
        if count > most_tensors or numbers > most_numbers:
            raise ValueError(
                f"the network that it describes has far more parameters than its {len(tensors)} "
                "weights."
            )

    handle = register_module_parameter_registration_hook(look)
    try:
        yield
    finally:
        handle.remove()


def _is_part(name: str, part: Any) -> bool:
    if name in _COUNTED:
        return is_count(part)
    holder, held = (list, dict) if name in _IN_ORDER else (dict, str)
    return isinstance(part, holder) and all(isinstance(item, held) for item in part)


def _check_progress(loops: dict[Any, Any], counts: bool = False) -> None:
    """Refuse progress of the Trainer's loops that is not counted."""
    for name, value in loops.items():
        inside = counts or str(name).endswith("progress")
        if isinstance(value, dict):
            _check_progress(value, inside)
        elif inside and not (is_count(value) or isinstance(value, bool)):
            raise ValueError(f"in its 'loops', {name} must be a count, and is {value!r:.50}")


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of {value.dtype}, {value.layout}, on {value.device}"
    return f"{type(value).__name__} {value!r:.50}"
