from functools import partial

import pytest
import torch
from support.commands import equal
from support.saving import fit, saved
from support.tiny_run import TinyModule, TinyNet
from torch.optim import Adam
from torch.optim import lr_scheduler as lr

from lit_diffusion.cli.changed_settings import ApplyChangedHyperparameters, differences
from lit_diffusion.cli.last_checkpoint import LastCheckpoint
from lit_diffusion.lr_schedules import WarmupConstant, WarmupLinear
from lit_diffusion.optimizers import MuonAdamW

ADAM = {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.1, "betas": [0.9, 0.99]}}
MODEL = {"class_path": "A", "init_args": {"optimizer": ADAM, "sizes": (1, 2), "dropout": None}}


def changed(**init_args):
    return {"class_path": "A", "init_args": MODEL["init_args"] | init_args}


@pytest.mark.parametrize(
    ("used", "expected"),
    [
        (MODEL, {}),
        (changed(sizes=[1, 3]), {"model.sizes": ((1, 2), [1, 3])}),
        (
            changed(optimizer=ADAM | {"init_args": {"lr": 0.2, "betas": [0.9, 0.99]}}),
            {"model.optimizer.lr": (0.1, 0.2)},
        ),
        (changed(optimizer=None), {"model.optimizer": (ADAM, None)}),
        ({"class_path": "B", "init_args": {}}, {"model": ("A", "B")}),
    ],
)
def test_settings_that_differ_are_listed_by_name(used, expected):
    assert differences(MODEL, used) == expected


def test_nan_is_equal_to_nan():
    assert differences(changed(dropout=float("nan")), changed(dropout=float("nan"))) == {}


# At a resume


def train(folder, optimizer, schedule=None, steps=8, changes=None):
    """lr inside each step; a resume with those changes, if there are any, else a new run."""
    lrs = []

    class Records(TinyModule):
        def on_before_optimizer_step(self, optimizer):
            lrs.append(optimizer.param_groups[0]["lr"])

    ckpt_path = None if changes is None else folder / "last.ckpt"
    apply = ApplyChangedHyperparameters(changes or {})
    module = Records(TinyNet(3), optimizer, schedule)
    fit(LastCheckpoint(folder), folder, ckpt_path, [apply], module, max_steps=steps)
    return lrs


LINEAR = partial(WarmupLinear, total_steps=8, warmup_steps=2)
LR = {"model.optimizer.lr": (0.1, 0.02)}
SCHEDULE = {"model.lr_scheduler": ("WarmupLinear", "another")}


@pytest.mark.parametrize(
    ("before", "lr", "after", "changes"),
    [
        (LINEAR, 0.1, LINEAR, {}),
        (LINEAR, 0.02, LINEAR, LR),
        (None, 0.02, None, LR),
        (partial(LINEAR, total_steps=12), 0.1, LINEAR, SCHEDULE),
        (LINEAR, 0.1, partial(WarmupConstant, warmup_steps=7), SCHEDULE),
        (None, 0.1, LINEAR, SCHEDULE),
    ],
)
def test_a_changed_lr_or_schedule_is_as_if_it_had_been_there_from_the_start(
    tmp_path, before, lr, after, changes
):
    whole = train(tmp_path / "whole", partial(Adam, lr=lr), after)
    train(tmp_path, partial(Adam, lr=0.1), before, steps=5)
    assert train(tmp_path, partial(Adam, lr=lr), after, changes=changes) == whole[5:]
    assert saved(tmp_path)["lr_schedulers"] == saved(tmp_path / "whole")["lr_schedulers"]


def train_with_muon(folder, steps=8, changes=None, schedule=None, optimizer=MuonAdamW, **options):
    """The lr of each param group in the end; a resume with those changes, if there are any."""
    network = TinyNet(3)
    network.block_names = ("layers",)

    def make(parameters):
        made = optimizer(parameters, **options)
        if optimizer is MuonAdamW:
            made.attach(network)
        return made

    ckpt_path = None if changes is None else folder / "last.ckpt"
    apply, module = ApplyChangedHyperparameters(changes or {}), TinyModule(network, make, schedule)
    trainer = fit(LastCheckpoint(folder), folder, ckpt_path, [apply], module, max_steps=steps)
    return [group["lr"] for group in trainer.optimizers[0].param_groups]


@pytest.mark.parametrize("schedule", [None, partial(LINEAR, total_steps=12)])
def test_a_changed_lr_of_one_group_is_applied(tmp_path, schedule):
    whole = train_with_muon(tmp_path / "whole", schedule=schedule, lr=0.1, adamw_lr=0.02)
    train_with_muon(tmp_path, 5, schedule=schedule, lr=0.1)
    changes = {"model.optimizer.adamw_lr": (None, 0.02)}
    resumed = train_with_muon(tmp_path, 8, changes, schedule, lr=0.1, adamw_lr=0.02)
    assert resumed == whole
    assert resumed[1] == pytest.approx(resumed[0] / 5)


def test_another_optimizer_is_refused_in_both_directions(tmp_path):
    names = {Adam: "torch.optim.Adam", MuonAdamW: "lit_diffusion.optimizers.MuonAdamW"}
    for old, new in ((Adam, MuonAdamW), (MuonAdamW, Adam)):
        folder = tmp_path / old.__name__
        train_with_muon(folder, 2, optimizer=old)
        changes = {"model.optimizer": (names[old], names[new])}
        with pytest.raises(ValueError, match=f"was {names[old]} and is now {names[new]}, whose"):
            train_with_muon(folder, 4, changes, optimizer=new)


SCHEDULES = {
    "phases": lambda o: lr.SequentialLR(o, [lr.LinearLR(o, 0.1), lr.StepLR(o, 3)], [5]),
    "chained": lambda o: lr.ChainedScheduler([lr.ConstantLR(o), lr.ExponentialLR(o, 0.9)]),
    "cycle": lambda o: lr.OneCycleLR(o, 0.1, 20),
    "restarts": lambda o: lr.CosineAnnealingWarmRestarts(o, 3),
    "factor": lambda o: lr.LambdaLR(o, lambda step: 1 / (1 + step)),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_state_of_a_schedule_is_restored_and_a_damaged_one_refused(tmp_path, name):
    def resume(steps, ckpt_path=None):
        torch.manual_seed(0)
        module = TinyModule(TinyNet(3), partial(torch.optim.SGD, lr=0.1), SCHEDULES[name])
        callback = ApplyChangedHyperparameters({})
        return fit(callback, tmp_path, ckpt_path, module=module, max_steps=steps)

    whole = resume(4)
    resume(2).save_checkpoint(tmp_path / "2.ckpt")
    assert equal(resume(4, tmp_path / "2.ckpt").model.state_dict(), whole.model.state_dict())
    content = torch.load(tmp_path / "2.ckpt", weights_only=True)
    content["lr_schedulers"][0]["_last_lr"] = None
    torch.save(content, tmp_path / "2.ckpt")
    with pytest.raises(ValueError, match=r"2\.ckpt has _last_lr=None in the state of its lr"):
        resume(4, tmp_path / "2.ckpt")
