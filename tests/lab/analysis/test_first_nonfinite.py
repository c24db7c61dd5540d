import pytest
import torch
from torch import nn

from lit_diffusion.lab.analysis.first_nonfinite import FirstNonFinite


class Root(nn.Module):
    """A network, of which one part is replaced, and a loss."""

    def __init__(self, middle):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Tanh(), middle), nn.Linear(3, 3))

    def forward(self, x):
        return self.net(x).square().sum()


class Output(nn.Module):
    """Adds something to its input, inside of which nothing is a module."""

    def __init__(self, value):
        super().__init__()
        self.value = value

    def forward(self, x):
        return {"x": x + self.value}["x"]


class SpoilsGradient(nn.Module):
    def forward(self, x):
        return x + (x * 0).abs().sqrt()


def watched(module, x=None, loss=lambda y: y):
    torch.manual_seed(0)
    root = Root(module)
    with FirstNonFinite(root) as first:
        loss(root(torch.randn(2, 3) if x is None else x)).backward()
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in root.modules())
    return first


def test_nothing_is_told_of_a_module_that_is_well():
    first = watched(nn.SiLU())
    assert (first.output, first.gradient) == (None, None)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_the_innermost_part_is_told_whose_output_is_first_not_finite(value):
    assert watched(Output(value)).output == "net.1.1 (Output)"


def test_what_was_so_before_a_part_is_not_blamed_on_it():
    first = watched(nn.SiLU(), torch.tensor([[1.0, torch.nan, 1.0]]))
    assert first.output == "net.0 (Linear), whose input was not finite"
    odd = nn.Linear(3, 3)
    nn.init.constant_(odd.weight, torch.nan)
    assert watched(odd).output == "net.1.1 (Linear), whose weights are not finite"


def test_the_part_is_told_in_whose_backward_pass_a_gradient_first_is_not_finite():
    first = watched(SpoilsGradient())
    assert (first.output, first.gradient) == (None, "net.1.1 (SpoilsGradient)")
    first = watched(nn.Sequential(SpoilsGradient(), nn.Tanh()))
    assert first.gradient == "net.1.1.0 (SpoilsGradient)"


def test_a_gradient_that_was_not_finite_before_the_network_is_said_to_be_so():
    first = watched(nn.SiLU(), loss=lambda y: y + (y * 0).sqrt())
    assert (first.output, first.gradient) == (None, "what follows net (Sequential)")


def test_weights_that_are_used_outside_of_their_module_are_told():
    root = Root(nn.SiLU())
    with FirstNonFinite(root) as first:
        (root.net[0].weight * 0).sqrt().sum().backward()
    assert first.gradient == "what uses the weights of net.0 (Linear)"


def test_watching_changes_no_number():
    grads = []
    for watch in (True, False):
        torch.manual_seed(0)
        root = Root(nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True)))
        x = torch.ones(2, 3)
        if watch:
            with FirstNonFinite(root):
                root(x).backward()
        else:
            root(x).backward()
        grads.append([p.grad for p in root.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
