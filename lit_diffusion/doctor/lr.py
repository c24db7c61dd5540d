"""How the lr goes over a run: read from our schedules, and found by running those of others."""

import warnings
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn

from lit_diffusion.doctor.plan import LRSchedule
from lit_diffusion.modules.diffusion import DiffusionModule

MOST = 1_000_000
"""Steps that a schedule is run for, at some microseconds each; longer runs are not looked at."""


def arguments_of(spec: Any) -> dict[str, Any]:
    """Arguments in what a config says of an object."""
    return dict(spec.get("init_args") or {}) if isinstance(spec, dict) else {}


def lr_of(spec: Any, module: LightningModule, steps: int | None) -> LRSchedule | None:
    """The schedule of the lr; None without one.

    Args:
        spec: what the config says of it.
        module: that steps it.
        steps: optimizer steps of the run; None where not known.
    """
    if not isinstance(spec, dict):
        return None
    name, arguments = spec["class_path"].rpartition(".")[2], arguments_of(spec)
    ours = spec["class_path"].startswith("lit_diffusion.")
    length = arguments.get("total_steps", arguments.get("T_max"))
    schedule = LRSchedule(
        name=name,
        warmup_steps=(arguments.get("warmup_steps") or 0) if ours else None,
        length=length,
        follows_run=ours and "total_steps" in arguments and length is None,
        final_factor=arguments.get("final_factor") or 0.0,
    )
    if not isinstance(module, DiffusionModule):
        return schedule
    known = 0 if ours or not steps or steps > MOST else steps
    return _tried(schedule, module, known)


def _tried(schedule: LRSchedule, module: DiffusionModule, steps: int) -> LRSchedule:
    """With its warm-up, or what it raises, found by running it beside a number; built for 0."""
    try:
        lrs = lrs_of(module, steps)
    except ScheduleError as error:
        return replace(schedule, fault=str(error))
    except Exception:  # it needs a metric, or the optimizer weights of another shape
        return schedule
    if not lrs:
        return schedule
    length = end_of(lrs) if schedule.length is None else schedule.length
    return replace(schedule, warmup_steps=warmup_of(lrs), length=length)


class ScheduleError(ValueError):
    """What a schedule says against its own arguments, or against further steps."""


def lrs_of(module: DiffusionModule, steps: int) -> list[float]:
    """The lr of each optimizer step, of the first group, by the module's own schedule.

    Raises:
        ScheduleError: where the schedule ends before, as OneCycleLR does.
    """
    assert module._make_lr_scheduler is not None
    optimizer = module._make_optimizer([nn.Parameter(torch.zeros(()))])
    lrs = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no step of the optimizer is made between these
        try:
            scheduler = module._make_lr_scheduler(optimizer)
            for _ in range(steps):
                lrs.append(float(optimizer.param_groups[0]["lr"]))
                scheduler.step()
        except ValueError as error:
            raise ScheduleError(str(error)) from error
    return lrs


def warmup_of(lrs: list[float]) -> int:
    """Optimizer steps until the highest lr, but for rounding; 0 where the first step has it.

    Example:
        >>> warmup_of([0.1, 0.2, 0.3, 0.3, 0.1]), warmup_of([0.3, 0.2])
        (3, 0)
    """
    peak = max(lrs) * (1 - 1e-9)
    before = next(step for step, lr in enumerate(lrs) if lr >= peak)
    return before + 1 if before else 0


def end_of(lrs: list[float]) -> int | None:
    """Optimizer steps before those at the end that have an lr of 0; None without such.

    Example:
        >>> end_of([0.2, 0.0, 0.1, 0.0, 0.0]), end_of([0.2, 0.1])
        (3, None)
    """
    steps = len(lrs)
    while steps and lrs[steps - 1] == 0:
        steps -= 1
    return None if steps == len(lrs) else steps
