import math

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn, optim
from torch.utils.data import DataLoader

from lit_diffusion.doctor.plan import Plan


class Nothing(LightningModule):
    """Trains a number, and counts."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        return self.weight(batch).mean()

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return optim.SGD(self.parameters(), 0.1)


class Count(Callback):
    def __init__(self):
        self.batches = self.validations = 0

    def on_train_batch_end(self, *_):
        self.batches += 1

    def on_validation_end(self, *_):
        self.validations += 1


@pytest.mark.parametrize(
    "settings",
    [
        {"max_steps": 11, "max_epochs": -1},
        {"max_steps": 11, "max_epochs": -1, "accumulate_grad_batches": 3},
        {"max_epochs": 4, "accumulate_grad_batches": 4},
        {"max_epochs": 6, "check_val_every_n_epoch": 2},
        {"max_epochs": 6, "check_val_every_n_epoch": 2, "val_check_interval": 0.5},
        {"max_epochs": 3, "val_check_interval": 3},
        {"max_epochs": 3, "val_check_interval": 0.3},
        {
            "max_steps": 25,
            "max_epochs": -1,
            "val_check_interval": 4,
            "check_val_every_n_epoch": None,
        },
        {
            "max_steps": 9,
            "max_epochs": -1,
            "val_check_interval": 6,
            "check_val_every_n_epoch": None,
            "accumulate_grad_batches": 3,
        },
    ],
    ids=str,
)
def test_a_plan_counts_as_the_trainer_does(settings, tmp_path):
    import torch

    counted, module = Count(), Nothing()
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    trainer = Trainer(
        **settings,
        **quiet,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        accelerator="cpu",
        callbacks=[counted],
        default_root_dir=tmp_path,
    )
    train, val = torch.zeros(20, 1), torch.zeros(4, 1)
    trainer.fit(module, DataLoader(train, batch_size=2), DataLoader(val, batch_size=2))
    plan = Plan(
        max_steps=settings.get("max_steps", -1),
        max_epochs=settings["max_epochs"],
        num_images=20,
        batch_size=2,
        batches_per_epoch=10,
        accumulate=settings.get("accumulate_grad_batches", 1),
        val_interval=settings.get("val_check_interval", 1.0),
        val_epochs=settings.get("check_val_every_n_epoch", 1),
        val_images=4,
    )
    assert plan.steps == trainer.global_step
    assert plan.batches(plan.steps) == counted.batches
    assert plan.images_seen == 2 * counted.batches
    assert plan.times(None) == counted.validations


def test_the_global_batch_is_that_of_all_ranks_and_accumulated_batches():
    assert Plan(batch_size=16, ranks=8, accumulate=2).global_batch == 256
    assert Plan(batch_size=16, ranks=None).global_batch is None


@pytest.mark.parametrize(
    ("plan", "endless"),
    [
        (Plan(max_steps=-1, max_epochs=-1), True),
        (Plan(max_steps=-1, max_epochs=-1, has_timer=True), False),
        (Plan(max_steps=-1, max_epochs=None), False),  # Lightning's 1,000 epochs
        (Plan(max_steps=10, max_epochs=-1), False),
    ],
)
def test_a_run_is_endless_if_nothing_ends_it(plan, endless):
    assert plan.is_endless is endless


def test_what_is_done_is_not_done_again():
    plan = Plan(max_steps=100, max_epochs=-1, start_step=60, val_images=0)
    assert plan.steps_to_go == 40
    assert plan.times(20) == 2
    assert plan.times(70) == 1
    assert plan.times(None) == 0  # there is no validation


def test_unknown_stays_unknown():
    plan = Plan(max_epochs=5)
    assert (plan.steps, plan.epochs, plan.images_seen, plan.times(10)) == (None,) * 4


def test_an_interval_that_the_trainer_refuses_has_no_time():
    plan = Plan(max_epochs=5, batches_per_epoch=10, val_interval=11)
    assert plan.steps_between_validations is None


def test_the_least_limit_counts():
    plan = Plan(max_steps=35, max_epochs=3, batches_per_epoch=10)
    assert plan.steps == 30
    assert math.isclose(plan.epochs, 3)
