"""Communication between the ranks of a distributed run.

`call_on_rank_zero` and `all_gather_objects` are collective: every rank must call them. If a process
does not use torch.distributed, its rank is 0, and the number of ranks is 1.
"""

import pickle
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def rank_and_world_size() -> tuple[int, int]:
    """Return the rank of this process, and the number of processes."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return 0, 1
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


def call_on_rank_zero(function: Callable[[], T]) -> T:
    """Call a function on rank 0 only, and send the outcome to all ranks.

    The result of the function is returned on every rank. If the function raises an exception, the
    exception is raised on every rank. If the exception cannot be pickled, the other ranks raise a
    RuntimeError with its message.
    """
    rank, world_size = rank_and_world_size()
    if world_size == 1:
        return function()
    outcome: list[Any] = [None, None]  # result, exception
    failure: Exception | None = None
    if rank == 0:
        try:
            outcome[0] = function()
        except Exception as error:  # sent below, because the other ranks wait for the broadcast
            failure, outcome[1] = error, _picklable(error)
    torch.distributed.broadcast_object_list(outcome)
    if (failure := failure or outcome[1]) is not None:
        raise failure
    return outcome[0]


def _picklable(error: Exception) -> Exception:
    """Return the exception, or a RuntimeError with its message if pickling would fail."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 - of this process
    except Exception:  # whatever the exception's attributes or its constructor raise
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def all_gather_objects(value: T) -> list[T]:
    """Return the values that all ranks pass, in the order of ranks."""
    _, world_size = rank_and_world_size()
    values: list[Any] = [value] * world_size
    if world_size > 1:
        torch.distributed.all_gather_object(values, value)
    return values


def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Compute the L2 norm over all entries of all tensors.

    The dtype of the norm is the widest dtype of the tensors, and at least float32. If a tensor is
    a DTensor (FSDP2), the norm includes its entries on all ranks, and every rank must call this
    function. Without DTensors, the ranks do not communicate.

    Example:
        >>> total_norm([torch.tensor([3.0, 0.0]), torch.tensor([[4.0]])])
        tensor(5.)
    """
    tensors = [t.coalesce().values() if t.is_sparse else t for t in tensors]
    wide = [torch.promote_types(tensor.dtype, torch.float32) for tensor in tensors]
    parts: list[Any] = [
        torch.linalg.vector_norm(t, dtype=d) for t, d in zip(tensors, wide, strict=True)
    ]
    norms = [norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in parts]
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
