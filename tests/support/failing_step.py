"""Fits that end at a step that is not finite, and leave its file."""

import pytest
import torch
from lightning.pytorch import seed_everything

from lit_diffusion.callbacks import FiniteUpdates
from support.plain_module import make_trainer
from support.tiny_diffusion import TinyNetwork, images, tiny_diffusion

FILE = "non-finite-rank0.ckpt"


class Overflowing(TinyNetwork):
    """Its output is infinite where t >= 80."""

    def forward(self, x, noise_label, labels):
        out = super().forward(x, noise_label, labels)
        return torch.where((noise_label >= 80).view(-1, 1, 1, 1), torch.inf, out)


def made():
    return tiny_diffusion(network=Overflowing())


def failed(folder, *callbacks, module=None, data=None, **options):
    seed_everything(11)
    trainer = make_trainer(folder, *callbacks, FiniteUpdates(), **{"max_epochs": 9, **options})
    with pytest.raises(FloatingPointError):
        trainer.fit(module or made(), data or images(32, 4))
    return folder / FILE
