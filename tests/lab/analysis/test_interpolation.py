import numpy as np
import pytest
import torch
from torch import nn

from lit_diffusion.lab.analysis.interpolation import interpolate
from lit_diffusion.lab.analysis.weights import between, state_of


def network(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()


def quadratic(a):
    return lambda: sum((p - 1).square().sum() for p in a.parameters())


def test_a_quadratic_is_a_parabola_between_its_ends_and_the_weights_are_put_back():
    a, b = network(0), network(1)
    before = state_of(a)
    found = interpolate(a, state_of(a), state_of(b), {"loss": quadratic(a)}, np.linspace(0, 1, 5))
    assert all(torch.equal(value, before[name]) for name, value in state_of(a).items())
    assert found.values[0, -1] == pytest.approx(quadratic(a)().item())  # alpha = 1 is at a
    assert found.values[0, 0] == pytest.approx(quadratic(b)().item())
    second = np.diff(found.values[0], 2)
    apart = sum(
        (p - q).square().sum().item() for p, q in zip(a.parameters(), b.parameters(), strict=True)
    )
    np.testing.assert_allclose(second, 2 * apart / 16, rtol=1e-9)
    assert found.barriers["loss"] == 0


def test_a_barrier_is_how_far_it_rises_above_the_line():
    a, b = network(0), network(0)
    with torch.no_grad():
        for p in b.parameters():
            p.neg_()
    norms = {"minus": lambda: -sum(p.square().sum() for p in a.parameters())}
    found = interpolate(a, state_of(a), state_of(b), norms, np.linspace(0, 1, 11))
    ends = -norms["minus"]().item()
    assert found.barriers["minus"] == pytest.approx(ends)


def test_running_statistics_are_on_the_line_too():
    a, b = network(0), network(1)
    a[1].running_mean += 2.0
    mean = between(state_of(a), state_of(b), 0.25)["1.running_mean"]
    assert mean.tolist() == [0.5] * 4


def test_other_architectures_are_refused():
    a = network(0)
    other = nn.Sequential(nn.Linear(3, 5)).double()
    with pytest.raises(ValueError, match=r"differ in 0\.bias and"):
        interpolate(a, state_of(a), state_of(other), {"loss": quadratic(a)}, [0.5])


def test_the_weights_are_put_back_after_an_error_too():
    a, b = network(0), network(1)
    before = state_of(a)

    def fails():
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        interpolate(a, state_of(a), state_of(b), {"loss": fails}, [0.5])
    assert all(torch.equal(value, before[name]) for name, value in state_of(a).items())
