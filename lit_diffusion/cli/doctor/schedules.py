"""Whether what changes over a run, lr, averages and curricula, fits its length."""

import math
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

from lightning.pytorch import Callback
from torch.optim.lr_scheduler import CosineAnnealingLR, ReduceLROnPlateau

from lit_diffusion.callbacks.ema import EMA
from lit_diffusion.callbacks.parts.averages import warmup_decay
from lit_diffusion.callbacks.power_ema import PowerEMA
from lit_diffusion.cli.doctor.plan import Plan
from lit_diffusion.cli.doctor.report import Finding, note, ok, problem, share, warning
from lit_diffusion.lr_schedules import WarmupConstant

MOST = 1_000_000
"""Steps that a schedule is run for, at some microseconds each; longer runs are not looked at."""


def check_lr(scheduler: Any, plan: Plan) -> Iterator[Finding]:
    """Whether a schedule of the lr is as long as the run, found by running it, which spends it."""
    name, steps = type(scheduler).__name__, plan.length
    if steps is None:
        if plan.steps is not None:
            yield ok("lr", f"{name}, for ever")
        return
    length = getattr(scheduler, "total_steps", None) or getattr(scheduler, "T_max", None)
    if isinstance(scheduler, WarmupConstant):
        yield _compare(scheduler, scheduler.warmup_steps, length, steps)
    elif isinstance(scheduler, ReduceLROnPlateau) or steps > MOST:
        yield note("lr", f"{name}; whether it warms up is not known.")
    else:
        try:
            lrs = lrs_of(scheduler, steps)
        except Exception as error:  # it may be of somebody else
            yield problem("lr", f"{name} fails: {error}")
            return
        yield _compare(scheduler, warmup_of(lrs), length or end_of(lrs), steps)


def _compare(scheduler: Any, warmup: int, length: int | None, steps: int) -> Finding:
    name, part = type(scheduler).__name__, share(warmup / steps)
    told = f"the warm-up of {name}, {warmup:,} steps, is "
    if warmup >= steps:
        return problem("lr", f"{told}all of the run of {steps:,}; make it shorter.")
    if warmup > 0.2 * steps:
        return warning("lr", f"{told}{part} of the run of {steps:,}; 1 to 10% is usual.")
    if length is not None and length < steps:
        after = f"train at {getattr(scheduler, 'final_factor', 0.0):g} of the lr"
        if isinstance(scheduler, CosineAnnealingLR):
            after = "let the lr rise again"
        text = f"{name} is over at step {length:,}: the other {steps - length:,} steps {after}"
        return warning("lr", f"{text}; make it as long as the run, {steps:,}.")
    if length is not None and length > steps:
        text = f"{name} is made for {length:,} steps, and the run stops at {steps:,}, before the "
        return warning("lr", f"{text}lr is down; make them equal.")
    warm = f"{warmup:,} steps ({part}) of warm-up" if warmup else "without warm-up"
    return ok("lr", f"{name}, {warm}")


def lrs_of(scheduler: Any, steps: int) -> list[float]:
    """The lr of each optimizer step, of the first group."""
    lrs = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no step of the optimizer is made between these
        for _ in range(steps):
            lrs.append(float(scheduler.optimizer.param_groups[0]["lr"]))
            scheduler.step()
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
    end = max((step for step, lr in enumerate(lrs, 1) if lr), default=0)
    return end if end < len(lrs) else None


def check_course(callback: Callback, plan: Plan) -> Iterator[Finding]:
    """Whether a callback's `num_steps` or `total_steps`, as of CLTS or MDLRC, fit the run's."""
    length = getattr(callback, "num_steps", None) or getattr(callback, "total_steps", None)
    if length is None or plan.length is None:
        return
    name, part = type(callback).__name__, length / plan.length
    if part > 1:
        text = f"takes {length:,} steps, and the run ends at {plan.length:,}: it gets to "
        yield warning(name, f"{text}{share(1 / part)} of its way; shorten it.")
    else:
        yield ok(name, f"{length:,} steps, {share(part)} of the run")


FEWEST_SNAPSHOTS = 20
"""With which widths from 0.02 to 0.25 can be had."""


def half_life(decay: float) -> float:
    """Optimizer steps in which the weight of the past halves."""
    return math.log(0.5) / math.log(decay) if decay > 0 else 0.0


def check_ema(ema: EMA, plan: Plan, looks: Iterable[float | None] = ()) -> list[Finding]:
    """Whether averages, looked at every so many steps, are of trained weights, and recent ones."""
    if plan.length is None:
        return []
    first = min((step for step in looks if step), default=None)
    return [_check_decay(ema, decay, plan, plan.length, first) for decay in ema.decays]


def check_power_ema(ema: PowerEMA, plan: Plan) -> Iterator[Finding]:
    """Whether there will be snapshots enough to tell other widths."""
    widths = f"widths {', '.join(f'{width:g}' for width in ema.decays)} of the run"
    every = ema.snapshot_every_n_steps
    if every is None:
        text = "no snapshots: of other widths, those between alone can be had later; set "
        yield note("PowerEMA", f"{widths}, {text}snapshot_every_n_steps.")
    elif plan.length is not None and plan.length < FEWEST_SNAPSHOTS * every:
        text = f"{plan.length / every:,.0f} snapshots: few other widths can be had from less than"
        yield warning("PowerEMA", f"{widths}, {text} {FEWEST_SNAPSHOTS}; take more.")
    elif plan.length is not None:
        yield ok("PowerEMA", f"{widths}, {plan.length / every:,.0f} snapshots")


def _check_decay(ema: EMA, decay: float, plan: Plan, steps: int, first: float | None) -> Finding:
    half = half_life(warmup_decay(decay, steps) if ema.warmup else decay)  # at the end of the run
    told = f"half-life of {decay:g} is {half:,.0f} steps"
    if plan.global_batch is not None:
        told += f" ({half * plan.global_batch:,.0f} images)"
    if half < half_life(decay):
        told += f" at the end of warm-up (later {half_life(decay):,.0f})"
    told += f", {share(half / steps)} of the run"
    if not ema.warmup and (start := decay**steps) > 0.01:
        text = f"{told}: at its end {share(start)} of the average are still the initial, random "
        advice = f"set warmup: true, or a decay of at most {_decay_for(steps)}."
        return warning("EMA", f"{text}weights; {advice}")
    if half / steps > 0.1:
        text = f"{told}: samples lag that far behind; a decay of {_decay_for(steps)} or less has 5%"
        return warning("EMA", f"{text}.")
    if first is not None and not ema.warmup and (start := decay**first) >= 0.1:
        text = f"without warmup, {share(start)} of the average of {decay:g} are random weights at "
        return note("EMA", f"{text}the first look, step {first:,.0f}.")
    return ok("EMA", told)


def _decay_for(steps: int) -> str:
    """A decay whose half-life is a twentieth of the run, rounded down to a usual one."""
    usual = (0.9, 0.95, 0.99, 0.995, 0.999, 0.9995, 0.9999, 0.99995, 0.99999)
    return f"{max((decay for decay in usual if decay <= 0.5 ** (20 / steps)), default=0.5):g}"
