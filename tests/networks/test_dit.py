"""Outputs are compared with diffusers' DiT in tests/interchange/test_diffusers_dit.py."""

from inspect import signature

import pytest
import torch

from lit_diffusion.networks.dit import DiT
from lit_diffusion.networks.layers import sincos_2d

SIZES = {
    "S": {"width": 384, "depth": 12, "num_heads": 6},
    "B": {"width": 768, "depth": 12, "num_heads": 12},
    "L": {"width": 1024, "depth": 24, "num_heads": 16},
    "XL": {"width": 1152, "depth": 28, "num_heads": 16},
}


@pytest.mark.parametrize(("size", "millions"), [("S", 33), ("B", 131), ("L", 458)])
def test_sizes_have_the_number_of_parameters_of_the_paper(size, millions):
    """Of patches of 2, with the table of positions, as published (Peebles & Xie 2022, table 1)."""
    with torch.device("meta"):
        state = DiT(32, 4, 8, 2, **SIZES[size], num_classes=1000).state_dict()
    assert round(sum(value.numel() for value in state.values()) / 1e6) == millions


def test_xl_2_has_the_published_number_of_parameters():
    with torch.device("meta"):
        state = DiT(32, 4, 8, 2, **SIZES["XL"], num_classes=1000).state_dict()
    assert sum(value.numel() for value in state.values()) == 675_129_632


def test_the_default_is_size_s():
    defaults = signature(DiT).parameters
    assert {name: defaults[name].default for name in SIZES["S"]} == SIZES["S"]


def test_parameters_have_the_names_of_the_published_checkpoints():
    network = DiT(32, 4, 8, 2, 32, 2, 2, num_classes=1000)
    shapes = {name: tuple(value.shape) for name, value in network.state_dict().items()}
    block = {
        "attn.qkv.weight": (96, 32),
        "attn.qkv.bias": (96,),
        "attn.proj.weight": (32, 32),
        "attn.proj.bias": (32,),
        "mlp.fc1.weight": (128, 32),
        "mlp.fc1.bias": (128,),
        "mlp.fc2.weight": (32, 128),
        "mlp.fc2.bias": (32,),
        "adaLN_modulation.1.weight": (192, 32),
        "adaLN_modulation.1.bias": (192,),
    }
    assert shapes == {
        "pos_embed": (1, 256, 32),
        "x_embedder.proj.weight": (32, 4, 2, 2),
        "x_embedder.proj.bias": (32,),
        "t_embedder.mlp.0.weight": (32, 256),
        "t_embedder.mlp.0.bias": (32,),
        "t_embedder.mlp.2.weight": (32, 32),
        "t_embedder.mlp.2.bias": (32,),
        "y_embedder.embedding_table.weight": (1001, 32),
        **{f"blocks.{i}.{name}": shape for i in range(2) for name, shape in block.items()},
        "final_layer.linear.weight": (32, 32),
        "final_layer.linear.bias": (32,),
        "final_layer.adaLN_modulation.1.weight": (64, 32),
        "final_layer.adaLN_modulation.1.bias": (64,),
    }


def test_positions_are_a_table_that_is_not_trained():
    network = DiT(8, 1, 1, 2, 32, 1, 2)
    assert "pos_embed" not in dict(network.named_parameters())
    assert torch.equal(network.pos_embed, sincos_2d(4, 32))


def test_a_new_network_is_initialised_as_in_the_paper():
    torch.manual_seed(0)
    network = DiT(8, 3, 3, 4, 128, 1, 2, num_classes=100).requires_grad_(False)
    uniform = (6 / (128 + 512)) ** 0.5
    assert network.blocks[0].mlp.fc1.weight.abs().max() == pytest.approx(uniform, rel=1e-2)
    flat = (6 / (128 + 3 * 16)) ** 0.5
    assert network.x_embedder.proj.weight.abs().max() == pytest.approx(flat, rel=1e-2)
    for table in (network.y_embedder["embedding_table"], network.t_embedder["mlp"][2]):
        assert table.weight.std() == pytest.approx(0.02, rel=0.05)
