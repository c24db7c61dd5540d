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
    """Writes checkpoint files atomically, and reads them without running code.

    A save writes a temporary file in the same folder, syncs it to the disk and renames it.
    Therefore the previous checkpoint survives a full disk or a crash. Files and URLs are always
    loaded with `weights_only=True`. Remote paths are written by Lightning's default method.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(plugins=[AtomicCheckpointIO()], logger=False, accelerator="cpu")
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write `checkpoint` to `path`. On an error, an existing file is not changed.

        Raises:
            OSError: if the file cannot be written.
            TypeError: if the content cannot be loaded with `weights_only=True`, or holds sharded
                tensors (DTensor), which a single rank cannot gather.
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

    If `fully_shard` has sharded the tensors, all ranks must call this. The first rank writes whole
    tensors, and the others do not wait for the file. To load the weights with any number of ranks,
    call `torch.distributed.checkpoint.state_dict.set_model_state_dict` with `full_state_dict=True`.

    Example:
        >>> from tempfile import mkdtemp
        >>> path = Path(mkdtemp()) / "tiny.ckpt"
        >>> write_checkpoint({"state_dict": {"weight": torch.ones(2)}}, path)
        >>> torch.load(path, weights_only=True)
        {'state_dict': {'weight': tensor([1., 1.])}}
    """
    gathered = gather_state(checkpoint)
    if gathered or not checkpoint:
        _write(plain_checkpoint(gathered), Path(path))


def plain_checkpoint(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checkpoint without hyperparameters that need pickle, such as objects.

    Example:
        >>> plain_checkpoint({"state_dict": {}, "hyper_parameters": {"network": print}})
        {'state_dict': {}, 'hyper_parameters': {}}
    """
    if split_tensor := find_dtensor(checkpoint):
        raise TypeError(
            f"a checkpoint must hold whole tensors, and {split_tensor!r} is one rank's part of "
            "one; save with write_checkpoint on all ranks, which gathers it, or with "
            "ModelParallelStrategy(save_distributed_checkpoint=False)."
        )
    plain = dict(checkpoint)
    for key in plain:
        if key.endswith("hyper_parameters"):
            plain[key] = {name: value for name, value in plain[key].items() if is_plain(value)}
    return plain


def _write(checkpoint: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # A folder at this path is intact until the new file is whole.
    target = path.with_name(f".{path.name}.file") if is_checkpoint_folder(path) else path
    with explain_write_errors(path), defer_signals():
        save_plain(checkpoint, target)
        if target != path:
            replace(target, path)


def save_plain(checkpoint: dict[str, Any], path: Path) -> None:
    """Write a checkpoint to a path with `torch.save`, atomically. The path must not be a folder."""
    # Write checksums even if torch is configured without them, to detect damaged files.
    with (
        atomic_write(path) as file,
        config.patch("save.compute_crc32", True),  # type: ignore[attr-defined]
    ):
        torch.save(checkpoint, file)
        # Detect content that cannot be loaded now, at the first save, and not when a run resumes.
        file.seek(0)
        if classes := get_unsafe_globals_in_checkpoint(file):
            raise TypeError(
                f"a checkpoint must hold tensors and plain builtins, got {', '.join(classes)};"
                " convert it in the state_dict() of the callback or module that it belongs to."
            )


@contextmanager
def explain_write_errors(path: Path) -> Iterator[None]:
    """Context whose OSErrors name the checkpoint and the free space on its disk."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        intact = "; the checkpoint saved there before is intact" if is_checkpoint(path) else ""
        free = shutil.disk_usage(path.parent).free / 2**20
        raise OSError(
            f"{path} could not be written, with {free:.0f} MiB free there: "
            f"{getattr(error, 'strerror', None) or first_line(error)}{intact}."
        ) from error
