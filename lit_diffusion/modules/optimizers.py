"""Create the optimizer of a module, fused on a GPU, and its lr schedule."""

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, Adam, AdamW, Optimizer

from lit_diffusion.callbacks.trainer_state import is_dtensor
from lit_diffusion.lr_schedules import WarmupLinear

_IMPLEMENTATION = ("fused", "foreach")  # options that select the kernels of an update


def optimizer_and_schedule(
    parameters: Iterable[Parameter],
    make_optimizer: Callable[[Iterable[Parameter]], Optimizer],
    make_schedule: Callable[[Optimizer], Any] | None,
    total_steps: Callable[[], int | None],
) -> Any:
    """Create the optimizer and the lr schedule, in the form that `configure_optimizers` returns.

    The schedule is stepped once per optimizer step.

    Args:
        parameters: parameters to train.
        make_optimizer: function that creates the optimizer from the parameters. Its result is
            passed to `with_fused_kernels`.
        make_schedule: function that creates the schedule from the optimizer; None keeps the lr
            constant.
        total_steps: function that returns the optimizer steps of the whole run, or None if the run
            has no end. The function is called only if the schedule needs this number and was
            created without it.

    Raises:
        ValueError: if the schedule needs the length of the run, and the run has no end.

    Example:
        >>> from lit_diffusion.lr_schedules import WarmupCosine
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> result = optimizer_and_schedule([weight], torch.optim.Adam, WarmupCosine, lambda: 1000)
        >>> result["lr_scheduler"]["scheduler"].total_steps
        1000
    """
    optimizer = with_fused_kernels(make_optimizer(parameters))
    if make_schedule is None:
        return optimizer
    schedule = make_schedule(optimizer)
    if isinstance(schedule, WarmupLinear) and schedule.total_steps is None:
        if (steps := total_steps()) is None:
            raise ValueError(
                "the lr schedule needs the length of the run, and this Trainer has none; pass "
                "max_steps to the Trainer or total_steps to the schedule."
            )
        schedule.set_total_steps(steps)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def with_fused_kernels(optimizer: Optimizer) -> Optimizer:
    """Set fused=True in torch's Adam, AdamW or SGD if all parameters are on GPUs.

    Parameters must be real. The optimizer must have been created without `fused`, `foreach` and
    `differentiable`. Optimizers that do not meet these conditions are returned unchanged. Loading a
    checkpoint does not change `fused` and `foreach`. Therefore, a run can resume on a different
    device, from a checkpoint that was written without fused=True, or with weights in a different
    memory format.

    With precision=16-mixed, the GradScaler unscales the gradients. If you pass fused=True to the
    constructor instead, the optimizer unscales the gradients itself. Lightning does not allow
    `gradient_clip_val` with such optimizers, not even in bf16-mixed.

    Example:
        >>> adam = torch.optim.Adam([torch.nn.Parameter(torch.zeros(2))])  # on a CPU
        >>> with_fused_kernels(adam).param_groups[0]["fused"] is None
        True
    """
    optimizer.register_load_state_dict_pre_hook(_keep_implementation)
    optimizer.register_load_state_dict_post_hook(_match_strides)
    groups = optimizer.param_groups
    params = list(chain.from_iterable(group["params"] for group in groups))
    is_plain = type(optimizer) in (Adam, AdamW, SGD) and not optimizer.defaults["differentiable"]
    is_unset = all(group.get(name) is None for group in groups for name in _IMPLEMENTATION)
    is_on_gpu = all(param.is_cuda and param.is_floating_point() for param in params)
    is_uniform = len({is_dtensor(param) for param in params}) == 1  # all split, or none
    if is_plain and is_unset and is_on_gpu and is_uniform:
        optimizer.defaults["fused"] = True
        for group in groups:
            group["fused"] = True
    return optimizer


def _keep_implementation(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any] | None:
    """Load hook: keep the current `fused` and `foreach`, to which torch converts the state."""
    saved, groups = state["param_groups"], optimizer.param_groups
    if len(saved) != len(groups):
        return None  # torch raises an error
    present = [{name: g[name] for name in _IMPLEMENTATION if name in g} for g in groups]
    merged = [old | new for old, new in zip(saved, present, strict=True)]
    return {**state, "param_groups": merged}


def _match_strides(optimizer: Optimizer) -> None:
    """Load hook: give the state the strides of its parameter, which fused kernels assume."""
    for group in optimizer.param_groups:
        for param in group["params"] if group.get("fused") else ():
            state = optimizer.state.get(param, {})
            for name, value in state.items():
                is_alike = isinstance(value, Tensor) and value.shape == param.shape
                if is_alike and value.stride() != param.stride():
                    empty = torch.empty_like(param, dtype=value.dtype, requires_grad=False)
                    state[name] = empty.copy_(value)
