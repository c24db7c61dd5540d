from dataclasses import replace

import pytest
import torch
from lightning.pytorch import Trainer
from support.tiny_run import TinyData, TinyModule, TinyNet
from torch import nn

from lit_diffusion.doctor.plan import Evaluation, Grid, Plan
from lit_diffusion.doctor.report import Level
from lit_diffusion.doctor.timing import (
    Stopwatch,
    Timing,
    check_timing,
    evaluation_seconds,
    forward_seconds,
    grid_seconds,
    sampling_seconds,
    solver_times,
    validation_seconds,
    watched,
)
from lit_diffusion.gaussian import FixedLarge
from lit_diffusion.processes import CosineBetas, DiscreteVP, EDMProcess
from lit_diffusion.protocols import NonFiniteSamples
from lit_diffusion.solvers import DDIM, DDPM, DPMSolverPP, Heun

PLAN = Plan(
    max_steps=1000, max_epochs=-1, batch_size=10, val_interval=100, val_epochs=None, val_images=30
)
TIMING = Timing("the CPU here", step=0.1, image=0.01)


def topics(plan, timing):
    return {finding.topic: finding for finding in check_timing(plan, timing)}


# What is made of measurements


def test_ranks_share_the_samples_of_an_evaluation_but_not_those_of_a_grid():
    plan = replace(PLAN, evaluations=(Evaluation(300, 250, 1),), grids=(Grid(16, 500),))
    assert evaluation_seconds(plan, TIMING) == pytest.approx(5 * 300 * 0.01)
    assert grid_seconds(plan, TIMING) == pytest.approx(2 * 16 * 0.01)
    shared = replace(plan, ranks=4)
    assert evaluation_seconds(shared, TIMING) == pytest.approx(5 * 75 * 0.01)
    assert grid_seconds(shared, TIMING) == grid_seconds(plan, TIMING)
    with_features = replace(TIMING, feature=0.01)
    assert evaluation_seconds(plan, with_features) == 2 * evaluation_seconds(plan, TIMING)


def test_validation_takes_a_third_of_training_on_the_same_images():
    plan = replace(PLAN, val_images=10, val_interval=1)
    assert validation_seconds(plan, TIMING) == pytest.approx(1000 * 0.1 / 3)
    assert validation_seconds(replace(plan, val_images=None), TIMING) == 0


def test_a_run_is_told_with_its_measurement():
    found = topics(PLAN, replace(TIMING, step_how="measured on 7 steps"))
    assert "about 101 s on the CPU here" in found["time"].text
    assert "100 ms a step, measured on 7 steps" in found["time"].text
    assert found.keys() == {"time"}


def test_much_evaluation_is_warned_of_and_little_is_not():
    little = replace(PLAN, evaluations=(Evaluation(300, 500),))
    assert topics(little, TIMING)["evaluation time"].level is Level.OK
    much = replace(PLAN, evaluations=(Evaluation(3000, 50),))
    assert topics(much, TIMING)["evaluation time"].level is Level.WARNING
    assert "86% of the time: 20 FIDs of 30 s each" in topics(much, TIMING)["evaluation time"].text


def test_much_validation_is_warned_of_and_little_is_not():
    assert "validation time" not in topics(PLAN, TIMING)
    much = replace(PLAN, val_interval=1, val_images=100)
    assert topics(much, TIMING)["validation time"].level is Level.WARNING


def test_a_run_too_long_for_a_cpu_is_for_another_machine():
    assert "another" not in topics(PLAN, TIMING)["time"].text
    slow = replace(TIMING, step=10_000.0)
    assert "ask again on the machine that is to train" in topics(PLAN, slow)["time"].text
    assert "ask again" not in topics(PLAN, replace(slow, is_cpu=False))["time"].text


@pytest.mark.parametrize(
    ("plan", "timing"),
    [(PLAN, replace(TIMING, step=None)), (replace(PLAN, max_steps=-1), TIMING)],
)
def test_what_is_not_known_is_not_told(plan, timing):
    assert check_timing(plan, timing) == []


def test_grids_without_fids_are_told():
    found = topics(replace(PLAN, grids=(Grid(16, 100),)), TIMING)
    assert "for grids" in found["evaluation time"].text


# Measuring


@pytest.mark.parametrize(
    ("solver", "process", "calls"),
    [
        (DPMSolverPP(steps=20), DiscreteVP(CosineBetas(1000)), 20),
        (DDIM(steps=7), DiscreteVP(CosineBetas(1000)), 7),
        (DDPM(FixedLarge(), steps=250), DiscreteVP(CosineBetas(1000)), 250),
        (Heun(steps=18), EDMProcess(), 35),
    ],
)
def test_calls_of_a_solver_are_counted_without_a_network(solver, process, calls):
    times = solver_times(solver, process)
    assert len(times) == calls
    assert times[0] == max(times)


class Sampler:
    """Calls its network so many times, whatever the number of samples."""

    def __init__(self, calls):
        self.network, self.calls, self.asked = nn.Identity(), calls, []

    def generate(self, num):
        self.asked.append(num)
        for _ in range(self.calls):
            self.network(torch.zeros(num))


def test_sampling_is_broken_off_after_the_first_call_when_time_is_over():
    sampler = Sampler(250)
    with watched(sampler.network, limit=0.0) as calls:
        sampler.generate(1)
    assert calls.done == 1
    sampler.network(torch.zeros(1))
    assert calls.done == 1  # nothing is left on the network


def test_one_sample_foretells_how_many_there_is_time_for():
    sampler = Sampler(5)
    each, how = sampling_seconds(sampler.generate, sampler.network, 5, 64, limit=1000.0)
    assert sampler.asked == [1, 64]
    assert how == "measured on 64 samples"
    assert each > 0


def test_what_was_broken_off_is_extrapolated_and_says_so():
    sampler = Sampler(250)
    each, how = sampling_seconds(sampler.generate, sampler.network, 250, 64, limit=0.0)
    assert sampler.asked == [1]
    assert how == "measured on 1 sample, 1 of 250 network calls"
    assert each > 0


def test_samples_that_are_not_finite_take_time_too():
    sampler = Sampler(2)

    def generate(num):
        sampler.generate(num)
        raise NonFiniteSamples([0], None, "t = 3")

    assert sampling_seconds(generate, sampler.network, 2, 1, limit=1000.0)[0] > 0


@pytest.mark.parametrize(
    ("limit", "sizes", "told"),
    [(1000.0, [1, 4, 16, 50], "50 images"), (0.0, [1], "1 image")],
)
def test_forward_passes_grow_while_there_is_time(limit, sizes, told):
    asked = []
    seconds, how = forward_seconds(asked.append, 50, limit)
    assert sorted(set(asked)) == sizes
    assert how == f"from forward passes of {told}"
    assert seconds >= 0


@pytest.mark.parametrize(
    ("limit", "accumulate", "steps", "counted"),
    [(0.0, 1, 1, 1), (1000.0, 1, 6, 4), (1000.0, 2, 6, 4)],
)
def test_a_stopwatch_counts_steps_and_stops(limit, accumulate, steps, counted, tmp_path):
    module, data = TinyModule(TinyNet(2), torch.optim.Adam), TinyData()
    watch = Stopwatch(limit)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    trainer = Trainer(
        max_steps=6,
        accumulate_grad_batches=accumulate,
        accelerator="cpu",
        limit_val_batches=0,
        enable_model_summary=False,
        callbacks=[watch],
        default_root_dir=tmp_path,
        **quiet,
    )
    trainer.fit(module, data)
    assert trainer.global_step == steps
    assert watch.steps == counted
    assert watch.seconds > 0
