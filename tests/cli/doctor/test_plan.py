import math

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from support.doctor import clean_folder, planned
from support.small_digits import small_digits
from torch import nn, optim
from torch.utils.data import DataLoader

from lit_diffusion.cli.doctor.plan import Plan, plan_of


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
    plan = plan_of(trainer)
    assert (plan.num_images, plan.batch_size, plan.val_images) == (20, 2, 4)
    assert plan.steps == trainer.global_step
    assert plan.images_seen == 2 * counted.batches
    assert plan.times(None) == counted.validations


def test_the_global_batch_is_that_of_all_ranks_and_accumulated_batches():
    assert Plan(batch_size=16, ranks=8, accumulate=2).global_batch == 256
    assert Plan(batch_size=None).global_batch is None


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"max_steps": -1, "max_epochs": -1}, math.inf),
        ({"max_steps": -1, "max_epochs": -1, "max_time": "00:01:00:00"}, None),
        ({"max_steps": -1}, 22_000),  # Lightning's 1,000 epochs
        ({"max_steps": -1, "max_time": "00:01:00:00"}, None),
        ({"max_steps": 10, "max_epochs": -1}, 10),
        ({"max_steps": 35, "max_epochs": 1}, 22),  # the least limit counts
        ({"max_steps": 10, "max_epochs": 0}, 0),
        ({"max_steps": 10, "limit_train_batches": 0}, 0),
    ],
)
def test_a_run_ends_as_the_trainer_says(settings, steps, tmp_path, monkeypatch):
    clean_folder(tmp_path, monkeypatch)
    config = small_digits(10)
    config["trainer"].update(settings)
    config["model"]["init_args"].pop("lr_scheduler")
    assert planned(config).steps == steps


def test_what_is_done_is_not_done_again():
    plan = Plan(steps=100, start_step=60, val_batches=0)
    assert plan.steps_to_go == 40
    assert plan.times(20) == 2
    assert plan.times(70) == 1
    assert plan.times(None) == 0  # there is no validation


@pytest.mark.parametrize("steps", [None, math.inf])
def test_unknown_stays_unknown(steps):
    plan = Plan(steps=steps)
    assert (plan.length, plan.epochs, plan.images_seen, plan.times(10)) == (None,) * 4


def test_a_plan_is_what_the_config_says(tmp_path, monkeypatch):
    clean_folder(tmp_path, monkeypatch)
    config = small_digits(50, val_check_interval=10, check_val_every_n_epoch=None)
    plan = planned(config, "--data.init_args.batch_size=100", "--trainer.accumulate_grad_batches=2")
    assert (plan.steps, plan.num_images, plan.held_out, plan.val_images) == (50, 1437, 360, 360)
    assert (plan.batch_size, plan.batches_per_epoch, plan.accumulate) == (100, 14, 2)
    assert (plan.val_batches, plan.steps_between_validations) == (10, 5)


def test_ranks_share_the_images_of_an_epoch(tmp_path, monkeypatch):
    clean_folder(tmp_path, monkeypatch)
    options = ["--trainer.strategy=ddp", "--trainer.devices=4", "--data.init_args.batch_size=100"]
    plan = planned(small_digits(8), *options)
    assert plan.ranks == 4
    assert plan.batches_per_epoch == 1437 // 4 // 100
    assert plan.global_batch == 400


@pytest.mark.parametrize(
    ("options", "batches", "val_images"),
    [
        (["--trainer.limit_train_batches=3"], 3, 360),
        (["--trainer.limit_train_batches=0.5"], 7, 360),
        (["--trainer.limit_val_batches=0"], 14, 0),
        (["--trainer.limit_val_batches=2"], 14, 200),
        (["--trainer.limit_val_batches=0.25"], 14, 100),
        (["--trainer.overfit_batches=2", "--trainer.limit_train_batches=3"], 2, 200),
        (["--trainer.overfit_batches=0.5"], 7, 200),
    ],
)
def test_limits_of_the_trainer_count(options, batches, val_images, tmp_path, monkeypatch):
    clean_folder(tmp_path, monkeypatch)
    plan = planned(small_digits(8), "--data.init_args.batch_size=100", *options)
    assert (plan.batches_per_epoch, plan.val_images) == (batches, val_images)
