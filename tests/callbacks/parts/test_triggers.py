import pytest

from lit_diffusion.callbacks.parts.triggers import EveryNSteps


@pytest.mark.parametrize("stride", [1, 2, 3])
def test_every_multiple_is_told_once_however_many_steps_a_batch_takes(stride):
    trigger = EveryNSteps(10)
    told = [step for step in range(0, 100, stride) for _ in range(3) if trigger.due(step)]
    assert [step // 10 for step in told] == list(range(1, 10))
    assert all(step % 10 < stride for step in told)


@pytest.mark.parametrize("resumed_at", [0, 5, 10, 11, 29])
def test_a_resumed_run_has_the_triggers_of_the_undisturbed_one(resumed_at):
    whole, resumed = EveryNSteps(10), EveryNSteps(10)
    resumed.start(resumed_at)
    expected = [step for step in range(1, 40) if whole.due(step)]
    after = range(resumed_at + 1, 40)
    assert [step for step in after if resumed.due(step)] == [s for s in expected if s > resumed_at]


def test_none_never_triggers():
    trigger = EveryNSteps(None)
    assert not any(trigger.due(step) for step in range(100))


def test_less_than_one_step_is_refused():
    with pytest.raises(ValueError, match="got 0"):
        EveryNSteps(0)
