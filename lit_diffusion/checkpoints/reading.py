"""Read and validate checkpoints without running any code in them.

A checkpoint has only tensors and plain builtins, so `torch.load(weights_only=True)` can read it.
The raw weights are in `state_dict`, and the averages are in the state of the EMA callback. The
class paths and arguments of the module are in `hyper_parameters`. `torch.load` runs no code, but it
ignores the checksums that `torch.save` has written, and accepts any size and any structure. This
file checks checksums, sizes and structure.
"""

import pickle
import re
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from lit_diffusion.callbacks.trainer_state import find_dtensor
from lit_diffusion.config.renamed import rename_checkpoint
from lit_diffusion.files import check_archive, check_regular, is_checkpoint_folder

Checkpoint = dict[str, Any]

_HYPER_PARAMETERS = ("hyper_parameters", "datamodule_hyper_parameters")
# entry: its type, and the type of its items or keys
_ENTRY_TYPES: dict[str, tuple[type[dict[Any, Any]] | type[list[Any]], type]] = {
    **dict.fromkeys(("state_dict", "callbacks", "loops", *_HYPER_PARAMETERS), (dict, str)),
    **dict.fromkeys(("optimizer_states", "lr_schedulers"), (list, dict)),
}
_RUN_ENTRIES = ("callbacks", "epoch", "global_step", "loops", "lr_schedulers", "optimizer_states")


def read_checkpoint(
    path: str | Path, *, shapes_only: bool = False, parameters: Mapping[str, Tensor] | None = None
) -> Checkpoint:
    """Read a local checkpoint to the CPU without running any code in it.

    Renamed classes and arguments get their current names.

    Args:
        path: path of the file, or of a folder to which ranks have written their parts.
        shapes_only: whether only the shapes of tensors are needed. If True, tensors of a file are
            memory-mapped if its format allows it, and tensors of a folder are zeros that take no
            memory.
        parameters: split tensors by name, for a folder. Weights, averages and optimizer state with
            these names are read with the same split, and the call is collective. None reads whole
            tensors.

    Raises:
        FileNotFoundError: if there is no file.
        ValueError: if the file is truncated, is not a checkpoint, contains pickled code, or
            contains only the part of one rank. Also if `path` is a folder without a checkpoint, or
            if a save replaces the folder during the read. The message has the path and the reason.

    Example:
        >>> from tempfile import mkdtemp
        >>> path = Path(mkdtemp()) / "tiny.ckpt"
        >>> torch.save({"state_dict": {"weight": torch.ones(2)}, "global_step": 5}, path)
        >>> read_checkpoint(path)["global_step"]
        5
    """
    path = Path(path)
    is_folder = is_checkpoint_folder(path)
    if (path / "network.json").is_file():
        raise ValueError(
            f"{path} is an exported network, which holds one set of weights and no state of a run; "
            "name a checkpoint here."
        )
    if path.is_dir() and not is_folder:
        raise ValueError(f"{path} is a folder; name the checkpoint file in it.")
    if not path.exists():
        raise FileNotFoundError(f"There is no checkpoint at {path}.")
    file = path / "meta.pt" if is_folder else check_regular(path)
    with _explain_read_errors(path):
        checkpoint: Any = {}
        if file.exists():
            check_archive(check_regular(file))
            mmap = shapes_only and zipfile.is_zipfile(file)
            checkpoint = torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
        split_tensor = find_dtensor(checkpoint)
        is_ours = isinstance(checkpoint, dict) and "state_dict" in checkpoint
        if is_folder and is_ours:
            from lit_diffusion.checkpoints import sharded  # slow

            checkpoint = sharded.fill(checkpoint, path, shapes_only, parameters)
    if is_folder and not is_ours:
        raise ValueError(
            f"{path} is a folder that `lit-diffusion fit` has not written; convert it to a file by "
            f"python -m lightning.fabric.utilities.consolidate_checkpoint {path}, or train with "
            "ModelParallelStrategy(save_distributed_checkpoint=False)."
        )
    try:
        check_content(checkpoint)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a training checkpoint: {error}.") from None
    if split_tensor:
        raise ValueError(
            f"{path} holds one rank's part of a tensor ({split_tensor}) and not the whole, so it "
            "cannot be used; save on all ranks with write_checkpoint, or with "
            "ModelParallelStrategy(save_distributed_checkpoint=False)."
        )
    return rename_checkpoint(checkpoint)


@contextmanager
def _explain_read_errors(path: Path) -> Iterator[None]:
    """Context that raises a ValueError with path and reason, even if a folder changes meanwhile."""

    def version() -> tuple[int, int] | None:
        if not path.is_dir():
            return None
        return path.stat().st_ino, path.stat().st_mtime_ns

    before = version()
    try:
        yield
        if version() != before:
            raise ValueError
    except PermissionError:
        raise
    except Exception as error:  # torch raises many types for a broken file
        reason = explain_unreadable(error)
        if version() != before:  # the files that were read may be of two checkpoints
            reason = "was replaced by a later save while it was read; read it again."
        # From None: torch advises to run the code in the file, which a traceback would show.
        raise ValueError(f"{path} {reason}") from None


def read_step(path: str | Path) -> int:
    """Read the number of optimizer steps of a checkpoint without its tensors. -1 if unknown."""
    try:
        file = Path(path) / "meta.pt" if is_checkpoint_folder(Path(path)) else Path(path)
        step = torch.load(check_regular(file), map_location="cpu", weights_only=True, mmap=True)[
            "global_step"
        ]
    except Exception:  # torch raises many types for a broken file
        return -1
    return step if isinstance(step, int) else -1


def check_content(checkpoint: Any) -> None:
    """Check that `checkpoint` has a state_dict and that its entries have the expected types.

    Raises:
        ValueError: if the check fails. The message has the reason, but not the file's name.

    Example:
        >>> check_content({"state_dict": {"weight": torch.ones(2)}, "global_step": 5})
    """
    if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
        raise ValueError("it has no 'state_dict'")
    for name, (container, item) in _ENTRY_TYPES.items():
        entry = checkpoint.get(name, container())
        if not isinstance(entry, container) or not all(isinstance(each, item) for each in entry):
            raise ValueError(f"its '{name}' is {_describe(entry)}, as no run saves it")
    for name in ("global_step", "epoch"):
        if not is_count(count := checkpoint.get(name, 0)):
            raise ValueError(f"its '{name}' is {_describe(count)}, as no run saves it")
    for name in _HYPER_PARAMETERS:
        if "_class_path" in (settings := checkpoint.get(name, {})):
            _check_settings(settings, name)
    _check_progress(checkpoint.get("loops", {}))
    for name, value in checkpoint["state_dict"].items():
        if not (_is_dense_tensor(value) or name.endswith("_extra_state")):
            raise ValueError(f"its weight {name} is no dense tensor, but {_describe(value)}")


def _check_settings(settings: Any, name: str) -> None:
    """Raise ValueError unless these are plain builtins, and class paths at any depth are text."""
    if not is_plain(settings):
        raise ValueError(f"its '{name}' must be plain builtins, and hold others")
    if isinstance(settings, list | tuple):
        settings = dict(enumerate(settings))
    if isinstance(settings, dict) and None in settings:
        raise ValueError(f"in its '{name}', names must be text, and are {list(settings)!r:.50}")
    for key, value in settings.items() if isinstance(settings, dict) else ():
        if key in ("class_path", "_class_path") and not isinstance(value, str):
            raise ValueError(f"in its '{name}', {key} must name a class, and is {value!r:.50}")
        names = list(value) if isinstance(value, dict) and key == "init_args" else []
        if not all(isinstance(each, str) for each in names):
            raise ValueError(f"in its '{name}', init_args must have names, and are {value!r:.50}")
        _check_settings(value, name)


_COUNTS = ("ready", "started", "processed", "completed", "_batches_that_stepped")


def _check_progress(loops: dict[Any, Any], in_progress: bool = False) -> None:
    """Raise ValueError if the progress of the Trainer's loops holds anything but counts."""
    for name, value in loops.items():
        is_progress = in_progress or name in _COUNTS or str(name).endswith("progress")
        if name == "combined_loader" and isinstance(value, list | dict):
            continue  # state of the user's loaders
        is_progress |= name == "combined_loader"
        if isinstance(value, dict) and name not in _COUNTS:
            _check_progress(value, is_progress)
        elif is_progress and not (is_count(value) or isinstance(value, bool)):
            raise ValueError(f"in its 'loops', {name} must be a count, and is {value!r:.50}")


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of {value.dtype}, {value.layout}, on {value.device}"
    return f"{type(value).__name__} {value!r:.50}"


def check_resumable(checkpoint: Mapping[str, Any], path: Path) -> None:
    """Check that a run can be resumed from `checkpoint`, which needs more than the weights.

    Raises:
        ValueError: if entries are missing. The message names them.
    """
    if missing := [name for name in _RUN_ENTRIES if name not in checkpoint]:
        raise ValueError(
            f"{path} holds no {', '.join(missing)}, so no run can be resumed from it; resume from "
            "a checkpoint that was saved in training, with more than the weights."
        )


@contextmanager
def limit_parameters(state: Mapping[str, Any]) -> Iterator[None]:
    """Context in which a module cannot have far more parameters than a state_dict.

    A file specifies its network, and a malicious one might need more memory than the machine has.
    Parameters are counted when they are registered, before they are initialized.

    Args:
        state: the state_dict in the file.

    Raises:
        ValueError: when a parameter is registered that exceeds the limit.
    """
    tensors = [value for value in state.values() if isinstance(value, Tensor)]
    # The limits are loose, because parametrizations and replaced layers register more than once.
    max_tensors = 1000 + 4 * len(tensors)
    max_numbers = 10**6 + 4 * sum(value.numel() for value in tensors)
    num_tensors = num_numbers = 0

    def count(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        nonlocal num_tensors, num_numbers
        num_tensors += 1
        num_numbers += 0 if parameter is None else parameter.numel()
        if num_tensors > max_tensors or num_numbers > max_numbers:
            raise ValueError(
                f"the network that it describes has far more parameters than its {len(tensors)} "
                "weights."
            )

    handle = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        handle.remove()


def is_count(value: Any) -> bool:
    """Whether a value is an int (not a bool) in `[0, 2**63)`.

    Example:
        >>> is_count(3), is_count(-1), is_count(True)
        (True, False, False)
    """
    return type(value) is int and 0 <= value < 2**63


def is_plain(value: Any) -> bool:
    """Whether a value is None, bool, int, float, str, or a dict, list or tuple of these.

    Example:
        >>> is_plain({"lr": 0.1, "betas": (0.9, 0.999)}), is_plain(print)
        (True, False)
    """
    if isinstance(value, dict):
        return type(value) is dict and all(is_plain(v) for pair in value.items() for v in pair)
    if isinstance(value, list | tuple):
        return type(value) in (list, tuple) and all(is_plain(v) for v in value)
    return value is None or type(value) in (bool, int, float, str)


def _is_dense_tensor(value: Any) -> bool:
    """Whether a value is a tensor that can be copied into a parameter."""
    return (
        isinstance(value, Tensor)
        and value.layout is torch.strided
        and not (value.is_nested or value.is_quantized or value.is_meta)
    )


def number_kind(tensor: Tensor) -> tuple[bool, bool, bool]:
    """Kind of a dtype: (is float, is complex, is bool). torch silently casts between kinds.

    Example:
        >>> number_kind(torch.ones(1))
        (True, False, False)
    """
    return tensor.is_floating_point(), tensor.is_complex(), tensor.dtype is torch.bool


def strip_compile_prefix(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Remove the prefix that torch.compile adds to names in a state_dict.

    Example:
        >>> strip_compile_prefix({"network._orig_mod.weight": torch.ones(1)})
        {'network.weight': tensor([1.])}
    """
    return {name.replace("_orig_mod.", ""): value for name, value in state.items()}


def explain_unreadable(error: Exception) -> str:
    """Explain an error of torch.load, because its message advises users to run code in the file."""
    message = str(error)
    if pickled := re.search(r"GLOBAL ([\w.]+)", message):
        return (
            f"holds pickled code ({pickled[1]}), which is never run; only tensors and plain "
            "builtins are read."
        )
    if isinstance(error, pickle.UnpicklingError) or "weights_only" in message:
        return (
            "may hold pickled code, which is never run, or is damaged or no checkpoint; only "
            "tensors and plain builtins are read, in the format that torch.save writes by default."
        )
    reason = "" if isinstance(error, KeyError) else f" ({first_line(error)})"  # an unknown opcode
    return (
        f"is truncated, damaged or no checkpoint{reason}; name the .ckpt file of a run "
        "(RUN/checkpoints/last.ckpt), or copy it again."
    )


def first_line(error: BaseException) -> str:
    """First line of an error's message without the full stop. If it is empty, the error's type.

    Example:
        >>> first_line(ValueError("lr must be > 0."))
        'lr must be > 0'
    """
    return str(error).split("\n")[0].rstrip(".") or type(error).__name__
