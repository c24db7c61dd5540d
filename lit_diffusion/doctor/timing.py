"""How long a run would take: a few samples and steps on this machine, measured and extrapolated.

Everything here is bounded: what a measurement would take is foretold from a smaller one, and
sampling is broken off when its time is over.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from lit_diffusion.doctor.plan import Evaluation, Plan
from lit_diffusion.doctor.report import Finding, count, duration, note, ok, share, warning
from lit_diffusion.protocols import Denoised, NonFiniteSamples, Process, Solver

MUCH = 0.5
"""Share of a run from which the time of measuring is told."""


LONG = 7 * 86_400
"""Seconds from which a run on a CPU is taken for one that is meant for a GPU."""


@dataclass(frozen=True)
class Timing:
    """Seconds on one process of this machine.

    Attributes:
        device: that it was measured on.
        is_cpu: whether that is no GPU.
        step: of an optimizer step; None where not known.
        step_how: what was measured for it.
        image: of a sample; None where not known.
        image_how: what was measured for it.
        feature: of a sample's features; None where not known.
    """

    device: str
    is_cpu: bool = True
    step: float | None = None
    step_how: str = ""
    image: float | None = None
    image_how: str = ""
    feature: float | None = None


def check_timing(plan: Plan, timing: Timing) -> list[Finding]:
    """What the run takes, and which share of it goes into looking at it."""
    if timing.step is None or plan.steps_to_go is None:
        return []
    training = timing.step * plan.steps_to_go
    validation, evaluation, grids = (
        validation_seconds(plan, timing),
        evaluation_seconds(plan, timing),
        grid_seconds(plan, timing),
    )
    total = training + validation + evaluation + grids
    told = f"about {duration(total)} on {timing.device} (estimate: {duration(timing.step)} a step, "
    told += f"{timing.step_how})"
    if total > LONG and timing.is_cpu:
        told += "; ask again on the machine that is to train"
    found = [note("time", told)]
    if timing.image is None:
        found.append(note("time", "how long sampling takes is not known."))
    if validation > MUCH * total:
        part = share(validation / total)
        text = f"about {part} of the time goes into validation; raise val_check_interval, or hold "
        found.append(warning("validation time", f"{text}out fewer images."))
    return [*found, *_check_sampling(plan, timing, evaluation, grids, total)]


def _check_sampling(
    plan: Plan, timing: Timing, evaluation: float, grids: float, total: float
) -> list[Finding]:
    both = evaluation + grids
    if not both:
        return []
    rounds = sum(rounds_of(each, plan) for each in plan.evaluations)
    told = f"about {share(both / total)} of the time: {count(rounds, 'FID')} of "
    told += f"{duration(evaluation / rounds)} each" if rounds else "no time"
    told += f" and {duration(grids)} for grids ({timing.image_how}"
    told += ")" if timing.feature or not rounds else "; without their features)"
    if both > MUCH * total:
        fix = "evaluate more rarely (every_n_steps), on fewer samples, or with fewer solver steps."
        return [warning("evaluation time", f"{told}; {fix}")]
    return [ok("evaluation time", told)]


def rounds_of(evaluation: Evaluation, plan: Plan) -> int:
    """FIDs that are measured, repeats included."""
    return (plan.times(evaluation.every_n_steps) or 0) + evaluation.repeats_at_end


def evaluation_seconds(plan: Plan, timing: Timing) -> float:
    """Of all FIDs; the ranks share the samples."""
    each = (timing.image or 0.0) + (timing.feature or 0.0)
    shares = sum(
        rounds_of(e, plan) * math.ceil(e.num_samples / (plan.ranks or 1)) for e in plan.evaluations
    )
    return each * shares


def grid_seconds(plan: Plan, timing: Timing) -> float:
    """Of all grids of samples; each rank generates all of one."""
    drawn = sum(grid.num * (plan.times(grid.every_n_steps) or 0) for grid in plan.grids)
    return (timing.image or 0.0) * drawn


def validation_seconds(plan: Plan, timing: Timing) -> float:
    """Of all validations: an image takes a third of what training on it takes."""
    if not plan.val_images or timing.step is None or not plan.batch_size:
        return 0.0
    each = timing.step / (plan.batch_size * plan.accumulate) / 3
    return each * math.ceil(plan.val_images / (plan.ranks or 1)) * (plan.times(None) or 0)


# Measuring


def solver_times(solver: Solver, process: Process) -> list[float]:
    """Times at which a solver asks the network, found by solving with one that costs nothing."""
    asked: list[float] = []

    def denoise(x_t: Tensor, t: Tensor) -> Denoised:
        asked.append(float(t[0]))
        return Denoised(torch.zeros_like(x_t), torch.zeros_like(x_t), torch.zeros_like(x_t))

    solver.sample(denoise, process, torch.zeros(1, 1, 1, 1), torch.zeros_like)
    return asked


class TimeIsOver(Exception):
    """Raised inside a measurement that has taken its time."""


@dataclass
class Calls:
    """Calls of a network while it was watched.

    Attributes:
        done: how many.
        seconds: from the first to the end of the last.
    """

    done: int = 0
    seconds: float = 0.0


@contextmanager
def watched(network: nn.Module, limit: float) -> Iterator[Calls]:
    """Context that counts calls of a network, and ends with the first after `limit` seconds."""
    calls, began = Calls(), time.monotonic()

    def count_call(module: nn.Module, args: Any, output: Any) -> None:
        _wait_for_device()
        calls.done += 1
        calls.seconds = time.monotonic() - began
        if calls.seconds > limit:
            raise TimeIsOver

    hook = network.register_forward_hook(count_call)
    try:
        yield calls
    except (TimeIsOver, NonFiniteSamples):  # untrained weights may well give such
        pass
    finally:
        hook.remove()


def sampling_seconds(
    generate: Callable[[int], object],
    network: nn.Module,
    total_calls: int,
    batch_size: int,
    limit: float,
) -> tuple[float, str]:
    """Seconds of a sample, and what was measured: one, then as many as one call has time for.

    Args:
        generate: makes so many samples.
        network: whose calls are counted.
        total_calls: of it, that a sample takes.
        batch_size: samples at a time, at most.
        limit: seconds that may be spent, but for a call that has begun.
    """
    with watched(network, limit / 2) as calls:
        generate(1)
    a_call = calls.seconds / calls.done
    each, how = a_call * total_calls, "1 sample"
    num = min(batch_size, int(limit / 4 / max(a_call, 1e-9)))
    if num > 1:
        with watched(network, limit / 2) as calls:
            generate(num)
        each, how = calls.seconds * total_calls / calls.done / num, f"{num} samples"
    done = "" if calls.done >= total_calls else f", {calls.done} of {total_calls} network calls"
    return each, f"measured on {how}{done}"


def forward_seconds(
    call: Callable[[int], object], batch_size: int, limit: float
) -> tuple[float, str]:
    """Seconds of a call on a batch, and what was measured: more and more of it while time allows.

    Args:
        call: on so many images.
        batch_size: that is wanted.
        limit: seconds that may be spent, but for the first image.
    """
    num, left = 1, limit
    while True:
        seconds = timed(lambda n=num: call(n))  # type: ignore[misc]
        left -= 2 * seconds
        following = min(4 * num, batch_size)
        if num == following or 2 * seconds * following / num > left:
            how = "image" if num == 1 else "images"
            return seconds * batch_size / num, f"from forward passes of {num} {how}"
        num = following


class Stopwatch(Callback):
    """Times optimizer steps, and stops the Trainer when the time is over.

    Args:
        limit: seconds; the step that has begun is ended.
        skip: steps that are not counted, in which memory is made ready.
    """

    def __init__(self, limit: float, skip: int = 2) -> None:
        self._limit = limit
        self._skip = skip
        self._start = (0.0, 0)
        self._began = 0.0
        self.seconds = math.nan
        self.steps = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start."""
        self._began = time.monotonic()
        self._start = (self._began, 0)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Look at the clock."""
        _wait_for_device()
        now, step = time.monotonic(), trainer.global_step
        if step > self._start[1]:
            self.steps = step - self._start[1]
            self.seconds = (now - self._start[0]) / self.steps
            if step <= self._skip:
                self._start = (now, step)
        if now - self._began > self._limit:
            trainer.should_stop = True


def timed(call: Callable[[], object]) -> float:
    """Seconds of the second call: the first makes memory ready."""
    call()
    _wait_for_device()
    began = time.monotonic()
    call()
    _wait_for_device()
    return time.monotonic() - began


def forward_context(trainer: Trainer | None) -> AbstractContextManager[Any]:
    """That in which the Trainer's precision computes; float32's without a Trainer."""
    if trainer is None:
        return nullcontext()
    return trainer.precision_plugin.forward_context()


def _wait_for_device() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
