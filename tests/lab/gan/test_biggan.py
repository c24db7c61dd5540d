import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lit_diffusion.lab.gan.biggan import (
    BigGANDiscriminator,
    BigGANGenerator,
    ConditionalBatchNorm,
    SelfAttention,
    normed,
)


def count(network):
    return sum(p.numel() for p in network.parameters())


@pytest.mark.slow
def test_biggan_has_as_many_parameters_as_the_paper_s_for_128():
    """70.43 M and 87.98 M are what others count in the author's code."""
    assert count(BigGANGenerator(1000, 3)) == 70_433_988
    assert count(BigGANDiscriminator(1000, 3)) == 87_982_370


def test_weights_have_a_largest_singular_value_of_one():
    torch.manual_seed(0)
    layer = normed(nn.Linear(7, 5))
    with torch.no_grad():
        layer.parametrizations.weight.original.copy_(torch.randn(5, 7))
    for _ in range(50):
        layer(torch.randn(2, 7))
    sizes = torch.linalg.svdvals(layer.weight)
    assert sizes[0].item() == pytest.approx(1, abs=1e-3)
    assert sizes[-1] < 0.9


def test_the_norm_is_told_its_gain_and_bias_by_the_condition():
    torch.manual_seed(0)
    norm = ConditionalBatchNorm(3, 4)
    x, condition = 5 + 2 * torch.randn(64, 3, 4, 4), torch.randn(64, 4)
    found = norm(x, condition)
    plain = (x - x.mean((0, 2, 3), keepdim=True)) / x.std((0, 2, 3), keepdim=True, correction=0)
    gain, bias = (part(condition)[:, :, None, None] for part in (norm.gain, norm.bias))
    torch.testing.assert_close(found, plain * (1 + gain) + bias, atol=1e-3, rtol=1e-3)


def test_attention_begins_as_the_identity_and_then_mixes_pixels():
    torch.manual_seed(0)
    layer = SelfAttention(16)
    x = torch.randn(2, 16, 4, 4)
    assert torch.equal(layer(x), x)
    with torch.no_grad():
        layer.gain.fill_(1.0)
    moved = x.clone()
    moved[:, :, 0, 0] += 3
    assert not torch.allclose(layer(moved)[:, :, 3, 3], layer(x)[:, :, 3, 3])


def test_the_judgement_is_linear_in_the_label_s_embedding():
    """Projection: the difference of two labels' logits is that of their embeddings' products."""
    torch.manual_seed(0)
    network = BigGANDiscriminator(3, 1, (2, 2), 8, image_size=8, attention_at=0).eval()
    x = torch.randn(2, 1, 8, 8)
    features = torch.relu(network.layers(x)).sum(dim=(2, 3))
    a, b = (network(x, torch.full((2,), y)) for y in (0, 2))
    weight = network.embedding.weight
    torch.testing.assert_close(a - b, features @ (weight[0] - weight[2]))


def conv(layer, x):
    return F.conv2d(x, layer.weight, layer.bias, padding=layer.kernel_size[0] // 2)


def normed_by(norm, x, condition):
    gain, bias = (condition @ part.weight.T for part in (norm.gain, norm.bias))
    x = F.batch_norm(x, norm.norm.running_mean, norm.norm.running_var)
    return x * (1 + gain)[:, :, None, None] + bias[:, :, None, None]


def attended(layer, x):
    """Queries of all pixels, keys and values of the largest of each 2 x 2."""
    pooled = [F.max_pool2d(conv(part, x), 2).flatten(2) for part in (layer.key, layer.value)]
    seen = torch.softmax(conv(layer.query, x).flatten(2).mT @ pooled[0], dim=-1)
    return x + layer.gain * conv(layer.out, (pooled[1] @ seen.mT).view(len(x), -1, *x.shape[2:]))


def doubled(x):
    return x.repeat_interleave(2, 2).repeat_interleave(2, 3)


def randomised(network):
    torch.manual_seed(0)
    for name, buffer in network.named_buffers():
        if "running" in name:
            buffer.copy_(0.5 + torch.rand_like(buffer))
    for part in network.modules():
        if isinstance(part, SelfAttention):
            torch.nn.init.constant_(part.gain, 0.7)
    return network.eval()


@torch.no_grad()
def test_the_generator_is_what_its_formulas_say():
    network = randomised(
        BigGANGenerator(3, 1, (2, 2, 1), 8, latent_dim=6, label_dim=5, attention_at=8)
    )
    z, labels = torch.randn(4, 6), torch.tensor([0, 2, 1, 2])
    h = F.linear(z[:, :2], network.first.weight, network.first.bias).view(4, 16, 4, 4)
    for i, block in enumerate(network.blocks):
        told = torch.cat([network.embedding.weight[labels], z[:, 2 * i + 2 : 2 * i + 4]], dim=1)
        inner = conv(block.conv1, doubled(F.relu(normed_by(block.norm1, h, told))))
        inner = conv(block.conv2, F.relu(normed_by(block.norm2, inner, told)))
        h = inner + conv(block.skip, doubled(h))
        if i == 0:
            h = attended(network.attention["0"], h)
    norm = network.norm
    h = F.relu(F.batch_norm(h, norm.running_mean, norm.running_var, norm.weight, norm.bias))
    torch.testing.assert_close(network(z, labels), torch.tanh(conv(network.out, h)))


@torch.no_grad()
def test_the_discriminator_is_what_its_formulas_say():
    network = randomised(BigGANDiscriminator(3, 1, (1, 2, 2), 8, image_size=16, attention_at=8))
    x, labels = torch.randn(4, 1, 16, 16), torch.tensor([0, 2, 1, 2])
    first, attention, second, third = network.layers
    h = F.avg_pool2d(conv(first.conv2, F.relu(conv(first.conv1, x))) + conv(first.skip, x), 2)
    h = attended(attention, h)
    inner = conv(second.conv2, F.relu(conv(second.conv1, F.relu(h))))
    h = F.avg_pool2d(inner + conv(second.skip, h), 2)
    h = h + conv(third.conv2, F.relu(conv(third.conv1, F.relu(h))))
    features = F.relu(h).sum((2, 3))
    logit = features @ network.linear.weight[0] + network.linear.bias
    logit = logit + (network.embedding.weight[labels] * features).sum(1)
    torch.testing.assert_close(network(x, labels), logit)


def test_attention_that_no_block_has_is_refused():
    with pytest.raises(ValueError, match=r"attention_at must be 0 or one of \[8, 16\], got 64"):
        BigGANGenerator(3, 1, (2, 2, 1), 8, latent_dim=6)
    with pytest.raises(ValueError, match=r"attention_at must be 0 or one of \[8\], got 64"):
        BigGANDiscriminator(3, 1, (1, 2), 8, image_size=16)
    with pytest.raises(ValueError, match="unhalved must be 0 to 1, got 2"):
        BigGANDiscriminator(3, 1, (1, 2), 8, unhalved=2, image_size=16, attention_at=0)


def test_each_block_sees_its_own_part_of_z():
    torch.manual_seed(0)
    network = BigGANGenerator(2, 1, (2, 2, 2), 8, latent_dim=6, label_dim=4, attention_at=0)
    network.eval()
    told = {}
    for i, block in enumerate(network.blocks):
        block.register_forward_pre_hook(lambda _, args, i=i: told.update({i: args[1]}))
    z = torch.arange(6.0)[None]
    network(z, torch.tensor([1]))
    assert told[0][0, 4:].tolist() == [2.0, 3.0]
    assert told[1][0, 4:].tolist() == [4.0, 5.0]
    assert torch.equal(told[0][0, :4], network.embedding.weight[1])
