import math

import pytest
import torch

from lit_diffusion.lr_schedules import (
    WarmupConstant,
    WarmupCosine,
    WarmupInverseSqrt,
    WarmupLinear,
)


def optimizer(lr=0.5):
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)


def trace(schedule, steps):
    rates = []
    for _ in range(steps):
        rates.append(schedule.optimizer.param_groups[0]["lr"])
        schedule.optimizer.step()
        schedule.step()
    return rates


@pytest.mark.parametrize(
    ("make", "after"),
    [
        (lambda o: WarmupConstant(o, 4), lambda step: 1.0),
        (lambda o: WarmupInverseSqrt(o, 9, 4), lambda step: min(1.0, 3 / math.sqrt(step))),
        (lambda o: WarmupLinear(o, 20, 4, 0.1), lambda step: 0.1 + 0.9 * (1 - (step - 4) / 16)),
        (
            lambda o: WarmupCosine(o, 20, 4),
            lambda step: 0.5 * (1 + math.cos(math.pi * (step - 4) / 16)),
        ),
    ],
)
def test_rates_follow_their_formula_at_every_step(make, after):
    expected = [0.5 * ((step + 1) / 4 if step < 4 else after(step)) for step in range(20)]
    assert trace(make(optimizer()), 20) == pytest.approx(expected, abs=1e-15)


def test_rates_stay_at_their_end_after_the_run():
    assert trace(WarmupLinear(optimizer(), 5, 0, 0.2), 9)[5:] == pytest.approx([0.1] * 4)


def test_a_resumed_schedule_continues_and_follows_a_new_length():
    first = WarmupCosine(optimizer(), 40, 3)
    trace(first, 10)
    undisturbed = trace(first, 5)
    fresh = WarmupCosine(optimizer(), 40, 3)
    trace(fresh, 10)
    state = fresh.state_dict()
    resumed = WarmupCosine(optimizer(), 40, 3)
    resumed.load_state_dict(state)
    resumed.optimizer.param_groups[0]["lr"] = state["_last_lr"][0]
    assert trace(resumed, 5) == undisturbed
    longer, unbroken = WarmupCosine(optimizer(), 80, 3, 0.1), WarmupCosine(optimizer(), 80, 3, 0.1)
    longer.load_state_dict(state)
    assert trace(longer, 20) == trace(unbroken, 30)[10:]


def test_the_inverse_square_root_falls_in_the_warm_up_too_and_follows_a_new_reference():
    assert trace(WarmupInverseSqrt(optimizer(), 1, 5), 10)[4] == pytest.approx(0.5 / 2)
    schedule, other = (WarmupInverseSqrt(optimizer(), steps) for steps in (4, 8))
    trace(schedule, 16)
    other.load_state_dict(schedule.state_dict())
    assert trace(other, 4) == trace(WarmupInverseSqrt(optimizer(), 8), 20)[16:]


def test_a_run_that_ends_within_its_warm_up_is_said_and_ends():
    schedule = WarmupCosine(optimizer(), warmup_steps=4)
    with pytest.warns(UserWarning, match="a warm-up of 4 steps does not end in this run of 4"):
        schedule.set_total_steps(4)
    assert trace(schedule, 6) == pytest.approx([0.125, 0.25, 0.375, 0.5, 0.0, 0.0])


def test_lengths_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="must exceed warmup_steps, got 5 and 5"):
        WarmupLinear(optimizer(), 5, 5)
    with pytest.raises(ValueError, match="warmup_steps must be >= 0"):
        WarmupConstant(optimizer(), -1)
    with pytest.raises(ValueError, match="reference_steps must be > 0, got 0"):
        WarmupInverseSqrt(optimizer(), 0)
    with pytest.raises(ValueError, match="needs the length of the run"):
        trace(WarmupLinear(optimizer()), 3)
