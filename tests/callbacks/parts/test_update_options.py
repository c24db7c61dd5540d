import copy

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.optim import ZeroRedundancyOptimizer

from lit_diffusion.callbacks.parts.update_options import (
    UpdateOptions,
    refuse_unhookable,
    refuse_unhooked,
)


def half(group):
    return {"lr": group["lr"] / 2}


def weight_and(optimizer_class, **options):
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    return weight, optimizer_class([weight], lr=0.5, **options)


def test_an_update_uses_the_other_options_and_between_updates_there_are_the_own_ones():
    weight, sgd = weight_and(torch.optim.SGD)
    update = UpdateOptions(sgd, half)
    assert update.in_force == []
    for expected in (0.75, 0.5):
        sgd.step()
        assert weight.tolist() == [expected] * 2
        assert sgd.param_groups[0]["lr"] == 0.5
        assert update.in_force[0]["lr"] == 0.25
        assert update.in_force[0]["momentum"] == 0


def test_the_options_are_computed_from_the_own_ones_as_they_are_now():
    weight, sgd = weight_and(torch.optim.SGD)
    UpdateOptions(sgd, half)
    sgd.param_groups[0]["lr"] = 0.25
    sgd.step()
    assert weight.tolist() == [0.875] * 2


def test_groups_have_options_of_their_own_also_those_that_are_added_later():
    weights = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    for weight in weights:
        weight.grad = torch.ones(1)
    sgd = torch.optim.SGD([weights[0]], lr=0.5)
    update = UpdateOptions(sgd, half)
    sgd.add_param_group({"params": [weights[1]], "lr": 0.25})
    sgd.step()
    assert [w.item() for w in weights] == [0.75, 0.875]
    assert [group["lr"] for group in update.in_force] == [0.25, 0.125]
    assert [group["lr"] for group in sgd.param_groups] == [0.5, 0.25]


def test_a_closure_sees_the_own_options_and_may_change_them():
    weight, sgd = weight_and(torch.optim.SGD)
    UpdateOptions(sgd, half)
    seen = []

    def closure():
        seen.append(sgd.param_groups[0]["lr"])
        sgd.param_groups[0]["lr"] = 1.0
        return torch.tensor(7.0)

    loss = sgd.step(closure=closure)
    assert (seen, loss.item()) == ([0.5], 7.0)
    assert weight.tolist() == [0.5] * 2
    assert sgd.param_groups[0]["lr"] == 1.0


def test_an_optimizer_that_reads_options_before_its_closures_uses_the_other_ones_too():
    def run(halved):
        weight, lbfgs = weight_and(torch.optim.LBFGS, max_iter=3)
        lbfgs.param_groups[0]["lr"] = 0.25 if halved else 0.125
        if halved:
            UpdateOptions(lbfgs, half)

        def closure():
            lbfgs.zero_grad()
            loss = (weight - 3).pow(4).sum()
            loss.backward()
            return loss

        for _ in range(3):
            lbfgs.step(closure=closure)
        return weight.tolist()

    assert run(halved=True) == run(halved=False)


def test_after_an_exception_in_a_closure_there_are_the_own_options():
    _, sgd = weight_and(torch.optim.SGD)
    UpdateOptions(sgd, half)
    with pytest.raises(ZeroDivisionError):
        sgd.step(closure=lambda: 1 / 0)
    assert sgd.param_groups[0]["lr"] == 0.5


def test_after_an_exception_in_an_update_restore_gives_the_own_options_and_so_does_the_next_one():
    for restore in (True, False):
        weight, sgd = weight_and(torch.optim.SGD)
        update = UpdateOptions(sgd, half)
        fails = sgd.register_step_pre_hook(lambda *_: 1 / 0)  # after the options are in place
        with pytest.raises(ZeroDivisionError):
            sgd.step()
        fails.remove()
        assert sgd.param_groups[0]["lr"] == 0.25
        if restore:
            update.restore()
            assert sgd.param_groups[0]["lr"] == 0.5
        sgd.step()
        assert weight.tolist() == [0.75] * 2
        assert sgd.param_groups[0]["lr"] == 0.5


def test_a_state_dict_taken_in_the_middle_of_an_update_holds_the_own_options():
    _, adam = weight_and(torch.optim.Adam, betas=(0.8, 0.9))
    saved = []
    adam.register_step_post_hook(lambda *_: saved.append(copy.deepcopy(adam.state_dict())))
    UpdateOptions(adam, lambda group: {"lr": 0.1, "betas": (0.3, 0.9)})
    adam.step()
    (packed,) = saved[0]["param_groups"]
    assert (packed["lr"], packed["betas"]) == (0.5, (0.8, 0.9))
    assert packed == adam.state_dict()["param_groups"][0]


def test_a_step_that_torch_makes_up_for_the_state_is_no_update():
    weight = nn.Parameter(torch.ones(2))
    sgd, asked = torch.optim.SGD([weight], lr=0.5), []
    update = UpdateOptions(sgd, lambda group: asked.append(group) or {"lr": 1.0})
    get_optimizer_state_dict(nn.ParameterList([weight]), sgd)
    assert asked == update.in_force == []
    assert sgd.param_groups[0]["lr"] == 0.5


def test_released_optimizers_are_as_they_were():
    weight, sgd = weight_and(torch.optim.SGD)
    update = UpdateOptions(sgd, half)
    sgd.step()
    update.release()
    sgd.step()
    assert weight.tolist() == [0.25] * 2
    for name in ("step_pre", "step_post", "state_dict_post"):
        assert not getattr(sgd, f"_optimizer_{name}_hooks")


def test_a_tensor_is_put_back_as_the_same_object():
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    lr = torch.tensor(0.5)
    sgd = torch.optim.SGD([weight], lr=lr, foreach=False)
    UpdateOptions(sgd, half)
    sgd.step()
    assert weight.tolist() == [0.75] * 2
    assert sgd.param_groups[0]["lr"] is lr
    assert lr.item() == 0.5


class Wrapper:
    """Steps an optimizer inside, as DeepSpeed's do."""

    def __init__(self, params):
        self.inside = torch.optim.SGD(params, lr=0.5)
        self.param_groups = self.inside.param_groups

    def step(self, closure=None):
        return self.inside.step(closure)


def test_optimizers_whose_steps_run_no_hooks_are_refused():
    with pytest.raises(ValueError, match=r"can be followed; Wrapper.*'ddp'"):
        UpdateOptions(Wrapper([nn.Parameter(torch.ones(2))]), half)


class Uninitialised(torch.optim.Optimizer):
    """As published Lookaheads are: an Optimizer in name."""

    def __init__(self, parameters):
        self.inside = torch.optim.SGD(parameters, lr=0.5)
        self.param_groups = self.inside.param_groups

    def step(self, closure=None):
        return self.inside.step(closure)


@pytest.mark.parametrize("refuse", [refuse_unhooked, refuse_unhookable])
def test_an_optimizer_that_torch_does_not_know_of_is_refused(refuse):
    with pytest.raises(ValueError, match=r"Uninitialised .*has not called Optimizer.__init__"):
        refuse(Uninitialised([nn.Parameter(torch.ones(2))]))


class Lookahead(torch.optim.Optimizer):
    """Hooks of its own, and the updates are another's: Zhang et al. 2019."""

    def __init__(self, parameters, *, shared=False, place=lambda inside: inside):
        super().__init__(parameters, {"lr": 0.5})
        inside = torch.optim.SGD(parameters, lr=0.5)
        if shared:
            self.param_groups = inside.param_groups
        self.place = place(inside)

    def step(self, closure=None):
        return self.place.step(closure)


@pytest.mark.parametrize(
    "place",
    [
        lambda inside: inside,
        lambda inside: [inside],
        lambda inside: {"adam": (1, inside)},
    ],
)
def test_an_optimizer_inside_with_groups_of_its_own_is_refused(place):
    with pytest.raises(ValueError, match=r"Lookahead holds another optimizer, SGD, "):
        UpdateOptions(Lookahead([nn.Parameter(torch.ones(2))], place=place), half)


def test_an_optimizer_inside_that_shares_the_groups_follows():
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    wrapper = Lookahead([weight], shared=True)
    UpdateOptions(wrapper, half)
    wrapper.step()
    assert weight.tolist() == [0.75] * 2


@pytest.fixture
def alone():
    """A process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_an_optimizer_inside_zero_redundancy_gets_the_options_in_each_step():
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    zero = ZeroRedundancyOptimizer([weight], torch.optim.SGD, lr=0.5)
    assert zero.optim.param_groups[0] is not zero.param_groups[0]
    UpdateOptions(zero, half)
    zero.step()
    assert weight.tolist() == [0.75] * 2


def test_captured_updates_are_refused():
    _, adam = weight_and(torch.optim.Adam, capturable=True)
    with pytest.raises(ValueError, match="Adam has capturable=True, pass capturable=False"):
        UpdateOptions(adam, half)
