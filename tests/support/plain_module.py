"""A LightningModule that has nothing to do with this project, and what tests ask of it."""

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lit_diffusion.ema_profiles import exponent


class PlainModule(LightningModule):
    """Denoises vectors with random noise; has BatchNorm, a shared and a frozen layer."""

    def __init__(self, lr=1e-2, optimizer=torch.optim.Adam):
        super().__init__()
        torch.manual_seed(7)
        self.inner = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4))
        self.shared = self.inner[3]
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.lr, self.optimizer = lr, optimizer
        self.losses = []

    def loss(self, batch):
        x = self.frozen(batch[0])
        return (self.inner(x + torch.randn_like(x)) - x).pow(2).mean()

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", (self.inner(batch[0]) - batch[0]).pow(2).mean())

    def test_step(self, batch, batch_idx):
        self.log("test_loss", (self.inner(batch[0]) - batch[0]).pow(2).mean())

    def predict_step(self, batch, batch_idx):
        return self.inner(batch[0])

    def configure_optimizers(self):
        return self.optimizer([p for p in self.parameters() if p.requires_grad], lr=self.lr)


def loader(num=32, batch_size=8):
    data = torch.randn(num, 4, generator=torch.Generator().manual_seed(3))
    return DataLoader(TensorDataset(data), batch_size=batch_size)


def make_trainer(folder, *callbacks, **options):
    options = {"max_epochs": 1, "logger": False, "enable_checkpointing": False, **options}
    options = {"accelerator": "cpu", **options}
    return Trainer(
        default_root_dir=folder,
        callbacks=list(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def trainable(module):
    """Values of the trainable parameters by name, as float64 copies."""
    return {n: p.detach().double().clone() for n, p in module.named_parameters() if p.requires_grad}


class Watch(Callback):
    """The raw weights at the start and after each optimizer step, and a float64 EMA of them."""

    def __init__(self):
        self.history = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if not self.history:
            self.history = [trainable(pl_module)]
            self._step = trainer.global_step

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step > self._step:
            self.history.append(trainable(pl_module))
            self._step = trainer.global_step

    def average(self, decay, warmup=True):
        average = dict(self.history[0])
        for n, weights in enumerate(self.history[1:]):
            d = min(decay, (1 + n) / (10 + n)) if warmup else decay
            average = {name: d * average[name] + (1 - d) * w for name, w in weights.items()}
        return average


def by_profile(path, width):
    """The average that PowerEMA makes of the weights {name: tensor} after each step.

    Each has the integral of the profile over its step.
    """
    edges = torch.arange(len(path) + 1, dtype=torch.float64) / len(path)
    shares = (edges ** (exponent(width) + 1)).diff()
    return {
        name: sum(
            share * weights[name].double() for share, weights in zip(shares, path, strict=True)
        )
        for name in path[0]
    }


def assert_close(actual, expected, atol=1e-6):
    """Equality of two {name: tensor} up to `atol`."""
    assert actual.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(
            actual[name].double(), expected[name].double(), rtol=0, atol=atol, msg=name
        )


def assert_same_bits(actual, expected):
    """Equality of every tensor and number in two nested structures."""
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        for key in expected:
            assert_same_bits(actual[key], expected[key])
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected)
        for a, b in zip(actual, expected, strict=True):
            assert_same_bits(a, b)
    elif isinstance(expected, torch.Tensor):
        assert actual.dtype == expected.dtype
        assert torch.equal(actual.cpu(), expected.cpu())
    else:
        assert actual == expected
