"""MDLRC: beta1 falls over the run and the lr with it; Demon, without the lr; its control, the lr.

The lr factor is 1 - beta0 * tau exactly, until beta1 reaches its floor: MDLRC is momentum decay
together with a linear decay of the lr. What the momentum does by itself shows only beside
`LRCompensation`, which has the same lr in every update and constant momentum.
"""

from collections.abc import Sequence
from math import inf
from typing import Any, NamedTuple

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lit_diffusion.callbacks.update_options import ParamGroup
from lit_diffusion.callbacks.update_schedule import UpdateSchedule, beta1_of


class DecayedMomentum(NamedTuple):
    """What one update uses.

    Attributes:
        beta1: share of the old momentum that is kept, per optimizer step.
        lr_factor: in (0, 1]; multiplies the lr.
    """

    beta1: float
    lr_factor: float


def momentum_decay(
    step: int, total_steps: int, beta0: float, min_beta1: float = 0.4
) -> DecayedMomentum:
    """Decayed beta1 and the lr factor that compensates for it.

    With tau = min(step / total_steps, 1), the share of the run that is over:

        beta1     = max(beta0 * (1 - tau) / (1 - beta0 * tau), min_beta1)
        lr_factor = (1 - beta0) / (1 - beta1)

    So beta1 / (1 - beta1), the weight of the past beside the newest gradient, falls linearly, and
    lr * (1 - beta1), with which that gradient enters the update, stays what it was. Until beta1
    reaches its floor, (beta0 - min_beta1) / (beta0 * (1 - min_beta1)) of the way, lr_factor is
    1 - beta0 * tau; from there on both rest.

    Args:
        step: optimizer steps completed before this one; the first has tau = 0.
        total_steps: of the whole run.
        beta0: beta1 at the start, in [0, 1).
        min_beta1: floor, in [0, beta0]; 0 for none.

    Raises:
        ValueError: an argument outside its range.

    Source: Eq. 9 and 10 of "Why diffusion models are stable and how to make them faster" (2023),
    section 4.3, and appendix B for the floor. beta1 without it: Chen & Kyrillidis 2019, "Decaying
    momentum helps neural network training" (Demon, arXiv 1910.04952).

    Example:
        >>> momentum_decay(0, 1000, beta0=0.8)
        DecayedMomentum(beta1=0.8, lr_factor=1.0)
        >>> beta1, lr_factor = momentum_decay(500, 1000, beta0=0.8)
        >>> round(beta1, 12), round(lr_factor, 12)
        (0.666666666667, 0.6)
        >>> beta1, lr_factor = momentum_decay(1000, 1000, beta0=0.8)
        >>> round(beta1, 12), round(lr_factor, 12)
        (0.4, 0.333333333333)
    """
    if not (step >= 0 and 1 <= total_steps < inf):
        raise ValueError(f"step must be >= 0 and total_steps >= 1, got {step} and {total_steps}.")
    if not 0 <= min_beta1 <= beta0 < 1:
        raise ValueError(
            f"0 <= min_beta1 <= beta0 < 1 must hold, got min_beta1={min_beta1} and beta0={beta0}; "
            "lower min_beta1, 0 being no floor."
        )
    tau = min(step / total_steps, 1.0)
    beta1 = max(beta0 * (1 - tau) / (1 - beta0 * tau), float(min_beta1))
    return DecayedMomentum(beta1, (1 - beta0) / (1 - beta1))


class MomentumDecay(UpdateSchedule):
    """Momentum decay with learning rate compensation (MDLRC), or Demon without the latter.

    Update after `step` completed ones: beta1, lr_factor = `momentum_decay`(step, total_steps,
    beta0, min_beta1), and the lr is lr_factor times the optimizer's own. beta0 is each param
    group's own beta1, so a config sets it where it sets the optimizer.

    - beta1 and lr differ in the update alone. Lr schedules, warm-up, LearningRateMonitor, the
      training step and checkpoints see the optimizer's own, and all of them go on as without.
    - `mdlrc/beta1` and `mdlrc/lr` log what the last update used; where there are several
      optimizers or groups, `mdlrc/lr_optimizer1_group0` and so on.
    - On resume an explicit total_steps wins, and a change is printed; None keeps the checkpoint's
      and warns if the run has another.
    - The weight decay of AdamW is multiplied by the lr, so the compensation scales it as well.
    - Steps are counted as `global_step` counts them, those that a GradScaler skips included; each
      of several optimizers has its own count.

    Args:
        total_steps: optimizer steps until beta1 would be 0; None takes the Trainer's.
        min_beta1: floor of beta1, in [0, beta0].
        compensate_lr: False is Demon: the lr stays as it is. SGD and RMSprop need it, whose
            momentum adds gradients up without a factor 1 - momentum, so that their steps shrink by
            themselves.
        optimizers: positions in `trainer.optimizers` of those that are changed; None for all.

    Raises:
        ValueError: bad arguments; at the start of a fit, an unknown number of steps, a floor above
            beta0, an optimizer without momentum, with another kind of it while compensate_lr is
            set, with a schedule that cycles it (OneCycleLR, CyclicLR) or whose updates can't be
            hooked (capturable), a strategy that is not supported (FSDPStrategy, DeepSpeed, XLA), or
            two such callbacks on one optimizer.

    Source: as of `momentum_decay`.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> mdlrc = MomentumDecay()  # with Adam(..., betas=(0.8, 0.999)): beta1 from 0.8 to 0.4
        >>> trainer = Trainer(max_steps=500, callbacks=[mdlrc], accelerator="cpu", logger=False)
    """

    def __init__(
        self,
        total_steps: int | None = None,
        min_beta1: float = 0.4,
        compensate_lr: bool = True,
        optimizers: Sequence[int] | None = None,
    ) -> None:
        super().__init__(total_steps, optimizers)
        if not 0 <= min_beta1 < 1:
            raise ValueError(f"min_beta1 must be in [0, 1), got {min_beta1}.")
        self.min_beta1 = min_beta1
        self._first_momenta: dict[int, list[float | None]] = {}
        self.compensate_lr = compensate_lr

    def options(self, step: int, total_steps: int, group: ParamGroup) -> dict[str, Any]:
        """The decayed momentum and, with compensation, the lr."""
        beta0 = beta1_of(group)
        assert beta0 is not None
        beta1, lr_factor = momentum_decay(step, total_steps, beta0, self.min_beta1)
        others: dict[str, Any] = {"momentum": beta1}
        if "betas" in group:
            others = {"betas": (beta1, *group["betas"][1:])}
        if self.compensate_lr:
            others["lr"] = group["lr"] * lr_factor
        return others

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin, and note where the momentum of each optimizer begins."""
        super().on_train_start(trainer, pl_module)
        self._first_momenta = {
            index: _momenta(trainer.optimizers[index]) for index in self._followed
        }

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log, and warn, once, where the momentum moves by itself, as a cycle by hand moves it."""
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        for index, before in self._first_momenta.items():
            optimizer = trainer.optimizers[index]
            now = _momenta(optimizer)[: len(before)]  # groups may be added
            if now != before:
                self._first_momenta = {}
                rank_zero_warn(
                    f"MomentumDecay decays the momentum of {type(optimizer).__name__}, which moves "
                    f"by itself as well ({before} to {now}); leave it to one of them, as "
                    "OneCycleLR and CyclicLR do with cycle_momentum=False."
                )
                return

    def refuse_unfit(self, trainer: Trainer, optimizer: Optimizer) -> None:
        """Raise ValueError for an optimizer without momentum, or with one that can't decay so."""
        name = type(optimizer).__name__
        for group in optimizer.param_groups:
            self._refuse_momentum(name, group)
        for config in trainer.lr_scheduler_configs:
            if _cycles_momentum(config.scheduler, optimizer):
                raise ValueError(
                    f"MomentumDecay decays the momentum that the lr schedule of {name} cycles; "
                    "pass cycle_momentum=False to it."
                )
        if "lion" in name.lower():
            rank_zero_warn(
                f"{name} takes the sign of its momentum, so its steps do not grow as 1 / (1 - "
                "beta1): momentum decay and its compensation were not made for it."
            )

    def _refuse_momentum(self, name: str, group: ParamGroup) -> None:
        beta0 = beta1_of(group)
        if beta0 is None:
            raise ValueError(
                f"MomentumDecay needs an optimizer with betas or momentum, and {name} has neither; "
                "use Adam or AdamW."
            )
        if isinstance(beta0, Tensor):
            raise ValueError(
                f"MomentumDecay computes with betas that are floats, and {name} has {beta0}; pass "
                f"{beta0.item():g}."
            )
        if self.compensate_lr and "betas" not in group:
            raise ValueError(
                f"The momentum of {name} has no factor 1 - momentum, so its steps shrink by "
                "themselves and the compensation would shrink them again; pass "
                "compensate_lr=False or use Adam."
            )
        if not self.min_beta1 <= beta0:
            raise ValueError(
                f"min_beta1 must be at most the beta1 or momentum of the optimizer, got "
                f"{self.min_beta1} and {beta0} ({name}); lower min_beta1, 0 being no floor."
            )


class LRCompensation(UpdateSchedule):
    """The control of `MomentumDecay`: its lr in every update, floor included, and nothing else.

    Update after `step` completed ones: the lr is lr_factor of `momentum_decay`(step, total_steps,
    beta0, min_beta1) times the optimizer's own; momentum stays as it is. A run with it has, to the
    last bit, the lr of a run with MomentumDecay on an optimizer whose beta1 is `beta0`, so what
    differs between the two is the momentum alone. The rest is as `MomentumDecay` says.

    Args:
        total_steps: optimizer steps of the decay; None takes the Trainer's.
        beta0: of the run that this one is compared with, in [0, 1).
        min_beta1: of the run that this one is compared with, in [0, beta0].
        optimizers: positions in the module's list of optimizers; None is all of them.

    Raises:
        ValueError: bad arguments; at the start of a fit, an unknown number of steps, a strategy
            that is not supported (FSDPStrategy, DeepSpeed, XLA), an optimizer whose updates can't
            be hooked, or MomentumDecay on the same one.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> control = LRCompensation(beta0=0.8)  # with Adam(..., betas=(0.9, 0.999)), say
        >>> trainer = Trainer(max_steps=500, callbacks=[control], accelerator="cpu", logger=False)
    """

    def __init__(
        self,
        total_steps: int | None = None,
        beta0: float = 0.8,
        min_beta1: float = 0.4,
        optimizers: Sequence[int] | None = None,
    ) -> None:
        super().__init__(total_steps, optimizers)
        momentum_decay(0, 1, beta0, min_beta1)  # refuses what it can't compute with
        self.beta0 = beta0
        self.min_beta1 = min_beta1

    def options(self, step: int, total_steps: int, group: ParamGroup) -> dict[str, Any]:
        """The lr."""
        lr_factor = momentum_decay(step, total_steps, self.beta0, self.min_beta1).lr_factor
        return {"lr": group["lr"] * lr_factor}

    def refuse_unfit(self, trainer: Trainer, optimizer: Optimizer) -> None:
        """Every optimizer has an lr."""


def _momenta(optimizer: Optimizer) -> list[float | None]:
    return [beta1_of(group) for group in optimizer.param_groups]


def _cycles_momentum(scheduler: object, optimizer: Optimizer) -> bool:
    """Whether the schedule, or one that it is made of, cycles the momentum of this optimizer."""
    if getattr(scheduler, "cycle_momentum", False):
        return getattr(scheduler, "optimizer", None) is optimizer
    return any(_cycles_momentum(part, optimizer) for part in getattr(scheduler, "_schedulers", ()))
