"""What callbacks share that change each update of an optimizer over a run of known length."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NoReturn

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch.optim import Optimizer

from lit_diffusion.callbacks.step_counts import StepCounts
from lit_diffusion.callbacks.strategies import refuse_split_weights, refuse_strategy
from lit_diffusion.callbacks.update_options import ParamGroup, UpdateOptions, refuse_unhookable

PATIENCE = 50  # steps without an update: a GradScaler may skip the first while its scale falls


class UpdateSchedule(Callback, ABC):
    """Changes options of each update as a function of the optimizer steps completed before it.

    Steps are counted as `global_step` counts them, those that a GradScaler skips included; each of
    several optimizers has its own count. A checkpoint holds these counts and the length of the
    schedule, and the optimizers' own options as if there were no such callback.

    Args:
        total_steps: length of the schedule, in steps of each optimizer; None takes the Trainer's.
        optimizers: positions in `trainer.optimizers` of those that are changed; None for all.

    Raises:
        ValueError: bad arguments; at the start of a fit, an unknown length, a strategy that is not
            supported (FSDPStrategy, DeepSpeed, XLA), an optimizer that does not fit, or two such
            callbacks on one optimizer.
    """

    def __init__(self, total_steps: int | None, optimizers: Sequence[int] | None = None) -> None:
        if total_steps is not None and not 1 <= total_steps < math.inf:
            raise ValueError(f"total_steps must be at least 1 or None, got {total_steps}.")
        if optimizers is not None and not _are_positions(optimizers):
            raise ValueError(
                f"optimizers must be positions from 0 on, each once, or None, got {optimizers}."
            )
        self.total_steps = total_steps
        self.optimizers = None if optimizers is None else list(optimizers)
        self._state_key = self._generate_state_key(optimizers=self.optimizers)  # asked at each hook
        self._loaded: dict[str, Any] = {}  # read from a checkpoint, not yet taken up
        self._length: int | None = None  # total_steps in force
        self._steps: StepCounts | None = None
        self._followed: dict[int, UpdateOptions] = {}
        self._lrs: dict[int, list[float]] = {}  # the optimizers' own, when last looked at
        self._told = False

    @abstractmethod
    def options(self, step: int, total_steps: int, group: ParamGroup) -> dict[str, Any]:
        """What the update after `step` completed ones sees instead of the group's own options."""

    @abstractmethod
    def refuse_unfit(self, trainer: Trainer, optimizer: Optimizer) -> None:
        """Raise ValueError for an optimizer whose options can't be changed so."""

    # State

    @property
    def state_key(self) -> str:
        """Key in `checkpoint["callbacks"]`."""
        return self._state_key

    def state_dict(self) -> dict[str, Any]:
        """Length of the schedule and steps completed by each optimizer; empty before a fit."""
        if self._length is None or self._steps is None:
            return self._loaded  # kept as read, should a save come before the training begins
        return {"total_steps": self._length, "steps": self._steps.completed()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep length and counts for the fit that starts.

        Raises:
            ValueError: where it is not what `state_dict()` gives.
        """
        length, steps = state_dict.get("total_steps", 1), state_dict.get("steps", [])
        if not (isinstance(steps, list) and all(map(_is_count, [length, *steps])) and length):
            raise ValueError(
                f"The checkpoint's state of {type(self).__name__} is damaged: total_steps must be "
                f"1 or more, and is {length!r:.50}; steps a list of counts, and is {steps!r:.50}."
            )
        self._loaded = state_dict

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
        resumes = trainer.ckpt_path is not None
        if self.total_steps is None and not resumes and _is_endless(trainer, pl_module):
            _refuse_unknown_length(trainer, pl_module, type(self).__name__)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find length and counts, and follow the optimizers as the checkpoint has left them."""
        self._refuse(trainer)
        self._length = self._find_length(trainer, pl_module)
        self._steps = StepCounts(trainer, self._known_counts(trainer))
        self._lrs = {}
        self._release()
        for index in self._chosen(trainer):
            options = partial(self._options_now, index)
            self._followed[index] = UpdateOptions(trainer.optimizers[index], options)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        """Note whose step the next one is."""
        if self._steps is not None:
            self._steps.turn_to(optimizer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log beta1 and lr of the last update when Lightning logs; 0 steps is never."""
        for index, update in self._followed.items():
            self._refuse_unseen(type(trainer.optimizers[index]).__name__, index, update)
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        by_hand = not pl_module.automatic_optimization  # Lightning then counts batches, not steps
        if every and (by_hand or trainer.global_step % every == 0):
            for index in self._followed:
                self._tell_decay(index, trainer.optimizers[index].param_groups)
            for name, value in self._effective(trainer):
                pl_module.log(name, value)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Warn where a run too short for `PATIENCE` has changed no update."""
        for index, update in self._followed.items():
            if not update.in_force and self._passed(index):
                rank_zero_warn(
                    f"{type(self).__name__} changed nothing: it saw none of the "
                    f"{self._passed(index)} steps of {type(trainer.optimizers[index]).__name__}. A "
                    "GradScaler has skipped them, or another optimizer stepped."
                )

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Put the optimizers' own options back."""
        self._release()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Let go of the optimizers."""
        self._release()

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
            if isinstance(other, UpdateSchedule) and other is not self:
                both = sorted({*self._chosen(trainer)} & {*other._chosen(trainer)})
                if both:
                    raise ValueError(
                        f"{name} and {type(other).__name__} would both change optimizer {both[0]}; "
                        "keep one of them, or give each other optimizers."
                    )
        for index in self._chosen(trainer):
            refuse_unhookable(trainer.optimizers[index])
            self.refuse_unfit(trainer, trainer.optimizers[index])

    def _find_length(self, trainer: Trainer, pl_module: LightningModule) -> int:
        """total_steps: the argument, else the checkpoint's, else the Trainer's."""
        name, stored = type(self).__name__, self._loaded.get("total_steps")
        if self.total_steps is not None:
            if stored not in (None, self.total_steps):
                rank_zero_info(
                    f"{name} total_steps: the checkpoint had {stored}, using {self.total_steps}."
                )
            return self.total_steps
        now = _estimate(trainer, pl_module)
        if stored is None:
            return now or _refuse_unknown_length(trainer, pl_module, name)
        if stored != now:
            rank_zero_warn(
                f"{name}(total_steps=None) keeps the {stored} steps of the checkpoint, while this "
                f"run has {now or 'no known number'}; pass total_steps to change the schedule."
            )
        return int(stored)

    def _known_counts(self, trainer: Trainer) -> list[int]:
        present, step = len(trainer.optimizers), trainer.global_step
        if present == 1 or step == 0:
            return [step] * present
        counts: list[int] = self._loaded.get("steps") or (
            self._steps.completed() if self._steps else []  # of an earlier fit with this Trainer
        )
        if len(counts) != present or sum(counts) != step:
            raise ValueError(
                f"{type(self).__name__} needs the steps that each of {present} optimizers has "
                f"completed, and the checkpoint has {counts or 'only their sum'} ({step}). Resume "
                f"one that was written with {type(self).__name__} and these optimizers."
            )
        return counts

    # In training

    def _options_now(self, index: int, group: ParamGroup) -> dict[str, Any]:
        assert self._steps is not None
        assert self._length is not None
        return self.options(self._steps.completed()[index], self._length, group)

    def _passed(self, index: int) -> int:
        assert self._steps is not None
        return self._steps.since_start()[index]

    def _refuse_unseen(self, name: str, index: int, update: UpdateOptions) -> None:
        """Raise where updates pass by unseen or uncounted."""
        passed = self._passed(index)
        if not update.in_force and passed >= PATIENCE:
            raise RuntimeError(
                f"{type(self).__name__} saw none of {passed} steps of {name}, which steps another "
                "optimizer inside, or never; return the one that steps from configure_optimizers."
            )
        if update.in_force and not passed:
            raise RuntimeError(
                f"{name} steps, and Lightning counts no step; step what self.optimizers() returns, "
                "not the optimizer inside it."
            )

    def _tell_decay(self, index: int, groups: Sequence[ParamGroup]) -> None:
        """Warn, once, where the lr falls by itself and in each update."""
        lrs = [float(group["lr"]) for group in groups if "lr" in self.options(0, 1, group)]
        before, self._lrs[index] = self._lrs.get(index, lrs), lrs
        falls = [(old, new) for old, new in zip(before, lrs, strict=False) if new < old]
        if falls and not self._told:
            self._told = True
            old, new = falls[0]
            rank_zero_warn(
                f"{type(self).__name__} multiplies the lr by a factor that falls over the run, and "
                f"the lr falls by itself as well ({old:g} to {new:g}); keep it constant if only "
                "one of them is meant."
            )

    def _effective(self, trainer: Trainer) -> Iterator[tuple[str, Any]]:
        """Names and values to log: beta1 and lr of the last update, per optimizer and group."""
        for index, update in self._followed.items():
            for number, group in enumerate(update.in_force):
                where = f"_optimizer{index}" if len(trainer.optimizers) > 1 else ""
                where += f"_group{number}" if len(update.in_force) > 1 else ""
                beta1 = beta1_of(group)
                if beta1 is not None:
                    yield f"mdlrc/beta1{where}", beta1
                yield f"mdlrc/lr{where}", group["lr"]


def _are_positions(numbers: Sequence[int]) -> bool:
    return bool(numbers) and min(numbers) >= 0 and len({*numbers}) == len(numbers)


def beta1_of(group: ParamGroup) -> float | None:
    """The momentum of a param group: its first beta, else `momentum`; None without either."""
    if "betas" in group:
        beta1: float = group["betas"][0]
        return beta1
    return group.get("momentum")


def _refuse_unknown_length(trainer: Trainer, pl_module: LightningModule, name: str) -> NoReturn:
    limits = f"Trainer(max_steps={trainer.max_steps}, max_epochs={trainer.max_epochs})"
    if not pl_module.automatic_optimization:
        limits = "a Trainer under manual optimization"
    raise ValueError(
        f"{name} needs the number of steps of each optimizer, of which {limits} knows none; pass "
        "total_steps=500000 or the like."
    )


def _is_endless(trainer: Trainer, pl_module: LightningModule) -> bool:
    """Whether the Trainer can't know, whatever the data, how often each optimizer will step."""
    return not pl_module.automatic_optimization or trainer.max_epochs == trainer.max_steps == -1


def _estimate(trainer: Trainer, pl_module: LightningModule) -> int | None:
    """Optimizer steps of the whole run; None where the Trainer does not know.

    Not before the training starts: the Trainer begins to read the data for it.
    """
    if _is_endless(trainer, pl_module):
        return None
    steps = trainer.estimated_stepping_batches
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, GradientAccumulationScheduler) and trainer.max_epochs != -1:
            steps = _steps_of(callback, trainer)
    return int(steps) if 0 < steps < math.inf else None


def _steps_of(accumulation: GradientAccumulationScheduler, trainer: Trainer) -> float:
    """Steps of a run whose epochs accumulate differently, of which Lightning's estimate is wrong.

    The last step of an epoch may be of fewer batches.
    """
    assert trainer.max_epochs is not None
    sizes = map(accumulation.get_accumulate_grad_batches, range(trainer.max_epochs))
    batches = trainer.num_training_batches
    steps = sum(batches if batches == math.inf else math.ceil(batches / size) for size in sizes)
    return steps if trainer.max_steps == -1 else min(steps, trainer.max_steps)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63
