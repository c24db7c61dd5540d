"""Checkpoints that are folders, to which each rank writes its shards of the tensors.

The file meta.pt in the folder contains the checkpoint. Its sharded tensors are replaced by tensors
on the meta device, which have no data. The data are in files of torch.distributed.checkpoint, where
the name of a tensor is its path in the checkpoint, such as "state_dict.network.final.weight".

The file `.metadata` lists the sharded tensors and where their data are. It is a pickle, but this
module reads it without running any code in it, and checks its content.
"""

import errno
import io
import math
import pickle
import re
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_parts
from torch.distributed.checkpoint.state_dict_saver import save as save_parts

from lit_diffusion.callbacks.trainer_state import is_count, is_dtensor, strip_compile_prefix
from lit_diffusion.checkpoints.reading import read_checkpoint
from lit_diffusion.checkpoints.saving import explain_write_errors, plain_checkpoint, save_plain
from lit_diffusion.distributed import call_on_rank_zero, rank_and_world_size
from lit_diffusion.files import check_archive, check_regular, is_checkpoint_folder, remove, replace
from lit_diffusion.signals import defer_signals

Keys = tuple[Any, ...]
"""Path of a tensor in a checkpoint: keys of dictionaries, and indices of lists."""


class AtomicModelParallelStrategy(ModelParallelStrategy):
    """ModelParallelStrategy that writes checkpoints atomically, and runs no code from them.

    `lit-diffusion fit` uses this class instead of Lightning's ModelParallelStrategy. The arguments
    are the same. With `save_distributed_checkpoint=True`, a checkpoint is a folder, and each rank
    writes and reads only its shards of weights, averages and optimizer state. A run with any number
    of ranks, and with any strategy, can load such a folder.

    Attributes:
        saves_split_tensors: whether callbacks may return sharded tensors (DTensor) in their state,
            which all ranks then save together.

    Example:
        >>> AtomicModelParallelStrategy(save_distributed_checkpoint=True).saves_split_tensors
        True
    """

    def __init__(self, *, save_distributed_checkpoint: bool = True, **kwargs: Any) -> None:
        super().__init__(save_distributed_checkpoint=save_distributed_checkpoint, **kwargs)
        self.saves_split_tensors = save_distributed_checkpoint

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        """Write a folder from all ranks, or a file from rank 0.

        If writing fails, an existing checkpoint at the path stays as it was.
        """
        if self.saves_split_tensors:
            write_folder(checkpoint, Path(self.broadcast(filepath)))
        elif self.global_rank == 0:  # Lightning would first delete a folder at this path
            self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load weights and optimizer state. From a folder, each rank reads only its shards."""
        path = Path(self.broadcast(checkpoint_path))
        if not is_checkpoint_folder(path):
            return super().load_checkpoint(path, weights_only=True)
        assert self.model is not None
        assert self.lightning_module is not None
        parameters = strip_compile_prefix(dict(self.model.named_parameters()))
        checkpoint = read_checkpoint(path, parameters=parameters)
        options = StateDictOptions(strict=self.lightning_module.strict_loading)
        set_model_state_dict(self.model, checkpoint.pop("state_dict"), options=options)
        states = checkpoint["optimizer_states"] if self.optimizers else []
        for optimizer, state in zip(self.optimizers, states, strict=True):
            set_optimizer_state_dict(self.model, optimizer, state)
        return checkpoint


# Writing


def write_folder(checkpoint: Mapping[str, Any], path: Path) -> None:
    """Write a checkpoint to a folder. All ranks must call this function.

    If this fails, an existing checkpoint at the path stays as it was, and the files that were
    written are deleted.

    Raises:
        OSError: on all ranks, if any rank cannot write.
        TypeError: if the content could not be loaded with `weights_only=True`.
    """
    split: dict[str, Tensor] = {}
    part = path.with_name(f".{path.name}.part")

    def strip(keys: Keys, tensor: Tensor) -> Tensor:
        if not is_dtensor(tensor):
            return tensor
        split[".".join(map(str, keys))] = tensor
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

    def prepare() -> None:
        if path.is_dir() and not is_checkpoint_folder(path):
            raise IsADirectoryError(errno.EISDIR, "the path is a folder that is not a checkpoint")
        remove(part)
        part.mkdir(parents=True)

    def finish() -> None:
        save_plain(plain_checkpoint(whole), part / "meta.pt")
        replace(part, path)

    whole = _map_tensors(checkpoint, strip)
    with explain_write_errors(path), defer_signals():
        call_on_rank_zero(prepare)
        try:
            save_parts(split, checkpoint_id=part)
            call_on_rank_zero(finish)
        except CheckpointException as error:
            raise _first_failure(error) from None
        finally:
            if rank_and_world_size()[0] == 0:
                with suppress(OSError):  # must not hide the exception of the write itself
                    remove(part)


def _map_tensors(value: Any, function: Callable[[Keys, Tensor], Tensor], keys: Keys = ()) -> Any:
    """Replace each tensor in nested dicts, lists and tuples by `function(keys, tensor)`."""
    if isinstance(value, Tensor):
        return function(keys, value)
    if isinstance(value, Mapping):
        return {key: _map_tensors(each, function, (*keys, key)) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_map_tensors(v, function, (*keys, i)) for i, v in enumerate(value))
    return value


def _first_failure(error: CheckpointException) -> BaseException:
    """Return the exception of the lowest rank that failed."""
    return error.failures[min(error.failures)][0]


# Reading


def fill(
    checkpoint: dict[str, Any],
    folder: Path,
    shapes_only: bool = False,
    parameters: Mapping[str, Tensor] | None = None,
) -> dict[str, Any]:
    """Load the data of the sharded tensors into a checkpoint that was read from meta.pt.

    `read_checkpoint` describes `shapes_only` and `parameters`. With `parameters=None`, the result
    equals a checkpoint that was saved to a single file. If the folder is damaged, the function may
    raise an error of any type.
    """
    reader = _Reader(folder)
    tensors: dict[str, Tensor] = {}

    def allocate(keys: Keys, tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor
        name = ".".join(map(str, keys))
        entry: Any = reader.metadata.state_dict_metadata.get(name)
        if entry is None or (entry.size, entry.properties.dtype) != (tensor.shape, tensor.dtype):
            raise ValueError(
                f"{folder / '.metadata'} does not list {name} with the shape and dtype in meta.pt"
            )
        if shapes_only:
            return torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
        named = ((parameters or {}).get(key) for key in keys)
        model = next((m for m in named if m is not None and m.shape == tensor.shape), tensor)
        tensors[name] = torch.zeros_like(model.detach(), dtype=tensor.dtype, device="cpu")
        return tensors[name]

    filled: dict[str, Any] = _map_tensors(checkpoint, allocate)
    planner = DefaultLoadPlanner(flatten_state_dict=False)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            load_parts(tensors, storage_reader=reader, planner=planner, no_dist=parameters is None)
    except CheckpointException as error:
        raise _first_failure(error) from None
    if parameters is None and "optimizer_states" in filled:
        filled["optimizer_states"] = list(map(_number_parameters, filled["optimizer_states"]))
    return filled


def _number_parameters(state: Any) -> Any:
    """Return optimizer state in which parameters have numbers, as torch saves it, not names."""
    names = [name for group in state["param_groups"] for name in group["params"]]
    numbers = {name: number for number, name in enumerate(names)}
    groups = [
        {**group, "params": [numbers[name] for name in group["params"]]}
        for group in state["param_groups"]
    ]
    entries = {numbers[name]: entry for name, entry in state["state"].items()}
    return {**state, "state": entries, "param_groups": groups}


class _Place(NamedTuple):
    """Position of the data of a shard: file, offset and length in bytes."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: None = None


class _Reader(FileSystemReader):
    """Reader of the files of torch.distributed.checkpoint in a folder, which checks them first."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.metadata = _read_metadata(folder)

    def read_metadata(self, *_: Any) -> Metadata:
        return self.metadata

    def _slice_file(self, file: IO[bytes], sinfo: Any) -> IO[bytes]:
        """Read the data of a shard and check their checksums, which torch.load ignores."""
        part = io.BytesIO(super()._slice_file(file, sinfo).read())
        check_archive(part)
        part.seek(0)
        return part


_RECORDS = {
    *(
        f"torch.distributed.checkpoint.metadata.{name}"
        for name in (
            *("Metadata", "StorageMeta", "MetadataIndex", "_MEM_FORMAT_ENCODING"),
            *("TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata"),
        )
    ),
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    "torch.serialization._get_layout",
    *("pathlib.PosixPath", "pathlib._local.PosixPath"),
}
"""Classes and functions that a `.metadata` file names, besides dtypes and shapes. Each is replaced
by a placeholder, so that none is called."""


class _Record:
    """Placeholder for an object whose class is in `_RECORDS`. It only stores the pickled state."""

    def __init__(self, *_: Any) -> None:
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


# Not the unpickler in C, which would allocate as much memory for objects as a file asks for.
class _Unpickler(pickle._Unpickler):
    """Unpickler of a `.metadata` file that runs no code of the file's choice."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a dtype, `torch.Size`, or the placeholder `_Record`."""
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype
        if (path := f"{module}.{name}") == "torch.Size":
            return torch.Size
        if path not in _RECORDS:
            raise pickle.UnpicklingError(f"GLOBAL {path}")  # as torch.load does
        return _Record


def _read_metadata(folder: Path) -> Metadata:
    """Read `.metadata`, and check that the files in the folder can contain the tensors it lists.

    If they cannot, the function may raise an error of any type.
    """
    with check_regular(folder / ".metadata").open("rb") as file:
        state = _Unpickler(file).load().state
    places = {
        MetadataIndex(index.state["fqn"], index.state["offset"]): place.state
        for index, place in state["storage_data"].items()
    }
    tensors: dict[str, Any] = {}
    storage: dict[MetadataIndex, _Place] = {}
    file_sizes: dict[str, int] = {}
    for name, entry in state["state_dict_metadata"].items():
        dtype = entry.state["properties"].state[0]
        size, chunks = _shape(entry.state["size"]), []
        for chunk in entry.state["chunks"]:
            offsets, sizes = _shape(chunk.state["offsets"]), _shape(chunk.state["sizes"])
            limits = zip(offsets, sizes, size, strict=True)
            _require(all(start + n <= end for start, n, end in limits), "shards inside tensors")
            place = places[index := MetadataIndex(name, offsets)]
            file, offset, length = place["relative_path"], place["offset"], place["length"]
            is_part = type(file) is str and re.fullmatch(r"__\d+_\d+\.distcp", file)
            _require(is_part and not place.get("transform_descriptors"), "plain .distcp files")
            file_sizes[file] = check_regular(folder / file).stat().st_size
            _require(is_count(offset) and is_count(length), "offsets and lengths in bytes")
            _require(offset + length <= file_sizes[file], "data inside files")
            _require(math.prod(sizes) * dtype.itemsize <= length, "shards with all their data")
            storage[index] = _Place(file, offset, length)
            chunks.append(ChunkStorageMetadata(offsets, sizes))
        num = sum(math.prod(chunk.sizes) for chunk in chunks)
        _require(num == math.prod(size), "tensors with all their shards")
        tensors[name] = TensorStorageMetadata(TensorProperties(dtype), size, chunks)
    stored = sum(place.length for place in storage.values())
    _require(stored <= sum(file_sizes.values()), "all data only once")
    return Metadata(tensors, storage_data=storage, storage_meta=StorageMeta())


def _shape(value: Any) -> torch.Size:
    _require(type(value) is torch.Size and all(map(is_count, value)), "shapes")
    return torch.Size(value)


def _require(condition: Any, rule: str) -> None:
    if not condition:
        raise ValueError(f"it must list {rule}")
