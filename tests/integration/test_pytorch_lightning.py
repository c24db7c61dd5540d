"""The callbacks under `pytorch_lightning`, whose classes are others than those of `lightning`."""

import pytest
import pytorch_lightning as pl
import torch
from lightning.pytorch import callbacks
from pytorch_lightning.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from pytorch_lightning.loggers import TensorBoardLogger
from support.pictures_module import pictures
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lit_diffusion.callbacks import EMA, MomentumDecay, SampleGrid, SaveOnSignal, StepSeed
from lit_diffusion.callbacks.trainer_state import isinstance_lightning


class Pictures(pl.LightningModule):
    """Somebody else's, written with the other package."""

    def __init__(self):
        super().__init__()
        self.shift = torch.nn.Parameter(torch.zeros(1, 6, 4))

    def training_step(self, batch, batch_idx):
        return (batch[0] / 255 - self.shift + torch.randn_like(self.shift)).pow(2).mean()

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", 0.0)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.1)

    def generate(self, seeds, labels=None):
        return (255 * self.shift.expand(len(seeds), 1, 6, 4)).clamp(0, 255).to(torch.uint8)


def test_a_run_has_its_whole_schedule_and_its_pictures_and_saves_last(tmp_path):
    decay = MomentumDecay()
    ours = SaveOnSignal(), StepSeed(0), EMA((0.5,)), decay, SampleGrid(4)
    theirs = ModelCheckpoint(tmp_path, save_weights_only=True)
    trainer = pl.Trainer(
        default_root_dir=tmp_path,
        max_epochs=2,
        accelerator="cpu",
        logger=TensorBoardLogger(tmp_path),
        callbacks=[*ours, theirs, GradientAccumulationScheduler({0: 1, 1: 2})],
        log_every_n_steps=1,
        enable_progress_bar=False,
    )
    with pytest.warns(UserWarning, match="EMA will not be in its files"):
        trainer.fit(Pictures(), pictures(), pictures(6))
    assert decay.state_dict().items() >= {"total_steps": 6, "steps": [6]}.items()
    assert trainer.global_step == 6
    events = EventAccumulator(str(next(tmp_path.rglob("events*"))))
    assert set(events.Reload().Tags()["images"]) == {"samples/step-ema", "samples/nearest-ema"}
    assert isinstance(trainer.callbacks[-1], SaveOnSignal)


@pytest.mark.parametrize("base", [ModelCheckpoint, callbacks.ModelCheckpoint])
def test_a_class_of_either_package_is_known(base):
    class Subclass(base):
        pass

    assert isinstance_lightning(Subclass(), callbacks.ModelCheckpoint)
    assert not isinstance_lightning(Subclass(), callbacks.EarlyStopping)
