import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn

from lit_diffusion.lr_schedules import WarmupLinear
from lit_diffusion.modules.optimizers import optimizer_and_schedule


class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=1.0)


def warmup(optimizer):
    return WarmupLinear(optimizer, warmup_steps=2)


def test_frozen_parameters_are_left_out_and_no_schedule_is_none():
    module = Module()
    module.layer.bias.requires_grad_(False)
    found = optimizer_and_schedule(module, sgd, None)
    assert [p is module.layer.weight for p in found.param_groups[0]["params"]] == [True]


def test_a_schedule_without_a_length_in_a_run_without_end_is_refused():
    module = Module()
    module.trainer = Trainer(max_steps=-1, max_epochs=-1, accelerator="cpu", logger=False)
    with pytest.raises(ValueError, match="needs the length of the run, and this Trainer has none"):
        optimizer_and_schedule(module, sgd, warmup)
