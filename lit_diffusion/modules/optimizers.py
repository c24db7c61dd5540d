"""Create a module's optimizer (with fused kernels on a GPU) and its learning-rate schedule."""

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lit_diffusion.callbacks.trainer_state import is_dtensor
from lit_diffusion.lr_schedules import WarmupLinear
from lit_diffusion.optimizers import MuonAdamW
from lit_diffusion.protocols import NormalizesWeights

_IMPLEMENTATION = ("fused", "foreach")  # options that select the kernels of an update


def optimizer_and_schedule(
    module: nn.Module,
    make_optimizer: Callable[[Iterable[Parameter]], Optimizer],
    make_schedule: Callable[[Optimizer], Any] | None,
    total_steps: Callable[[], int | None],
) -> OptimizerLRScheduler:
    """Create optimizer and learning-rate schedule, in the form of Lightning's configure_optimizers.

    The optimizer trains the parameters of the module that require a gradient. If it is a
    `MuonAdamW`, this function calls its method `attach(module)`. After each step of the optimizer,
    networks with a method `normalize_weights` normalize their weights. Lightning steps the schedule
    once per optimizer step. With `make_schedule=None`, the learning rate is constant.

    Args:
        module: module to train.
        make_optimizer: function that creates the optimizer from the parameters.
        make_schedule: function that creates the schedule from the optimizer, or None.
        total_steps: function that returns the number of optimizer steps of the whole run, or None
            if the run is unlimited. It is called only if the schedule needs this number but was
            created without it.

    Raises:
        ValueError: if the schedule needs the length of the run, but the run is unlimited, or if the
            schedule is `ReduceLROnPlateau`.

    Example:
        >>> from lit_diffusion.lr_schedules import WarmupCosine
        >>> module = torch.nn.Linear(2, 1)
        >>> result = optimizer_and_schedule(module, torch.optim.Adam, WarmupCosine, lambda: 1000)
        >>> result["lr_scheduler"]["scheduler"].total_steps
        1000
    """
    parameters = [param for param in module.parameters() if param.requires_grad]
    optimizer = with_fused_kernels(make_optimizer(parameters))
    if isinstance(optimizer, MuonAdamW):
        optimizer.attach(module)
    if networks := [part for part in module.modules() if isinstance(part, NormalizesWeights)]:
        optimizer.register_step_post_hook(lambda *_: _normalize_weights(networks))
    if make_schedule is None:
        return optimizer
    schedule = make_schedule(optimizer)
    if isinstance(schedule, ReduceLROnPlateau):
        raise ValueError(
            "the lr schedule must depend on the optimizer step only, but ReduceLROnPlateau needs a "
            "metric; use another schedule, such as WarmupCosine, or override configure_optimizers."
        )
    if isinstance(schedule, WarmupLinear) and schedule.total_steps is None:
        if (steps := total_steps()) is None:
            raise ValueError(
                "the lr schedule needs the length of the run, but this Trainer has no limit; pass "
                "max_steps to the Trainer or total_steps to the schedule."
            )
        schedule.set_total_steps(steps)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def _normalize_weights(networks: Iterable[NormalizesWeights]) -> None:
    for network in networks:
        network.normalize_weights()


def with_fused_kernels(optimizer: Optimizer) -> Optimizer:
    """Set fused=True in torch's Adam, AdamW or SGD if all parameters are on GPUs.

    The function leaves `fused` unchanged if the optimizer was created with `fused`, `foreach` or
    `differentiable`, or if a parameter is complex.

    When the optimizer loads a checkpoint, it keeps its own `fused` and `foreach`, and converts the
    loaded state to the memory format of the weights. Therefore, a run may be resumed on another
    device, with another value of `fused`, or in another memory format.

    If fused=True is passed to the optimizer's constructor, the optimizer itself unscales the
    gradients of precision=16-mixed. For this reason, Lightning does not allow `gradient_clip_val`
    with such an optimizer in 16-mixed and bf16-mixed. If this function sets fused=True instead, the
    GradScaler unscales the gradients, and clipping is allowed.
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
    """Load hook: replace the saved `fused` and `foreach` with the optimizer's current options."""
    saved, groups = state["param_groups"], optimizer.param_groups
    if len(saved) != len(groups):
        return None  # torch raises an error
    present = [{name: g[name] for name in _IMPLEMENTATION if name in g} for g in groups]
    merged = [old | new for old, new in zip(saved, present, strict=True)]
    return {**state, "param_groups": merged}


def _match_strides(optimizer: Optimizer) -> None:
    """Load hook: give the state the strides of its parameter, because fused kernels assume them."""
    for group in optimizer.param_groups:
        for param in group["params"] if group.get("fused") else ():
            state = optimizer.state.get(param, {})
            for name, value in state.items():
                is_alike = isinstance(value, Tensor) and value.shape == param.shape
                if is_alike and value.stride() != param.stride():
                    empty = torch.empty_like(param, dtype=value.dtype, requires_grad=False)
                    state[name] = empty.copy_(value)
