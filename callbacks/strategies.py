"""Which strategies the callbacks that follow optimizers and weights work with."""

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import (
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    Strategy,
)
from lightning.pytorch.strategies.single_xla import SingleDeviceXLAStrategy
from lightning.pytorch.strategies.xla import XLAStrategy

from lit_diffusion.sharding import first_split, is_flat

INSTEAD = (
    "use strategy='ddp', or ModelParallelStrategy with fully_shard in configure_model for weights "
    "that are split over ranks"
)


def refuse_strategy(trainer: Trainer, name: str) -> None:
    """Raise ValueError where callback `name` does not work with the Trainer's strategy."""
    why = _objection(trainer.strategy)
    if why:
        raise ValueError(
            f"{name} does not support {type(trainer.strategy).__name__}, which {why}; {INSTEAD}."
        )


def _objection(strategy: Strategy) -> str:
    if isinstance(strategy, ModelParallelStrategy):
        return ""
    if isinstance(strategy, FSDPStrategy):
        return "flattens the weights of several layers into one"
    if isinstance(strategy, DeepSpeedStrategy):
        return "steps optimizers of its own and saves checkpoints in its own way"
    if isinstance(strategy, XLAStrategy | SingleDeviceXLAStrategy):
        return "traces the updates, and with which nothing of this was tried"
    if strategy.restore_checkpoint_after_setup:  # true of all of Lightning's that split weights
        return "restores checkpoints in its own way"
    return ""


def refuse_split_weights(trainer: Trainer, module: LightningModule, name: str) -> None:
    """Raise ValueError where weights are split and the strategy would save one rank's part.

    Raises:
        ValueError: for weights split by `fully_shard` or tensor parallelism under a strategy that
            does not know of them, and for FSDP1's flat ones.
    """
    strategy = trainer.strategy
    for path, part in module.named_modules():
        if is_flat(part):
            raise ValueError(
                f"{name} does not support FullyShardedDataParallel, which flattens the weights of "
                f"several layers into one (module {path!r}); {INSTEAD}."
            )
    if isinstance(strategy, ModelParallelStrategy):
        return
    split = first_split(dict(module.named_parameters()))
    if split:
        raise ValueError(
            f"{name} needs a strategy that gathers split weights for checkpoints, and "
            f"{type(strategy).__name__} would save one rank's part of {split!r}; use "
            "ModelParallelStrategy, and call fully_shard in configure_model."
        )


def refuse_split_sampling(module: LightningModule, name: str) -> None:
    """Raise ValueError where weights are split: ranks with other samples would wait for each other.

    Every pass through such a network is a collective, and callback `name` gives each rank samples
    of its own, not equally many.
    """
    split = first_split(dict(module.named_parameters()))
    if split:
        raise ValueError(
            f"{name} has every rank compute samples of its own, which needs whole weights, and "
            f"{split!r} is split over ranks; leave {name} out, and look at checkpoints in another "
            "process (`lit-diffusion sample`, `lit-diffusion evaluate`)."
        )
