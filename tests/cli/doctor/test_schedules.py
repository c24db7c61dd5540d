"""Schedules of the lr are those that a run has: found by running them, or said to be unknown."""

from dataclasses import replace
from math import inf

import pytest
import torch
from support.doctor import clean_folder, look_at
from support.small_digits import small_digits
from support.tiny_run import HERE, tiny_config
from torch import optim
from torch.optim import lr_scheduler

from lit_diffusion.callbacks import EMA, MomentumDecay, PowerEMA, TimestepCurriculum
from lit_diffusion.callbacks.parts.averages import warmup_decay
from lit_diffusion.checkpoints.snapshots import FARTHEST
from lit_diffusion.cli.doctor import schedules
from lit_diffusion.cli.doctor.plan import Plan
from lit_diffusion.cli.doctor.report import Level
from lit_diffusion.cli.doctor.schedules import (
    FEWEST_SNAPSHOTS,
    check_course,
    check_ema,
    check_lr,
    check_power_ema,
    end_of,
    half_life,
    lrs_of,
    warmup_of,
)
from lit_diffusion.ema_profiles import coefficients, exponent
from lit_diffusion.lr_schedules import WarmupConstant, WarmupCosine, WarmupLinear

RUN = Plan(steps=2000, batch_size=64)
TORCH = "torch.optim.lr_scheduler"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    clean_folder(tmp_path, monkeypatch)


def made(kind, **arguments):
    return kind(optim.Adam([torch.nn.Parameter(torch.zeros(()))], lr=0.002), **arguments)


@pytest.mark.parametrize(
    ("kind", "arguments", "level", "told"),
    [
        (WarmupConstant, {"warmup_steps": 50}, Level.OK, "50 steps (2.5%) of warm-up"),
        (WarmupConstant, {}, Level.OK, "without warm-up"),
        (WarmupConstant, {"warmup_steps": 400}, Level.OK, "20%"),
        (WarmupConstant, {"warmup_steps": 401}, Level.WARNING, "1 to 10% is usual"),
        (WarmupConstant, {"warmup_steps": 2000}, Level.PROBLEM, "all of the run"),
        (WarmupLinear, {"warmup_steps": 50, "total_steps": 2000}, Level.OK, "50 steps"),
        (WarmupLinear, {"total_steps": 1500}, Level.WARNING, "other 500 steps train at 0 of"),
        (WarmupCosine, {"total_steps": 1500, "final_factor": 0.1}, Level.WARNING, "at 0.1 of"),
        (WarmupLinear, {"total_steps": 4000}, Level.WARNING, "before the lr is down"),
        (lr_scheduler.CosineAnnealingLR, {"T_max": 2000}, Level.OK, "without warm-up"),
        (lr_scheduler.CosineAnnealingLR, {"T_max": 1500}, Level.WARNING, "let the lr rise again"),
        (lr_scheduler.OneCycleLR, {"max_lr": 0.002, "total_steps": 2000}, Level.WARNING,
         "600 steps, is 30% of the run"),
        (lr_scheduler.OneCycleLR, {"max_lr": 0.002, "total_steps": 2000, "pct_start": 0.05},
         Level.OK, "100 steps (5%)"),
        (lr_scheduler.OneCycleLR, {"max_lr": 0.002, "total_steps": 50}, Level.PROBLEM,
         "Tried to step 51 times"),
        (lr_scheduler.LinearLR, {"total_iters": 1500}, Level.WARNING, "1,501 steps, is 75%"),
        (lr_scheduler.LinearLR, {"start_factor": 1.0, "end_factor": 0.1, "total_iters": 1500},
         Level.OK, "without warm-up"),
        (lr_scheduler.PolynomialLR, {"total_iters": 5}, Level.WARNING, "over at step 5"),
        (lr_scheduler.ExponentialLR, {"gamma": 1.001}, Level.PROBLEM, "all of the run"),
        (lr_scheduler.ReduceLROnPlateau, {}, Level.NOTE, "not known"),
    ],
)  # fmt: skip
def test_the_lr_must_fit_the_length_of_the_run(kind, arguments, level, told):
    (finding,) = check_lr(made(kind, **arguments), Plan(steps=2000))
    assert finding.level is level
    assert told in finding.text


def test_the_steps_below_the_peak_are_those_of_a_run():
    scheduler = made(WarmupLinear, warmup_steps=7, total_steps=100)
    lrs = lrs_of(scheduler, 100)
    assert warmup_of(lrs) == 7
    assert end_of(lrs) is None


def test_a_run_without_end_has_an_lr_for_ever():
    (finding,) = check_lr(made(WarmupConstant, warmup_steps=50), Plan(steps=inf))
    assert finding.level is Level.OK
    assert list(check_lr(made(WarmupConstant), Plan(steps=None))) == []


def test_an_lr_that_falls_to_the_end_needs_one():
    config = small_digits(-1, max_epochs=-1)
    del config["model"]["init_args"]["lr_scheduler"]["init_args"]["total_steps"]
    found = look_at(config, seconds=0.0)
    assert found["optimizer"].level is Level.PROBLEM
    assert "needs the length of the run" in found["optimizer"].text


def test_a_schedule_that_is_too_long_to_be_run_is_not_known(monkeypatch):
    monkeypatch.setattr(schedules, "MOST", 1999)
    scheduler = made(lr_scheduler.LinearLR, total_iters=5)
    assert [f.level for f in check_lr(scheduler, Plan(steps=2000))] == [Level.NOTE]


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (small_digits(50), "WarmupLinear is made for 100 steps, and the run stops at 50"),
        (tiny_config(max_steps=50), "the warm-up of LinearLR, 46 steps, is 92%"),
    ],
)
def test_the_schedule_is_that_of_the_module(config, told):
    if "total_steps" not in str(config):
        config["model"]["init_args"]["lr_scheduler"] = {
            "class_path": f"{TORCH}.LinearLR",
            "init_args": {"total_iters": 45},
        }
    found = look_at(config, "--trust", HERE.split(".")[0])
    assert found["lr"].level is Level.WARNING
    assert told in found["lr"].text


@pytest.mark.parametrize(
    ("length", "steps", "level", "told"),
    [
        (400, 2000, Level.OK, "20% of the run"),
        (2000, 2000, Level.OK, "100% of the run"),
        (4000, 2000, Level.WARNING, "gets to 50% of its way"),
        (20, 2000, Level.OK, "1% of the run"),
        (None, 2000, None, ""),
        (400, inf, None, ""),
    ],
)
def test_what_changes_over_the_run_must_fit_its_length(length, steps, level, told):
    for kind in (MomentumDecay, TimestepCurriculum)[: 1 if length is None else 2]:
        callback = kind(length)
        found = list(check_course(callback, Plan(steps=steps)))
        assert [finding.level for finding in found] == [level] * (level is not None)
        assert all(told in f.text and f.topic == type(callback).__name__ for f in found)


# Averages


def test_a_half_life_halves():
    assert 0.9999 ** half_life(0.9999) == pytest.approx(0.5)
    assert half_life(0.0) == 0


def test_a_warmup_bounds_the_half_life_by_the_run():
    assert half_life(warmup_decay(0.9999, 1000)) < 80
    assert half_life(warmup_decay(0.9999, 10**7)) == half_life(0.9999)
    for warmup, told in ((True, "half-life of 0.9999 is 77 steps"), (False, "is 6,931 steps")):
        (finding,) = check_ema(EMA((0.9999,), warmup), replace(RUN, steps=1000), [])
        assert told in finding.text


@pytest.mark.parametrize(
    ("decay", "warmup", "steps", "level", "told"),
    [
        (0.99, True, 2000, Level.OK, "69 steps (4,414 images), 3.4% of the run"),
        (0.9999, True, 2000, Level.OK, "(later 6,931)"),
        (0.9999, False, 2000, Level.WARNING, "82% of the average are still the initial"),
        (0.9999, False, 50_000, Level.WARNING, "14% of the run"),
        (0.9999, False, 500_000, Level.OK, "1.4% of the run"),
        (0.0, False, 2000, Level.OK, "half-life of 0 is 0 steps"),
    ],
)
def test_averages_must_fit_the_length_of_the_run(decay, warmup, steps, level, told):
    (finding,) = check_ema(EMA((decay,), warmup), replace(RUN, steps=steps), [steps])
    assert finding.level is level
    assert told in finding.text


def test_each_decay_has_a_line():
    assert len(check_ema(EMA((0.99, 0.9)), RUN)) == 2


def test_the_decay_that_is_advised_is_one_that_passes():
    plan = replace(RUN, steps=20_000)
    (finding,) = check_ema(EMA((0.99999,), warmup=False), plan, [5000])
    advised = float(finding.text.rstrip(".").split()[-1])
    (finding,) = check_ema(EMA((advised,), warmup=False), plan, [5000])
    assert finding.level is Level.OK


def test_a_first_look_at_random_weights_is_told():
    plan, ema = replace(RUN, steps=500_000), EMA((0.9999,), warmup=False)
    (early,) = check_ema(ema, plan, [50_000, 10_000, None])
    assert early.level is Level.NOTE
    assert "37% of the average of 0.9999" in early.text
    (late,) = check_ema(ema, plan, [50_000])
    assert late.level is Level.OK


def test_an_endless_run_has_no_share():
    assert check_ema(EMA((0.9999,), warmup=False), replace(RUN, steps=inf)) == []


@pytest.mark.parametrize(
    ("every", "steps", "level", "told"),
    [
        (100, 2000, Level.OK, "widths 0.05, 0.1 of the run, 20 snapshots"),
        (101, 2000, Level.WARNING, "20 snapshots: few other widths"),
        (1000, 2000, Level.WARNING, "2 snapshots: few other widths can be had from less than 20"),
        (None, 2000, Level.NOTE, "those between alone can be had later; set snapshot_every_n_step"),
    ],
)
def test_other_widths_need_snapshots(every, steps, level, told):
    ema = PowerEMA(snapshot_every_n_steps=every)
    (finding,) = check_power_ema(ema, replace(RUN, steps=steps))
    assert finding.level is level
    assert told in finding.text
    if every:
        assert list(check_power_ema(ema, replace(RUN, steps=inf))) == []


def test_as_many_snapshots_as_are_advised_give_the_widths():
    steps = list(range(1, FEWEST_SNAPSHOTS + 1)) * 2
    gammas = [exponent(width) for width in (0.05, 0.1) for _ in range(FEWEST_SNAPSHOTS)]
    for width in (0.02, 0.25):
        assert coefficients(steps, gammas, FEWEST_SNAPSHOTS, exponent(width))[1] < FARTHEST
