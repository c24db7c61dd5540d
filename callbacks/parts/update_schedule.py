"""What callbacks share that change each update of an optimizer over a run of known length."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch.optim import Optimizer

from lit_diffusion.callbacks.parts.update_options import (
    ParamGroup,
    UpdateOptions,
    refuse_unhookable,
)
from lit_diffusion.callbacks.trainer_state import (
    is_accumulating,
    refuse_split_weights,
    refuse_strategy,
    should_log,
    total_steps,
)


class UpdateSchedule(Callback, ABC):
    """Changes options of each update as a function of the optimizer steps completed before it.

    Steps are counted as `global_step` counts them, those that a GradScaler skips included; each of
    several optimizers has its own count. A checkpoint holds these counts and the length of the
    schedule, and the optimizers' own options as if there were no such callback.

    Args:
        total_steps: length of the schedule, in steps of each optimizer; None takes the Trainer's.
        optimizers: positions in `trainer.optimizers` of those that are changed; None for all.

    Raises:
        ValueError: bad arguments; at the start of a fit, an unknown length, a strategy or optimizer
            whose updates can't be hooked, or two such callbacks on one optimizer.
    """

    def __init__(self, total_steps: int | None, optimizers: Sequence[int] | None = None) -> None:
        if total_steps is not None and not 1 <= total_steps < math.inf:
            raise ValueError(f"total_steps must be at least 1 or None, got {total_steps}.")
        positions = [0] if optimizers is None else list(optimizers)
        if not positions or min(positions) < 0 or len({*positions}) < len(positions):
            raise ValueError(
                f"optimizers must be positions from 0 on, each once, or None, got {optimizers}."
            )
        self.total_steps = total_steps
        self.optimizers = None if optimizers is None else list(optimizers)
        self._loaded: dict[str, Any] = {}  # read from a checkpoint, not yet taken up
        self._length: int | None = None  # total_steps in force
        self._trainer: Trainer | None = None
        self._counts: list[int] = []  # steps completed by each optimizer; see `_completed`
        self._start: list[int] = []  # likewise, when this fit began
        self._turn = 0  # the optimizer whose step is the next to complete
        self._followed: dict[int, UpdateOptions] = {}

    @abstractmethod
    def options(self, step: int, total_steps: int, group: ParamGroup) -> dict[str, Any]:
        """What the update after `step` completed ones sees instead of the group's own options."""

    @abstractmethod
    def numbers(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """What to log of the options that the last update of a group saw, by name."""

    def refuse_unfit(self, trainer: Trainer, optimizer: Optimizer) -> None:
        """Raise ValueError for an optimizer whose options can't be changed so."""

    # State

    @property
    def state_key(self) -> str:
        """Key in `checkpoint["callbacks"]`."""
        return f"{type(self).__qualname__}{ {'optimizers': self.optimizers} }"

    def state_dict(self) -> dict[str, Any]:
        """Length of the schedule and steps completed by each optimizer; empty before a fit."""
        if self._length is None:
            return self._loaded  # kept as read, should a save come before the training begins
        return {"total_steps": self._length, "steps": list(self._completed())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep length and counts for the fit that starts."""
        length, steps = state_dict.get("total_steps", 1), state_dict.get("steps", [])
        if not (isinstance(steps, list) and all(map(_is_count, [length, *steps])) and length):
            raise ValueError(
                f"The checkpoint's state of {type(self).__name__} is damaged: total_steps must be "
                f"1 or more, and is {length!r:.50}; steps a list of counts, and is {steps!r:.50}."
            )
        self._loaded = state_dict
        if self._followed:  # restored in mid-fit, as a search for an lr does when it is done
            self._counts = list(steps)

    # Lightning hooks

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forget the length of an earlier fit, and refuse a strategy that does not fit."""
        self._loaded = {}
        if stage == "fit":
            self._length = None
            refuse_strategy(trainer, type(self).__name__)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse what can't work, before the first batch."""
        refuse_split_weights(trainer, pl_module, type(self).__name__)
        self._refuse(trainer)
        may_be_stored = trainer.ckpt_path is not None
        if self.total_steps is None and not may_be_stored and _is_endless(trainer, pl_module):
            raise self._unknown_length(trainer, pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find length and counts, and follow the optimizers as the checkpoint has left them."""
        self._refuse(trainer)
        self._length = self._find_length(trainer, pl_module)
        self._counts = self._known_counts(trainer)
        self._start, self._turn, self._trainer = list(self._counts), 0, trainer
        self._release()
        for index in self._chosen(trainer):
            options = partial(self._options_now, index)
            self._followed[index] = UpdateOptions(trainer.optimizers[index], options)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        """Note whose step the next one is."""
        if self._followed:
            self._completed()
            self._turn = trainer.optimizers.index(optimizer)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Log what the batch's update used, when Lightning logs."""
        for index, update in self._followed.items():
            if update.in_force and not self._passed(index):
                raise RuntimeError(
                    f"{type(trainer.optimizers[index]).__name__} steps, and Lightning counts no "
                    "step; step what self.optimizers() returns, not the optimizer inside it."
                )
        if is_accumulating(trainer) or not should_log(trainer):
            return
        for index, update in self._followed.items():
            for number, group in enumerate(update.in_force):
                where = f"_optimizer{index}" if len(trainer.optimizers) > 1 else ""
                where += f"_group{number}" if len(update.in_force) > 1 else ""
                numbers = self.numbers(group).items()
                pl_module.log_dict({name + where: value for name, value in numbers})

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Warn where no update was changed."""
        for index, update in self._followed.items():
            if self._passed(index) and not update.in_force:
                rank_zero_warn(
                    f"{type(self).__name__} changed nothing: it saw none of the "
                    f"{self._passed(index)} steps of {type(trainer.optimizers[index]).__name__}. A "
                    "GradScaler has skipped them, or another optimizer stepped."
                )

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: object) -> None:
        """Let go of the optimizers, with their own options."""
        self._release()

    on_exception = teardown  # type: ignore[assignment]

    def _release(self) -> None:
        for update in self._followed.values():
            update.release()
        self._followed = {}

    # At the start

    def _chosen(self, trainer: Trainer) -> Sequence[int]:
        return self.optimizers or range(len(trainer.optimizers))

    def _refuse(self, trainer: Trainer) -> None:
        name, present = type(self).__name__, len(trainer.optimizers)
        if max(self._chosen(trainer)) >= present:
            raise ValueError(
                f"optimizers must be positions among the {present} of the module, the first being "
                f"0, got {self.optimizers}."
            )
        for other in trainer.callbacks:  # type: ignore[attr-defined]
            if not isinstance(other, UpdateSchedule) or other is self:
                continue
            if both := {*self._chosen(trainer)} & {*other._chosen(trainer)}:
                raise ValueError(
                    f"{name} and {type(other).__name__} would both change optimizer {min(both)}; "
                    "keep one of them, or give each other optimizers."
                )
        for index in self._chosen(trainer):
            refuse_unhookable(trainer.optimizers[index])
            self.refuse_unfit(trainer, trainer.optimizers[index])

    def _find_length(self, trainer: Trainer, pl_module: LightningModule) -> int:
        name, stored = type(self).__name__, self._loaded.get("total_steps")
        if self.total_steps is not None:
            if stored not in (None, self.total_steps):
                rank_zero_info(
                    f"{name} total_steps: the checkpoint had {stored}, using {self.total_steps}."
                )
            return self.total_steps
        now = None if _is_endless(trainer, pl_module) else total_steps(trainer)
        if stored is None:
            if now is None:
                raise self._unknown_length(trainer, pl_module)
            return now
        if stored != now:
            rank_zero_warn(
                f"{name}(total_steps=None) keeps the {stored} steps of the checkpoint, while this "
                f"run has {now or 'no known number'}; pass total_steps to change the schedule."
            )
        return int(stored)

    def _unknown_length(self, trainer: Trainer, pl_module: LightningModule) -> ValueError:
        limits = f"Trainer(max_steps={trainer.max_steps}, max_epochs={trainer.max_epochs})"
        if not pl_module.automatic_optimization:
            limits = "a Trainer under manual optimization"
        return ValueError(
            f"{type(self).__name__} needs the number of steps of each optimizer, of which {limits} "
            "knows none; pass total_steps=500000 or the like."
        )

    def _known_counts(self, trainer: Trainer) -> list[int]:
        present, step = len(trainer.optimizers), trainer.global_step
        if present == 1 or step == 0:
            return [step] * present
        counts = list(self._loaded.get("steps", self._counts))  # else of an earlier fit
        if len(counts) != present or sum(counts) != step:
            raise ValueError(
                f"{type(self).__name__} needs the steps that each of {present} optimizers has "
                f"completed, and the checkpoint has {counts or 'only their sum'} ({step}). Resume "
                f"one that was written with {type(self).__name__} and these optimizers."
            )
        return counts

    # In training

    def _completed(self) -> list[int]:
        """Steps completed by each optimizer; their sum is `global_step`."""
        assert self._trainer is not None
        self._counts[self._turn] += self._trainer.global_step - sum(self._counts)
        return self._counts

    def _passed(self, index: int) -> int:
        return self._completed()[index] - self._start[index]

    def _options_now(self, index: int, group: ParamGroup) -> dict[str, Any]:
        assert self._length is not None
        return self.options(self._completed()[index], self._length, group)


def _is_endless(trainer: Trainer, pl_module: LightningModule) -> bool:
    return not pl_module.automatic_optimization or trainer.max_epochs == trainer.max_steps == -1


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63
