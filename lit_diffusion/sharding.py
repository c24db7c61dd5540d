"""Tensors that are split over ranks, as by FSDP2 and tensor parallelism: the parts and the whole.

A split tensor is a torch DTensor: its shape is that of the whole, this rank's memory holds a part,
empty where there are fewer rows than ranks. What is collective here waits for every rank.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_AVAILABLE = torch.distributed.is_available()

if _AVAILABLE:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor, distribute_tensor


def is_split(value: object) -> "TypeGuard[DTensor]":
    """Whether a value is a tensor that is split over ranks."""
    return _AVAILABLE and isinstance(value, DTensor)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, in the same memory; of one that is not split, the tensor."""
    return tensor.to_local() if is_split(tensor) else tensor


def split_like(whole: Tensor, model: Tensor) -> Tensor:
    """`whole`, which each rank has, split as `model` is, if that one is and `whole` not yet."""
    if is_split(whole) or not is_split(model):
        return whole
    return distribute_tensor(whole, model.device_mesh, model.placements, src_data_rank=None)


def gathered(state: Mapping[str, Any]) -> dict[str, Any]:
    """A nested state with whole tensors in place of split ones: on the CPU of rank 0, for a file.

    Collective where tensors are split: every rank calls it with its parts of the same state. Ranks
    but the first get {} then, and hold no more than one whole tensor at a time.
    """
    if first_split(state) is None:
        return dict(state)
    first = torch.distributed.get_rank() == 0
    whole: dict[str, Any] = _gathered(state, first)
    return whole if first else {}


def _gathered(value: Any, keep: bool) -> Any:
    if is_split(value):
        # Parts that were offloaded to the CPU go back to where their ranks can talk.
        parts: Any = value.detach().to(value.device_mesh.device_type)
        whole = parts.full_tensor()
        return whole.cpu() if keep else None
    if isinstance(value, Mapping):
        return {key: _gathered(entry, keep) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_gathered(entry, keep) for entry in value)
    return value


def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """L2 norm of all entries of all tensors, (), in float32 or wider; collective if any is split.

    Example:
        >>> total_norm([torch.tensor([3.0, 0.0]), torch.tensor([[4.0]])])
        tensor(5.)
    """
    tensors = [t.coalesce().values() if t.is_sparse else t for t in tensors]
    wide = [torch.promote_types(tensor.dtype, torch.float32) for tensor in tensors]
    parts = [torch.linalg.vector_norm(t, dtype=d) for t, d in zip(tensors, wide, strict=True)]
    norms = [norm.full_tensor() if is_split(norm) else norm for norm in parts]
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())


def first_split(state: Mapping[str, Any]) -> str | None:
    """Where a nested state holds a split tensor, its keys joined by dots; None where nowhere."""
    return next(_splits(state, ""), None)


def _splits(value: Any, name: str) -> Iterator[str]:
    if is_split(value):
        yield name
    if isinstance(value, list | tuple):
        value = dict(enumerate(value))
    if isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _splits(entry, f"{name}.{key}" if name else str(key))


def on_any_rank(flags: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    """Flags (n,) bool, up on any rank over which `tensors` are split; collective if they are."""
    for mesh in dict.fromkeys(tensor.device_mesh for tensor in tensors if is_split(tensor)):
        raised = flags.to(mesh.device_type, torch.int32)
        for group in mesh.get_all_groups():
            torch.distributed.all_reduce(raised, torch.distributed.ReduceOp.MAX, group)
        flags = raised.to(flags.device, torch.bool)
    return flags


def reshard(module: nn.Module) -> None:
    """Drop the whole weights that FSDP2 keeps after a forward pass without a backward one.

    Until then `parameters()` are those copies, and the next forward pass computes with them,
    whatever has been written to the parts. Not collective.
    """
    if _AVAILABLE:
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()


def is_made_up(optimizer: Optimizer, kwargs: Mapping[str, Any]) -> bool:
    """Whether a step with `kwargs` is one that torch takes with lr 0 to make an optimizer's state.

    `torch.distributed.checkpoint.state_dict` does before it saves or loads a state that is empty.
    """
    asked = dict(kwargs) == {"closure": None}
    return asked and all(group.get("lr") == 0 for group in optimizer.param_groups)
