import math

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from lit_diffusion.networks.layers import (
    AttentionBlock,
    AttentionPool,
    GroupNorm32,
    Pointwise,
    ResBlock,
    TimestepMLP,
    downsample,
    self_attention,
    timestep_embedding,
    upsample,
)


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


def test_group_norm_of_float64_is_in_float64():
    x = torch.randn(4, 64, 3, 3, dtype=torch.float64)
    grouped = x.view(4, 32, -1)
    grouped = grouped - grouped.mean(2, keepdim=True)
    expected = grouped / (grouped.square().mean(2, keepdim=True) + 1e-5).sqrt()
    actual = GroupNorm32(64).double()(x)
    assert_close(actual, expected.view_as(x), rtol=1e-12, atol=1e-12)


def test_group_norm_refuses_channels_that_its_groups_do_not_divide():
    with pytest.raises(ValueError, match="48 channels and 32 groups"):
        GroupNorm32(48)


def test_pointwise_is_a_1x1_convolution_of_tokens():
    layer = Pointwise(8, 12).double()
    tokens = torch.randn(2, 5, 8, dtype=torch.float64)
    channels_first = F.conv1d(tokens.transpose(1, 2), layer.weight, layer.bias)
    assert_close(layer(tokens), channels_first.transpose(1, 2), rtol=1e-12, atol=1e-12)


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


def test_softmax_stays_accurate_in_bfloat16():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 64, 16).bfloat16()
    q = 8 * q  # logits of several tens, which bfloat16 itself rounds by up to 0.1
    actual = self_attention(torch.cat([q, k, v], dim=2), 1, split_heads_first=False)
    expected = attention_of_one_head(q.double(), k.double(), v.double())
    assert_close(actual.double(), expected, rtol=0, atol=2**-7 * v.abs().max().item())


@pytest.mark.parametrize("resample", [None, downsample, upsample])
def test_res_block_starts_as_its_skip_connection(resample):
    options = {"dropout": 0.0, "scale_shift_norm": True, "norm_groups": 8}
    x, emb = torch.randn(2, 32, 4, 4), torch.randn(2, 16)
    skip = x if resample is None else resample(x)
    assert torch.equal(ResBlock(32, 32, 16, resample=resample, **options)(x, emb), skip)
    widened = ResBlock(32, 64, 16, resample=resample, **options)
    assert torch.equal(widened(x, emb), widened.skip_connection(skip))


def test_attention_block_starts_as_the_identity():
    x = torch.randn(2, 32, 4, 4)
    block = AttentionBlock(32, 4, split_heads_first=True, norm_groups=32)
    assert torch.equal(block(x), x)


def test_attention_block_follows_a_permutation_of_the_pixels():
    block = AttentionBlock(32, 4, split_heads_first=True, norm_groups=8).double()
    torch.nn.init.normal_(block.proj_out.weight)
    x, order = torch.randn(2, 32, 16, dtype=torch.float64), torch.randperm(16)
    permuted = block(x[..., order].view(2, 32, 4, 4))
    assert_close(permuted.flatten(2), block(x.view(2, 32, 4, 4)).flatten(2)[..., order])


def test_attention_pool_tells_positions_apart():
    pool = AttentionPool(4, channels=8, num_heads=2, out_channels=5)
    x = torch.randn(3, 8, 4, 4)
    assert pool(x).shape == (3, 5)
    assert (pool(x) - pool(x.flip(3))).abs().max() > 1e-4


def test_downsample_takes_means_and_undoes_upsample():
    x = torch.randn(2, 3, 4, 6, dtype=torch.float64)
    assert torch.equal(downsample(upsample(x)), x)
    assert_close(downsample(x)[:, :, 0, 0], x[:, :, :2, :2].mean((2, 3)))
