"""Reading checkpoints, without running any code in them.

A checkpoint holds tensors and plain builtins, nothing else: `torch.load(path, weights_only=True)`
reads it. `state_dict` are the raw weights, averages are in the state of the EMA callback,
`hyper_parameters` the class paths and arguments of the module.
"""

import pickle
import re
import zipfile
from pathlib import Path
from typing import Any

import torch

from lit_diffusion.callbacks.trainer_state import find_dtensor
from lit_diffusion.checkpoints.content import check_archive, check_content
from lit_diffusion.config.renamed import rename_checkpoint

Checkpoint = dict[str, Any]


def read_checkpoint(path: str | Path, *, mmap: bool = False) -> Checkpoint:
    """A local checkpoint file, on the CPU and without running any code in it.

    With `mmap` tensors stay on the disk until they are used, where the format allows it.

    Raises:
        FileNotFoundError: where there is none.
        ValueError: where the file is truncated, no checkpoint, one rank's part of one, or holds
            pickled code, or where it is a folder of all parts; names file and reason.
    """
    path = Path(path)
    if holds_parts(path):
        raise ValueError(
            f"{path} is a folder with the parts that ranks have saved of a checkpoint; make a file "
            f"of it with python -m lightning.fabric.utilities.consolidate_checkpoint {path}, or "
            "train with ModelParallelStrategy(save_distributed_checkpoint=False)."
        )
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name the checkpoint file in it.")
    if not path.is_file():
        raise FileNotFoundError(f"There is no checkpoint at {path}.")
    try:
        check_archive(path)
        mmap = mmap and zipfile.is_zipfile(path)
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except PermissionError:
        raise
    except Exception as error:  # what torch says of a broken file is of many types
        # From None: torch advises to run the code in the file, which a traceback would tell.
        raise ValueError(f"{path} {why_unreadable(error)}") from None
    try:
        check_content(checkpoint)
        split = find_dtensor(checkpoint)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a training checkpoint: {error}.") from None
    if split:
        raise ValueError(
            f"{path} holds one rank's part of a tensor ({split}) and not the whole, so nothing can "
            "be read from it; save on all ranks with write_checkpoint, or with "
            "ModelParallelStrategy(save_distributed_checkpoint=False)."
        )
    return rename_checkpoint(checkpoint)


def saved_step(path: str | Path) -> int:
    """Optimizer steps behind a checkpoint, its tensors left unread; -1 where it tells none."""
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)["global_step"]
    except Exception:  # what torch says of a broken file is of many types
        return -1
    return found if isinstance(found, int) else -1


def holds_parts(folder: Path) -> bool:
    """Whether a folder is a checkpoint of `torch.distributed.checkpoint`."""
    return (folder / ".metadata").is_file()


def why_unreadable(error: Exception) -> str:
    """The reason, in our words: those of torch advise to run the code in the file."""
    said = str(error)
    if found := re.search(r"GLOBAL ([\w.]+)", said):
        return (
            f"holds pickled code ({found[1]}), which is never run; only tensors and plain builtins "
            "are read."
        )
    if isinstance(error, pickle.UnpicklingError) or "weights_only" in said:
        return (
            "may hold pickled code, which is never run, or is damaged or no checkpoint; only "
            "tensors and plain builtins are read, in the format that torch.save writes by default."
        )
    return f"is truncated, damaged or no checkpoint: {first_line(error)}"


def first_line(error: BaseException) -> str:
    """What an error says, in a line."""
    return str(error).split("\n")[0].rstrip(".") or type(error).__name__
