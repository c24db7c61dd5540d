import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from lit_diffusion.sharding import (
    first_split,
    gathered,
    is_made_up,
    is_split,
    local,
    on_any_rank,
    reshard,
    split_like,
    total_norm,
)


@pytest.fixture
def split():
    """A network whose weights one rank alone has parts of: all of each."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    yield fully_shard(nn.Linear(3, 2), mesh=mesh)
    torch.distributed.destroy_process_group()


def test_the_local_part_is_the_tensors_own_memory(split):
    local(split.weight.detach()).fill_(5)
    assert (split.weight.full_tensor() == 5).all()
    whole = torch.ones(2)
    assert local(whole) is whole


def test_whole_tensors_are_split_as_their_model_is_and_gathered_again(split):
    whole = torch.randn(2, 3)
    part = split_like(whole, split.weight)
    assert is_split(part)
    assert part.placements == split.weight.placements
    assert torch.equal(part.full_tensor(), whole)
    assert split_like(whole, whole) is whole


def test_a_nested_state_is_gathered_and_the_rest_of_it_kept(split):
    state = {"a": [split.weight, (split.bias, 3)], "b": {"c": torch.ones(1), "d": None}}
    whole = gathered(state)
    assert first_split(state) == "a.0"
    assert first_split(whole) is None
    assert torch.equal(whole["a"][0], local(split.weight))
    assert not whole["a"][0].requires_grad
    assert whole["a"][1][1] == 3
    assert whole["b"]["c"] is state["b"]["c"]


def test_the_norm_of_all_is_that_of_whole_split_and_sparse_tensors_in_float32(split):
    torch.manual_seed(0)
    half = torch.randn(5).bfloat16()
    sparse = torch.sparse_coo_tensor([[0, 0, 2]], [3.0, 1.0, -2.0], (4,))  # 4, 0, -2, 0
    parts = [split.weight.full_tensor(), half.float(), sparse.to_dense()]
    expected = torch.cat([part.flatten() for part in parts]).norm()
    found = total_norm([split.weight.detach(), half, sparse])
    assert not is_split(found)
    torch.testing.assert_close(found, expected.detach())


def test_a_state_without_split_tensors_is_gathered_as_it_is():
    state = {"a": [torch.ones(1)], "b": ({"c": 2},)}
    assert gathered(state) == state
    assert gathered({}) == {}


def test_a_flag_of_tensors_that_are_not_split_is_this_ranks_own(split):
    flags = torch.tensor([True, False])
    assert on_any_rank(flags, [torch.ones(1)] * 2) is flags
    assert on_any_rank(flags, [split.weight, split.bias]).tolist() == [True, False]


def test_resharding_drops_the_whole_weights_that_a_forward_pass_left(split):
    x = torch.ones(1, 3)
    with torch.no_grad():
        split(x)
        assert not is_split(split.weight)
        reshard(split)
        assert is_split(split.weight)
        local(split.weight).zero_()
        assert torch.equal(split(x)[0], split.bias)


@pytest.mark.parametrize(
    ("lr", "arguments", "made_up"),
    [
        (0.0, {"closure": None}, True),
        (torch.tensor(0.0), {"closure": None}, True),
        (0.1, {"closure": None}, False),
        (0.0, {}, False),  # the first step of a warm-up from 0
        (0.0, {"closure": lambda: 1.0}, False),  # the same, as Lightning takes it
    ],
)
def test_only_a_step_as_torch_makes_it_up_counts_as_made_up(lr, arguments, made_up):
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=lr)
    found = []
    sgd.register_step_pre_hook(lambda opt, _args, kwargs: found.append(is_made_up(opt, kwargs)))
    sgd.step(**arguments)
    assert found == [made_up]
