"""Read and validate checkpoints without running any code in them.

A checkpoint contains only tensors and plain builtins, so `torch.load(weights_only=True)` can read
it. The raw weights are in `state_dict`, and their averages are in the state of the EMA callback.
The class paths and arguments of the module are in `hyper_parameters`.

With `weights_only=True`, `torch.load` runs no code. However, it ignores the checksums that
`torch.save` has written, and accepts any size and structure. Therefore, this file checks checksums,
sizes and structure itself.
"""

import pickle
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from inspect import currentframe
from pathlib import Path
from traceback import walk_stack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from lit_diffusion.callbacks.trainer_state import find_dtensor, is_count, is_dense_tensor
from lit_diffusion.config.renamed import rename_checkpoint
from lit_diffusion.config.trust import is_within
from lit_diffusion.files import check_archive, check_regular, is_checkpoint_folder

Checkpoint = dict[str, Any]

_HYPER_PARAMETERS = ("hyper_parameters", "datamodule_hyper_parameters")
# name of an entry -> its type, and the type of its items (list) or keys (dict)
_ENTRY_TYPES: dict[str, tuple[type[dict[Any, Any]] | type[list[Any]], type]] = {
    **dict.fromkeys(("state_dict", "callbacks", "loops", *_HYPER_PARAMETERS), (dict, str)),
    **dict.fromkeys(("callback_metrics", "model_checkpoints"), (dict, str)),  # of ExactResume
    **dict.fromkeys(("optimizer_states", "lr_schedulers"), (list, dict)),
}
_RUN_ENTRIES = ("callbacks", "epoch", "global_step", "loops", "lr_schedulers", "optimizer_states")


def read_checkpoint(
    path: str | Path, *, shapes_only: bool = False, parameters: Mapping[str, Tensor] | None = None
) -> Checkpoint:
    """Read a local checkpoint to the CPU without running any code in it.

    If an earlier version of this package wrote the checkpoint, classes and arguments that have
    been renamed since then get their current names.

    Args:
        path: path of the checkpoint. It is a file, or a folder to which each rank has written its
            shards of the tensors.
        shapes_only: whether the caller needs only the shapes of tensors. Reading then needs less
            memory: a file is memory-mapped if its format allows this, and the tensors of a folder
            are replaced by zeros.
        parameters: sharded parameters (DTensor) of the module, by name; only for folders. The
            weights, averages and optimizer state of a parameter are then sharded in the same way as
            the parameter, and all ranks must call this function. None reads whole tensors.

    Raises:
        FileNotFoundError: if there is nothing at `path`.
        ValueError: if a file is damaged, if it is not a checkpoint, if it contains pickled code, if
            it contains only one rank's shard of a tensor, if a folder contains no checkpoint, or if
            a folder is replaced while it is read. The message gives the path and the reason.
    """
    path = Path(path)
    is_folder = is_checkpoint_folder(path)
    if (path / "network.json").is_file():
        raise ValueError(
            f"{path} is an exported network, which contains one set of weights and no training "
            "state; use a checkpoint instead."
        )
    if path.is_dir() and not is_folder:
        raise ValueError(f"{path} is a folder, not a checkpoint; use a checkpoint file in it.")
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
            f"{path} is a folder that was not written by `lit-diffusion fit`; convert it to a file "
            f"with python -m lightning.fabric.utilities.consolidate_checkpoint {path}, or train "
            "with ModelParallelStrategy(save_distributed_checkpoint=False)."
        )
    try:
        check_content(checkpoint)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a training checkpoint: {error}.") from None
    if split_tensor:
        raise ValueError(
            f"{path} holds one rank's part of a tensor ({split_tensor}) instead of the whole "
            "tensor, so it cannot be used; save on all ranks with write_checkpoint, or with "
            "ModelParallelStrategy(save_distributed_checkpoint=False)."
        )
    return rename_checkpoint(checkpoint)


@contextmanager
def _explain_read_errors(path: Path) -> Iterator[None]:
    """Context that turns any error into a ValueError with the path and the reason.

    It also raises a ValueError if the folder was replaced while it was read.
    """

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
        if version() != before:  # the files may be a mixture of the old and the new checkpoint
            reason = "was replaced by a later save while it was read; read it again."
        # "from None" hides the message of torch, which advises to run the code in the file.
        raise ValueError(f"{path} {reason}") from None


def read_step(path: str | Path) -> int:
    """Return the number of optimizer steps after which a checkpoint was written.

    The tensors of the checkpoint are not read. The result is -1 if the step is unknown.
    """
    try:
        file = Path(path) / "meta.pt" if is_checkpoint_folder(Path(path)) else Path(path)
        content = torch.load(check_regular(file), map_location="cpu", weights_only=True, mmap=True)
        step = content["global_step"]
    except Exception:  # torch raises many types for a broken file
        return -1
    return step if isinstance(step, int) else -1


def check_content(checkpoint: Any) -> None:
    """Raise ValueError if a checkpoint has no state_dict, or if an entry has an unexpected type.

    The message gives the reason, and callers add the path.
    """
    if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
        raise ValueError("it has no 'state_dict'")
    for name, (container, item) in _ENTRY_TYPES.items():
        entry = checkpoint.get(name, container())
        if not isinstance(entry, container) or not all(isinstance(each, item) for each in entry):
            raise ValueError(f"its '{name}' is {_describe(entry)}, which no run saves")
    for name in ("global_step", "epoch"):
        if not is_count(count := checkpoint.get(name, 0)):
            raise ValueError(f"its '{name}' is {_describe(count)}, which no run saves")
    for name in _HYPER_PARAMETERS:
        if "_class_path" in (settings := checkpoint.get(name, {})):
            _check_settings(settings, name)
    _check_progress(checkpoint.get("loops", {}))
    _check_exact_resume(checkpoint)
    for name, value in checkpoint["state_dict"].items():
        if not (is_dense_tensor(value) or name.endswith("_extra_state")):
            raise ValueError(f"its weight {name} is not a dense tensor, but {_describe(value)}")


def _check_settings(settings: Any, name: str) -> None:
    """Raise ValueError unless settings are plain builtins whose class paths and names are text."""
    if not is_plain(settings):
        raise ValueError(f"its '{name}' must contain only plain builtins")
    if isinstance(settings, list | tuple):
        settings = dict(enumerate(settings))
    if isinstance(settings, dict) and None in settings:
        raise ValueError(f"in its '{name}', names must be text, got {list(settings)!r:.50}")
    for key, value in settings.items() if isinstance(settings, dict) else ():
        if key in ("class_path", "_class_path") and not isinstance(value, str):
            raise ValueError(f"in its '{name}', {key} must name a class, got {value!r:.50}")
        names = list(value) if isinstance(value, dict) and key == "init_args" else []
        if not all(isinstance(each, str) for each in names):
            raise ValueError(f"in its '{name}', names of init_args must be text, got {value!r:.50}")
        _check_settings(value, name)


def _check_exact_resume(checkpoint: Checkpoint) -> None:
    """Raise ValueError if an entry of the callback ExactResume has an unexpected type."""
    for name, value in checkpoint.get("callback_metrics", {}).items():
        if not is_dense_tensor(value):
            raise ValueError(f"its metric {name} is not a dense tensor, but {_describe(value)}")
    for name, value in checkpoint.get("model_checkpoints", {}).items():
        if not isinstance(value, dict):
            raise ValueError(f"its state of {name} is {_describe(value)}, which no run saves")


_COUNTS = ("ready", "started", "processed", "completed", "_batches_that_stepped")


def _check_progress(loops: dict[Any, Any], in_progress: bool = False) -> None:
    """Raise ValueError if the state of the Trainer's loops has a progress that is not a count."""
    for name, value in loops.items():
        is_progress = in_progress or name in _COUNTS or str(name).endswith("progress")
        if name == "combined_loader" and isinstance(value, list | dict):
            continue  # state of the user's data loaders, of any type
        is_progress |= name == "combined_loader"
        if isinstance(value, dict) and name not in _COUNTS:
            _check_progress(value, is_progress)
        elif is_progress and not (is_count(value) or isinstance(value, bool)):
            raise ValueError(f"in its 'loops', {name} must be a count, got {value!r:.50}")


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor with dtype {value.dtype} and layout {value.layout} on {value.device}"
    return f"{type(value).__name__} {value!r:.50}"


def check_resumable(checkpoint: Mapping[str, Any], path: Path) -> None:
    """Raise ValueError if a checkpoint lacks entries that are needed to resume a run."""
    if missing := [name for name in _RUN_ENTRIES if name not in checkpoint]:
        raise ValueError(
            f"{path} has no {', '.join(missing)}, so no run can be resumed from it; resume from a "
            "checkpoint that was saved during training and contains more than the weights."
        )


@contextmanager
def limit_parameters(state: Mapping[str, Any], trust: Iterable[str] = ()) -> Iterator[None]:
    """Context that raises ValueError if a network built in it has far more parameters than `state`.

    A malicious checkpoint can describe a network that needs more memory than the machine has.
    Therefore, the context counts each parameter when a module registers it, and raises the error
    before the whole network is built. Parameters that code of a package in `trust` registers are
    not counted, because a class of the user may have frozen networks outside of its state_dict.
    The code that enters the context is counted, even if it is in such a package.
    """
    trust = tuple(trust)
    num_outer = len(list(walk_stack(currentframe()))) - 2  # without this frame and `__enter__`
    tensors = [value for value in state.values() if isinstance(value, Tensor)]
    # The limits are loose, because parametrizations and replaced layers register parameters again.
    max_tensors = 1000 + 4 * len(tensors)
    max_numbers = 10**6 + 4 * sum(value.numel() for value in tensors)
    num_tensors = num_numbers = 0

    def count(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        nonlocal num_tensors, num_numbers
        if trust:
            frames = [frame for frame, _ in walk_stack(currentframe())][:-num_outer]
            if any(is_within(str(frame.f_globals.get("__name__")), trust) for frame in frames):
                return
        num_tensors += 1
        num_numbers += 0 if parameter is None else parameter.numel()
        if num_tensors > max_tensors or num_numbers > max_numbers:
            raise ValueError(
                f"the network that the checkpoint describes has far more parameters than its "
                f"{len(tensors)} weights."
            )

    handle = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        handle.remove()


def is_plain(value: Any) -> bool:
    """Return whether a value is None, bool, int, float, str, or a dict, list or tuple of these."""
    if isinstance(value, dict):
        return type(value) is dict and all(is_plain(v) for pair in value.items() for v in pair)
    if isinstance(value, list | tuple):
        return type(value) in (list, tuple) and all(is_plain(v) for v in value)
    return value is None or type(value) in (bool, int, float, str)


def number_kind(tensor: Tensor) -> tuple[bool, bool, bool]:
    """Return the kind of a tensor's dtype as (is floating-point, is complex, is bool).

    The kind matters because `load_state_dict` silently casts weights from one kind to another.
    """
    return tensor.is_floating_point(), tensor.is_complex(), tensor.dtype is torch.bool


def explain_unreadable(error: Exception) -> str:
    """Explain an error of torch.load in a clause that follows the name of the file.

    If the file may contain pickled code, the message of torch.load is not shown, because it advises
    users to run this code.
    """
    message = str(error)
    if pickled := re.search(r"GLOBAL ([\w.]+)", message):
        return (
            f"contains pickled code ({pickled[1]}), which is never run; a checkpoint may contain "
            "only tensors and plain builtins."
        )
    if isinstance(error, pickle.UnpicklingError) or "weights_only" in message:
        return (
            "may contain pickled code, which is never run, or is damaged or not a checkpoint; a "
            "checkpoint may contain only tensors and plain builtins, in the default format of "
            "torch.save."
        )
    reason = "" if isinstance(error, KeyError) else f" ({first_line(error)})"  # an unknown opcode
    return (
        f"is truncated, damaged or not a checkpoint{reason}; use the .ckpt file of a run "
        "(RUN/checkpoints/last.ckpt), or copy it again."
    )


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the error's type if it has no message."""
    return str(error).split("\n")[0].rstrip(".") or type(error).__name__
