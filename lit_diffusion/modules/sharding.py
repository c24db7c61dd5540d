"""Shard the weights of a network over ranks with FSDP2, and measure the cost of a training step."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.flop_counter import FlopCounterMode

_GATHERED = {"32-true": None, "bf16-mixed": torch.bfloat16, "bf16-true": None}
"""Precision of a Trainer -> dtype in which weights are gathered. None keeps the weights' dtype."""


def network_blocks(network: nn.Module) -> Iterator[nn.Module]:
    """Iterate over the blocks of a network. Each block can be sharded or compiled on its own.

    The attribute `block_names` of a network lists the attributes that are blocks or ModuleLists of
    blocks. A network without `block_names` has no blocks.
    """
    for name in getattr(network, "block_names", ()):
        child = network.get_submodule(name)
        yield from child if isinstance(child, nn.ModuleList) else [child]


def shard_network(network: nn.Module, mesh: DeviceMesh, precision: str) -> None:
    """Shard a network's weights, gradients and optimizer state over the ranks of a mesh, in place.

    Each block gathers its weights just before it is used, and frees them afterwards. Weights
    outside the blocks stay gathered for the whole forward and backward pass.

    Weights and optimizer state keep their dtype. Gradients are summed over ranks in float32. With
    "bf16-mixed", the ranks gather weights in bfloat16.

    Args:
        network: a network with the same weights on all ranks. If it is already sharded over this
            mesh for this precision, the function does nothing.
        mesh: one-dimensional mesh of all data-parallel ranks.
        precision: precision of the Trainer, "32-true", "bf16-mixed" or "bf16-true".

    Raises:
        ValueError: if the precision is not supported, if the network has no `block_names`, or if
            the network is already sharded over a different mesh or for a different precision.

    Source: Zhao et al. 2023 (arXiv 2304.11277).
    """
    if isinstance(network, FSDPModule):
        before = vars(network)["split_for"]
        if before != (mesh, precision):
            raise ValueError(
                f"an earlier Trainer has sharded the network over {before[0].size()} ranks in "
                f"{before[1]}, so it cannot be sharded over {mesh.size()} ranks in {precision}; "
                "build it again, and load its weights from a checkpoint."
            )
        return
    if precision not in _GATHERED:
        names = ", ".join(_GATHERED)
        raise ValueError(f"precision must be one of {names} for sharded weights, got {precision}.")
    blocks = list(network_blocks(network))
    if not blocks:
        raise ValueError(
            f"{type(network).__name__} has no blocks whose weights could be sharded over ranks; "
            "list its blocks in an attribute block_names, or use strategy='ddp'."
        )
    # Inputs are not cast, because bfloat16 cannot represent a noise label of 999.
    policy = MixedPrecisionPolicy(
        param_dtype=_GATHERED[precision], reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for part in (*blocks, network):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    vars(network)["split_for"] = mesh, precision


class StepCost(NamedTuple):
    """Memory and computation of one training step of a network.

    Attributes:
        parameters: number of weights of the network.
        block: number of weights of the largest block.
        rest: number of weights outside all blocks.
        activations: number of bytes that the forward pass stores for the backward pass.
        flops: number of floating-point operations of the forward and backward pass.
    """

    parameters: int
    block: int
    rest: int
    activations: int
    flops: int


def measure_step(network: nn.Module, image_shape: Sequence[int], batch: int) -> StepCost:
    """Measure memory and computation of a training step without running it.

    The function traces the step on the meta device, which neither allocates nor computes tensors.

    Args:
        network: a network on the meta device. Give its weights the dtype in which the real step
            computes matrix products.
        image_shape: (C, H, W) of x.
        batch: number of images per rank.
    """
    stored: list[Tensor] = []

    def store(tensor: Tensor) -> Tensor:
        stored.append(tensor)
        return tensor

    x = torch.zeros(batch, *image_shape, dtype=next(network.parameters()).dtype, device="meta")
    with FlopCounterMode(display=False) as counter:
        with torch.autograd.graph.saved_tensors_hooks(store, lambda tensor: tensor):
            output = network.train()(x, torch.zeros(batch, device="meta"), None)
        output.float().square().mean().backward()
    weights = {id(s): s for s in (param.untyped_storage() for param in network.parameters())}
    storages = {id(s): s for s in (tensor.untyped_storage() for tensor in stored)}
    activations = sum(storages[key].nbytes() for key in storages.keys() - weights.keys())
    blocks = [sum(p.numel() for p in block.parameters()) for block in network_blocks(network)]
    parameters = sum(param.numel() for param in network.parameters())
    return StepCost(
        parameters,
        max(blocks, default=0),
        parameters - sum(blocks),
        activations,
        counter.get_total_flops(),
    )
