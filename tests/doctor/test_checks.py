"""Each check is tried where it must speak and where it must not."""

from dataclasses import replace

import pytest

from lit_diffusion.doctor.checks import (
    check_average,
    check_batches,
    check_course,
    check_evaluation,
    check_length,
    check_lr,
    check_plan,
    check_validation,
    half_life,
    half_life_at,
)
from lit_diffusion.doctor.plan import Average, Course, Evaluation, LRSchedule, Plan
from lit_diffusion.doctor.report import Level

RUN = Plan(
    max_steps=2000,
    max_epochs=-1,
    num_images=1437,
    batch_size=64,
    batches_per_epoch=22,
    val_interval=500,
    val_epochs=None,
    val_images=360,
)
FID = Evaluation(360, num_features=64, num_real=360)


def gravest(findings):
    return max((finding.level for finding in findings), default=None)


def text(findings):
    return " ".join(finding.text for finding in findings)


def test_a_sound_plan_has_no_more_than_ok():
    plan = replace(
        RUN,
        averages=(Average((0.99,), True),),
        evaluations=(FID,),
        lr=LRSchedule("WarmupLinear", 50, follows_run=True),
        courses=(Course("TimestepCurriculum", 400), Course("MomentumDecay", None)),
    )
    found = check_plan(plan)
    assert {finding.level for finding in found} == {Level.OK}
    assert [finding.topic for finding in found] == [
        "length",
        "batch",
        "validation",
        "FID",
        "EMA",
        "lr",
        "TimestepCurriculum",
    ]


# Length


@pytest.mark.parametrize(
    ("changes", "level", "told"),
    [
        ({}, Level.OK, "2,000 optimizer steps = 128,000 images = 90.9 epochs of 1,437"),
        ({"max_steps": -1}, Level.WARNING, "never stops"),
        ({"max_steps": -1, "max_epochs": None}, Level.WARNING, "Lightning's own 1,000 epochs"),
        ({"start_step": 2000}, Level.PROBLEM, "nothing is left"),
        ({"start_step": 1999}, Level.OK, "1,999 of them done"),
        ({"max_steps": -1, "max_epochs": 3, "batches_per_epoch": None}, Level.NOTE, "not known"),
    ],
)
def test_the_length_of_a_run(changes, level, told):
    (finding,) = check_length(replace(RUN, **changes))
    assert finding.level is level
    assert told in finding.text


def test_the_global_batch_is_told_with_its_factors():
    found = check_batches(replace(RUN, ranks=8, accumulate=2))
    assert "1,024 images an optimizer step = 64 x 8 ranks x 2 accumulated" in text(found)
    assert "=" not in text(check_batches(RUN))


def test_images_that_make_no_batch_are_a_problem():
    found = check_batches(replace(RUN, ranks=30, batches_per_epoch=0))
    assert gravest(found) is Level.PROBLEM
    assert "1,437 images make no batch of 64 for each of 30 ranks" in text(found)


@pytest.mark.parametrize(
    ("changes", "level", "told"),
    [
        ({}, Level.OK, ""),
        ({"accumulate": 11}, Level.WARNING, "between the batches of one"),
        ({"accumulate": 2}, Level.NOTE, "every 250 optimizer steps"),
        ({"accumulate": 3, "val_interval": 600}, Level.NOTE, "1 of 3 batches"),
        ({"accumulate": 2, "val_epochs": 1, "val_interval": 1.0}, Level.OK, ""),
    ],
)
def test_accumulation_tells_what_counts_batches(changes, level, told):
    found = check_batches(replace(RUN, **changes))
    assert gravest(found) is level
    assert told in text(found)


# Validation and FID


@pytest.mark.parametrize(
    ("changes", "level", "told"),
    [
        ({}, Level.OK, "4 times, every 500 steps on 360 images"),
        ({"val_interval": 2001}, Level.WARNING, "never runs"),
        ({"val_interval": 2000}, Level.OK, "1 time"),
        ({"val_epochs": 1}, Level.PROBLEM, "check_val_every_n_epoch=null"),
        ({"val_epochs": 1, "val_interval": 22}, Level.OK, "90 times"),
        ({"val_epochs": 1, "val_interval": 1}, Level.WARNING, "1.0 is after every epoch"),
        ({"val_epochs": 1, "val_interval": 1.0}, Level.OK, "90 times"),
        ({"val_epochs": 100, "val_interval": 1.0}, Level.WARNING, "never runs"),
        ({"val_images": 0}, None, ""),
        ({"val_interval": None}, None, ""),
    ],
)
def test_validation_that_does_not_run_as_one_would_think(changes, level, told):
    found = check_validation(replace(RUN, **changes))
    assert gravest(found) is level
    assert told in text(found)


@pytest.mark.parametrize(
    ("evaluation", "changes", "level", "told"),
    [
        (FID, {}, Level.OK, "4 times, every 500 steps, of 360 samples"),
        (replace(FID, every_n_steps=2001), {}, Level.WARNING, "never measured"),
        (replace(FID, every_n_steps=2001, repeats_at_end=2), {}, Level.WARNING, "but for the end"),
        (replace(FID, every_n_steps=2000), {}, Level.OK, "1 time"),
        (FID, {"val_interval": 5000}, Level.WARNING, "never measured"),
        (FID, {"val_images": 0}, Level.WARNING, "never measured"),
        (replace(FID, every_n_steps=600), {}, Level.NOTE, "step 1,800; the final weights"),
        (replace(FID, every_n_steps=600, repeats_at_end=1), {}, Level.OK, ""),
        (replace(FID, num_samples=64), {}, Level.WARNING, "num_samples, 64, must exceed the 64"),
        (replace(FID, num_samples=65), {}, Level.OK, ""),
        (replace(FID, num_real=64), {}, Level.WARNING, "the real images, 64"),
        (replace(FID, num_features=None, num_samples=3), {}, Level.OK, ""),
        (replace(FID, num_real=None), {}, Level.OK, ""),
    ],
)
def test_fid_that_is_not_measured_or_means_nothing(evaluation, changes, level, told):
    found = check_evaluation(evaluation, replace(RUN, **changes))
    assert gravest(found) is level
    assert told in text(found)


# Averages


def test_a_half_life_halves():
    assert 0.9999 ** half_life(0.9999) == pytest.approx(0.5)
    assert half_life(0.0) == 0


def test_a_warmup_bounds_the_half_life_by_the_run():
    average = Average((0.9999,), warmup=True)
    assert half_life_at(average, 0.9999, 1000) < 80
    assert half_life_at(average, 0.9999, 10**7) == half_life(0.9999)


@pytest.mark.parametrize(
    ("decay", "warmup", "steps", "level", "told"),
    [
        (0.99, True, 2000, Level.OK, "69 steps (4,414 images), 3.4% of the run"),
        (0.9999, True, 2000, Level.OK, "(later 6,931)"),
        (0.9999, False, 2000, Level.WARNING, "82% of the average are still the initial"),
        (0.9999, False, 50_000, Level.WARNING, "14% of the run"),
        (0.9999, False, 500_000, Level.OK, "1.4% of the run"),
        (0.5, True, 2000, Level.NOTE, "hardly an average"),
        (0.0, False, 2000, Level.NOTE, "averages nothing"),
    ],
)
def test_averages_must_fit_the_length_of_the_run(decay, warmup, steps, level, told):
    plan = replace(RUN, max_steps=steps, val_interval=steps)
    found = check_average(Average((decay,), warmup), plan)
    assert gravest(found) is level
    assert told in text(found)


def test_each_decay_has_a_line():
    found = check_average(Average((0.99, 0.9), True), RUN)
    assert len(found) == 2


def test_the_decay_that_is_advised_is_one_that_passes():
    plan = replace(RUN, max_steps=20_000, val_interval=5000)
    (finding,) = check_average(Average((0.99999,), False), plan)
    advised = float(finding.text.rstrip(".").split()[-1])
    assert gravest(check_average(Average((advised,), False), plan)) is Level.OK


def test_a_first_look_at_random_weights_is_told():
    plan = replace(RUN, max_steps=500_000, val_interval=10_000)
    (early,) = check_average(Average((0.9999,), False), plan)
    assert early.level is Level.NOTE
    assert "37% of the average of 0.9999" in early.text
    (late,) = check_average(Average((0.9999,), False), replace(plan, val_interval=50_000))
    assert late.level is Level.OK


def test_an_endless_run_has_no_share():
    assert check_average(Average((0.9999,), False), replace(RUN, max_steps=-1)) == []


# lr, curricula, momentum


@pytest.mark.parametrize(
    ("lr", "level", "told"),
    [
        (None, None, ""),
        (LRSchedule("WarmupConstant", 50), Level.OK, "50 steps (2.5%) of warm-up"),
        (LRSchedule("WarmupConstant"), Level.OK, "without warm-up"),
        (LRSchedule("WarmupConstant", 400), Level.OK, "20%"),
        (LRSchedule("WarmupConstant", 401), Level.WARNING, "1 to 10% is usual"),
        (LRSchedule("WarmupConstant", 2000), Level.PROBLEM, "all of the run"),
        (LRSchedule("OneCycleLR", 600, 2000), Level.WARNING, "is 30% of the run"),
        (LRSchedule("ReduceLROnPlateau", None), Level.NOTE, "not known"),
        (LRSchedule("OneCycleLR", 9, 9, fault="over"), Level.PROBLEM, "fails: over"),
        (LRSchedule("WarmupLinear", 50, 2000), Level.OK, ""),
        (LRSchedule("WarmupLinear", 50, 1500), Level.WARNING, "other 500 steps train at 0 of"),
        (LRSchedule("CosineAnnealingLR", 0, 1500), Level.WARNING, "let the lr rise again"),
        (LRSchedule("WarmupLinear", 50, 4000), Level.WARNING, "before the lr is down"),
    ],
)
def test_the_lr_must_fit_the_length_of_the_run(lr, level, told):
    found = check_lr(replace(RUN, lr=lr))
    assert gravest(found) is level
    assert told in text(found)


def test_an_lr_that_falls_to_the_end_needs_one():
    endless = replace(RUN, max_steps=-1)
    falling = LRSchedule("WarmupLinear", 50, follows_run=True)
    assert gravest(check_lr(replace(endless, lr=falling))) is Level.PROBLEM
    assert gravest(check_lr(replace(endless, lr=LRSchedule("WarmupConstant", 50)))) is Level.OK


@pytest.mark.parametrize(
    ("length", "steps", "level", "told"),
    [
        (400, 2000, Level.OK, "20% of the run"),
        (2000, 2000, Level.OK, "100% of the run"),
        (4000, 2000, Level.WARNING, "gets to 50% of its way"),
        (19, 2000, Level.NOTE, "is it made for a shorter one?"),
        (20, 2000, Level.OK, ""),
        (None, 2000, None, ""),
        (None, -1, Level.PROBLEM, "pass total_steps"),
        (400, -1, None, ""),
    ],
)
def test_what_changes_over_the_run_must_fit_its_length(length, steps, level, told):
    found = check_course(Course("MomentumDecay", length), replace(RUN, max_steps=steps))
    assert gravest(found) is level
    assert told in text(found)
