from functools import partial
from inspect import signature

import pytest
import torch
import torch.nn.functional as F
from support.dispatched import forward_and_backward
from support.golden import Z
from support.small_networks import batch, condition, small
from torch.testing import assert_close

from lit_diffusion.networks.conditions import Tokens
from lit_diffusion.networks.jit import JiT, apply_rope, rope_cos_sin

SIZES = {
    "B": {"width": 768, "depth": 12, "num_heads": 12, "bottleneck": 128, "in_context_start": 4},
    "L": {"width": 1024, "depth": 24, "num_heads": 16, "bottleneck": 128, "in_context_start": 8},
    "H": {"width": 1280, "depth": 32, "num_heads": 16, "bottleneck": 256, "in_context_start": 10},
    "G": {"width": 1664, "depth": 40, "num_heads": 16, "bottleneck": 256, "in_context_start": 10},
}


@pytest.mark.parametrize(
    ("size", "millions"), [("B", 131), ("L", 459), ("H", 953), ("G", 2007)], ids=str
)
def test_sizes_have_the_number_of_parameters_of_the_paper(size, millions):
    with torch.device("meta"):
        network = JiT(256, 3, 3, 16, **SIZES[size], in_context_tokens=32, num_classes=1000)
    assert round(sum(p.numel() for p in network.parameters()) / 1e6) == millions


def test_the_default_is_size_b():
    defaults = signature(JiT).parameters
    assert {name: defaults[name].default for name in SIZES["B"]} == SIZES["B"]


def test_rope_keeps_lengths_and_is_a_product_of_complex_numbers():
    x, angles = Z((2, 5, 8), 1), Z((5, 4), 2)
    cos_sin, (a, b) = torch.stack([angles.cos(), angles.sin()]), x.chunk(2, dim=-1)
    expected = torch.complex(a, b) * torch.polar(torch.ones_like(angles), angles)
    assert_close(apply_rope(x, cos_sin), torch.cat([expected.real, expected.imag], dim=-1))
    assert apply_rope(x.bfloat16(), cos_sin).dtype == torch.bfloat16


def test_angles_are_rows_and_columns_times_geometric_frequencies():
    cos, sin = rope_cos_sin(3, 8, num_extra=2)
    assert cos.shape == sin.shape == (11, 4)
    row, column = 2, 1
    angles = torch.tensor([row, row / 100, column, column / 100], dtype=torch.float64)
    assert_close(cos[3 * row + column], angles.cos())
    assert_close(sin[3 * row + column], angles.sin())
    assert (cos[9:] == 1).all()
    assert (sin[9:] == 0).all()


def test_attention_is_its_formula():
    attention = small("jit").blocks[0].attn.double()
    x, cos_sin = Z((2, 16, 32), 1), rope_cos_sin(4, 16, num_extra=0)
    q, k, v = (part.reshape(2, 16, 2, 16).transpose(1, 2) for part in attention.qkv(x).chunk(3, 2))
    q, k = (
        apply_rope(x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight, cos_sin)
        for x, norm in ((q, attention.q_norm), (k, attention.k_norm))
    )
    heads = (q @ k.transpose(2, 3) / 4).softmax(-1) @ v
    expected = attention.proj(heads.transpose(1, 2).reshape(2, 16, 32))
    assert_close(attention(x, cos_sin, None), expected, rtol=1e-10, atol=1e-10)


def test_attention_in_bfloat16_copies_only_what_is_rotated_in_float32():
    """Queries and keys, to float32 and back; copies of norms are counted in `test_layers`."""
    attention = small("jit").blocks[0].attn.bfloat16()
    attention.q_norm = attention.k_norm = torch.nn.Identity()
    cos_sin = rope_cos_sin(4, 16, num_extra=0).float()
    attend = partial(attention, cos_sin=cos_sin, mask=None)
    for counts in forward_and_backward(attend, torch.randn(2, 16, 32).bfloat16()):
        assert (counts["_to_copy"], counts["clone"]) == (4, 0)


def test_the_mlp_is_gated_and_has_the_parameters_of_one_that_is_not():
    mlp, x = small("jit", width=96, mlp_ratio=4.0).blocks[0].mlp, Z((2, 96), 1).float()
    gate, value = (x @ mlp.gate_value.weight.T + mlp.gate_value.bias).chunk(2, dim=1)
    assert_close(mlp(x), mlp.proj(F.silu(gate) * value))
    assert sum(p.numel() for p in mlp.parameters() if p.ndim == 2) == 8 * 96**2


def test_images_pass_a_bottleneck():
    reduce, _ = small("jit", patch_size=4).patch_embed
    assert (reduce.weight.shape, reduce.bias) == ((8, 16), None)


def test_the_class_is_tokens_from_a_block_on_without_the_rotary_positions_of_patches():
    network, inputs = small("jit", in_context_start=2), []
    for block in network.blocks:
        block.register_forward_pre_hook(lambda _, args: inputs.append(args))
    network(*batch(), condition("labels"))
    for (tokens, _, cos_sin, *_), num_extra in zip(inputs, (0, 0, 3, 3), strict=True):
        assert tokens.shape[1] == 16 + num_extra
        assert_close(cos_sin, rope_cos_sin(4, 16, num_extra).float(), rtol=0, atol=1e-6)
    rows = network.condition(condition("labels")).vector
    assert torch.equal(inputs[2][0][:, 16:], rows[:, None] + network.in_context)


def test_in_context_tokens_start_small():
    torch.manual_seed(0)
    sizes = {"width": 256, "depth": 1, "num_heads": 2, "in_context_start": 0}
    network = JiT(8, 1, 1, 4, **sizes, in_context_tokens=8, num_classes=10)
    in_context = network.in_context.detach()
    assert in_context.std() == pytest.approx(0.02, rel=0.1)
    assert abs(in_context.mean()) < 0.002


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"in_context_tokens": 2}, "in_context_tokens=2 .* condition=None"),
        ({"in_context_tokens": 2, "condition": Tokens(3)}, "in_context_tokens=2 .* label"),
        (
            {"in_context_tokens": 2, "num_classes": 3, "in_context_start": 12},
            "in_context_start must be the index of a block, 0 to 11, got 12",
        ),
        ({"width": 12, "num_heads": 2}, "divisible by 4, got width / num_heads = 12 / 2"),
    ],
)
def test_arguments_that_do_not_fit_together_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        JiT(16, 1, 1, **arguments)
