"""Averages of weights that fully_shard splits over ranks, without a Trainer.

Beside them, on each rank, the same network with whole weights and the same batches.
"""

import pytest
import torch
import torch.distributed as dist
from support.plain_module import assert_same_bits
from support.sharded import network
from support.spawn import spawn
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    set_model_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lit_diffusion.callbacks.ema import AveragedGroup, RawWeights, ema_update_, pack, unpack
from lit_diffusion.callbacks.trainer_state import (
    first_nonfinite,
    gather_state,
    is_dtensor,
    local_part,
)
from lit_diffusion.checkpoints.reading import read_checkpoint
from lit_diffusion.checkpoints.saving import AtomicCheckpointIO, write_checkpoint

DECAYS = (0.9, 0.5)
STEPS = 6


def split():
    net = network()
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(net[0], mesh=mesh)
    return fully_shard(net, mesh=mesh)


def whole(tensors):
    return [t.full_tensor() if is_dtensor(t) else t.clone() for t in tensors]


def followed(net, known=None):
    group = AveragedGroup(DECAYS)
    for name, param in net.named_parameters():
        group.add(name, param, known and known[name])
    return group


class Training:
    """A network, its averages, and the same averages of its whole weights."""

    def __init__(self, net):
        self.net, self.group = net, followed(net)
        self.params = list(net.parameters())
        self.expected = [whole(self.params) for _ in DECAYS]
        self.optimizer = torch.optim.AdamW(self.params, lr=0.05)

    def step(self, batch):
        self.optimizer.zero_grad()
        self.net(batch).square().mean().backward()
        self.optimizer.step()
        self.group.advance(every_n_steps=1)
        for decay, average in zip(DECAYS, self.expected, strict=True):
            ema_update_(average, whole(self.params), decay)

    def weights(self):
        return whole(self.params)

    def averages(self):
        return [whole(column) for column in self.group.shadows]


def averaged_as_whole_ones(one, other):
    assert_same_bits(one.averages(), one.expected)
    if dist.get_world_size() == 2:  # the mean of two equal gradients is exact, that of three not
        assert_same_bits(one.averages(), other.averages())
        assert_same_bits(one.weights(), other.weights())
    torch.testing.assert_close(one.averages(), other.averages(), rtol=1e-5, atol=1e-6)


def each_rank_holds_its_parts_alone(one):
    for column in one.group.shadows:
        assert [local_part(s).shape for s in column] == [local_part(p).shape for p in one.params]
    held = torch.tensor([sum(local_part(s).numel() for s in one.group.shadows[0])])
    dist.all_reduce(held)
    assert held.item() == sum(p.numel() for p in one.params)
    assert any(not local_part(s).numel() for s in one.group.shadows[0]) == (dist.get_rank() > 0)


def swapped_in_and_out(one):
    """What the forward pass computes with follows, though FSDP2 keeps whole weights after it."""
    batch = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
    plain, raw = network(), RawWeights()
    weights, averages = one.weights(), one.averages()[0]

    def computes_with(expected):
        plain.load_state_dict(dict(zip(one.group.names, expected, strict=True)))
        with torch.no_grad():
            assert_same_bits(one.net(batch), plain(batch))

    computes_with(weights)
    raw.save(one.net, one.params)
    with torch.no_grad():
        for param, average in zip(one.params, one.group.shadows[0], strict=True):
            local_part(param).copy_(local_part(average))
    assert_same_bits(whole(one.net.state_dict().values()), weights)
    computes_with(averages)
    raw.restore()
    computes_with(weights)


def saved_and_read_by_any_number_of_ranks(one, other, folder):
    def state(training):
        return {
            "state_dict": training.net.state_dict(),
            "ema": pack(training.group.averages(), DECAYS),
            "optimizer": training.optimizer.state_dict(),
        }

    assert bool(gather_state(state(one))) == (dist.get_rank() == 0)
    with pytest.raises(TypeError, match=r"'state_dict\.0\.weight' is one rank's part"):
        AtomicCheckpointIO().save_checkpoint(state(one), folder / "refused.ckpt")
    write_checkpoint(state(one), folder / "split.ckpt")
    if dist.get_rank() == 0:
        write_checkpoint(state(other), folder / "whole.ckpt")
    dist.barrier()
    assert not (folder / "refused.ckpt").exists()
    files = {name: read_checkpoint(folder / f"{name}.ckpt") for name in ("split", "whole")}
    if dist.get_world_size() == 2:
        assert_same_bits(files["split"], files["whole"])
    full = StateDictOptions(full_state_dict=True)
    for file in files.values():
        for net in (split(), network()):
            set_model_state_dict(net, dict(file["state_dict"]), options=full)
            known = unpack(file["ema"], DECAYS, dict(net.named_parameters()))
            group = followed(net, known)
            assert_same_bits([whole(c) for c in group.shadows], unnamed(file["ema"]["shadows"]))
            assert_same_bits(whole(net.parameters()), list(file["state_dict"].values()))
            assert is_dtensor(group.shadows[0][0]) == is_dtensor(net[0].weight)


def unnamed(shadows):
    return [list(shadow.values()) for shadow in shadows]


def refused_on_every_rank_though_one_has_it(one):
    column = one.group.shadows[1]
    assert first_nonfinite(column) is None
    last = dist.get_world_size() - 1
    if dist.get_rank() == last:
        local_part(column[2])[-1, -1] = torch.nan  # the last row of "2.weight"
    assert first_nonfinite(column) == 2
    with pytest.raises(FloatingPointError, match=r"average of '2\.weight' \(decay 0\.5\)"):
        one.group.refuse_nonfinite()


def train_and_compare(folder):
    """Train split and whole weights on each rank and compare them at every turn."""
    dist.init_process_group("gloo")
    one, other = Training(split()), Training(network())
    for batch in torch.randn(STEPS, 4, 4, generator=torch.Generator().manual_seed(0)):
        one.step(batch)
        other.step(batch)
    averaged_as_whole_ones(one, other)
    each_rank_holds_its_parts_alone(one)
    swapped_in_and_out(one)
    saved_and_read_by_any_number_of_ranks(one, other, folder)
    refused_on_every_rank_though_one_has_it(one)
    dist.barrier()


@pytest.mark.system
def test_two_ranks_average_save_and_load_as_one_does(tmp_path):
    spawn(train_and_compare, 2, tmp_path)


@pytest.mark.slow
def test_three_ranks_average_save_and_load_as_one_does(tmp_path):
    spawn(train_and_compare, 3, tmp_path)


def split_twice(net):
    """The network split by tensor parallelism, then by fully_shard, over a grid of 2 x 2 ranks."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return fully_shard(parallelize_module(net, mesh["tensor"], plan), mesh=mesh["data"])


def average_on_a_grid(folder):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = split_twice(nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3)))
    group, expected = followed(net), {}
    with torch.no_grad():
        for name, param in net.named_parameters():
            before = param.full_tensor()
            param.mul_(3)  # half of it and of the weight before is twice that one, exactly
            expected[name] = 2 * before
    group.advance(every_n_steps=1)
    write_checkpoint({"state_dict": {}, **pack(group.averages(), DECAYS)}, folder / "x.ckpt")
    dist.barrier()
    content = read_checkpoint(folder / "x.ckpt")
    assert_same_bits(content["shadows"][1], expected)  # of decay 0.5
    again = followed(net, unpack(content, DECAYS, dict(net.named_parameters())))
    for one, other in zip(again.shadows[1], group.shadows[1], strict=True):
        assert_same_bits(local_part(one), local_part(other))
    dist.barrier()


@pytest.mark.slow
def test_weights_that_are_split_twice_are_averaged_saved_and_loaded_too(tmp_path):
    spawn(average_on_a_grid, 4, tmp_path)
