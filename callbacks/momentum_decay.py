"""Momentum decay with learning rate compensation (MDLRC), and a control with only its lr."""

from collections.abc import Mapping, Sequence
from functools import partial
from math import inf
from typing import Any, NamedTuple

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from .trainer_state import (
    is_accumulating,
    is_state_init_step,
    refuse_split_weights,
    refuse_strategy,
    refuse_unhooked,
    should_log,
    total_steps,
)

try:
    import lightning.pytorch as pl
except ImportError:
    import pytorch_lightning as pl  # type: ignore[no-redef]

ParamGroup = dict[str, Any]


class DecayedMomentum(NamedTuple):
    """Hyperparameters of one update."""

    beta1: float  # decay rate of the momentum
    lr_factor: float  # in (0, 1]


def momentum_decay(
    step: int, total_steps: int, beta0: float, min_beta1: float = 0.4
) -> DecayedMomentum:
    """Decayed beta1, and the lr factor that compensates for it.

    With tau = min(step / total_steps, 1), the completed fraction of the run:

        beta1     = max(beta0 * (1 - tau) / (1 - beta0 * tau), min_beta1)
        lr_factor = (1 - beta0) / (1 - beta1)

    So beta1 / (1 - beta1), the weight of past gradients relative to the newest one, falls linearly,
    and lr * (1 - beta1), the weight of the newest gradient in the update, stays constant. Until
    beta1 reaches min_beta1, lr_factor is 1 - beta0 * tau, a linear decay; then both are constant.

    Args:
        step: optimizer steps completed before this one; the first has tau = 0.
        total_steps: optimizer steps of the whole run.
        beta0: beta1 at the start, in [0, 1).
        min_beta1: floor, in [0, beta0]; 0 for none.

    Source: Eq. 9 and 10 of "Why diffusion models are stable and how to make them faster" (2023),
    section 4.3, and appendix B for the floor. beta1 without it: Chen & Kyrillidis 2019, "Decaying
    momentum helps neural network training" (Demon, arXiv 1910.04952).

    Example:
        >>> momentum_decay(0, 1000, beta0=0.8)
        DecayedMomentum(beta1=0.8, lr_factor=1.0)
        >>> beta1, lr_factor = momentum_decay(1000, 1000, beta0=0.8)
        >>> round(beta1, 12), round(lr_factor, 12)
        (0.4, 0.333333333333)
    """
    if not (step >= 0 and 1 <= total_steps < inf):
        raise ValueError(f"step must be >= 0 and total_steps >= 1, got {step} and {total_steps}.")
    if not 0 <= min_beta1 <= beta0 < 1:
        raise ValueError(
            f"0 <= min_beta1 <= beta0 < 1 must hold, got min_beta1={min_beta1} and beta0={beta0}, "
            "the beta1 or momentum of the optimizer; lower min_beta1, 0 being no floor."
        )
    tau = min(step / total_steps, 1.0)
    beta1 = max(beta0 * (1 - tau) / (1 - beta0 * tau), float(min_beta1))
    return DecayedMomentum(beta1, (1 - beta0) / (1 - beta1))


class MomentumDecay(pl.Callback):
    """Momentum decay with learning rate compensation (MDLRC), or Demon without the compensation.

    The update after `step` completed ones uses beta1 and lr * lr_factor, where beta1 and lr_factor
    are `momentum_decay`(step, total_steps, beta0, min_beta1). beta0 is the beta1 with which each
    param group is configured.

    - beta1 and lr are changed only during the update. Schedulers, LearningRateMonitor, the training
      step and all checkpoints see the configured values.
    - Logs `mdlrc/beta1` and `mdlrc/lr` of the last update; with several optimizers or groups,
      `mdlrc/lr_optimizer1_group0` and so on.
    - Steps are counted like `global_step`, including those that a GradScaler skips, and separately
      for each optimizer. Checkpoints contain these counts and total_steps.
    - On resume, an explicit total_steps overrides that of the checkpoint, and a change is printed.
      None uses that of the checkpoint, with a warning if the Trainer has another.
    - AdamW multiplies its weight decay by the lr, so the compensation scales it as well.

    Args:
        total_steps: steps of each optimizer until beta1 would be 0; None uses the Trainer's.
        min_beta1: floor of beta1, in [0, beta0].
        compensate_lr: False leaves the lr unchanged (Demon). SGD, RMSprop and Muon need False: the
            updates of SGD and RMSprop shrink with the momentum anyway, as they have no factor
            1 - momentum, and those of Muon are normalized.
        optimizers: indices in `trainer.optimizers` of the optimizers to change; None for all.

    Raises:
        ValueError: bad arguments; at the start of a fit, an unknown total_steps, a strategy or
            optimizer whose updates cannot be hooked, two such callbacks on one optimizer,
            min_beta1 above beta0, an optimizer without momentum or with momentum that a scheduler
            cycles (OneCycleLR), or compensate_lr with another optimizer than Adam's family.

    Source: Eq. 9 and 10 of "Why diffusion models are stable and how to make them faster" (2023);
    Demon: Chen & Kyrillidis 2019 (arXiv 1910.04952).

    Example:
        >>> mdlrc = MomentumDecay()  # with Adam(..., betas=(0.8, 0.999)): beta1 from 0.8 to 0.4
        >>> trainer = pl.Trainer(max_steps=500, callbacks=[mdlrc], accelerator="cpu", logger=False)
    """

    def __init__(
        self,
        total_steps: int | None = None,
        min_beta1: float = 0.4,
        compensate_lr: bool = True,
        optimizers: Sequence[int] | None = None,
    ) -> None:
        if total_steps is not None and not 1 <= total_steps < inf:
            raise ValueError(f"total_steps must be at least 1 or None, got {total_steps}.")
        if not 0 <= min_beta1 < 1:
            raise ValueError(f"min_beta1 must be in [0, 1), got {min_beta1}.")
        self.total_steps = total_steps
        self.min_beta1 = min_beta1
        self.compensate_lr = compensate_lr
        self.optimizers = None if optimizers is None else list(optimizers)
        self._loaded: dict[str, Any] = {}  # state of a checkpoint, until training starts
        self._total_steps = 0  # the total_steps in effect; 0 before training starts
        self._trainer: pl.Trainer | None = None
        self._steps: list[int] = []  # steps completed by each optimizer; see `_completed_steps`
        self._next_index = 0  # index of the optimizer that steps next
        self._base_options: list[tuple[ParamGroup, ParamGroup]] = []  # (group, its base options)
        self._updated_at: dict[int, int] = {}  # optimizer index -> steps before its last update
        self._last_values: dict[int, list[ParamGroup]] = {}  # index -> what is logged of each group
        self._hooks: list[RemovableHandle] = []

    def update_options(self, step: int, total_steps: int, group: ParamGroup) -> ParamGroup:
        """Options of the update after `step` completed ones, which replace those of the group."""
        beta1, lr_factor = momentum_decay(step, total_steps, _beta1(group) or 0.0, self.min_beta1)
        options: ParamGroup = {"momentum": beta1}
        if "betas" in group:
            options = {"betas": (beta1, *group["betas"][1:])}
        if self.compensate_lr:
            options["lr"] = group["lr"] * lr_factor
        return options

    # Inside optimizer.step()

    def _before_step(self, index: int, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if is_state_init_step(optimizer, kwargs):
            return None
        self._apply(index, optimizer)  # some optimizers read options before they call the closure
        closure = kwargs.get("closure")
        if closure is None:
            return None

        def run_with_base_options() -> Any:  # the closure runs training_step
            self._restore()
            result = closure()
            self._apply(index, optimizer)
            return result

        return args, {**kwargs, "closure": run_with_base_options}

    def _apply(self, index: int, optimizer: Optimizer) -> None:
        self._restore()
        step = self._completed_steps()[index]
        if step == self._updated_at.get(index):
            raise RuntimeError(
                f"{type(optimizer).__name__} steps, and Lightning counts no step; step what "
                "self.optimizers() returns, not the optimizer inside it."
            )
        for group in optimizer.param_groups:
            options = self.update_options(step, self._total_steps, group)
            self._base_options.append((group, {name: group[name] for name in options}))
            group.update(options)

    def _after_step(self, index: int, optimizer: Optimizer, *_: Any) -> None:
        if self._base_options:  # else a state init step, or one that contained this step
            self._updated_at[index] = self._completed_steps()[index]
            self._last_values[index] = [_values(group) for group in optimizer.param_groups]
            self._restore()

    def _restore(self, *_: Any) -> None:
        for group, options in self._base_options:
            group.update(options)
        self._base_options = []

    def _completed_steps(self) -> list[int]:
        """Steps completed by each optimizer; their sum is `global_step`."""
        assert self._trainer is not None
        self._steps[self._next_index] += self._trainer.global_step - sum(self._steps)
        return self._steps

    # Lightning hooks

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Reset the state of an earlier fit, and refuse unsupported strategies."""
        self._loaded = {}
        if stage == "fit":
            self._total_steps = 0
            refuse_strategy(trainer, type(self).__name__)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuse unsupported optimizers and schedulers, and conflicts between callbacks."""
        name, indices = type(self).__name__, self._optimizer_indices(trainer)
        refuse_split_weights(trainer, pl_module, name)
        for other in trainer.callbacks:  # type: ignore[attr-defined]
            is_another = isinstance(other, MomentumDecay) and other is not self
            if is_another and (shared := indices & other._optimizer_indices(trainer)):
                raise ValueError(
                    f"{name} and {type(other).__name__} would both change optimizer {min(shared)}; "
                    "keep one of them, or give each other optimizers."
                )
        for optimizer in (trainer.optimizers[index] for index in indices):
            refuse_unhooked(optimizer)
            self._refuse_momentum(trainer, optimizer)

    def _optimizer_indices(self, trainer: pl.Trainer) -> set[int]:
        valid = {*range(len(trainer.optimizers))}
        indices = valid if self.optimizers is None else {*self.optimizers}
        if not indices or not indices <= valid:
            raise ValueError(
                f"optimizers must be positions among the {len(valid)} of the module, the first "
                f"being 0, got {self.optimizers}."
            )
        return indices

    def _refuse_momentum(self, trainer: pl.Trainer, optimizer: Optimizer) -> None:
        name = type(optimizer).__name__
        if any(_cycles_momentum(c.scheduler, optimizer) for c in trainer.lr_scheduler_configs):
            raise ValueError(
                f"MomentumDecay decays the momentum that the lr schedule of {name} cycles; pass "
                "cycle_momentum=False to it."
            )
        for group in optimizer.param_groups:
            if _beta1(group) is None or "ScheduleFree" in name:  # its beta1 is no momentum
                raise ValueError(
                    f"MomentumDecay needs an optimizer with momentum, and {name} has none; use "
                    "Adam or AdamW, or leave MomentumDecay out."
                )
            if self.compensate_lr and not {"betas", "eps"} <= group.keys():  # Lion has no eps
                raise ValueError(
                    "The compensation keeps lr * (1 - beta1), with which the newest gradient "
                    f"enters an update of Adam's; the momentum of {name} enters its updates in "
                    "another way: pass compensate_lr=False or use Adam."
                )
            self.update_options(0, 1, group)  # raises if min_beta1 > beta0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Determine total_steps and step counts, and hook the restored optimizers."""
        self._total_steps = self._resolve_total_steps(trainer)
        self._steps = self._restore_steps(trainer)
        self._last_values = dict(self._loaded.get("last_values", {}))
        self._trainer, self._next_index, self._updated_at = trainer, 0, {}
        for index in self._optimizer_indices(trainer):
            optimizer = trainer.optimizers[index]
            self._hooks += [
                optimizer.register_step_pre_hook(partial(self._before_step, index)),
                optimizer.register_step_post_hook(partial(self._after_step, index)),
                optimizer.register_state_dict_pre_hook(self._restore),  # a step that failed
            ]

    def _resolve_total_steps(self, trainer: pl.Trainer) -> int:
        name, stored, steps = type(self).__name__, self._loaded.get("total_steps"), self.total_steps
        if steps is None and trainer.lightning_module.automatic_optimization:
            steps = total_steps(trainer)
        length = self.total_steps or stored or steps
        if length is None:
            raise ValueError(
                f"{name} needs the number of steps of each optimizer, which is unknown for "
                f"Trainer(max_steps={trainer.max_steps}, max_epochs={trainer.max_epochs}) or under "
                "manual optimization; pass total_steps=500000 or the like."
            )
        text = f"{name} total_steps: the checkpoint has {stored}, this run "
        text += f"{steps or 'no known number'}, using {length}."
        if stored not in (None, steps) and self.total_steps:
            pl.utilities.rank_zero_info(text)
        elif stored not in (None, steps):
            pl.utilities.rank_zero_warn(f"{text} Pass total_steps to change the schedule.")
        return int(length)

    def _restore_steps(self, trainer: pl.Trainer) -> list[int]:
        count, step = len(trainer.optimizers), trainer.global_step
        if count == 1 or step == 0:
            return [step] * count
        steps = list(self._loaded.get("steps", self._steps))  # or those of an earlier fit
        if len(steps) != count or sum(steps) != step:
            raise ValueError(
                f"{type(self).__name__} needs the steps that each of {count} optimizers has "
                f"completed, and the checkpoint has {steps or 'only their sum'} ({step}). Resume "
                f"one that was written with {type(self).__name__} and these optimizers."
            )
        return steps

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Store which optimizer steps next."""
        if self._hooks:
            self._completed_steps()
            self._next_index = trainer.optimizers.index(optimizer)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        """Log lr and beta1 of each optimizer's last update."""
        if is_accumulating(trainer) or not should_log(trainer):
            return
        for index, groups in self._last_values.items():
            for number, values in enumerate(groups):
                suffix = f"_optimizer{index}" if len(trainer.optimizers) > 1 else ""
                suffix += f"_group{number}" if len(groups) > 1 else ""
                for name, value in values.items():
                    pl_module.log(f"mdlrc/{name}{suffix}", value)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: object) -> None:
        """Restore the optimizers and remove the hooks."""
        self._restore()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    on_exception = teardown  # type: ignore[assignment]

    # State

    @property
    def state_key(self) -> str:
        """Key in `checkpoint["callbacks"]`."""
        return f"{type(self).__qualname__}{ {'optimizers': self.optimizers} }"

    def state_dict(self) -> dict[str, Any]:
        """total_steps, steps completed by each optimizer, values to log; empty before a fit."""
        if self._total_steps == 0:
            return self._loaded  # for a save before training starts
        values = {
            index: [{name: float(value) for name, value in group.items()} for group in groups]
            for index, groups in self._last_values.items()
        }
        steps = list(self._completed_steps())
        return {"total_steps": self._total_steps, "steps": steps, "last_values": values}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Store total_steps and step counts until training starts."""
        length, steps = state_dict.get("total_steps", 1), state_dict.get("steps", [])
        numbers = [length, *steps] if isinstance(steps, list) else [None]
        is_damaged = not length or any(type(n) is not int or not 0 <= n < 2**63 for n in numbers)
        try:
            rows = [row for rows in state_dict.get("last_values", {}).values() for row in rows]
            is_damaged |= any(type(value) is not float for row in rows for value in row.values())
        except (AttributeError, TypeError):
            is_damaged = True
        if is_damaged:
            raise ValueError(
                f"The checkpoint's state of {type(self).__name__} is damaged: total_steps must be "
                f"1 or more, and is {length!r:.50}; steps a list of counts, and is {steps!r:.50}."
            )
        self._loaded = state_dict
        if self._hooks:  # restored during a fit, for example after the lr finder
            self._steps, self._updated_at = list(steps), {}


class LRCompensation(MomentumDecay):
    """Control of `MomentumDecay`: applies its lr in every update, but leaves beta1 unchanged.

    The lr is that of the optimizer times lr_factor of `momentum_decay`(step, total_steps, beta0,
    min_beta1). It equals the lr of MomentumDecay with an initial beta1 of `beta0` bit for bit, so
    two such runs differ only in momentum.

    Args:
        total_steps: length of the schedule in optimizer steps; None uses the Trainer's.
        beta0: initial beta1 of the run to compare with.
        min_beta1: floor of beta1 of that run.
        optimizers: indices in `trainer.optimizers` of the optimizers to change; None for all.

    Example:
        >>> control = LRCompensation(beta0=0.8)  # with Adam(..., betas=(0.9, 0.999)), say
        >>> trainer = pl.Trainer(max_steps=9, callbacks=[control], accelerator="cpu", logger=False)
    """

    def __init__(
        self,
        total_steps: int | None = None,
        beta0: float = 0.8,
        min_beta1: float = 0.4,
        optimizers: Sequence[int] | None = None,
    ) -> None:
        super().__init__(total_steps, min_beta1, optimizers=optimizers)
        momentum_decay(0, 1, beta0, min_beta1)  # raises for bad arguments
        self.beta0 = beta0

    def update_options(self, step: int, total_steps: int, group: ParamGroup) -> ParamGroup:
        """The lr of the update after `step` completed ones."""
        lr_factor = momentum_decay(step, total_steps, self.beta0, self.min_beta1).lr_factor
        return {"lr": group["lr"] * lr_factor}

    def _refuse_momentum(self, trainer: pl.Trainer, optimizer: Optimizer) -> None:
        pass  # supports any momentum, or none


def _beta1(group: Mapping[str, Any]) -> float | None:
    """The momentum of a param group: its first beta, else `momentum`; None without either."""
    return group["betas"][0] if "betas" in group else group.get("momentum")


def _values(group: ParamGroup) -> dict[str, Any]:
    """What is logged of a param group."""
    beta1 = _beta1(group)
    return {"lr": group["lr"]} | ({} if beta1 is None else {"beta1": beta1})


def _cycles_momentum(scheduler: object, optimizer: Optimizer) -> bool:
    """Whether a scheduler, or one nested inside it, cycles the momentum of this optimizer."""
    if getattr(scheduler, "cycle_momentum", False):
        return getattr(scheduler, "optimizer", None) is optimizer
    return any(_cycles_momentum(part, optimizer) for part in getattr(scheduler, "_schedulers", ()))
