from types import SimpleNamespace

import pytest

from lit_diffusion.callbacks.parts.triggers import RunsEveryNSteps


class Tells(RunsEveryNSteps):
    """Steps at which it ran."""

    def __init__(self, n):
        super().__init__(n)
        self.told = []

    def at_step(self, trainer, pl_module):
        self.told.append(trainer.global_step)

    def metric_names(self):
        return ["val/told"]

    def see(self, steps):
        for step in steps:
            self.on_train_batch_end(SimpleNamespace(global_step=step), None, None, None, 0)
        return self.told


@pytest.mark.parametrize("stride", [1, 2, 3])
def test_every_multiple_is_told_once_however_many_steps_a_batch_takes(stride):
    told = Tells(10).see(step for step in range(0, 100, stride) for _ in range(3))
    assert [step // 10 for step in told] == list(range(1, 10))
    assert all(step % 10 < stride for step in told)


@pytest.mark.parametrize("resumed_at", [0, 5, 10, 11, 29])
def test_a_resumed_run_has_the_triggers_of_the_undisturbed_one(resumed_at):
    whole, resumed = Tells(10), Tells(10)
    resumed.on_train_start(SimpleNamespace(global_step=resumed_at), None)
    expected = [step for step in whole.see(range(1, 40)) if step > resumed_at]
    assert resumed.see(range(resumed_at + 1, 40)) == expected


def test_none_never_triggers():
    assert Tells(None).see(range(100)) == []


def test_less_than_one_step_is_refused():
    with pytest.raises(ValueError, match="got 0"):
        Tells(0)
