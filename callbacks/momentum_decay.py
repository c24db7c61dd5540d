"""Decay the momentum with learning rate compensation (MDLRC), or only lower the lr, as a control.

The learning rate is called lr, as in torch.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from math import inf
from typing import Any, NamedTuple

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from .trainer_state import (
    is_count,
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
    """Hyperparameters of one update of the weights.

    Attributes:
        beta1: decay rate of the momentum.
        lr_factor: factor by which the lr is multiplied, in (0, 1].
    """

    beta1: float
    lr_factor: float


def momentum_decay(
    step: int, total_steps: int, beta0: float, min_beta1: float = 0.4
) -> DecayedMomentum:
    """Compute the decayed beta1 of an update, and the lr factor that compensates for the decay.

    Let `tau = min(step / total_steps, 1)` be the completed fraction of the run. The results are:

        beta1     = max(beta0 * (1 - tau) / (1 - beta0 * tau), min_beta1)
        lr_factor = (1 - beta0) / (1 - beta1)

    The ratio `beta1 / (1 - beta1)` is the total weight of all past gradients, divided by the weight
    of the newest gradient. Until `beta1` reaches `min_beta1`, this ratio and
    `lr_factor = 1 - beta0 * tau` fall linearly with tau. From then on, `beta1` and `lr_factor` are
    constant. Because of `lr_factor`, the newest gradient has the same weight in all updates:
    `lr * lr_factor * (1 - beta1) = lr * (1 - beta0)`.

    Args:
        step: optimizer steps completed before this update; 0 for the first update.
        total_steps: optimizer steps of the whole run.
        beta0: beta1 at the start, in [0, 1).
        min_beta1: lower bound of beta1, in [0, beta0]. 0 means no lower bound.

    Source: Eq. 9 and 10 of "Why diffusion models are stable and how to make them faster" (2023),
    section 4.3. Appendix B of this paper adds the lower bound. The formula for beta1 without the
    lower bound is from Chen & Kyrillidis 2019, "Decaying momentum helps neural network training"
    (Demon, arXiv 1910.04952).

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
            "which is the optimizer's beta1 or momentum; lower min_beta1 (0 means no lower bound)."
        )
    tau = min(step / total_steps, 1.0)
    beta1 = max(beta0 * (1 - tau) / (1 - beta0 * tau), float(min_beta1))
    return DecayedMomentum(beta1, (1 - beta0) / (1 - beta1))


class MomentumDecay(pl.Callback):
    """Decays the momentum, and lowers the learning rate to compensate (MDLRC).

    After `step` completed updates, the next update uses `beta1` and `lr * lr_factor`. The function
    `momentum_decay(step, total_steps, beta0, min_beta1)` computes `beta1` and `lr_factor`. Here, lr
    and `beta0` are the lr and the beta1 that the optimizer's param group has outside of updates.

    - beta1 and lr are changed only during the update. Schedulers, LearningRateMonitor, the training
      step and all checkpoints see the unchanged values.
    - `step` is the number of calls of `optimizer.step()`, counted for each optimizer. An update
      that a GradScaler skips counts for fused optimizers only, because a GradScaler calls `step()`
      of a fused optimizer even in a skipped update.
    - Checkpoints contain total_steps and the number of steps of each optimizer. If you pass a
      number as total_steps, it overrides the checkpoint's total_steps on resume. With None, the
      checkpoint's total_steps is used, even if the length of the fit differs. In both cases, a
      difference from the checkpoint's total_steps causes a warning.
    - At the start of a batch, the beta1 and lr of the next update are logged as `mdlrc/beta1` and
      `mdlrc/lr`. If there are several optimizers or param groups, the names are
      `mdlrc/lr_optimizer1_group0` and so on.
    - AdamW multiplies its weight decay by the lr, so `lr_factor` scales the weight decay as well.
    - The momentum of torch's Muon is treated as beta1. The paper does not consider Muon. Muon
      gives the newest gradient the weight `1 - beta1**2` (Nesterov) and then orthogonalizes the
      update. Therefore, the newest gradient does not have the same weight in all updates of Muon.

    Args:
        total_steps: length of the schedule in steps of each optimizer; None uses the length of the
            fit. With min_beta1=0, beta1 is 0 at the end of the schedule.
        min_beta1: lower bound of beta1, in [0, beta0].
        compensate_lr: whether to multiply the lr by lr_factor. With False, the method is Demon.
        optimizers: indices in `trainer.optimizers` of the optimizers to change; None for all.

    Raises:
        ValueError: if an argument is out of range, or if the strategy is not supported. At the
            start of a fit, the error is also raised if total_steps is unknown, if min_beta1 is
            above beta0, if an optimizer has no momentum, if a scheduler cycles the momentum, or if
            another callback of this class would change the same optimizer. With compensate_lr=True,
            the error is also raised for optimizers such as SGD and Lion, in whose updates the
            newest gradient does not have the weight `1 - beta1`.

    Source: Eq. 9 and 10 of "Why diffusion models are stable and how to make them faster" (2023).
    Demon is from Chen & Kyrillidis 2019 (arXiv 1910.04952).

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
        self._total_steps = 0  # before a fit starts, the checkpoint's total_steps; 0 if unknown
        self._steps: list[int] = []  # steps completed by each optimizer of the Trainer
        self._is_fit = True  # False in a validate or test of the Trainer
        self._base_options: list[tuple[ParamGroup, ParamGroup]] = []  # (group, unchanged values)
        self._hooks: list[RemovableHandle] = []

    def update_options(self, step: int, total_steps: int, group: ParamGroup) -> ParamGroup:
        """Return a param group's new options for the update after `step` completed updates."""
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
        self._restore()  # an earlier step may have failed, or this step may be inside another step
        for group in optimizer.param_groups:
            options = self.update_options(self._steps[index], self._total_steps, group)
            self._base_options.append((group, {name: group[name] for name in options}))
            group.update(options)

    def _after_step(self, index: int, *_: Any) -> None:
        if self._base_options:  # not for a state init step, or a step with another step inside
            self._steps[index] += 1
            self._restore()

    def _restore(self, *_: Any) -> None:
        for group, options in self._base_options:
            group.update(options)
        self._base_options = []

    # Lightning hooks

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Raise ValueError if the strategy is not supported. Reset the state for a new fit."""
        self._is_fit = stage == "fit"
        if self._is_fit:
            refuse_strategy(trainer, type(self).__name__)
            self._total_steps, self._steps = 0, self._steps if trainer.global_step else []

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Raise ValueError if an optimizer or scheduler is not supported, or callbacks conflict."""
        refuse_split_weights(trainer, pl_module, type(self).__name__)
        indices = self._optimizer_indices(trainer)
        for other in trainer.callbacks:  # type: ignore[attr-defined]
            is_another = isinstance(other, MomentumDecay) and other is not self
            if is_another and not indices.isdisjoint(other._optimizer_indices(trainer)):
                raise ValueError(
                    f"{type(self).__name__} and {type(other).__name__} would change the same "
                    "optimizer; remove one of them, or pass different indices as `optimizers`."
                )
        for optimizer in (trainer.optimizers[index] for index in indices):
            refuse_unhooked(optimizer)
            self._refuse_momentum(trainer, optimizer)

    def _optimizer_indices(self, trainer: pl.Trainer) -> set[int]:
        count = len(trainer.optimizers)
        indices = {*range(count)} if self.optimizers is None else {*self.optimizers}
        if not indices or not indices <= {*range(count)}:
            raise ValueError(
                f"optimizers must be indices from 0 to {count - 1}, got {self.optimizers}."
            )
        return indices

    def _refuse_momentum(self, trainer: pl.Trainer, optimizer: Optimizer) -> None:
        schedulers: list[Any] = [config.scheduler for config in trainer.lr_scheduler_configs]
        schedulers += [part for s in schedulers for part in getattr(s, "_schedulers", ())]
        cycled = [s.optimizer for s in schedulers if getattr(s, "cycle_momentum", False)]
        for group in optimizer.param_groups:
            problem = None
            if optimizer in cycled:
                problem = "its lr schedule cycles that; pass cycle_momentum=False to the schedule"
            elif _beta1(group) is None or "ScheduleFree" in type(optimizer).__name__:
                problem = "it has none; use Adam or AdamW, or leave MomentumDecay out"
            elif self.compensate_lr and not (
                {"betas", "eps"} <= group.keys() or "ns_steps" in group  # Lion has no eps; Muon
            ):
                problem = "the compensated lr suits only updates in which the newest gradient has "
                problem += "the weight 1 - beta1; pass compensate_lr=False or use Adam"
            if problem is not None:
                name = type(optimizer).__name__
                raise ValueError(f"MomentumDecay cannot decay the momentum of {name}: {problem}.")
            self.update_options(0, 1, group)  # raises if min_beta1 > beta0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Determine total_steps and the step counts, and hook the optimizers."""
        name, stored, steps = type(self).__name__, self._total_steps, self.total_steps
        if steps is None and pl_module.automatic_optimization:
            steps = total_steps(trainer)
        self._total_steps = int(self.total_steps or stored or steps or 0)
        if self._total_steps == 0:
            raise ValueError(
                f"{name} cannot compute the number of optimizer steps under manual "
                f"optimization or Trainer(max_steps={trainer.max_steps}, "
                f"max_epochs={trainer.max_epochs}); pass a number, such as total_steps=500000."
            )
        if stored not in (0, steps):
            advice = "" if self.total_steps else " Pass total_steps to change it."
            pl.utilities.rank_zero_warn(
                f"{name}: total_steps is {stored} in the checkpoint and {steps} in this run; using "
                f"{self._total_steps}.{advice}"
            )
        if stored == 0 and trainer.ckpt_path:  # the checkpoint's run did not have this callback
            self._steps = []
        count, step = len(trainer.optimizers), trainer.global_step
        if not self._steps and (count == 1 or step == 0):
            self._steps = [step] * count
        if len(self._steps) != count:
            raise ValueError(
                f"{name} needs a step count for each of {count} optimizers, and the checkpoint has "
                f"{self._steps or 'none'}; resume a checkpoint that was written with {name} and "
                "these optimizers."
            )
        for index in self._optimizer_indices(trainer):
            optimizer = trainer.optimizers[index]
            self._hooks += [
                optimizer.register_step_pre_hook(partial(self._before_step, index)),
                optimizer.register_step_post_hook(partial(self._after_step, index)),
                optimizer.register_state_dict_pre_hook(self._restore),  # needed if a step failed
            ]

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Log the lr and beta1 of each optimizer's next update."""
        for index in self._optimizer_indices(trainer) if should_log(trainer) else ():
            groups = trainer.optimizers[index].param_groups
            for number, group in enumerate(groups):
                suffix = f"_optimizer{index}" if len(trainer.optimizers) > 1 else ""
                suffix += f"_group{number}" if len(groups) > 1 else ""
                values = group | self.update_options(self._steps[index], self._total_steps, group)
                trainer.lightning_module.log(f"mdlrc/lr{suffix}", values["lr"])
                if (beta1 := _beta1(values)) is not None:
                    trainer.lightning_module.log(f"mdlrc/beta1{suffix}", beta1)

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
        """Key of the state in `checkpoint["callbacks"]`."""
        return f"{type(self).__qualname__}{ {'optimizers': self.optimizers} }"

    def state_dict(self) -> dict[str, Any]:
        """Return total_steps and the steps completed by each optimizer; {} before the first fit."""
        if self._total_steps == 0:
            return {}
        return {"total_steps": self._total_steps, "steps": list(self._steps)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load total_steps and step counts. Lightning's lr finder also calls this during a fit."""
        total: Any = state_dict.get("total_steps")
        steps: Any = state_dict.get("steps")
        numbers = [total, *steps] if isinstance(steps, list) else [None]
        if not all(map(is_count, numbers)) or not total:
            raise ValueError(
                f"The checkpoint's state of {type(self).__name__} is damaged: total_steps must be "
                f"1 or more, got {total!r:.50}; steps must be a list of counts, got {steps!r:.50}."
            )
        if self._is_fit or not self._steps:  # a test of a checkpoint must not change a fit's counts
            self._total_steps, self._steps = total, list(steps)


class LRCompensation(MomentumDecay):
    """Control experiment for `MomentumDecay`: lowers the lr by the same factor, but keeps beta1.

    Each update uses the optimizer's lr, multiplied by the `lr_factor` that
    `momentum_decay(step, total_steps, beta0, min_beta1)` returns. A run with `MomentumDecay` and
    an initial beta1 of `beta0` has exactly the lr of this control, and differs only in momentum.

    Args:
        total_steps: length of the schedule in optimizer steps; None uses the length of the fit.
        beta0: initial beta1 in the run with `MomentumDecay`.
        min_beta1: lower bound of beta1 in the run with `MomentumDecay`.
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
        """Return the lr of the update after `step` completed updates."""
        lr_factor = momentum_decay(step, total_steps, self.beta0, self.min_beta1).lr_factor
        return {"lr": group["lr"] * lr_factor}

    def _refuse_momentum(self, trainer: pl.Trainer, optimizer: Optimizer) -> None:
        pass  # supports any momentum, or none


def _beta1(group: Mapping[str, Any]) -> float | None:
    """Return the first of a param group's `betas`, else its `momentum`; None if it has neither."""
    return group["betas"][0] if "betas" in group else group.get("momentum")
