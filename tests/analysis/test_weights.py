import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from lit_diffusion.analysis.weights import between, move_, put_, restored, state_of


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


def test_spectral_norm_divides_by_the_norm_of_the_weights_in_between():
    ends = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        ends.append(spectral_norm(nn.Linear(40, 30), n_power_iterations=50).eval())
    middle = between(*map(state_of, ends), 0.5)
    before = ends[0].weight.detach().clone()
    with restored(ends[0]):
        move_(ends[0], middle)
        largest = torch.linalg.matrix_norm(ends[0].weight, 2).item()
        assert not ends[0].parametrizations["weight"][0].training
    assert largest == pytest.approx(1, abs=0.02)
    assert torch.equal(ends[0].weight, before)
