import pytest
import torch
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    SingleDeviceXLAStrategy,
    XLAStrategy,
)
from support.plain_module import PlainModule, loader, make_trainer
from support.tiny_diffusion import images, tiny_diffusion
from torch.distributed.fsdp import fully_shard

from lit_diffusion.callbacks import (
    EMA,
    FIDEvaluation,
    LRCompensation,
    MomentumDecay,
    NoiseLevelLoss,
    SampleGrid,
)
from lit_diffusion.callbacks.parts.strategies import refuse_strategy

FOLLOWERS = [EMA, MomentumDecay, LRCompensation]
SPLIT = "ModelParallelStrategy"


class ATrainer:
    """As much of a Trainer as is looked at: strategies of GPUs can't be started here."""

    def __init__(self, kind):
        self.strategy = kind.__new__(kind)


@pytest.mark.parametrize(
    "kind", [FSDPStrategy, DeepSpeedStrategy, XLAStrategy, SingleDeviceXLAStrategy]
)
def test_a_strategy_that_is_not_supported_is_named_with_what_to_use(kind):
    with pytest.raises(ValueError, match=rf"EMA does not support {kind.__name__}.*'ddp'.*{SPLIT}"):
        refuse_strategy(ATrainer(kind), "EMA")


@pytest.mark.parametrize("kind", [SingleDeviceStrategy, DDPStrategy, ModelParallelStrategy])
def test_strategies_that_are_supported_pass(kind):
    refuse_strategy(ATrainer(kind), "EMA")


@pytest.mark.parametrize("callback", FOLLOWERS)
def test_each_callback_that_follows_optimizers_refuses_a_strange_strategy(tmp_path, callback):
    class Strange(SingleDeviceStrategy):
        restore_checkpoint_after_setup = True

    trainer = make_trainer(tmp_path, callback(), strategy=Strange("cpu"))
    with pytest.raises(ValueError, match=f"{callback.__name__} does not support Strange"):
        trainer.fit(PlainModule(), loader())


class SplitByHand(PlainModule):
    def configure_model(self):
        fully_shard(self.inner, mesh=torch.distributed.init_device_mesh("cpu", (1,)))


@pytest.mark.parametrize("callback", FOLLOWERS)
def test_weights_that_are_split_behind_the_strategys_back_are_refused(tmp_path, one_rank, callback):
    trainer = make_trainer(tmp_path, callback())
    expected = rf"{callback.__name__}.*SingleDeviceStrategy would save one rank's part of 'inner.0"
    with pytest.raises(ValueError, match=expected):
        trainer.fit(SplitByHand(), loader())


@pytest.mark.parametrize(
    "callback",
    [SampleGrid(4), FIDEvaluation(64, "digits-cnn", weights="raw"), NoiseLevelLoss(2, 4)],
)
def test_samples_are_not_computed_with_split_weights(tmp_path, one_rank, callback):
    """Ranks with unequal numbers of them would wait for each other without end."""

    class Split(type(tiny_diffusion())):
        def configure_model(self):
            fully_shard(self.network, mesh=torch.distributed.init_device_mesh("cpu", (1,)))

    module = tiny_diffusion()
    module.__class__ = Split
    trainer = make_trainer(tmp_path, callback, max_steps=1, num_sanity_val_steps=0)
    with pytest.raises(ValueError, match=f"{type(callback).__name__} has every rank .*'network"):
        trainer.fit(module, images(8, 4), images(8, 4))
