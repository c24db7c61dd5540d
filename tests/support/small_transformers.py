"""The three transformers in small, all of whose parameters matter, and conditions for them."""

import torch

from lit_diffusion.networks.dit import DiT
from lit_diffusion.networks.jit import JiT
from lit_diffusion.networks.uvit import UViT
from support.golden import Z
from support.golden_weights import fill_

NETWORKS = {"uvit": UViT, "dit": DiT, "jit": JiT}
KINDS = ["none", "labels", "vectors", "tokens", "words"]
TAKES = {
    "none": {},
    "labels": {"num_classes": 10},
    "vectors": {"vector_dim": 6},
    "tokens": {"context_dim": 6},
    "words": {"num_words": 7},
}


def small(name, kind="labels", **changes):
    arguments = {"patch_size": 2, "width": 32, "depth": 4, "num_heads": 2}
    if name == "jit":
        arguments |= {"bottleneck": 8, "in_context_start": 2}
        arguments["in_context_tokens"] = 3 if kind in ("labels", "vectors") else 0
    return fill_(NETWORKS[name](8, 1, 2, **(arguments | TAKES[kind] | changes)))


def condition(kind):
    """Of four images, the first of which has none."""
    return {
        "none": None,
        "labels": torch.tensor([-1, 3, 0, 9]),
        "vectors": (Z((4, 6), 5).float(), torch.tensor([False, True, True, True])),
        "tokens": (Z((4, 5, 6), 5).float(), torch.arange(5) < torch.tensor([[0], [1], [3], [5]])),
        "words": torch.tensor([[-1, -1, -1], [4, -1, -1], [0, 5, 6], [1, 2, 3]]),
    }[kind]


def no_condition(kind):
    """None for each of four images, in rows that hold something."""
    if kind in ("labels", "words"):
        return torch.full_like(condition(kind), -1)
    rows, there = condition(kind)
    return rows, torch.zeros_like(there)


def batch(dtype=torch.float32):
    return Z((4, 1, 8, 8), 3).to(dtype), torch.tensor([0.0, 3.5, 500, 999])


def row(condition, i):
    """The condition of image i alone."""
    if isinstance(condition, tuple):
        return tuple(part[i : i + 1] for part in condition)
    return None if condition is None else condition[i : i + 1]


def gradients(network, *inputs):
    network.zero_grad()
    network(*inputs).square().sum().backward()
    return {name: parameter.grad for name, parameter in network.named_parameters()}
