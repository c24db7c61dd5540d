"""Progress as plain lines, for batch systems and pipes, where a bar would be thousands of lines."""

import math
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.trainer.states import TrainerFn

from lit_diffusion.system.trainer_state import steps_of_run


def progress_line(
    step: int, total: float, epoch: int, metrics: Mapping[str, float], seconds: float, done: int
) -> str:
    """One line that says how far training is; `done` steps took this process `seconds`.

    Example:
        >>> progress_line(20, 100, 1, {"train/loss": 0.123456}, seconds=10.0, done=20)
        'step 20/100  epoch 1  train/loss 0.1235  2.0 steps/s  0:00:40 left'
    """
    parts = [f"step {step}" + (f"/{total:.0f}" if total < float("inf") else ""), f"epoch {epoch}"]
    parts += [f"{name} {value:.4g}" for name, value in metrics.items()]
    return "  ".join([*parts, *pace("step", done, total - step, seconds)])


def pace(unit: str, done: int, left: float, seconds: float) -> list[str]:
    """How fast that is, and how long the rest will take.

    Example:
        >>> pace("image", 20, 80, seconds=40.0)
        ['2.0 s/image', '0:02:40 left']
    """
    rate = done / max(seconds, 1e-9)
    parts = [f"{rate:.1f} {unit}s/s" if rate >= 1 else f"{1 / max(rate, 1e-9):.1f} s/{unit}"]
    if left < float("inf") and rate > 0:
        parts.append(f"{timedelta(seconds=round(left / rate))} left")
    return parts


class PlainProgress(ProgressBar):
    """Prints a line every so many seconds, at the first and last step and after each validation.

    Rank zero only. It takes the place of the Trainer's bar.

    Args:
        every_n_seconds: between lines, > 0.

    Example:
        >>> trainer = Trainer(callbacks=[PlainProgress()], logger=False, accelerator="cpu")
    """

    def __init__(self, every_n_seconds: float = 10.0) -> None:
        super().__init__()
        if not every_n_seconds > 0:
            raise ValueError(f"every_n_seconds must be > 0, got {every_n_seconds}.")
        self.every_n_seconds = every_n_seconds
        self._enabled = True
        self._start = (0.0, 0)
        self._total = math.inf
        self._last_line = 0.0

    def disable(self) -> None:
        """Print no more: called on every rank but the first."""
        self._enabled = False

    def enable(self) -> None:
        """Print again."""
        self._enabled = True

    def print(self, *args: Any, **kwargs: Any) -> None:
        """What the module prints through `self.print`."""
        if self._enabled:
            print(*args, **kwargs, flush=True)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        super().on_train_start(trainer, pl_module)
        self._start = (time.monotonic(), trainer.global_step)
        self._total = steps_of_run(trainer) or math.inf
        self._last_line = float("-inf")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Print where a line is due."""
        due = time.monotonic() - self._last_line >= self.every_n_seconds
        if due or trainer.global_step == self._total:
            self._line(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the validation's metrics."""
        if not trainer.sanity_checking and trainer.state.fn == TrainerFn.FITTING:
            self._line(trainer, pl_module)

    def _line(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._enabled:
            return
        metrics = {k: v for k, v in self.get_metrics(trainer, pl_module).items() if k != "v_num"}
        numbers = {k: float(v) for k, v in metrics.items() if not isinstance(v, str | dict)}
        self._last_line = time.monotonic()
        start, first = self._start
        seconds, done = self._last_line - start, trainer.global_step - first
        where = trainer.global_step, self._total, trainer.current_epoch
        print(progress_line(*where, numbers, seconds, done), file=sys.stderr, flush=True)
