import time

import pytest

from lit_diffusion.metrics.clock import EvaluationClock


def work(clock, batches, seconds):
    for size in batches:
        with clock.phase("generate"):
            time.sleep(seconds)
        clock.tick(size)


def test_the_estimate_after_the_first_batch_is_within_a_factor_of_two():
    clock = EvaluationClock("val/fid_40", total=40)
    work(clock, [10, 10, 10, 10], seconds=0.1)
    seconds = clock.seconds()
    assert 0.5 < seconds["estimated"] / seconds["total"] < 2
    assert seconds["generate"] == pytest.approx(seconds["total"], rel=0.2)


def test_a_process_without_samples_estimates_nothing():
    clock = EvaluationClock("val/fid_2", total=2)
    clock.tick(0)
    assert clock.seconds()["estimated"] == 0


def test_long_evaluations_say_how_far_they_are(caplog):
    caplog.set_level("INFO")
    clock = EvaluationClock("val/fid_40", total=40, every=0.05)
    work(clock, [10, 10, 10], seconds=0.06)
    assert "40 samples take about" in caplog.text
    assert "20 of 40" in caplog.text
