"""Run under torchrun: what each process sees of a data set, in a file per rank.

Arguments: output folder, number of images, validation batch size; perhaps a set to stream, in place
of blank images.
"""

import os
import sys
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn

from lit_diffusion.data.base import ImageDataModule
from lit_diffusion.data.datasets import TensorImages
from lit_diffusion.data.streaming import StreamedImages

OUT, NUM_IMAGES, BATCH_SIZE = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
STREAMED = sys.argv[4:]


class Numbers(ImageDataModule):
    image_shape = (1, 2, 2)
    class_names = ("only",)

    def load(self, split):
        images = torch.zeros(NUM_IMAGES, 1, 2, 2, dtype=torch.uint8)
        return TensorImages(images, torch.zeros(NUM_IMAGES, dtype=torch.int64))


def data(**options):
    """All images for both splits."""
    one = {"image_size": 2, "channels": 1}
    return StreamedImages(*STREAMED * 2, **one, **options) if STREAMED else Numbers(**options)


class Recorder(LightningModule):
    """Processes that must meet in every step, as those of a sharded model do."""

    def __init__(self):
        super().__init__()
        self.net = nn.Conv2d(1, 2, 1)
        self.seen = {"train": {}, "validate": [], "test": [], "predict": []}

    def training_step(self, batch, batch_idx):
        images, _, index = batch
        self.seen["train"].setdefault(self.current_epoch, []).extend(index.tolist())
        return self.net(images.float()).square().mean()

    def validation_step(self, batch, batch_idx):
        self.all_gather(self.net(batch[0].float()).mean())
        self.seen["validate"] += batch[2].tolist()

    def test_step(self, batch, batch_idx):
        self.all_gather(self.net(batch[0].float()).mean())
        self.seen["test"] += batch[2].tolist()

    def predict_step(self, batch, batch_idx):
        self.seen["predict"] += batch[0].tolist()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def main():
    module = Recorder()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    devices = int(os.environ["WORLD_SIZE"])
    trainer = Trainer(accelerator="cpu", devices=devices, strategy="ddp", max_epochs=2, **quiet)
    trainer.fit(module, data(batch_size=2))
    module.seen["validate"].clear()
    trainer.validate(module, data(batch_size=BATCH_SIZE), verbose=False)
    trainer.test(module, data(batch_size=BATCH_SIZE), verbose=False)
    trainer.predict(module, data(), return_predictions=False)
    torch.save(module.seen, OUT / f"{trainer.global_rank}.pt")


if __name__ == "__main__":
    main()
    os._exit(0)  # torch aborts at times while it takes groups apart
