"""Outputs are compared with diffusers' DiT in tests/interchange/test_diffusers_dit.py."""

from functools import cache
from inspect import signature

import pytest
import torch
from support.small_networks import batch, condition, small
from torch.testing import assert_close

from lit_diffusion.networks.dit import DiT
from lit_diffusion.networks.layers import sincos_2d

SIZES = {
    "S": {"width": 384, "depth": 12, "num_heads": 6},
    "B": {"width": 768, "depth": 12, "num_heads": 12},
    "L": {"width": 1024, "depth": 24, "num_heads": 16},
    "XL": {"width": 1152, "depth": 28, "num_heads": 16},
}


@cache
def count(size, latents=32, patch_size=2):
    """Trained parameters, and with the table of positions, as published."""
    with torch.device("meta"):
        network = DiT(latents, 4, 8, patch_size, **SIZES[size], num_classes=1000)
    trained = sum(parameter.numel() for parameter in network.parameters())
    return trained, sum(value.numel() for value in network.state_dict().values())


def test_xl_2_has_the_published_number_of_parameters():
    assert count("XL") == (675_129_632 - 256 * 1152, 675_129_632)
    assert count("XL", latents=64)[0] == count("XL")[0]


@pytest.mark.parametrize(
    ("size", "patch_size", "millions"),
    [("S", 2, 33), ("S", 8, 33), ("B", 4, 130), ("L", 2, 458), ("L", 4, 458), ("XL", 4, 675)],
)
def test_the_others_have_the_number_of_the_paper(size, patch_size, millions):
    """Table 1 and 4 of Peebles & Xie 2022, which round."""
    assert round(count(size, patch_size=patch_size)[1] / 1e6) in (millions, millions + 1)


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


def test_labels_and_vectors_are_added_to_the_noise_level():
    """A label's row may as well be a bias of the noise level's embedding."""
    network, (x, noise_label) = small("dit").double(), batch(torch.float64)
    labels = torch.full((4,), 3)
    expected = network(x, noise_label, labels)
    with torch.no_grad():
        table = network.y_embedder["embedding_table"].weight
        network.t_embedder["mlp"][2].bias += table[3] - table[5]
    assert_close(network(x, noise_label, labels + 2), expected, rtol=1e-10, atol=1e-10)


def test_tokens_are_appended_to_the_patches():
    network, lengths = small("dit", "tokens"), []
    network.blocks[0].register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[1]))
    network(*batch(), condition("tokens"))
    network(*batch())
    assert lengths == [16 + 1 + 5, 16 + 1]
