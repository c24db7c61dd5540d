"""Compile networks and losses with `torch.compile`.

The network is compiled in place, so the names in its state_dict do not change. Copies made with
deepcopy or pickle are not compiled.
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
    """Raise ValueError if CUDA graphs would be combined with gradient accumulation.

    With CUDA graphs, the gradients of a micro-batch overwrite the gradients of the previous
    micro-batch, so the sum of the gradients would be wrong
    (github.com/pytorch/pytorch/issues/169545).
    """
    if mode != "default" and device.type == "cuda" and micro_batches > 1:
        raise ValueError(
            f"compile={mode!r} uses CUDA graphs, which cannot accumulate gradients, but "
            f"accumulate_grad_batches={micro_batches}; use compile='default'."
        )


def compile_network(network: nn.Module, mode: CompileMode | None, by_block: bool = False) -> None:
    """Compile a network, or each of its blocks, in place. Compilation starts at the next call.

    With the mode None, the network runs eagerly again.

    Tensor sizes are constants of a compiled graph, unless `run_compiled` marks them as dynamic. By
    default, torch would compile a slower graph with dynamic sizes as soon as the size of a tensor
    changes, and would use this graph from then on. The exact result of a step would then depend on
    the sizes of earlier batches, so a resumed fit could differ from an uninterrupted fit.

    With `by_block`, each of the blocks from `sharding.network_blocks` is compiled separately.

    Example:
        >>> network = nn.Linear(2, 2)
        >>> compile_network(network, "default")
        >>> list(network.state_dict())
        ['weight', 'bias']
    """
    for part in network_blocks(network) if by_block else (network,):
        part.compile(mode=mode, dynamic=False, disable=mode is None)


# The first call also traces the backward pass. By default, torch traces it under the autocast of
# the forward pass, whereas backward() of an eager network runs without autocast. Compiled gradients
# of the parts that keep float32 (`no_autocast`) would then be computed in bfloat16.
_backward_as_eager = torch._functorch.config.patch({"backward_pass_autocast": "off"})


@_backward_as_eager  # type: ignore[untyped-decorator]
def run_compiled(
    network: nn.Module, mode: CompileMode, x: Tensor, noise_label: Tensor, condition: Condition
) -> Tensor:
    """Run a compiled network on images x (B, C, H, W) at noise labels (B,).

    In training mode, torch compiles a graph for each batch size B. In evaluation mode, a single
    graph is used for all B > 1.
    """
    noise_label = noise_label.contiguous()  # strides are constants of a graph; solvers expand t
    if not network.training and len(x) > 1:
        for inputs in (x, noise_label, condition):
            by_part(lambda part: torch._dynamo.mark_dynamic(part, 0), inputs)
    output = network(x, noise_label, condition)
    # A CUDA graph writes each output into the same memory, but solvers need the outputs of earlier
    # steps, and a loss or a callback may need them for longer.
    return output if mode == "default" else output.clone()


@_backward_as_eager  # type: ignore[untyped-decorator]
def run_compiled_loss(
    loss: Loss,
    weighted_error: Tensor,
    prediction: Prediction,
    process: Process,
    parameterization: Parameterization,
) -> Tensor:
    """Call `loss.per_sample` in training, compiled if the loss learns the variance.

    Torch compiles a graph for each batch size. The arguments after `loss` are the same as in
    `protocols.Loss.per_sample`.
    """
    if loss.output_factor == 1:
        return loss.per_sample(weighted_error, prediction, process, parameterization)
    step_table(process, prediction.t.device)  # fills the cache outside of the graph
    per_sample = _compile(type(loss).per_sample)
    return per_sample(loss, weighted_error, prediction, process, parameterization)


@cache
def _compile(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(function, dynamic=False)
