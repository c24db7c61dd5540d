"""Averages weights that fully_shard has split over two gloo ranks, beside unsharded ones."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from lit_diffusion.callbacks.averages import Group


def train(module, optimizer, batches, group):
    for batch in batches:
        optimizer.zero_grad()
        module(batch).pow(2).mean().backward()
        optimizer.step()
        group.advance(every_n_steps=1, warmup=True)


def followed(module):
    group = Group((0.9,))
    for name, param in module.named_parameters():
        group.add(name, param, None)
    return group


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))  # shapes that split unevenly
    sharded = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    sharded.load_state_dict(whole.state_dict())
    mesh = dist.init_device_mesh("cpu", (2,))
    fully_shard(sharded, mesh=mesh)
    batches = list(torch.randn(6, 4, 5))
    groups = followed(whole), followed(sharded)
    for module, group in zip((whole, sharded), groups, strict=True):
        train(module, torch.optim.SGD(module.parameters(), 0.1), batches, group)
    for expected, shards in zip(groups[0].shadows[0], groups[1].shadows[0], strict=True):
        torch.testing.assert_close(shards.full_tensor(), expected, rtol=1e-5, atol=1e-6)
    dist.barrier()
    # Leaves without taking the process group apart: gloo aborts there one time in about twenty.
    os._exit(0)


if __name__ == "__main__":
    main()
