"""Show progress in optimizer steps: as a bar in a terminal, or as plain lines elsewhere."""

import logging
import math
import sys
import time
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar, TQDMProgressBar
from lightning.pytorch.trainer.states import TrainerFn
from tqdm.contrib.logging import logging_redirect_tqdm

from lit_diffusion.callbacks.trainer_state import may_read, should_log, total_steps


def format_speed(unit: str, done: int, left: float, seconds: float) -> list[str]:
    """Format the speed and the remaining time of a process.

    `done` units have finished in `seconds`, and `left` units remain. If the number of remaining
    units is unknown, pass `left=math.inf`.

    Example:
        >>> format_speed("image", 20, 80, seconds=40.0)
        ['2.0 s/image', '0:02:40 left']
    """
    if not done:
        return []
    rate = done / max(seconds, 1e-9)
    parts = [f"{rate:.1f} {unit}s/s" if rate >= 1 else f"{1 / rate:.1f} s/{unit}"]
    seconds_left = max(left, 0) / rate
    if seconds_left < 1e13:  # a timedelta cannot be longer than 2.7 million years
        parts.append(f"{timedelta(seconds=round(seconds_left))} left")
    return parts


class LoggedLoss(ProgressBar):
    """Base class of progress bars that show train/loss without waiting for the GPU in each batch.

    On a GPU, the bar shows the loss of the last logging step. Modules should log train/loss
    without `prog_bar=True`, because with `prog_bar=True`, Lightning waits for the GPU in each
    batch.
    """

    _loss: float | None = None

    def on_train_start(self, trainer: Trainer, *args: Any) -> None:
        """Forget the loss of an earlier fit."""
        super().on_train_start(trainer, *args)
        self._loss = None

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Read the loss in steps in which metrics are logged."""
        if should_log(trainer):
            self._read_loss(trainer)

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """Return the loss, and the metrics that are logged with `prog_bar=True`."""
        if may_read(trainer):
            self._read_loss(trainer)
        loss = {} if self._loss is None else {"train/loss": self._loss}
        return {**loss, **super().get_metrics(trainer, pl_module)}

    def _read_loss(self, trainer: Trainer) -> None:
        if (loss := trainer.callback_metrics.get("train/loss")) is not None:
            self._loss = float(loss)


class PlainProgress(LoggedLoss):
    """Prints a line of progress every few seconds, and after the last step and each validation.

    The first line is printed after the first batch. Only rank 0 prints. This callback replaces the
    Trainer's progress bar.

    Args:
        every_n_seconds: seconds between lines, > 0.
    """

    def __init__(self, every_n_seconds: float = 10.0) -> None:
        super().__init__()
        if not every_n_seconds > 0:
            raise ValueError(f"every_n_seconds must be > 0, got {every_n_seconds}.")
        self.every_n_seconds = every_n_seconds
        self._is_enabled = True
        self._start_time, self._start_step = 0.0, 0
        self._total = math.inf
        self._last_line = 0.0  # time of the last line

    def disable(self) -> None:
        """Stop printing; Lightning calls this on all ranks except rank 0."""
        self._is_enabled = False

    def enable(self) -> None:
        """Resume printing."""
        self._is_enabled = True

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print a text. `LightningModule.print` calls this method."""
        if self._is_enabled:
            print(*args, **kwargs, flush=True)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        super().on_train_start(trainer, pl_module)
        self._start_time, self._start_step = time.monotonic(), trainer.global_step
        self._total = _total_steps(trainer) or math.inf
        self._last_line = -math.inf

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Print a line if one is due."""
        super().on_train_batch_end(trainer, pl_module)
        is_due = time.monotonic() - self._last_line >= self.every_n_seconds
        if is_due or trainer.global_step == self._total:
            self._print_line(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the metrics of the validation."""
        if not trainer.sanity_checking and trainer.state.fn == TrainerFn.FITTING:
            self._print_line(trainer, pl_module)

    def _print_line(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._is_enabled:
            return
        self._last_line = time.monotonic()
        step, total, seconds = trainer.global_step, self._total, self._last_line - self._start_time
        count = f"step {step}" + (f"/{total:.0f}" if total < math.inf else "")
        metrics = [
            f"{name} {float(value):.4g}"
            for name, value in self.get_metrics(trainer, pl_module).items()
            if name != "v_num" and not isinstance(value, str | dict)
        ]
        speed = format_speed("step", step - self._start_step, total - step, seconds)
        line = "  ".join([count, f"epoch {trainer.current_epoch}", *metrics, *speed])
        print(line, file=sys.stderr, flush=True)


class StepBar(LoggedLoss, TQDMProgressBar):
    """Progress bar that counts the optimizer steps of the whole run, not the batches of an epoch.

    The displayed speed and remaining time take the time of validations into account. Lines that
    Python loggers print to the terminal appear above the bar.
    """

    def __init__(self) -> None:
        super().__init__()
        self._log_redirection = ExitStack()

    def on_train_start(self, trainer: Trainer, *args: Any) -> None:
        """Start the bar at the current step of the run."""
        super().on_train_start(trainer, *args)
        bar = self.train_progress_bar
        bar.total, bar.unit = _total_steps(trainer), "step"
        bar.n = bar.initial = bar.last_print_n = trainer.global_step
        self.on_train_epoch_start(trainer)  # Lightning does not call it in the middle of an epoch
        console = (sys.stdout, sys.stderr)
        loggers = [
            logger
            for logger in (logging.getLogger("lightning.pytorch"), logging.root)
            if any(getattr(handler, "stream", None) in console for handler in logger.handlers)
        ]
        if self.is_enabled:
            self._log_redirection.enter_context(logging_redirect_tqdm(loggers))

    def on_train_epoch_start(self, trainer: Trainer, *args: Any) -> None:
        """Show the number of the epoch."""
        self.train_progress_bar.set_description(f"epoch {trainer.current_epoch}", refresh=False)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Advance the bar. If the bar is redrawn, show metrics."""
        LoggedLoss.on_train_batch_end(self, trainer, pl_module)
        bar = self.train_progress_bar
        if bar.update(trainer.global_step - bar.n):
            bar.set_postfix(self.get_metrics(trainer, pl_module))

    def on_train_end(self, *args: Any) -> None:
        """Close the bar."""
        super().on_train_end(*args)
        self._log_redirection.close()

    def on_exception(self, *args: Any) -> None:
        """Let Python loggers print to the terminal directly again."""
        self._log_redirection.close()


def _total_steps(trainer: Trainer) -> int | None:
    """Return the steps of all optimizers in the whole run; None if the run has no end.

    The Trainer's `global_step` counts in the same way.
    """
    if len(trainer.optimizers) > 1:
        return trainer.max_steps if trainer.max_steps > 0 else None
    return total_steps(trainer)
