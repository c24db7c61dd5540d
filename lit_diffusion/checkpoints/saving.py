"""Writing checkpoint files so that no crash leaves half of one."""

import pickle
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from torch.serialization import get_unsafe_globals_in_checkpoint
from torch.utils.serialization import config

from lit_diffusion.callbacks.trainer_state import find_dtensor, gather_state
from lit_diffusion.checkpoints.content import is_plain
from lit_diffusion.checkpoints.reading import first_line, read_checkpoint, why_unreadable
from lit_diffusion.files import atomic_write
from lit_diffusion.signals import defer_signals


class AtomicCheckpointIO(TorchCheckpointIO):
    """Checkpoint files that are whole or not there, and that are read without running code.

    A save writes a temporary file in the same folder, syncs it to the disk and renames it: on a
    full disk or a crash the previous checkpoint stays. Loading is always with `weights_only=True`,
    also from URLs. Remote paths are written as Lightning does.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(plugins=[AtomicCheckpointIO()], logger=False, accelerator="cpu")
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write `checkpoint`, or leave what was at `path`.

        Raises:
            OSError: where the file cannot be written; the previous one is intact.
            TypeError: for content that could not be read back with `weights_only=True`, and for
                tensors that are split over ranks, which one rank alone cannot gather.
        """
        kept = plain(checkpoint)
        if "://" in str(path):
            super().save_checkpoint(kept, path, storage_options)
        else:
            _write(kept, path)

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """The checkpoint at `path`, read with `weights_only=True` whatever is asked."""
        if "://" not in str(path):
            return read_checkpoint(path)
        try:
            return super().load_checkpoint(path, map_location, weights_only=True)
        except pickle.UnpicklingError as error:
            raise ValueError(f"{path} {why_unreadable(error)}") from None


def write_checkpoint(checkpoint: Mapping[str, Any], path: str | Path) -> None:
    """Write a checkpoint to a local path, atomically: see `AtomicCheckpointIO`.

    One with tensors that `fully_shard` has split is written by all ranks together: each calls this,
    the first writes whole tensors, and the others do not wait for the file. It fits any number of
    ranks: `torch.distributed.checkpoint.state_dict.set_model_state_dict` takes the weights, with
    `full_state_dict=True`.
    """
    whole = gather_state(checkpoint)
    if whole or not checkpoint:
        _write(plain(whole), path)


def plain(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """`checkpoint` without hyper-parameters that are objects, which would be pickled by class."""
    if split := find_dtensor(checkpoint):
        raise TypeError(
            f"a checkpoint must hold whole tensors, and {split!r} is one rank's part of one; "
            "gather it on all ranks (write_checkpoint does), or let the strategy: "
            "ModelParallelStrategy(save_distributed_checkpoint=False)."
        )
    kept = dict(checkpoint)
    for key in kept:
        if key.endswith("hyper_parameters"):
            kept[key] = {name: value for name, value in kept[key].items() if is_plain(value)}
    return kept


def _write(checkpoint: dict[str, Any], path: str | Path) -> None:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        # Without checksums, which a setting of torch leaves out, no damage to the file is told.
        with (
            defer_signals(),
            atomic_write(path) as file,
            config.patch("save.compute_crc32", True),  # type: ignore[attr-defined]
        ):
            torch.save(checkpoint, file)
            _check_plain(file)
    except (OSError, RuntimeError) as error:
        kept = "; the checkpoint saved there before is intact" if path.exists() else ""
        free = shutil.disk_usage(path.parent).free / 2**20
        raise OSError(
            f"{path} could not be written, with {free:.0f} MiB free there: "
            f"{first_line(error)}{kept}."
        ) from error


def _check_plain(file: IO[bytes]) -> None:
    """Find at the first save, not at the resume, what cannot be read back."""
    file.seek(0)
    if classes := get_unsafe_globals_in_checkpoint(file):
        raise TypeError(
            f"a checkpoint must hold tensors and plain builtins, got {', '.join(classes)}; "
            "convert it in the state_dict() of the callback or module that it belongs to."
        )
