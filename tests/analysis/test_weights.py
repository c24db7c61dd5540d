import pytest
import torch
from torch import nn

from lit_diffusion.analysis.weights import between, put_, restored, state_of


def network(width=3):
    torch.manual_seed(width)
    return nn.Sequential(nn.Linear(2, width), nn.BatchNorm1d(width))


def test_copies_hold_running_statistics_and_no_counters():
    made = network()
    state = state_of(made)
    assert "1.running_mean" in state
    assert "1.num_batches_tracked" not in state
    with torch.no_grad():
        made[0].weight.zero_()
    assert state["0.weight"].any()


def test_points_of_a_line_end_at_its_ends():
    a, b = state_of(network()), {n: v + 1 for n, v in state_of(network()).items()}
    for alpha, end in ((1.0, a), (0.0, b)):
        assert all(torch.equal(between(a, b, alpha)[n], v) for n, v in end.items())
    torch.testing.assert_close(
        between(a, b, 0.25)["0.bias"], 0.25 * a["0.bias"] + 0.75 * b["0.bias"]
    )


def test_weights_are_put_back_also_where_something_fails():
    made = network()
    before = state_of(made)

    def fail():
        with restored(made):
            put_(made, {name: value + 1 for name, value in before.items()})
            assert not torch.equal(made[0].weight, before["0.weight"])
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert all(torch.equal(value, before[name]) for name, value in state_of(made).items())


def test_other_architectures_are_refused_with_a_name():
    with pytest.raises(ValueError, match=r"one architecture.*differ in 0.bias and 5 more"):
        between(state_of(network(3)), state_of(network(4)), 0.5)
