"""The images of a data set that a rank gets."""

import torch
from lightning.pytorch import LightningModule
from torch import nn

from lit_diffusion.data.base import ImageDataModule
from lit_diffusion.data.datasets import TensorImages
from support.plain_module import make_trainer
from support.spawn import rank_and_size


class Numbers(ImageDataModule):
    """129 blank images, all of them in both splits."""

    image_shape = (1, 2, 2)
    class_names = ("only",)

    def load(self, split):
        images = torch.zeros(129, 1, 2, 2, dtype=torch.uint8)
        return TensorImages(images, torch.zeros(129, dtype=torch.int64))


class Recorder(LightningModule):
    """Its ranks must meet in every step, as those of a sharded model do."""

    def __init__(self):
        super().__init__()
        self.net = nn.Conv2d(1, 2, 1)
        self.train_index = {}
        self.index = []

    def training_step(self, batch, batch_idx):
        images, _, index = batch
        self.train_index.setdefault(self.current_epoch, []).extend(index.tolist())
        return self.net(images.float()).square().mean()

    def validation_step(self, batch, batch_idx):
        self.all_gather(self.net(batch[0].float()).mean())
        self.index += batch[2].tolist()

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        self.index += batch[0].tolist()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def count_images(folder):
    """Places of the images that this rank trains on, by epoch, and that other stages give it."""
    module, options = Recorder(), {"devices": rank_and_size()[1], "strategy": "ddp"}
    trainer = make_trainer(folder, max_epochs=2, **options)
    trainer.fit(module, Numbers(batch_size=2))
    stages = {"train": [module.train_index[epoch] for epoch in range(2)]}
    for stage in (trainer.validate, trainer.test, trainer.predict):
        module.index = []
        stage(module, Numbers(batch_size=64))
        stages[stage.__name__] = module.index
    return stages
