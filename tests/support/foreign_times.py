"""Somebody else's LightningModule, which draws noise levels as protocols.HasTimesteps says."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lit_diffusion.callbacks import StepSeed
from support.plain_module import PlainModule, make_trainer


class ForeignTimes(PlainModule):
    """Denoises vectors at levels u that it draws; records what was set on it, and its draws."""

    def __init__(self, lr=1e-2, optimizer=torch.optim.Adam):
        super().__init__(lr, optimizer)
        self.inner = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4))
        self.shared = self.inner[2]
        self.timestep_density = None
        self.timestep_weight = None
        self.visible, self.drawn = [], []

    def training_step(self, batch, batch_idx):
        self.visible.append((self.global_step, self.timestep_density, self.timestep_weight))
        x, n = batch[0], len(batch[0])
        u, factor = torch.rand(n), torch.ones(n)
        if self.timestep_density is not None:
            bins = torch.multinomial(self.timestep_density, n, replacement=True)
            u = (bins + u) / len(self.timestep_density)
        if self.timestep_weight is not None:
            weight = self.timestep_weight
            factor = weight[(u * len(weight)).long().clamp(max=len(weight) - 1)]
        x_u = x + u[:, None] * torch.randn_like(x)
        losses = (self.inner(torch.cat([x_u, u[:, None]], dim=1)) - x).pow(2).mean(1)
        self.drawn.append((u, losses.detach()))
        return {"loss": (losses * factor).mean(), "u": u, "per_sample_loss": losses}

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", batch[0].pow(2).mean())


class Ragged(ForeignTimes):
    """Batches of 8 on rank 0 and of 5 on rank 1."""

    def train_dataloader(self):
        size = (8, 5)[self.global_rank]
        return DataLoader(TensorDataset(torch.randn(4 * size, 4)), batch_size=size)


def to_lists(value):
    """Tensors as lists of numbers, at any depth."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return value if value is None or isinstance(value, int) else [to_lists(v) for v in value]


def train_on_two_ranks(folder, callback):
    """What a rank saw set on its module and drew, its weights at the end, the callback's state."""
    module, options = Ragged(), {"devices": 2, "strategy": "ddp", "use_distributed_sampler": False}
    make_trainer(folder, StepSeed(0), callback, max_epochs=1, **options).fit(module)
    return {
        "visible": to_lists(module.visible),
        "drawn": to_lists(module.drawn),
        "weights": to_lists(module.parameters()),
        "state": to_lists(callback.state_dict().values()),
    }
