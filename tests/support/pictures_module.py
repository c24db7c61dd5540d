"""A foreign LightningModule that generates images, and tiny image data for it."""

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Stripes(Dataset):
    """(image uint8 (channels, 6, 4), label), each a function of its index."""

    def __init__(self, num=20, channels=1):
        self.num, self.channels = num, channels

    def __len__(self):
        return self.num

    def __getitem__(self, index):
        if index >= self.num:  # ends a for loop over the data set
            raise IndexError(index)
        generator = torch.Generator().manual_seed(index)
        image = torch.randint(0, 256, (self.channels, 6, 4), generator=generator)
        return image.to(torch.uint8), index % 3


class PicturesModule(LightningModule):
    """A learned shift of per-seed noise; draws noise and uses dropout in training."""

    def __init__(self, channels=1):
        super().__init__()
        torch.manual_seed(5)
        self.shift = nn.Parameter(torch.zeros(channels, 6, 4))
        self.dropout = nn.Dropout(0.5)
        self.losses, self.calls = [], []

    def training_step(self, batch, batch_idx):
        target = batch[0].float() / 255
        loss = (self.dropout(target) - self.shift + torch.randn_like(target)).pow(2).mean()
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", (batch[0].float() / 255 - self.shift).pow(2).mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)

    def generate(self, seeds, labels=None):
        torch.rand(3)  # a module may draw from the global generator
        self.calls.append((list(seeds), None if labels is None else labels.tolist()))
        assert not self.training
        assert not torch.is_grad_enabled()
        noise = torch.stack(
            [
                torch.rand(self.shift.shape, generator=torch.Generator().manual_seed(seed))
                for seed in seeds
            ]
        )
        value = self.shift + noise / 2
        if labels is not None:
            value = value + labels.view(-1, 1, 1, 1) / 10
        return (255 * value).clamp(0, 255).to(torch.uint8)


def pictures(num=20, channels=1, **options):
    return DataLoader(Stripes(num, channels), **{"batch_size": 5, **options})
