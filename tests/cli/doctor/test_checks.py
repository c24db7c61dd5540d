"""Each check is tried where it must speak and where it must not."""

from dataclasses import replace
from math import inf

import pytest

from lit_diffusion.cli.doctor.checks import (
    check_accumulation,
    check_batch,
    check_length,
    check_validation,
)
from lit_diffusion.cli.doctor.plan import Plan
from lit_diffusion.cli.doctor.report import Level

RUN = Plan(
    steps=2000,
    num_images=1437,
    held_out=360,
    batch_size=64,
    batches_per_epoch=22,
    val_batches=500,
    val_images=360,
)


def gravest(findings):
    return max((finding.level for finding in findings), default=None)


def text(findings):
    return " ".join(finding.text for finding in findings)


@pytest.mark.parametrize(
    ("changes", "is_chosen", "level", "told"),
    [
        ({}, True, Level.OK, "2,000 optimizer steps = 128,000 images = 90.9 epochs of 1,437"),
        ({"steps": inf}, True, Level.WARNING, "never stops"),
        ({"steps": 22_000}, False, Level.WARNING, "Lightning's own 1,000 epochs"),
        ({"steps": 0}, True, Level.PROBLEM, "no step is made"),
        ({"start_step": 2000}, True, Level.PROBLEM, "nothing is left"),
        ({"start_step": 1999}, True, Level.OK, "1,999 of them done"),
        ({"steps": None}, True, Level.NOTE, "not known"),
    ],
)
def test_the_length_of_a_run(changes, is_chosen, level, told):
    finding = check_length(replace(RUN, **changes), is_chosen)
    assert finding.level is level
    assert told in finding.text


def test_the_global_batch_is_told_with_its_factors():
    found = list(check_batch(replace(RUN, ranks=8, accumulate=2)))
    assert "1,024 images an optimizer step = 64 x 8 ranks x 2 accumulated" in text(found)
    assert "=" not in text(check_batch(RUN))


@pytest.mark.parametrize(
    ("interval", "accumulate", "level", "told"),
    [
        (500, 1, None, ""),
        (500, 11, Level.WARNING, "between the batches of one"),
        (500, 2, Level.NOTE, "every 250 optimizer steps"),
        (1.0, 2, None, ""),
    ],
)
def test_accumulation_tells_what_counts_batches(interval, accumulate, level, told):
    found = list(check_accumulation(interval, accumulate))
    assert gravest(found) is level
    assert told in text(found)


@pytest.mark.parametrize(
    ("changes", "level", "told"),
    [
        ({}, Level.OK, "4 times, every 500 steps on 360 images"),
        ({"val_batches": 2001}, Level.WARNING, "never runs"),
        ({"val_batches": 2000}, Level.OK, "1 time"),
        ({"val_batches": 22}, Level.OK, "90 times"),
        ({"val_batches": 1}, Level.WARNING, "1.0 is after every epoch"),
        ({"val_batches": 2200}, Level.WARNING, "never runs"),
        ({"val_batches": 0}, None, ""),
        ({"val_batches": None}, None, ""),
    ],
)
def test_validation_that_does_not_run_as_one_would_think(changes, level, told):
    found = list(check_validation(replace(RUN, **changes)))
    assert gravest(found) is level
    assert told in text(found)
