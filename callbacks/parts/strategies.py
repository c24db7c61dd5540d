"""Which strategies the callbacks that follow optimizers and weights work with."""

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.strategies.single_xla import SingleDeviceXLAStrategy
from lightning.pytorch.strategies.xla import XLAStrategy

from lit_diffusion.sharding import first_split
from lit_diffusion.trainer_state import is_a


def refuse_strategy(trainer: Trainer, name: str) -> None:
    """Raise ValueError where callback `name` does not work with the Trainer's strategy."""
    strategy = trainer.strategy
    if is_a(strategy, ModelParallelStrategy):
        return
    traces = is_a(strategy, XLAStrategy) or is_a(strategy, SingleDeviceXLAStrategy)
    # True of all of Lightning's that split weights, such as FSDPStrategy and DeepSpeedStrategy.
    if traces or strategy.restore_checkpoint_after_setup:
        raise ValueError(
            f"{name} does not support {type(strategy).__name__}, which updates or saves weights in "
            "its own way; use strategy='ddp', or ModelParallelStrategy with fully_shard in "
            "configure_model for weights that are split over ranks."
        )


def refuse_split_weights(trainer: Trainer, module: LightningModule, name: str) -> None:
    """Raise ValueError where weights are split and the strategy would save one rank's part."""
    strategy, split = trainer.strategy, first_split(dict(module.named_parameters()))
    if split and not is_a(strategy, ModelParallelStrategy):
        raise ValueError(
            f"{name} needs ModelParallelStrategy, with fully_shard in configure_model: "
            f"{type(strategy).__name__} would save one rank's part of {split!r}."
        )
