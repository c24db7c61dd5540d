"""Write checkpoint files atomically, so that a crash leaves no partial file."""

import pickle
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from torch.serialization import get_unsafe_globals_in_checkpoint
from torch.utils.serialization import config

from lit_diffusion.callbacks.trainer_state import find_dtensor, gather_state
from lit_diffusion.checkpoints.reading import (
    explain_unreadable,
    first_line,
    is_plain,
    read_checkpoint,
)
from lit_diffusion.files import atomic_write, is_checkpoint, is_checkpoint_folder, replace
from lit_diffusion.signals import defer_signals


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning plugin that writes checkpoints atomically, and reads them without running code.

    To save, the plugin writes a temporary file in the same folder, syncs it to the disk and renames
    it. Therefore, the previous checkpoint survives a full disk or a crash. URLs are an exception,
    because Lightning's default method writes them. Files and URLs are always loaded with
    `weights_only=True`.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(plugins=[AtomicCheckpointIO()], logger=False, accelerator="cpu")
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write `checkpoint` to `path`. If this fails, an existing file stays as it was.

        Raises:
            OSError: if the file cannot be written.
            TypeError: if the content could not be loaded with `weights_only=True`, or if it
                contains sharded tensors (DTensor), which a single rank cannot gather.
        """
        plain = plain_checkpoint(checkpoint)
        if "://" in str(path):
            super().save_checkpoint(plain, path, storage_options)
        else:
            _write(plain, Path(path))

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read the checkpoint at `path`, always with `weights_only=True`."""
        if "://" not in str(path):
            return read_checkpoint(path)
        try:
            return super().load_checkpoint(path, map_location, weights_only=True)
        except pickle.UnpicklingError as error:
            raise ValueError(f"{path} {explain_unreadable(error)}") from None


def write_checkpoint(checkpoint: Mapping[str, Any], path: str | Path) -> None:
    """Write a checkpoint to a local path atomically, like `AtomicCheckpointIO`.

    If the checkpoint contains tensors that `fully_shard` has sharded, all ranks must call this
    function. It gathers the tensors, and the first rank writes them. The other ranks return without
    waiting for the file. To load the weights with any number of ranks, call
    `torch.distributed.checkpoint.state_dict.set_model_state_dict` with
    `StateDictOptions(full_state_dict=True)`.
    """
    gathered = gather_state(checkpoint)
    if gathered or not checkpoint:
        _write(plain_checkpoint(gathered), Path(path))


def plain_checkpoint(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checkpoint without hyperparameters that are not plain builtins.

    Such hyperparameters, for example functions, would have to be pickled.

    Raises:
        TypeError: if the checkpoint contains a sharded tensor (DTensor).
    """
    if split_tensor := find_dtensor(checkpoint):
        raise TypeError(
            f"a checkpoint must contain whole tensors, but {split_tensor!r} is one rank's part of "
            "a tensor; save with write_checkpoint on all ranks, which gathers the tensor, or with "
            "ModelParallelStrategy(save_distributed_checkpoint=False)."
        )
    plain = dict(checkpoint)
    for key in plain:
        if key.endswith("hyper_parameters"):
            plain[key] = {name: value for name, value in plain[key].items() if is_plain(value)}
    return plain


def _write(checkpoint: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # If the path is a folder, write the file next to it, so that the folder stays until the end.
    target = path.with_name(f".{path.name}.file") if is_checkpoint_folder(path) else path
    with explain_write_errors(path), defer_signals():
        save_plain(checkpoint, target)
        if target != path:
            replace(target, path)


def save_plain(checkpoint: dict[str, Any], path: Path) -> None:
    """Write a checkpoint with `torch.save`, atomically, to a path that is not a folder."""
    # Write checksums even if torch is configured without them, so that damage can be detected.
    with (
        atomic_write(path) as file,
        config.patch("save.compute_crc32", True),  # type: ignore[attr-defined]
    ):
        torch.save(checkpoint, file)
        # Find content that cannot be loaded at the first save, not when a run resumes.
        file.seek(0)
        if classes := get_unsafe_globals_in_checkpoint(file):
            raise TypeError(
                "a checkpoint must contain only tensors and plain builtins, got "
                f"{', '.join(classes)}; convert these objects in the state_dict() of their "
                "callback or module."
            )


@contextmanager
def explain_write_errors(path: Path) -> Iterator[None]:
    """Context manager that turns write errors into OSErrors that name the path and free space."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        intact = "; the checkpoint saved there before is intact" if is_checkpoint(path) else ""
        folder = next(parent for parent in path.absolute().parents if parent.exists())
        free = shutil.disk_usage(folder).free / 2**20
        raise OSError(
            f"{path} could not be written, with {free:.0f} MiB free there: "
            f"{getattr(error, 'strerror', None) or first_line(error)}{intact}."
        ) from error
