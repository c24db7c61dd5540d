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


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    ours = SaveOnSignal(), StepSeed(0), EMA((0.5,)), MomentumDecay(), SampleGrid(4)
    theirs = (
        ModelCheckpoint(folder, save_weights_only=True),
        GradientAccumulationScheduler({0: 1, 1: 2}),
    )
    trainer = pl.Trainer(
        default_root_dir=folder,
        max_epochs=2,
        accelerator="cpu",
        logger=TensorBoardLogger(folder),
        callbacks=[*ours, *theirs],
        log_every_n_steps=1,
        enable_progress_bar=False,
    )
    with pytest.warns(UserWarning, match="EMA will not be in its files"):
        trainer.fit(Pictures(), pictures(), pictures(6))
    return trainer, folder


def test_a_schedule_is_as_long_as_the_run(run):
    trainer, _ = run
    decay = next(c for c in trainer.callbacks if isinstance(c, MomentumDecay))
    assert decay.state_dict().items() >= {"total_steps": 6, "steps": [6]}.items()
    assert trainer.global_step == 6


def test_pictures_reach_its_loggers(run):
    events = EventAccumulator(str(next(run[1].rglob("events*"))))
    assert set(events.Reload().Tags()["images"]) == {"samples/step-ema", "samples/nearest-ema"}


def test_what_is_saved_on_a_signal_has_all_that_others_do(run):
    assert isinstance(run[0].callbacks[-1], SaveOnSignal)


@pytest.mark.parametrize("base", [ModelCheckpoint, callbacks.ModelCheckpoint])
def test_a_class_of_either_package_is_known(base):
    class Subclass(base):
        pass

    assert isinstance_lightning(Subclass(), callbacks.ModelCheckpoint)
    assert not isinstance_lightning(Subclass(), callbacks.EarlyStopping)
