import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from lit_diffusion.lab.analysis.hessian import difference_error, hessian_product
from lit_diffusion.lab.analysis.weights import (
    between,
    exact_spectral_norms_,
    put_,
    restored,
    state_of,
)


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


def test_spectral_norm_is_of_the_weights_wherever_they_are():
    ends = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        ends.append(nn.Sequential(spectral_norm(nn.Linear(40, 30))).eval())
        exact_spectral_norms_(ends[-1])
    with restored(ends[0]) as before:
        assert set(before) == {"0.bias", "0.parametrizations.weight.original"}
        put_(ends[0], between(*map(state_of, ends), 0.5))
        largest = torch.linalg.matrix_norm(ends[0][0].weight, 2).item()
    assert largest == pytest.approx(1, abs=1e-5)


def test_the_norm_is_a_part_of_the_curvature():
    """By differences of gradients of W / its norm, which torch's own takes for W / a constant."""
    torch.manual_seed(0)
    module = spectral_norm(nn.Linear(5, 4, bias=False).double())
    exact_spectral_norms_(module)
    x = torch.randn(20, 5).double()
    assert difference_error(lambda: module(x).square().mean(), module.parameters()) < 1e-5
    w = module.parametrizations["weight"].original.detach().requires_grad_()

    def by_formula():
        return (x @ (w / torch.linalg.svdvals(w)[0]).T).square().mean()

    exact = torch.autograd.grad(by_formula(), w)[0].flatten()
    _, found = hessian_product(lambda: module(x).square().mean(), module.parameters())
    torch.testing.assert_close(found, exact)


def test_deconvolutions_have_the_norm_of_torch_s_own():
    torch.manual_seed(0)
    usual = spectral_norm(nn.ConvTranspose2d(3, 6, 2), n_power_iterations=200)
    expected = usual.weight.detach().clone()
    exact_spectral_norms_(usual)
    torch.testing.assert_close(usual.weight, expected, rtol=1e-4, atol=1e-6)


def test_the_older_spectral_norm_is_refused():
    with pytest.raises(ValueError, match=r"0 has torch\.nn\.utils\.spectral_norm"):
        exact_spectral_norms_(nn.Sequential(nn.utils.spectral_norm(nn.Linear(2, 2))))
