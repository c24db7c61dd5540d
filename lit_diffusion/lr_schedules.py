"""Learning rate schedules: a linear warm-up, then constant, linear or cosine.

Each is a torch LambdaLR whose factor is a pure function of the optimizer step, so it resumes
exactly. Settings are not saved in the checkpoint: a run that is resumed with another length follows
the new length.
"""

import math
import warnings
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


class WarmupConstant(LambdaLR):
    """lr rises over `warmup_steps`, then stays constant.

    Args:
        optimizer: its lr is the constant.
        warmup_steps: optimizer steps until the full lr; the first step uses 1 / warmup_steps of it.
            0 is no warm-up.

    Raises:
        ValueError: if warmup_steps is negative.
    """

    def __init__(self, optimizer: Optimizer, warmup_steps: int = 0) -> None:
        if warmup_steps < 0:
            raise ValueError(f"warmup_steps must be >= 0, got {warmup_steps}.")
        self.warmup_steps = warmup_steps
        super().__init__(optimizer, self.factor)

    def factor(self, step: int) -> float:
        """Factor on the lr in step `step`, counted from 0."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        return 1.0

    def state_dict(self) -> dict[str, Any]:
        """State of LambdaLR, without the settings of this class."""
        settings = ("warmup_steps", "total_steps", "final_factor")
        return {k: v for k, v in super().state_dict().items() if k not in settings}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume at the saved step, with the lr that this object's settings give for it."""
        super().load_state_dict(state_dict)
        self._last_lr = [lr * self.factor(self.last_epoch) for lr in self.base_lrs]
        for group, lr in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            group["lr"] = lr


class WarmupLinear(WarmupConstant):
    """lr rises over `warmup_steps`, then falls linearly to `final_factor` times its peak.

    Args:
        optimizer: its lr is the peak.
        total_steps: optimizer steps of the whole run, warm-up included; None lets DiffusionModule
            set it from the Trainer.
        warmup_steps: optimizer steps until the full lr.
        final_factor: factor on the lr at `total_steps`, one step after the last.

    Raises:
        ValueError: if total_steps <= warmup_steps.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int | None = None,
        warmup_steps: int = 0,
        final_factor: float = 0.0,
    ) -> None:
        if total_steps is not None and total_steps <= warmup_steps:
            raise ValueError(
                f"total_steps must exceed warmup_steps, got {total_steps} and {warmup_steps}."
            )
        self.total_steps = total_steps
        self.final_factor = final_factor
        super().__init__(optimizer, warmup_steps)

    def factor(self, step: int) -> float:
        """Factor on the lr in step `step`, counted from 0."""
        if step < self.warmup_steps or step == 0:
            return super().factor(step)
        if self.total_steps is None:
            raise ValueError(
                f"{type(self).__name__} needs the length of the run; pass total_steps, in "
                "optimizer steps."
            )
        if step >= self.total_steps:
            return self.final_factor
        done = (step - self.warmup_steps) / (self.total_steps - self.warmup_steps)
        return self.final_factor + (1 - self.final_factor) * self.decay(done)

    def set_total_steps(self, total_steps: int) -> None:
        """Set the length of the run, in optimizer steps; warns if it ends within the warm-up."""
        if total_steps <= self.warmup_steps:
            warnings.warn(
                f"a warm-up of {self.warmup_steps} steps is all of this run of {total_steps}; "
                "lower warmup_steps or raise max_steps.",
                stacklevel=2,
            )
        self.total_steps = total_steps

    def decay(self, done: float) -> float:
        """Falls from 1 to 0 as `done` goes from 0 to 1."""
        return 1 - done


class WarmupCosine(WarmupLinear):
    """lr rises over `warmup_steps`, then falls as a cosine to `final_factor` times its peak.

    Source: Loshchilov & Hutter 2017 (SGDR), Eq. 5, without restarts.
    """

    def decay(self, done: float) -> float:
        """(1 + cos(pi done)) / 2."""
        return (1 + math.cos(math.pi * done)) / 2
