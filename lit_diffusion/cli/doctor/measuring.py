"""Seconds of samples, forward passes and training steps, each measured within a limit."""

import time
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lit_diffusion.modules.diffusion import DiffusionModule
from lit_diffusion.protocols import Denoise, NonFiniteSamples, Process
from lit_diffusion.solvers.steps import solver_times


def sampling_seconds(module: DiffusionModule, batch_size: int, limit: float) -> tuple[float, str]:
    """Seconds of a sample, and what was measured: one call of the network of all that it takes."""
    solver, times = module.solver, solver_times(module.solver, module.process)

    def first_call(denoise: Denoise, process: Process, noise: Tensor, *_: object) -> Tensor:
        t = torch.full((len(noise),), float(times[0]), dtype=torch.float64, device=noise.device)
        return denoise(noise, t).x0

    def generate(num: int) -> None:
        with suppress(NonFiniteSamples):  # untrained weights may well give such
            module.generate(range(num))

    module.solver = SimpleNamespace(sample=first_call)
    try:
        seconds, num = seconds_of(generate, batch_size, limit)
    finally:
        module.solver = solver
    how = f"measured on one of {len(times)} network calls, of {num} at a time"
    return seconds * len(times) / batch_size, how


def seconds_of(call: Callable[[int], object], batch_size: int, limit: float) -> tuple[float, int]:
    """Seconds of a call on a batch, and how much of it was measured: more while time allows."""
    num, left = 1, limit
    while True:
        call(num)  # makes memory ready
        began = _now()
        call(num)
        seconds = _now() - began
        left -= 2 * seconds
        following = min(4 * num, batch_size)
        if num == following or 2 * seconds * following / num > left:
            return seconds * batch_size / num, num
        num = following


class Stopwatch(Callback):
    """Times optimizer steps, and stops the Trainer after `limit` seconds."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._times: list[float] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start."""
        self._times = [_now()]

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Look at the clock."""
        now = _now()
        if trainer.global_step >= len(self._times):
            self._times.append(now)
        trainer.should_stop |= now - self._times[0] > self._limit

    @property
    def steps(self) -> int:
        """That were counted: where there are more, not the two in which memory is made ready."""
        return max(len(self._times) - 3, min(len(self._times) - 1, 1))

    @property
    def seconds(self) -> float:
        """Of one of them."""
        return (self._times[-1] - self._times[-1 - self.steps]) / self.steps


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.monotonic()
