"""What is made of measurements, and measured samples and steps: how long is never asserted."""

from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
import torch
from support.doctor import clean_folder, look_at
from support.doctor import topics as topics_at
from support.small_digits import small_digits

from lit_diffusion.callbacks import FIDEvaluation, SampleGrid
from lit_diffusion.cli.doctor.fid import Extractor
from lit_diffusion.cli.doctor.plan import Plan
from lit_diffusion.cli.doctor.report import Level
from lit_diffusion.cli.doctor.timing import (
    Looks,
    Timing,
    check_timing,
    fid_seconds,
    grid_seconds,
    validation_seconds,
)

PLAN = Plan(steps=1000, batch_size=10, val_batches=100, val_images=30)
TIMING = Timing("the CPU here", step=0.1, image=0.01)


def fid(num_samples, **arguments):
    return FIDEvaluation(num_samples, "digits-cnn", **arguments)


def looks(*evaluations, grids=()):
    return Looks(dict.fromkeys(evaluations, Extractor()), tuple(grids))


def topics(plan, timing, looks=looks()):  # noqa: B008 - frozen
    return {finding.topic: finding for finding in check_timing(plan, looks, timing)}


def test_ranks_share_the_samples_of_an_evaluation_but_not_those_of_a_grid():
    evaluation = fid(300, every_n_steps=250, repeats_at_end=1)
    both = looks(evaluation, grids=[SampleGrid(16, every_n_steps=500)])
    assert fid_seconds(PLAN, both, TIMING) == pytest.approx(5 * 300 * 0.01)
    assert grid_seconds(PLAN, both, TIMING) == pytest.approx(2 * 16 * 0.01)
    shared = replace(PLAN, ranks=4)
    assert fid_seconds(shared, both, TIMING) == pytest.approx(5 * 75 * 0.01)
    assert grid_seconds(shared, both, TIMING) == grid_seconds(PLAN, both, TIMING)
    with_features = replace(TIMING, feature=0.01)
    assert fid_seconds(PLAN, both, with_features) == 2 * fid_seconds(PLAN, both, TIMING)


def test_validation_takes_a_third_of_training_on_the_same_images():
    plan = replace(PLAN, val_images=10, val_batches=1)
    assert validation_seconds(plan, TIMING) == pytest.approx(1000 * 0.1 / 3)
    assert validation_seconds(replace(plan, val_images=None), TIMING) == 0


def test_a_run_is_told_with_its_measurement():
    found = topics(PLAN, replace(TIMING, step_how="measured on 7 steps"))
    assert "about 101 s on the CPU here" in found["time"].text
    assert "100 ms a step, measured on 7 steps" in found["time"].text
    assert found.keys() == {"time"}


def test_much_evaluation_is_warned_of_and_little_is_not():
    little = looks(fid(300, every_n_steps=500))
    assert topics(PLAN, TIMING, little)["evaluation time"].level is Level.OK
    much = topics(PLAN, TIMING, looks(fid(3000, every_n_steps=50)))["evaluation time"]
    assert much.level is Level.WARNING
    assert "86% of the time: 20 FIDs of 30 s each" in much.text


def test_much_validation_is_warned_of_and_little_is_not():
    assert "validation time" not in topics(PLAN, TIMING)
    much = replace(PLAN, val_batches=1, val_images=100)
    assert topics(much, TIMING)["validation time"].level is Level.WARNING


@pytest.mark.parametrize(
    ("plan", "timing"),
    [(PLAN, replace(TIMING, step=None)), (replace(PLAN, steps=inf), TIMING)],
)
def test_what_is_not_known_is_not_told(plan, timing):
    assert check_timing(plan, looks(), timing) == []


def test_grids_without_fids_are_told():
    found = topics(PLAN, TIMING, looks(grids=[SampleGrid(16, every_n_steps=100)]))
    assert "for grids" in found["evaluation time"].text


# Measuring


@pytest.fixture
def folder(tmp_path, monkeypatch):
    clean_folder(tmp_path, monkeypatch)


def test_steps_are_measured_where_there_is_time_and_foretold_where_not(folder):
    assert "measured on" in look_at(small_digits(200), seconds=30.0)["time"].text
    assert "extrapolated from" in look_at(small_digits(200), seconds=0.0)["time"].text


def test_a_run_that_fails_in_its_first_steps_is_a_problem(folder):
    config = small_digits(200)
    config["model"]["init_args"]["optimizer"]["init_args"]["lr"] = 1e30
    found = look_at(config, seconds=30.0)
    assert topics_at(found, Level.PROBLEM) == {"training"}
    assert "the loss is not finite" in found["training"].text


def test_measuring_leaves_no_files(folder):
    look_at(small_digits(200), seconds=30.0)
    assert [path.name for path in Path().iterdir()] == ["run.yaml"]
    assert torch.is_grad_enabled()
