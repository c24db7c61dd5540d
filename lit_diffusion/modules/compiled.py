"""Compile a network by `torch.compile`: one graph for each size of training batches, one to sample.

The network is compiled in place, so names in its state_dict are those of the uncompiled network.
Copies of it, by deepcopy or pickle, are not compiled.
"""

from collections.abc import Callable
from functools import cache
from typing import Literal, TypeAlias, get_args

import torch
import torch._functorch.config
from torch import Tensor, nn

from lit_diffusion.gaussian import step_table
from lit_diffusion.modules.sharding import network_blocks
from lit_diffusion.protocols import Condition, Loss, Parameterization, Prediction, Process, by_part

CompileMode: TypeAlias = Literal["default", "reduce-overhead", "max-autotune"]
"""A mode of `torch.compile`. All but "default" use CUDA graphs."""


def check_mode(mode: str | None) -> None:
    """Raise ValueError unless `mode` is a `CompileMode` or None."""
    if mode not in (None, *get_args(CompileMode)):
        names = ", ".join(map(repr, get_args(CompileMode)))
        raise ValueError(f"compile must be {names} or None, got {mode!r}.")


def check_accumulation(mode: CompileMode, device: torch.device, micro_batches: int) -> None:
    """Raise ValueError if gradients of CUDA graphs would be accumulated over micro-batches.

    A graph overwrites the gradients of its last replay (github.com/pytorch/pytorch/issues/169545).
    """
    if mode != "default" and device.type == "cuda" and micro_batches > 1:
        raise ValueError(
            f"compile={mode!r} uses CUDA graphs, which overwrite gradients that are accumulated, "
            f"got accumulate_grad_batches={micro_batches}; use compile='default'."
        )


def compile_network(network: nn.Module, mode: CompileMode, by_block: bool = False) -> None:
    """Compile a network, or each of its blocks, in place, at its next call.

    Sizes of tensors are constants of a graph, unless `run_compiled` marks them as dynamic. By its
    default torch makes them dynamic at the second size that it meets, and uses that slower graph
    from then on; a step's bits would depend on the sizes before it, and a resumed fit would differ
    from one that did not stop.
    """
    for part in network_blocks(network) if by_block else (network,):
        part.compile(mode=mode, dynamic=False)


# The first call also traces the backward pass. By default torch does so under the autocast around
# the call, but backward() of an eager network has none: gradients of the parts that keep float32
# (`no_autocast`) would be computed in bfloat16.
_backward_as_eager = torch._functorch.config.patch({"backward_pass_autocast": "off"})


@_backward_as_eager
def run_compiled(
    network: nn.Module, mode: CompileMode, x: Tensor, noise_label: Tensor, condition: Condition
) -> Tensor:
    """The network's output for images x (B, C, H, W), at noise labels (B,).

    In training mode each B has its own graph, in evaluation mode one graph is for all B above 1.
    """
    noise_label = noise_label.contiguous()  # as strides are constants too, and solvers expand t
    if not network.training and len(x) > 1:
        for inputs in (x, noise_label, condition):
            by_part(lambda part: torch._dynamo.mark_dynamic(part, 0), inputs)
    output: Tensor = network(x, noise_label, condition)
    # A CUDA graph writes each output into the same memory, but solvers keep outputs of earlier
    # steps, and a loss or a callback may keep them for longer.
    return output if mode == "default" else output.clone()


@_backward_as_eager
def run_compiled_loss(
    loss: Loss,
    weighted_error: Tensor,
    prediction: Prediction,
    process: Process,
    parameterization: Parameterization,
) -> Tensor:
    """`loss.per_sample` of the other arguments, in training; each batch size has its own graph.

    Only losses with a learned variance are compiled, which otherwise take more than 100 kernels.
    """
    inputs = (loss, weighted_error, prediction, process, parameterization)
    if loss.output_factor == 1:
        return type(loss).per_sample(*inputs)
    step_table(process, prediction.t.device)  # computed outside of the graph
    return _compile(type(loss).per_sample)(*inputs)


@cache
def _compile(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(function, dynamic=False)
