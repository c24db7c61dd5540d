"""The optimizer that a module was handed, and its schedule, as Lightning wants them."""

from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.utilities.types import OptimizerLRScheduler

from lit_diffusion.callbacks.trainer_state import total_steps
from lit_diffusion.lr_schedules import WarmupLinear


def optimizer_and_schedule(
    module: LightningModule,
    make_optimizer: OptimizerCallable,
    make_schedule: LRSchedulerCallable | None,
) -> OptimizerLRScheduler:
    """What `configure_optimizers` returns for all that a module trains.

    The schedule is stepped with the optimizer.

    Raises:
        ValueError: where the schedule needs the length of the run, and the Trainer has none.
    """
    optimizer = make_optimizer([p for p in module.parameters() if p.requires_grad])
    if make_schedule is None:
        return optimizer
    schedule = make_schedule(optimizer)
    if isinstance(schedule, WarmupLinear) and schedule.total_steps is None:
        if (steps := total_steps(module.trainer)) is None:
            raise ValueError(
                "the lr schedule needs the length of the run, and this Trainer has none; pass "
                "max_steps to the Trainer or total_steps to the schedule."
            )
        schedule.set_total_steps(steps)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
