"""Schedules of the lr are those that a run has: found by running them, or said to be unknown."""

import pytest
from support.doctor import clean_folder, look_at, rehearse
from support.small_digits import small_digits
from support.tiny_run import HERE, tiny_config

from lit_diffusion.doctor import lr
from lit_diffusion.doctor.lr import lr_of
from lit_diffusion.doctor.plan import LRSchedule
from lit_diffusion.doctor.rehearsal import data_of, plan_of
from lit_diffusion.doctor.report import Level

TORCH = "torch.optim.lr_scheduler"
OURS = "lit_diffusion.lr_schedules"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    clean_folder(tmp_path, monkeypatch)


def scheduled(name, steps=2000, **arguments):
    config = small_digits(steps)
    spec = {"class_path": name, "init_args": arguments}
    config["model"]["init_args"]["lr_scheduler"] = spec
    return config


def schedule_of(config):
    cli = rehearse(config)
    return plan_of(cli, data_of(cli)).lr


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            scheduled(f"{OURS}.WarmupCosine", warmup_steps=5, final_factor=0.1),
            LRSchedule("WarmupCosine", 5, None, follows_run=True, final_factor=0.1),
        ),
        (scheduled(f"{OURS}.WarmupConstant", warmup_steps=5), LRSchedule("WarmupConstant", 5)),
        (scheduled(f"{TORCH}.CosineAnnealingLR", T_max=9), LRSchedule("CosineAnnealingLR", 0, 9)),
        (
            scheduled(f"{TORCH}.OneCycleLR", max_lr=0.002, total_steps=2000),
            LRSchedule("OneCycleLR", 600, 2000),
        ),
        (
            scheduled(f"{TORCH}.OneCycleLR", max_lr=0.002, total_steps=2000, pct_start=0.05),
            LRSchedule("OneCycleLR", 100, 2000),
        ),
        (scheduled(f"{TORCH}.LinearLR", total_iters=1500), LRSchedule("LinearLR", 1501)),
        (
            scheduled(f"{TORCH}.LinearLR", start_factor=1.0, end_factor=0.1, total_iters=1500),
            LRSchedule("LinearLR", 0),
        ),
        (scheduled(f"{TORCH}.PolynomialLR", total_iters=5), LRSchedule("PolynomialLR", 0, 5)),
        (scheduled(f"{TORCH}.ExponentialLR", gamma=1.001), LRSchedule("ExponentialLR", 2000)),
        (scheduled(f"{TORCH}.ReduceLROnPlateau"), LRSchedule("ReduceLROnPlateau", None)),
    ],
    ids=lambda value: value.name if isinstance(value, LRSchedule) else "",
)
def test_a_schedule_is_known_as_it_will_be(config, expected):
    assert schedule_of(config) == expected


def test_the_steps_below_the_peak_are_those_of_a_run():
    config = scheduled(f"{OURS}.WarmupLinear", steps=100, warmup_steps=7, total_steps=100)
    cli = rehearse(config)
    assert lr.warmup_of(lr.lrs_of(cli.model, 100)) == schedule_of(config).warmup_steps == 7


def test_a_schedule_that_ends_before_the_run_is_a_problem():
    found = look_at(scheduled(f"{TORCH}.OneCycleLR", max_lr=0.002, total_steps=50))
    assert found["lr"].level is Level.PROBLEM
    assert "Tried to step 51 times" in found["lr"].text


def test_a_schedule_that_cannot_be_run_here_is_not_known(monkeypatch):
    config = tiny_config(max_steps=50)
    spec = {"class_path": f"{TORCH}.LinearLR", "init_args": {"total_iters": 45}}
    config["model"]["init_args"]["lr_scheduler"] = spec
    cli = rehearse(config, "--trust", HERE.split(".")[0])
    assert lr_of(spec, cli.model, 50) == LRSchedule("LinearLR", None)
    monkeypatch.setattr(lr, "MOST", 1999)
    assert schedule_of(scheduled(f"{TORCH}.LinearLR")) == LRSchedule("LinearLR", None)
    assert lr_of(None, cli.model, 50) is None
