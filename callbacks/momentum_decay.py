"""MDLRC: beta1 falls over the run, and the lr with it; Demon; the control, with the lr alone."""

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any, NamedTuple

from lightning.pytorch import Trainer
from torch.optim import Optimizer

from lit_diffusion.callbacks.parts.update_options import ParamGroup
from lit_diffusion.callbacks.parts.update_schedule import UpdateSchedule


class DecayedMomentum(NamedTuple):
    """What one update uses."""

    beta1: float  # share of the old momentum that is kept
    lr_factor: float  # in (0, 1]


def momentum_decay(
    step: int, total_steps: int, beta0: float, min_beta1: float = 0.4
) -> DecayedMomentum:
    """Decayed beta1 and the lr factor that compensates for it.

    With tau = min(step / total_steps, 1), the share of the run that is over:

        beta1     = max(beta0 * (1 - tau) / (1 - beta0 * tau), min_beta1)
        lr_factor = (1 - beta0) / (1 - beta1)

    So beta1 / (1 - beta1), the weight of the past beside the newest gradient, falls linearly, and
    lr * (1 - beta1), with which that gradient enters the update, stays what it was. Until beta1
    reaches its floor lr_factor is 1 - beta0 * tau, a linear decay; from there on both rest.

    Args:
        step: optimizer steps completed before this one; the first has tau = 0.
        total_steps: of the whole run.
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
            f"0 <= min_beta1 <= beta0 < 1 must hold, got min_beta1={min_beta1} and beta0={beta0}; "
            "lower min_beta1, 0 being no floor."
        )
    tau = min(step / total_steps, 1.0)
    beta1 = max(beta0 * (1 - tau) / (1 - beta0 * tau), float(min_beta1))
    return DecayedMomentum(beta1, (1 - beta0) / (1 - beta1))


class _MDLRC(UpdateSchedule):
    def numbers(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """beta1, where there is momentum, and lr."""
        beta1 = _beta1_of(group)
        return ({} if beta1 is None else {"mdlrc/beta1": beta1}) | {"mdlrc/lr": group["lr"]}


class MomentumDecay(_MDLRC):
    """Momentum decay with learning rate compensation (MDLRC), or Demon without the latter.

    Update after `step` completed ones: beta1, lr_factor = `momentum_decay`(step, total_steps,
    beta0, min_beta1), and the lr is lr_factor times the optimizer's own. beta0 is each param
    group's own beta1, so a config sets it where it sets the optimizer.

    - beta1 and lr differ in the update alone: schedules, LearningRateMonitor, the training step and
      checkpoints see the optimizer's own.
    - `mdlrc/beta1` and `mdlrc/lr` log what the last update used; where there are several
      optimizers or groups, `mdlrc/lr_optimizer1_group0` and so on.
    - On resume an explicit total_steps wins, and a change is printed; None keeps the checkpoint's
      and warns if the run has another.
    - The weight decay of AdamW is multiplied by the lr, so the compensation scales it as well.
    - Steps are counted as by `UpdateSchedule`.

    Args:
        total_steps: optimizer steps until beta1 would be 0; None takes the Trainer's.
        min_beta1: floor of beta1, in [0, beta0].
        compensate_lr: False is Demon: the lr stays as it is. SGD, RMSprop and Muon need it: the
            steps of the first two shrink by themselves, as their momentum has no factor 1 -
            momentum, and those of Muon have one length whatever it is.
        optimizers: positions in `trainer.optimizers` of those that are changed; None for all.

    Raises:
        ValueError: as `UpdateSchedule`; at the start of a fit, a floor above beta0, or an optimizer
            whose momentum is none, is cycled (OneCycleLR) or, with compensate_lr, not Adam's.

    Source: as of `momentum_decay`.

    Example:
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
        self.compensate_lr = compensate_lr

    def options(self, step: int, total_steps: int, group: ParamGroup) -> dict[str, Any]:
        """The decayed momentum and, with compensation, the lr."""
        beta0 = _beta1_of(group)
        assert beta0 is not None
        beta1, lr_factor = momentum_decay(step, total_steps, beta0, self.min_beta1)
        others: dict[str, Any] = {"momentum": beta1}
        if "betas" in group:
            others = {"betas": (beta1, *group["betas"][1:])}
        if self.compensate_lr:
            others["lr"] = group["lr"] * lr_factor
        return others

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

    def _refuse_momentum(self, name: str, group: ParamGroup) -> None:
        if "ScheduleFree" in name:
            raise ValueError(
                f"The beta1 of {name} is no momentum: it says between which averages gradients "
                "are taken. Leave MomentumDecay out, or use Adam or AdamW."
            )
        beta0 = _beta1_of(group)
        if beta0 is None:
            raise ValueError(
                f"MomentumDecay needs an optimizer with betas or momentum, and {name} has neither; "
                "use Adam or AdamW."
            )
        if self.compensate_lr and not {"betas", "eps"} <= group.keys():  # Lion has no eps
            raise ValueError(
                "The compensation keeps lr * (1 - beta1), with which the newest gradient enters an "
                f"update of Adam's; the momentum of {name} enters its updates in another way: pass "
                "compensate_lr=False or use Adam."
            )
        if not self.min_beta1 <= beta0:
            raise ValueError(
                f"min_beta1 must be at most the beta1 or momentum of the optimizer, got "
                f"{self.min_beta1} and {beta0} ({name}); lower min_beta1, 0 being no floor."
            )


class LRCompensation(_MDLRC):
    """The control of `MomentumDecay`: its lr in every update, floor included, and nothing else.

    The lr is lr_factor of `momentum_decay`(step, total_steps, beta0, min_beta1) times the
    optimizer's own: to the last bit that of MomentumDecay on an optimizer whose beta1 is `beta0`,
    so what differs between two such runs is the momentum alone.

    Args:
        total_steps, optimizers: as of `MomentumDecay`.
        beta0, min_beta1: of the run that this one is compared with.

    Example:
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


def _beta1_of(group: Mapping[str, Any]) -> float | None:
    """The momentum of a param group: its first beta, else `momentum`; None without either."""
    return group["betas"][0] if "betas" in group else group.get("momentum")


def _cycles_momentum(scheduler: object, optimizer: Optimizer) -> bool:
    """Whether the schedule, or one that it is made of, cycles the momentum of this optimizer."""
    if getattr(scheduler, "cycle_momentum", False):
        return getattr(scheduler, "optimizer", None) is optimizer
    return any(_cycles_momentum(part, optimizer) for part in getattr(scheduler, "_schedulers", ()))
