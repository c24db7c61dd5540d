"""The four networks in small, all of whose parameters matter, and conditions for them."""

import torch

from lit_diffusion.networks.conditions import Tokens, Vectors, WordIds
from lit_diffusion.networks.dit import DiT
from lit_diffusion.networks.jit import JiT
from lit_diffusion.networks.unet import UNet
from lit_diffusion.networks.uvit import UViT
from support.golden import Z, fill_

NETWORKS = {"unet": UNet, "uvit": UViT, "dit": DiT, "jit": JiT}
KINDS = {
    "none": {},
    "labels": {"num_classes": 10},
    "vectors": {"condition": Vectors(6)},
    "tokens": {"condition": Tokens(6)},
    "words": {"condition": WordIds(7)},
}


def arguments(name, kind="labels", **changes):
    """Of a network for images of one channel, with two channels out."""
    sizes = {"in_channels": 1, "out_channels": 2}
    if name == "unet":
        sizes |= {"model_channels": 16, "channel_mult": (1, 2), "num_res_blocks": 1}
        sizes["norm_groups"] = 4
    else:
        sizes |= {"image_size": 8, "patch_size": 2, "width": 32, "depth": 4, "num_heads": 2}
    if name == "jit":
        sizes |= {"bottleneck": 8, "in_context_start": 2}
        sizes["in_context_tokens"] = 3 if kind in ("labels", "vectors") else 0
    return sizes | KINDS[kind] | changes


def small(name, kind="labels", **changes):
    return fill_(NETWORKS[name](**arguments(name, kind, **changes)))


def smallest(name, kind="labels", **changes):
    """With as few blocks as have attention, for tests that compile."""
    if name == "unet":
        sizes = {"model_channels": 8, "channel_mult": (1,), "attention_downsample": (1,)}
    else:
        sizes = {"width": 16, "depth": 2} | ({"in_context_start": 1} if name == "jit" else {})
    return small(name, kind, **sizes, **changes)


def condition(kind, dtype=torch.float32):
    """Of four images, the first of which has none."""
    return {
        "none": None,
        "labels": torch.tensor([-1, 3, 0, 9]),
        "vectors": (Z((4, 6), 5).to(dtype), torch.tensor([False, True, True, True])),
        "tokens": (
            Z((4, 5, 6), 5).to(dtype),
            torch.arange(5) < torch.tensor([[0], [1], [3], [5]]),
        ),
        "words": torch.tensor([[-1, -1, -1], [4, -1, -1], [0, 5, 6], [1, 2, 3]]),
    }[kind]


def no_condition(kind, dtype=torch.float32):
    """None for each of four images, in rows that hold something."""
    if kind in ("labels", "words"):
        return torch.full_like(condition(kind), -1)
    rows, mask = condition(kind, dtype)
    return rows, torch.zeros_like(mask)


def batch(dtype=torch.float32):
    """Images and noise labels."""
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
