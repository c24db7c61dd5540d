"""The optimizer of a module, fused on a GPU, and the lr schedule that is stepped with it."""

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, Adam, AdamW, Optimizer

from lit_diffusion.callbacks.trainer_state import is_dtensor
from lit_diffusion.lr_schedules import WarmupLinear

_IMPLEMENTATION = ("fused", "foreach")  # options that say how an update is computed


def optimizer_and_schedule(
    parameters: Iterable[Parameter],
    make_optimizer: Callable[[Iterable[Parameter]], Optimizer],
    make_schedule: Callable[[Optimizer], Any] | None,
    total_steps: Callable[[], int | None],
) -> Any:
    """What `configure_optimizers` returns: the optimizer, and the schedule stepped with it.

    Args:
        parameters: parameters to train.
        make_optimizer: called with the parameters; see `with_fused_kernels`.
        make_schedule: called with the optimizer; None keeps the lr constant.
        total_steps: returns the optimizer steps of the whole run, or None if it has no end; called
            only for a schedule that needs this number and was built without it.

    Raises:
        ValueError: if the schedule needs the length of the run, and there is none.
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
    """The optimizer, with fused=True if it is torch's Adam, AdamW or SGD on a GPU.

    This needs real parameters, all on GPUs, and an optimizer that was built without `fused`,
    `foreach` and `differentiable`. A checkpoint does not change `fused` and `foreach`, so that a
    run resumes on another device, or from a checkpoint that was written without fused=True, or
    with weights in another memory format.

    Unlike fused=True in the constructor, this leaves the division by the loss scale of
    precision=16-mixed to the GradScaler: Lightning refuses `gradient_clip_val` with optimizers that
    divide by themselves, in bf16-mixed too.
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
    """Load hook: keep the present `fused` and `foreach`, for which torch converts the state."""
    saved, groups = state["param_groups"], optimizer.param_groups
    if len(saved) != len(groups):
        return None  # torch raises an error
    present = [{name: g[name] for name in _IMPLEMENTATION if name in g} for g in groups]
    merged = [old | new for old, new in zip(saved, present, strict=True)]
    return {**state, "param_groups": merged}


def _match_strides(optimizer: Optimizer) -> None:
    """Load hook: give state the strides of its parameter, which fused kernels take for granted."""
    for group in optimizer.param_groups:
        for param in group["params"] if group.get("fused") else ():
            state = optimizer.state.get(param, {})
            for name, value in state.items():
                is_alike = isinstance(value, Tensor) and value.shape == param.shape
                if is_alike and value.stride() != param.stride():
                    empty = torch.empty_like(param, dtype=value.dtype, requires_grad=False)
                    state[name] = empty.copy_(value)
