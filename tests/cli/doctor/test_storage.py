import math
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from lit_diffusion.callbacks import EMA
from lit_diffusion.cli.doctor.plan import Plan
from lit_diffusion.cli.doctor.report import Level
from lit_diffusion.cli.doctor.storage import (
    Storage,
    averages_bytes,
    check_storage,
    kept_files,
    optimizer_bytes,
    replaced_bytes,
    state_bytes,
)

SIZES = {"weights": 10**6, "optimizer": 2 * 10**6, "EMA": 10**6}
RUN = Storage("/runs", free=10**9, sizes=SIZES, checkpoints=2)


def test_a_file_more_than_are_kept_must_fit():
    assert RUN.needed == 3 * 4 * 10**6
    assert replace(RUN, checkpoints=0, weight_files=3).needed == 3 * 10**6
    assert replace(RUN, replaced=5 * 10**6).needed == RUN.needed - 5 * 10**6
    assert replace(RUN, replaced=50 * 10**6).needed == 0


@pytest.mark.parametrize(
    ("changes", "level", "told"),
    [
        ({}, Level.OK, "12.0 MB needed: checkpoints of 4.0 MB"),
        ({"free": 25 * 10**6}, Level.OK, "25.0 MB are free"),
        ({"free": 23 * 10**6}, Level.WARNING, "more than half"),
        ({"free": 11 * 10**6}, Level.PROBLEM, "choose another disk"),
        ({"free": 11 * 10**6, "replaced": 4 * 10**6}, Level.WARNING, "4.0 MB there already"),
        ({"snapshots": 3 * 10**6}, Level.OK, "15.0 MB needed"),
        ({"snapshots": 3 * 10**6}, Level.OK, "3.0 MB of snapshots"),
        ({"checkpoints": math.inf}, Level.WARNING, "no checkpoint is ever deleted"),
        ({"weight_files": math.inf}, Level.WARNING, "no checkpoint is ever deleted"),
        ({"sizes": {"weights": 10**6}}, Level.NOTE, "not known"),
    ],
)
def test_the_disk_must_hold_it(changes, level, told):
    finding = check_storage(replace(RUN, **changes))
    assert finding.level is level
    assert told in finding.text


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.Adam,
        torch.optim.AdamW,
        lambda p: torch.optim.Adam(p, amsgrad=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.SGD(p, lr=0.1),
        torch.optim.RMSprop,
        torch.optim.Adagrad,
    ],
)
def test_the_state_of_an_optimizer_is_known_before_it_steps(make):
    module = nn.Sequential(nn.Linear(7, 5), nn.Conv2d(3, 4, 3))
    optimizer = make(list(module.parameters()))
    foretold = optimizer_bytes(optimizer)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = [v for entry in optimizer.state.values() for v in entry.values()]
    assert foretold == sum(v.numel() * v.element_size() for v in state if torch.is_tensor(v))


def test_looking_leaves_the_optimizer_as_it_is():
    module = nn.Linear(3, 2)
    optimizer, before = torch.optim.Adam(module.parameters()), module.weight.clone()
    optimizer_bytes(optimizer)
    assert not optimizer.state
    assert module.weight.equal(before)
    assert optimizer.param_groups[0]["params"][0] is module.weight


def test_shared_weights_are_saved_once(tmp_path: Path):
    module = nn.Sequential(nn.Linear(200, 200, bias=False), nn.Linear(200, 200, bias=False))
    module[1].weight = module[0].weight
    assert state_bytes(module) == 4 * 200 * 200
    torch.save(module.state_dict(), tmp_path / "state")
    assert (tmp_path / "state").stat().st_size == pytest.approx(state_bytes(module), rel=0.05)


def test_averages_take_what_ema_saves():
    module = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2).double(), nn.Linear(2, 2).half())
    module[0].bias.requires_grad_(False)
    expected = 4 * 6 + 8 * 6 + 4 * 6
    assert averages_bytes(module, EMA()) == expected
    assert averages_bytes(module, EMA((0.9, 0.99, 0.999))) == 3 * expected
    assert averages_bytes(module, EMA(prefix="0")) == 4 * 6


@pytest.mark.parametrize(
    ("arguments", "plan", "kept"),
    [
        ({"save_top_k": 5, "monitor": "loss"}, Plan(), 5),
        ({"save_top_k": 1, "monitor": "loss", "save_last": True}, Plan(), 2),
        ({"save_top_k": 0, "save_last": True}, Plan(steps=100), 1),
        ({"save_top_k": -1, "every_n_train_steps": 7}, Plan(steps=100), 14),
        ({"save_top_k": -1, "every_n_epochs": 2}, Plan(steps=100, batches_per_epoch=10), 5),
        ({"save_top_k": -1}, Plan(), math.inf),
        ({"save_top_k": -1, "train_time_interval": timedelta(hours=1)}, Plan(steps=9), math.inf),
    ],
)
def test_kept_files_are_counted(arguments, plan, kept):
    assert kept_files(ModelCheckpoint(**arguments), plan) == kept


def test_as_many_files_are_replaced_as_are_kept(tmp_path: Path):
    assert replaced_bytes(tmp_path / "nowhere", 3, 99) == 0
    for number, size in enumerate((10, 30, 20)):
        (tmp_path / f"{number}.ckpt").write_bytes(bytes(size))
    (tmp_path / "notes.txt").write_bytes(bytes(99))
    assert replaced_bytes(tmp_path, 2, 99) == 50
    assert replaced_bytes(tmp_path, math.inf, 25) == 55
