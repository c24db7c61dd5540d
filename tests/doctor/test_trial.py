"""Measured samples and steps. How long they take is never asserted."""

from pathlib import Path

import pytest
import torch
from support.doctor import clean_folder, look_at, topics
from support.small_digits import small_digits

from lit_diffusion.doctor.report import Level


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    clean_folder(tmp_path, monkeypatch)


def test_steps_are_measured_where_there_is_time_and_foretold_where_not():
    assert "measured on" in look_at(small_digits(200), seconds=30.0)["time"].text
    assert "extrapolated from" in look_at(small_digits(200), seconds=0.0)["time"].text


def test_a_run_that_fails_in_its_first_steps_is_a_problem():
    config = small_digits(200)
    config["model"]["init_args"]["optimizer"]["init_args"]["lr"] = 1e30
    found = look_at(config, seconds=30.0)
    assert topics(found, Level.PROBLEM) == {"training"}
    assert "the loss is not finite" in found["training"].text


def test_measuring_leaves_no_files():
    look_at(small_digits(200), seconds=30.0)
    assert [path.name for path in Path().iterdir()] == ["run.yaml"]
    assert torch.is_grad_enabled()
