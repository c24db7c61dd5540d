import math

import pytest
import torch
from support.plain_module import PlainModule, loader, make_trainer

from lit_diffusion.callbacks.trainer_state import completed_steps
from lit_diffusion.modules.watches import SampleWatch
from lit_diffusion.protocols import Denoised, NonFiniteSamples


def watched(values):
    """A SampleWatch that has seen, at t = 9, 8, ..., one row of values per step."""
    steps = iter(values)
    watch = SampleWatch(lambda x, t: Denoised(x + torch.tensor(next(steps)).view(-1, 1), x))
    for i in range(len(values)):
        watch(torch.zeros(2, 1), torch.full((2,), 9.0 - i))
    return watch


def test_samples_that_stay_finite_pass():
    watched([[0.0, 1.0], [2.0, 3.0]]).refuse_non_finite(torch.zeros(2, 1), [5, 6], 0)


def test_a_sample_is_named_with_the_time_at_which_it_went_wrong():
    watch = watched([[0.0, 1.0], [0.0, math.inf], [math.nan, 0.0]])
    with pytest.raises(NonFiniteSamples, match="after 40 optimizer steps, from t = 8 on") as told:
        watch.refuse_non_finite(torch.zeros(2, 1), [5, 6], 40)
    assert told.value.seeds == [5, 6]


def test_a_result_that_is_not_finite_is_found_too():
    with pytest.raises(NonFiniteSamples, match="from the last step on") as told:
        watched([[0.0, 0.0]]).refuse_non_finite(torch.tensor([[0.0], [math.nan]]), [5, 6], 1)
    assert told.value.seeds == [6]


def test_steps_are_those_of_a_fit_and_unknown_outside_of_one(tmp_path):
    module, found = PlainModule(), {}
    assert completed_steps(module) is None
    module.on_validation_end = lambda: found.update(fit=completed_steps(module))
    module.on_predict_end = lambda: found.update(predict=completed_steps(module))
    make_trainer(tmp_path, num_sanity_val_steps=0).fit(module, loader(32, 8), loader())
    assert completed_steps(module) == 4
    make_trainer(tmp_path).predict(module, loader())
    assert found == {"fit": 4, "predict": None}
