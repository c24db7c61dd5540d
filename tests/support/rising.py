"""A foreign LightningModule whose one weight counts the steps, and whose FID follows it."""

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from support.pixels import random_images
from support.plain_module import make_trainer


class Rising(LightningModule):
    """`level` rises by one a step; samples are darker before `best` and brighter after it.

    Training draws random numbers that are in the loss, so a disturbed generator shows in `losses`.
    """

    def __init__(self, best=5):
        super().__init__()
        self.level = nn.Parameter(torch.zeros(()))
        self.frozen = nn.BatchNorm1d(1, affine=False).eval()
        self.dropout = nn.Dropout(0.5)
        self.best = best
        self.losses, self.levels, self.seeds, self.labels = [], [], [], []

    def training_step(self, batch, batch_idx):
        loss = torch.randn(()) - self.level
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val/zero", 0.0)

    def test_step(self, batch, batch_idx):
        self.log("test/zero", 0.0)

    def configure_optimizers(self):
        return torch.optim.SGD([self.level], lr=1.0)

    def generate(self, seeds, labels=None):
        assert not torch.is_grad_enabled()
        assert not any(module.training for module in self.modules())
        torch.rand(3)  # a module may draw from the global generator
        self.levels.append(self.level.item())
        self.seeds.extend(seeds)
        self.labels.extend([None] * len(seeds) if labels is None else labels.tolist())
        images = torch.cat([random_images(1, 1000 + seed) for seed in seeds])
        return (images + 30 * (self.level - self.best)).round().clamp(0, 255).to(torch.uint8)


def loader(count=8, seed=0, batch_size=1):
    return DataLoader(TensorDataset(random_images(count, seed)), batch_size=batch_size)


def trainer(folder, callbacks, **options):
    return make_trainer(folder, *callbacks, **({"num_sanity_val_steps": 0} | options))
