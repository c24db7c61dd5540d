"""Learning rate schedules: a linear warm-up, and then a constant or decaying lr.

Each schedule is a torch LambdaLR. The learning rate (lr) depends only on the optimizer step and on
the settings of the schedule, so a resumed run continues with exactly the same lr. Checkpoints do
not contain the settings. If you resume a run with a different length, the lr follows the schedule
of the new length.
"""

import math
import warnings
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


class WarmupConstant(LambdaLR):
    """Schedule in which the lr rises linearly over `warmup_steps` and then stays constant.

    Args:
        optimizer: optimizer that was created with the full lr.
        warmup_steps: number of optimizer steps in the warm-up. The first step uses the full lr
            divided by warmup_steps, and the last step of the warm-up uses the full lr. With 0,
            there is no warm-up.

    Raises:
        ValueError: if warmup_steps is negative.

    Example:
        >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
        >>> schedule = WarmupConstant(optimizer, warmup_steps=4)
        >>> [schedule.factor(step) for step in range(6)]
        [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    """

    def __init__(self, optimizer: Optimizer, warmup_steps: int = 0) -> None:
        if warmup_steps < 0:
            raise ValueError(f"warmup_steps must be >= 0, got {warmup_steps}.")
        self.warmup_steps = warmup_steps
        super().__init__(optimizer, self.factor)

    def factor(self, step: int) -> float:
        """Return the factor on the lr in step `step`, counted from 0."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        return 1.0

    def state_dict(self) -> dict[str, Any]:
        """Return the state of LambdaLR, without the settings of this class."""
        settings = ("warmup_steps", "total_steps", "final_factor", "reference_steps")
        return {k: v for k, v in super().state_dict().items() if k not in settings}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume at the saved step; the lr follows the settings of this object."""
        super().load_state_dict(state_dict)
        self._last_lr = [lr * self.factor(self.last_epoch) for lr in self.base_lrs]
        for group, lr in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            group["lr"] = lr


class WarmupInverseSqrt(WarmupConstant):
    """Schedule in which the lr warms up, then stays constant, and then falls as `1 / sqrt(step)`.

    The lr is multiplied by `1 / sqrt(max(step / reference_steps, 1))`, and by the factor of the
    warm-up. Unlike with `WarmupLinear`, the lr does not depend on the length of the run.

    Args:
        optimizer: optimizer that was created with the full lr.
        reference_steps: optimizer step after which the lr falls. At four times this step, the lr is
            half of the full lr.
        warmup_steps: number of optimizer steps in the warm-up.

    Raises:
        ValueError: if reference_steps <= 0.

    Source: Karras et al. 2024 (EDM2, arXiv 2312.02696), section 2.3 and Eq. 67, for networks with
        forced weight normalization such as `MagnitudePreservingUNet`. On ImageNet-512, the authors
        use 70,000 reference steps.

    Example:
        >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
        >>> schedule = WarmupInverseSqrt(optimizer, reference_steps=4, warmup_steps=2)
        >>> [schedule.factor(step) for step in (0, 1, 4, 16, 64)]
        [0.5, 1.0, 1.0, 0.5, 0.25]
    """

    def __init__(self, optimizer: Optimizer, reference_steps: int, warmup_steps: int = 0) -> None:
        if reference_steps <= 0:
            raise ValueError(f"reference_steps must be > 0, got {reference_steps}.")
        self.reference_steps = reference_steps
        super().__init__(optimizer, warmup_steps)

    def factor(self, step: int) -> float:
        """Return the factor on the lr in step `step`, counted from 0."""
        return super().factor(step) / math.sqrt(max(step / self.reference_steps, 1.0))


class WarmupLinear(WarmupConstant):
    """Schedule in which the lr rises linearly over `warmup_steps` and then falls linearly.

    Args:
        optimizer: optimizer that was created with the peak lr.
        total_steps: number of optimizer steps of the whole run, including the warm-up. If None,
            `DiffusionModule` sets it to the length of the fit.
        warmup_steps: number of optimizer steps in the warm-up.
        final_factor: ratio of the final lr to the peak lr. The schedule would reach the final lr at
            step `total_steps`. This is one step after the last step of the run, because steps are
            counted from 0.

    Raises:
        ValueError: if total_steps <= warmup_steps.

    Example:
        >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
        >>> schedule = WarmupLinear(optimizer, total_steps=4)
        >>> [schedule.factor(step) for step in range(5)]
        [1.0, 0.75, 0.5, 0.25, 0.0]
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
        """Return the factor on the lr in step `step`, counted from 0."""
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
        """Set the length of the run in optimizer steps. Warn if the run ends within the warm-up."""
        if total_steps <= self.warmup_steps:
            warnings.warn(
                f"a warm-up of {self.warmup_steps} steps does not end in this run of "
                f"{total_steps} steps; lower warmup_steps or raise max_steps.",
                stacklevel=2,
            )
        self.total_steps = total_steps

    def decay(self, done: float) -> float:
        """Return a factor that falls from 1 to 0 as the fraction `done` of the decay rises to 1."""
        return 1 - done


class WarmupCosine(WarmupLinear):
    """Schedule in which the lr rises linearly over `warmup_steps` and then falls along a cosine.

    The arguments are the same as in `WarmupLinear`.

    Source: Loshchilov & Hutter 2017 (SGDR), Eq. 5, without restarts.

    Example:
        >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
        >>> schedule = WarmupCosine(optimizer, total_steps=4)
        >>> [round(schedule.factor(step), 3) for step in range(5)]
        [1.0, 0.854, 0.5, 0.146, 0.0]
    """

    def decay(self, done: float) -> float:
        """Return `(1 + cos(pi * done)) / 2`."""
        return (1 + math.cos(math.pi * done)) / 2
