import copy
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from support.dispatched import CountOperations, forward_and_backward
from support.golden import Z
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.testing import assert_close

from lit_diffusion.networks.layers import (
    Attention,
    LayerNorm32,
    Patched,
    RMSNorm32,
    TimestepMLP,
    patchify,
    self_attention,
    sincos_2d,
    timestep_embedding,
    unpatchify,
)
from lit_diffusion.networks.unet import AttentionBlock, GroupNorm32, ResBlock


def test_embedding_is_cosines_then_sines_of_geometric_frequencies():
    label, dim = 37.25, 6
    frequencies = [10_000 ** (-2 * k / dim) for k in range(3)]
    expected = [math.cos(label * f) for f in frequencies]
    expected += [math.sin(label * f) for f in frequencies]
    actual = timestep_embedding(torch.tensor([label]), dim)
    assert_close(actual, torch.tensor([expected], dtype=torch.float64), rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.float64])
def test_embedding_is_the_same_for_labels_of_any_type(dtype):
    labels = torch.tensor([0, 1, 999])
    assert torch.equal(timestep_embedding(labels.to(dtype), 32), timestep_embedding(labels, 32))


def test_embedding_refuses_an_odd_width():
    with pytest.raises(ValueError, match="dim=7"):
        timestep_embedding(torch.zeros(1), 7)


def test_noise_embedding_is_not_touched_by_autocast():
    mlp, labels = TimestepMLP(32, 64), torch.tensor([998.0, 999.0, 999.75])
    with torch.autocast("cpu", torch.bfloat16):
        inside = mlp(labels)
    assert inside.dtype == torch.float32
    assert torch.equal(inside, mlp(labels))


def test_steps_998_and_999_differ_in_a_bfloat16_network():
    mlp = TimestepMLP(32, 64).bfloat16()
    a, b = mlp(torch.tensor([998.0, 999.0]))
    assert a.dtype == torch.bfloat16
    assert (a - b).abs().max() > 0.02


# Norms


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_group_norm_of_bfloat16_is_the_float32_result_rounded_once(weights, autocast):
    torch.manual_seed(0)
    norm = GroupNorm32(64, 32)
    torch.nn.init.normal_(norm.weight)
    norm.to(weights)
    x = (20 + torch.randn(4, 64, 8, 8)).bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        actual = norm(x)
    expected = F.group_norm(x.float(), 32, norm.weight.float(), norm.bias.float(), eps=1e-5)
    assert torch.equal(actual, expected.bfloat16())


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


@pytest.mark.gpu
@pytest.mark.parametrize("norm", [LayerNorm32(64), RMSNorm32(64, eps=1e-6)])
def test_norms_on_a_gpu_compute_in_float32_and_round_once(norm):
    x = (20 + torch.randn(32, 64)).bfloat16().cuda().requires_grad_()
    norm, dy = norm.cuda(), torch.randn(32, 64).bfloat16().cuda()
    with torch.autocast("cuda", torch.bfloat16):
        actual = norm(x)
    assert actual.dtype == torch.bfloat16
    gradients = torch.autograd.grad(actual, (x, norm.weight), dy)
    x64, norm64 = x.detach().double().requires_grad_(), copy.deepcopy(norm).double()
    expected = norm64(x64)
    correct = torch.autograd.grad(expected, (x64, norm64.weight), dy.double())
    for value, right in zip((actual, *gradients), (expected, *correct), strict=True):
        assert (value.double() - right).norm() < 5e-3 * right.norm()


@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", [LayerNorm32, RMSNorm32])
def test_norms_of_bfloat16_on_a_gpu_copy_only_weights_of_another_dtype(kind, weights):
    with FakeTensorMode(), torch.device("cuda"):
        norm = kind(16, dtype=weights)
        x = torch.empty(2, 4, 16, dtype=torch.bfloat16, requires_grad=True)
        with CountOperations() as forward:
            y = norm(x)
        with CountOperations() as backward:  # by hand, as torch's engine needs the device
            y.grad_fn(torch.empty_like(y), *[None] * (kind is RMSNorm32))  # of its statistics
    num_rounded = len(list(norm.parameters())) if weights == torch.float32 else 0
    assert (forward.counts["_to_copy"], forward.counts["clone"]) == (num_rounded, 0)
    assert (backward.counts["_to_copy"], backward.counts["clone"]) == (0, 0)
    assert y.grad_fn.next_functions[0][0].variable is x


# Attention


def attention_of_one_head(q, k, v):
    return torch.softmax(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5, dim=-1) @ v


@pytest.mark.parametrize("split_heads_first", [True, False])
def test_attention_reads_features_in_the_order_it_names(split_heads_first):
    heads = [[torch.randn(2, 7, 4, dtype=torch.float64) for _ in "qkv"] for _ in range(3)]
    if split_heads_first:
        features = [part for head in heads for part in head]
    else:
        features = [head[i] for i in range(3) for head in heads]
    actual = self_attention(torch.cat(features, dim=2), 3, split_heads_first=split_heads_first)
    expected = torch.cat([attention_of_one_head(*head) for head in heads], dim=2)
    assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("split_heads_first", [True, False])
def test_attention_copies_only_the_gradients_of_q_k_and_v_into_one_tensor(split_heads_first):
    qkv = torch.randn(2, 7, 3 * 16).bfloat16()
    attention = partial(self_attention, num_heads=2, split_heads_first=split_heads_first)
    for counts, num_stacked in zip(forward_and_backward(attention, qkv), (0, 1), strict=True):
        assert (counts["_to_copy"], counts["clone"], counts["stack"]) == (0, 0, num_stacked)


def test_softmax_stays_accurate_in_bfloat16():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 64, 16).bfloat16()
    q = 8 * q  # logits of several tens, which bfloat16 itself rounds by up to 0.1
    actual = self_attention(torch.cat([q, k, v], dim=2), 1, split_heads_first=False)
    expected = attention_of_one_head(q.double(), k.double(), v.double())
    assert_close(actual.double(), expected, rtol=0, atol=2**-7 * v.abs().max().item())


def test_a_token_that_is_masked_is_not_attended_to():
    attention, x = Attention(8, 2).double(), Z((2, 5, 8), 1)
    mask = torch.tensor([[True, False, True, True, True], [True] * 5])
    output = attention(x, mask)
    alone = attention(x[:1, [0, 2, 3, 4]])
    assert_close(output[:1, [0, 2, 3, 4]], alone, rtol=1e-12, atol=1e-12)
    assert_close(output[1:], attention(x[1:]), rtol=1e-12, atol=1e-12)


# Blocks


@pytest.mark.parametrize("resample", [None, nn.AvgPool2d(2), nn.Upsample(scale_factor=2)])
def test_res_block_starts_as_its_skip_connection(resample):
    options = {"dropout": 0.0, "scale_shift_norm": True, "norm_groups": 8, "resample": resample}
    x, emb = torch.randn(2, 32, 4, 4), torch.randn(2, 16)
    skip = x if resample is None else resample(x)
    assert torch.equal(ResBlock(32, 32, 16, **options)(x, emb), skip)
    widened = ResBlock(32, 64, 16, **options)
    assert torch.equal(widened(x, emb), widened.skip_connection(skip))


def test_attention_block_starts_as_the_identity():
    x = torch.randn(2, 32, 4, 4)
    block = AttentionBlock(32, 4, split_heads_first=True, norm_groups=32)
    assert torch.equal(block(x), x)


# Patches and positions


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


class Repeat(nn.Module):
    """Returns its image, `copies` times, and remembers its inputs."""

    def __init__(self, copies: int) -> None:
        super().__init__()
        self.copies = copies

    def forward(self, x: Tensor, noise_label: Tensor, condition: Tensor | None) -> Tensor:
        self.x, self.others = x, (noise_label, condition)
        return torch.cat([x] * self.copies, 1)


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_pixels_of_patched_images_return_to_their_places_both_halves_in_order(size, copies):
    x, network = torch.randn(2, 3, 8, 12), Repeat(copies)
    others = torch.rand(2), torch.tensor([0, -1])
    output = Patched(network, size)(x, *others)
    assert network.others == others
    assert torch.equal(output, torch.cat([x] * copies, 1))
    patch = x[0, 0, :size, size : 2 * size].flatten()
    assert torch.equal(network.x[0, : size**2, 0, 1], patch)


def test_other_sizes_of_images_and_patches_are_refused():
    with pytest.raises(ValueError, match="size must be above 0 and finite, got 0"):
        Patched(Repeat(1), 0)
    with pytest.raises(ValueError, match=r"size=4.* got images of shape \(1, 1, 8, 6\)"):
        Patched(Repeat(1), 4)(torch.zeros(1, 1, 8, 6), torch.zeros(1), None)
