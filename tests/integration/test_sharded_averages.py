"""Averages of weights that fully_shard splits over ranks, without a Trainer."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from support.plain_module import assert_same_bits
from support.sharded import network
from support.spawn import spawn
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lit_diffusion.callbacks import EMA
from lit_diffusion.callbacks.trainer_state import local_part
from lit_diffusion.checkpoints.reading import read_checkpoint
from lit_diffusion.checkpoints.saving import AtomicCheckpointIO, write_checkpoint


def follow(net, optimizer, state=None):
    """An EMA that follows an optimizer, as under a strategy that has just read the checkpoint."""
    ema = EMA((0.9, 0.5), warmup=False)
    ema.load_state_dict(state or {})
    strategy = SimpleNamespace(restore_checkpoint_after_setup=True)
    trainer = SimpleNamespace(optimizers=[optimizer], ckpt_path=None, strategy=strategy)
    ema.on_train_start(trainer, net)
    return ema


def train(net):
    """The averages of a network, and their state, after six steps on the same batches."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    ema = follow(net, optimizer)
    for batch in torch.randn(6, 4, 4, generator=torch.Generator().manual_seed(0)):
        optimizer.zero_grad()
        net(batch).square().mean().backward()
        optimizer.step()
    return ema, ema.state_dict()


def train_and_compare(folder):
    """Train split and whole weights on each rank, and compare them."""
    dist.init_process_group("gloo")
    net = network()
    mesh = dist.init_device_mesh("cpu", (2,))
    fully_shard(net[0], mesh=mesh)
    (ema, state), (_, expected) = train(fully_shard(net, mesh=mesh)), train(network())
    assert_same_bits(state, expected if dist.get_rank() == 0 else {})
    each_rank_holds_its_parts_alone(net, ema)
    with pytest.raises(TypeError, match=r"'state_dict\.0\.weight' is one rank's part"):
        AtomicCheckpointIO().save_checkpoint({"state_dict": net.state_dict()}, folder / "x.ckpt")
    if dist.get_rank() == 1:
        local_part(ema._shadows[1]["2.weight"])[-1, -1] = torch.nan
    with pytest.raises(FloatingPointError, match=r"average of '2\.weight' \(decay 0\.5\)"):
        ema.state_dict()
    dist.barrier()


def each_rank_holds_its_parts_alone(net, ema):
    for shadow in ema._shadows:
        sizes = [local_part(shadow[name]).numel() for name, _ in net.named_parameters()]
        assert sizes == [local_part(param).numel() for param in net.parameters()]
        assert (0 in sizes) == (dist.get_rank() > 0)
        total = torch.tensor(sum(sizes))
        dist.all_reduce(total)
        assert total == sum(param.numel() for param in net.parameters())


@pytest.mark.system
def test_two_ranks_average_as_one_does_and_refuse_what_is_not_finite_on_one(tmp_path):
    spawn(train_and_compare, 2, tmp_path)


def average_on_a_grid(folder):
    """Weights split by tensor parallelism, then by fully_shard, over a grid of 2 x 2 ranks."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3))
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    fully_shard(parallelize_module(net, mesh["tensor"], plan), mesh=mesh["data"])
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0, foreach=False)
    ema = follow(net, optimizer)
    before = {name: param.detach().full_tensor() for name, param in net.named_parameters()}
    for param in net.parameters():
        param.grad = -2 * param.detach()
    optimizer.step()  # half of the result and half of the weight before is twice that one, exactly
    write_checkpoint({"state_dict": net.state_dict(), "ema": ema.state_dict()}, folder / "x.ckpt")
    dist.barrier()
    state = read_checkpoint(folder / "x.ckpt")["ema"]
    assert_same_bits(state["shadows"][1], {name: 2 * value for name, value in before.items()})
    again = follow(net, optimizer, state)
    for name, average in ema._shadows[1].items():
        assert_same_bits(local_part(again._shadows[1][name]), local_part(average))
    dist.barrier()


@pytest.mark.slow
def test_weights_that_are_split_twice_are_averaged_saved_and_loaded_too(tmp_path):
    spawn(average_on_a_grid, 4, tmp_path)
