"""The parts that transformers share, and what holds for all three networks."""

import math

import pytest
import torch
import torch.nn.functional as F
from jsonargparse import ArgumentParser
from support.golden import Z
from support.small_transformers import (
    KINDS,
    NETWORKS,
    TAKES,
    batch,
    condition,
    gradients,
    no_condition,
    row,
    small,
)
from torch import nn
from torch.testing import assert_close

from lit_diffusion.networks.transformers import (
    MLP,
    AdaLNBlock,
    Attention,
    LayerNorm32,
    RMSNorm32,
    patchify,
    sincos_2d,
    unpatchify,
)

each_network = pytest.mark.parametrize("name", NETWORKS)
each_kind = pytest.mark.parametrize("kind", KINDS)
each_condition = pytest.mark.parametrize("kind", KINDS[1:])


# Parts


def test_a_patch_is_its_rows_of_columns_of_channels():
    x = Z((2, 3, 6, 6), 1)
    patches = patchify(x, 2)
    assert patches.shape == (2, 9, 12)
    second_row_third_column = x[:, :, 2:4, 4:6].permute(0, 2, 3, 1).flatten(1)
    assert torch.equal(patches[:, 5], second_row_third_column)
    assert torch.equal(unpatchify(patches, 3, 2), x)


def test_positions_are_those_of_the_column_then_of_the_row():
    table = sincos_2d(3, 8)
    assert table.shape == (1, 9, 8)
    row, column = 1, 2
    expected = [f(p / s) for p in (column, row) for f in (math.sin, math.cos) for s in (1, 100)]
    assert_close(table[0, 3 * row + column], torch.tensor(expected))


def test_rms_norm_is_its_formula():
    norm, x = RMSNorm32(16, eps=1e-6).double(), Z((3, 16), 1)
    nn.init.uniform_(norm.weight)
    expected = x / (x.square().mean(1, keepdim=True) + 1e-6).sqrt() * norm.weight
    assert_close(norm(x), expected)


@pytest.mark.parametrize("norm", [LayerNorm32(16), RMSNorm32(16, eps=1e-6)])
def test_norms_of_bfloat16_are_computed_in_float32(norm):
    x = Z((8, 16), 1).bfloat16()
    output = norm.bfloat16()(x)
    assert output.dtype == torch.bfloat16
    assert torch.equal(output, norm.float()(x.float()).bfloat16())


def test_a_token_that_is_masked_is_not_attended_to():
    attention, x = Attention(8, 2).double(), Z((2, 5, 8), 1)
    mask = torch.tensor([[True, False, True, True, True], [True] * 5])
    output = attention(x, mask)
    alone = attention(x[:1, [0, 2, 3, 4]])
    assert_close(output[:1, [0, 2, 3, 4]], alone, rtol=1e-12, atol=1e-12)
    assert_close(output[1:], attention(x[1:]), rtol=1e-12, atol=1e-12)


def test_a_gated_block_is_its_formula():
    block = AdaLNBlock(8, lambda: LayerNorm32(8), Attention(8, 2), MLP(8, 16)).double()
    x, c = Z((2, 3, 8), 1), Z((2, 8), 2)
    a, b, gate, e, f, mlp_gate = block.adaLN_modulation[1](F.silu(c))[:, None].split(8, dim=2)
    h = x + gate * block.attn(block.norm1(x) * (1 + b) + a)
    expected = h + mlp_gate * block.mlp(block.norm2(h) * (1 + f) + e)
    assert_close(block(x, c), expected, rtol=1e-12, atol=1e-12)


# Networks


@pytest.mark.parametrize("name", ["dit", "jit"])
def test_a_new_network_says_nothing_and_its_blocks_are_identities(name):
    network = NETWORKS[name](8, 1, 2, 2, 32, 2, 2, num_classes=10)
    assert torch.equal(network(*batch(), condition("labels")), torch.zeros(4, 2, 8, 8))
    x, c = Z((2, 16, 32), 1).float(), Z((2, 32), 2).float()
    where = () if name == "dit" else (torch.zeros(2, 16, 8), None)
    assert torch.equal(network.blocks[0](x, c, *where), x)


@each_network
def test_a_new_network_learns(name):
    torch.manual_seed(0)
    network = NETWORKS[name](8, 1, 1, 2, 32, 2, 2, num_classes=10)
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    (x, noise_label), labels = batch(), torch.tensor([-1, 0, 1, 2])
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        error = network(x, noise_label, labels) - labels.view(-1, 1, 1, 1)
        losses.append(error.square().mean())
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < 0.5 * losses[0]


@each_network
@each_kind
def test_every_parameter_gets_a_gradient(name, kind):
    for parameter, gradient in gradients(small(name, kind), *batch(), condition(kind)).items():
        assert gradient is not None, parameter
        assert gradient.norm() > 1e-4, parameter


@each_network
@each_kind
def test_an_image_is_told_its_own_noise_level_and_condition(name, kind):
    network = small(name, kind).double()
    x, noise_label = batch(torch.float64)
    together = network(x, noise_label, condition(kind))
    for i in range(4):
        alone = network(x[i : i + 1], noise_label[i : i + 1], row(condition(kind), i))
        assert_close(together[i : i + 1], alone, rtol=1e-10, atol=1e-10)


@each_network
@each_condition
def test_no_condition_is_none_in_every_row_whatever_the_row_holds(name, kind):
    network = small(name, kind).double()
    inputs = batch(torch.float64)
    output = network(*inputs)
    if kind in ("labels", "words"):
        none = network(*inputs, no_condition(kind))
        assert_close(none, output, rtol=1e-12, atol=1e-12)
    else:
        rows, there = no_condition(kind)
        assert_close(network(*inputs, (rows, there)), output, rtol=1e-12, atol=1e-12)
        absent = (torch.full_like(rows, torch.nan), there)
        assert torch.equal(network(*inputs, absent), network(*inputs, (rows, there)))
        found = gradients(network, *inputs, absent)
        assert all(gradient.isfinite().all() for gradient in found.values())
    assert (network(*inputs, condition(kind)) - output).abs()[1:].amax(dim=(1, 2, 3)).min() > 1e-3


@each_network
def test_tokens_that_are_masked_change_no_bit(name):
    network, inputs = small(name, "tokens"), batch()
    tokens, mask = condition("tokens")
    output = network(*inputs, (tokens, mask))
    assert torch.equal(network(*inputs, (tokens.where(mask[..., None], 100.0), mask)), output)
    longer = F.pad(tokens, (0, 0, 0, 3), value=7.0), F.pad(mask, (0, 3))
    assert_close(network(*inputs, longer), output, rtol=1e-5, atol=1e-5)


@each_network
def test_tokens_are_a_set(name):
    network, inputs = small(name, "tokens").double(), batch(torch.float64)
    tokens, mask = condition("tokens")
    turned = network(*inputs, (tokens.flip(1), mask.flip(1)))
    assert_close(turned, network(*inputs, (tokens, mask)), rtol=1e-10, atol=1e-10)


@each_network
def test_words_are_in_an_order_and_those_that_are_not_there_change_nothing(name):
    network, inputs = small(name, "words").double(), batch(torch.float64)
    words = condition("words")
    output = network(*inputs, words)
    turned = network(*inputs, words.flip(1))
    assert ((turned - output)[2:].flatten(1).abs().amax(1) > 1e-4).all()
    longer = network(*inputs, F.pad(words, (0, 3), value=-7))
    assert_close(longer, output, rtol=1e-10, atol=1e-10)


@each_network
def test_patches_know_where_they_are(name):
    """Even those of a plain image, which have nothing else to differ by."""
    with torch.no_grad():
        output = small(name, "none")(torch.ones(1, 1, 8, 8), torch.tensor([500.0]))
    patches = patchify(output, 2)[0]
    assert (torch.cdist(patches, patches) + torch.eye(16)).min() > 1e-2


@each_network
@each_kind
def test_gradient_checkpointing_changes_no_bit(name, kind):
    results = [
        gradients(small(name, kind, gradient_checkpointing=on), *batch(), condition(kind))
        for on in (False, True)
    ]
    for parameter, gradient in results[0].items():
        assert torch.equal(gradient, results[1][parameter]), parameter


@each_network
def test_gradient_checkpointing_computes_every_block_twice(name):
    network, calls = small(name, gradient_checkpointing=True), []
    blocks = [m for m in network.modules() if isinstance(getattr(m, "attn", None), nn.Module)]
    for block in blocks:
        block.register_forward_pre_hook(lambda block, args: calls.append(block))
    gradients(network, *batch(), condition("labels"))
    assert sorted(map(id, calls)) == sorted(2 * [id(block) for block in blocks])
    assert len(blocks) >= 4


@each_network
@each_kind
def test_no_value_is_read_back_from_the_device(name, kind):
    """The meta device has no values: a host synchronisation or a branch on data would raise."""
    with torch.device("meta"):
        network = NETWORKS[name](8, 1, 2, 2, 32, 2, 2, gradient_checkpointing=True, **TAKES[kind])
    given, known = condition(kind), None
    if given is not None:
        parts = given if isinstance(given, tuple) else (given,)
        known = tuple(part.to("meta") for part in parts)
        known = known if isinstance(given, tuple) else known[0]
    output = network(*(part.to("meta") for part in batch()), known)
    output.sum().backward()
    assert output.shape == (4, 2, 8, 8)


@each_network
@each_kind
def test_bfloat16_autocast_is_close_and_keeps_norms_and_output_in_float32(name, kind, monkeypatch):
    network, seen = small(name, kind), []
    expected = network(*batch(), condition(kind))
    for norm in ("layer_norm", "rms_norm"):
        monkeypatch.setattr(F, norm, recording(getattr(F, norm), seen))
    with torch.autocast("cpu", torch.bfloat16):
        output = network(*batch(), condition(kind))
    assert output.dtype == torch.float32
    assert set(seen) == {torch.float32}
    error = (output - expected).norm() / expected.norm()
    assert 1e-5 < error < 0.03


def recording(function, seen):
    def recorded(x, *arguments):
        seen.append(x.dtype)
        return function(x, *arguments)

    return recorded


@each_network
@each_kind
def test_a_bfloat16_network_is_close(name, kind):
    x, noise_label = batch()
    expected = small(name, kind)(x, noise_label, condition(kind))
    output = small(name, kind).bfloat16()(x.bfloat16(), noise_label, condition(kind))
    assert output.dtype == torch.bfloat16
    assert (output.float() - expected).norm() < 0.05 * expected.norm()


@each_network
@pytest.mark.parametrize("kind", ["labels", "tokens", "words"])
def test_torch_compile_captures_the_whole_network_in_one_graph(name, kind):
    network, inputs = small(name, kind), (*batch(), condition(kind))
    expected = network(*inputs)
    network.compile(fullgraph=True, backend="eager")
    assert_close(network(*inputs), expected)


@pytest.mark.slow
@each_network
@each_kind
@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_the_gradient_is_captured_as_well(name, kind, gradient_checkpointing):
    network = small(name, kind, gradient_checkpointing=gradient_checkpointing).double()
    inputs = (*batch(torch.float64), condition(kind))
    expected, names = gradients(network, *inputs), list(network.state_dict())
    torch.compiler.reset()  # of other tests' graphs, which count against a limit
    network.compile(fullgraph=True, backend="aot_eager")
    for parameter, gradient in gradients(network, *inputs).items():
        assert_close(gradient, expected[parameter], rtol=1e-8, atol=1e-8)
    assert list(network.state_dict()) == names


@each_network
def test_images_of_another_size_are_refused(name):
    with pytest.raises(ValueError, match=r"\(image_size=8\) got images of shape \(2, 1, 8, 16\)"):
        small(name)(torch.zeros(2, 1, 8, 16), torch.zeros(2), torch.zeros(2).long())


@each_network
@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"patch_size": 3}, "patch_size must divide image_size, got 3 and 8"),
        ({"num_heads": 5}, "divisible by num_heads and by 4, got width=32 and num_heads=5"),
        ({"num_heads": 0}, "divisible by num_heads and by 4, got width=32 and num_heads=0"),
        ({"patch_size": 0}, "patch_size must divide image_size, got 0 and"),
        ({"width": 30, "num_heads": 3}, "got width=30 and num_heads=3"),
        ({"width": 10**9}, "width and image_size must be at most 100000"),
        ({"depth": 10**9}, "depth 1000, got 32, 8 and 1000000000"),
        ({"vector_dim": 3}, "one kind of condition, got num_classes=10 and vector_dim=3"),
        ({"num_words": 3}, "one kind of condition, got num_classes=10 and num_words=3"),
    ],
)
def test_numbers_that_do_not_fit_together_are_refused(name, sizes, message):
    with pytest.raises(ValueError, match=message):
        small(name, **sizes)


@each_network
def test_a_condition_of_another_kind_is_refused_by_the_name_of_the_network(name):
    network = NETWORKS[name].__name__
    with pytest.raises(ValueError, match=rf"{network} takes labels \(B,\) int64 with B=4, got \("):
        small(name)(*batch(), condition("vectors"))
    with pytest.raises(ValueError, match=rf"{network} without num_classes.* got torch.int64 \(4,"):
        small(name, "none")(*batch(), condition("labels"))


@each_network
def test_a_network_can_be_written_in_yaml(name):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--network", type=nn.Module)
    text = f"""
        class_path: lit_diffusion.networks.{name}.{NETWORKS[name].__name__}
        init_args: {{image_size: 8, in_channels: 1, out_channels: 2, width: 32, depth: 2,
                    patch_size: 2, num_heads: 2, context_dim: 5}}
    """
    network = parser.instantiate(parser.parse_args([f"--network={text}"])).network
    assert network(*batch()).shape == (4, 2, 8, 8)
