"""Progress by optimizer steps: a bar on a terminal; plain lines for batch systems and pipes."""

import logging
import math
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar, TQDMProgressBar
from lightning.pytorch.trainer.states import TrainerFn
from tqdm.contrib.logging import logging_redirect_tqdm

from lit_diffusion.callbacks.trainer_state import total_steps


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
    if not done:
        return []
    rate = done / max(seconds, 1e-9)
    parts = [f"{rate:.1f} {unit}s/s" if rate >= 1 else f"{1 / rate:.1f} s/{unit}"]
    if left < float("inf"):
        parts.append(f"{timedelta(seconds=round(max(left, 0) / rate))} left")
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
        self._total = _total(trainer) or math.inf
        self._last_line = float("-inf")

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
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


class StepBar(TQDMProgressBar):
    """The Trainer's bar, by the optimizer steps of the whole run, not by the batches of an epoch.

    Its rate and the time that is left include validations. What is logged meanwhile goes above it.

    Example:
        >>> trainer = Trainer(callbacks=[StepBar()], logger=False, accelerator="cpu")
    """

    def __init__(self) -> None:
        super().__init__()
        self._redirected = ExitStack()

    def on_train_start(self, trainer: Trainer, *args: Any) -> None:
        """Begin where the run does."""
        super().on_train_start(trainer, *args)
        bar = self.train_progress_bar
        bar.total, bar.unit = _total(trainer), "step"
        bar.n = bar.initial = bar.last_print_n = trainer.global_step
        self.on_train_epoch_start(trainer)  # not called in the middle of an epoch
        loggers = (logging.getLogger("lightning.pytorch"), logging.root)
        printing = [logger for logger in loggers if self.is_enabled and _prints(logger)]
        self._redirected.enter_context(logging_redirect_tqdm(printing))

    def on_train_epoch_start(self, trainer: Trainer, *args: Any) -> None:
        """Name the epoch."""
        self.train_progress_bar.set_description(f"epoch {trainer.current_epoch}", refresh=False)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Move, and show metrics where the bar is drawn."""
        bar = self.train_progress_bar
        if bar.update(trainer.global_step - bar.n):
            bar.set_postfix(self.get_metrics(trainer, pl_module))

    def on_train_end(self, *args: Any) -> None:
        """Close the bar."""
        super().on_train_end(*args)
        self._redirected.close()

    def on_exception(self, *args: Any) -> None:
        """Let the log go its usual way."""
        self._redirected.close()


def _total(trainer: Trainer) -> int | None:
    """Steps of the run, as `global_step` counts them: those of several optimizers together."""
    if len(trainer.optimizers) > 1:
        return trainer.max_steps if trainer.max_steps > 0 else None
    return total_steps(trainer)


def _prints(logger: logging.Logger) -> bool:
    console = (sys.stdout, sys.stderr)
    return any(getattr(handler, "stream", None) in console for handler in logger.handlers)
