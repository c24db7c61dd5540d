import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lit_diffusion.lab.gan.biggan import (
    BigGANDiscriminator,
    BigGANGenerator,
    SelfAttention,
    orthogonal_spectral_norm,
)
from lit_diffusion.lab.gan.dcgan import DCGANDiscriminator, DCGANGenerator


def count(network):
    return sum(p.numel() for p in network.parameters())


def test_dcgan_has_the_parameters_of_pytorch_s_example():
    torch.manual_seed(0)
    generator = DCGANGenerator(64, 3)
    assert (count(generator), count(DCGANDiscriminator(64, 3))) == (3_576_704, 2_765_568)
    assert count(DCGANGenerator(32, 3)) == 1_068_928
    stds = [p.std().item() for p in generator.parameters() if p.ndim == 4]
    assert stds == pytest.approx([0.02] * len(stds), rel=0.1)


@pytest.mark.slow  # the first operation on meta tensors imports much
def test_biggan_has_as_many_parameters_as_the_paper_s_for_128():
    """70.43 M and 87.98 M are what others count in the author's code."""
    with torch.device("meta"):
        assert count(BigGANGenerator(1000, 3)) == 70_433_988
        assert count(BigGANDiscriminator(1000, 3)) == 87_982_370


def test_weights_have_a_largest_singular_value_of_one():
    torch.manual_seed(0)
    layer = orthogonal_spectral_norm(nn.Linear(7, 5))
    with torch.no_grad():
        layer.parametrizations.weight.original.copy_(torch.randn(5, 7))
    for _ in range(50):
        layer(torch.randn(2, 7))
    sizes = torch.linalg.svdvals(layer.weight)
    assert (sizes[0].item(), sizes[-1] < 0.9) == (pytest.approx(1, abs=1e-3), True)


def conv(layer, x):
    return F.conv2d(x, layer.weight, layer.bias, padding=layer.kernel_size[0] // 2)


def conditional_norm(norm, x, condition):
    gain, bias = (condition @ part.weight.T for part in (norm.gain, norm.bias))
    x = F.batch_norm(x, norm.norm.running_mean, norm.norm.running_var)
    return x * (1 + gain)[:, :, None, None] + bias[:, :, None, None]


def attend(layer, x):
    """Queries of all pixels, keys and values of the largest of each 2 x 2."""
    pooled = [F.max_pool2d(conv(part, x), 2).flatten(2) for part in (layer.key, layer.value)]
    weights = torch.softmax(conv(layer.query, x).flatten(2).mT @ pooled[0], dim=-1)
    mixed = (pooled[1] @ weights.mT).view(len(x), -1, *x.shape[2:])
    return x + layer.gain * conv(layer.out, mixed)


def double(x):
    return x.repeat_interleave(2, 2).repeat_interleave(2, 3)


def randomize(network):
    torch.manual_seed(0)
    for name, buffer in network.named_buffers():
        if "running" in name:
            buffer.copy_(0.5 + torch.rand_like(buffer))
    for part in network.modules():
        if isinstance(part, SelfAttention):
            assert part.gain == 0  # the identity at first
            torch.nn.init.constant_(part.gain, 0.7)
    return network.eval()


@torch.no_grad()
def test_biggan_s_generator_is_what_its_formulas_say():
    sizes = {"latent_dim": 6, "label_dim": 5, "attention_at": 8}
    network = randomize(BigGANGenerator(3, 1, (2, 2, 1), 8, **sizes))
    z, labels = torch.randn(4, 6), torch.tensor([0, 2, 1, 2])
    h = F.linear(z[:, :2], network.first.weight, network.first.bias).view(4, 16, 4, 4)
    for i, block in enumerate(network.blocks):
        condition = torch.cat(
            [network.embedding.weight[labels], z[:, 2 * i + 2 : 2 * i + 4]], dim=1
        )
        inner = conv(block.conv1, double(F.relu(conditional_norm(block.norm1, h, condition))))
        inner = conv(block.conv2, F.relu(conditional_norm(block.norm2, inner, condition)))
        h = inner + conv(block.skip, double(h))
        if i == 0:
            h = attend(network.attention["0"], h)
    norm = network.norm
    h = F.relu(F.batch_norm(h, norm.running_mean, norm.running_var, norm.weight, norm.bias))
    torch.testing.assert_close(network(z, labels), torch.tanh(conv(network.out, h)))


@torch.no_grad()
def test_biggan_s_discriminator_is_what_its_formulas_say():
    network = randomize(BigGANDiscriminator(3, 1, (1, 2, 2), 8, image_size=16, attention_at=8))
    x, labels = torch.randn(4, 1, 16, 16), torch.tensor([0, 2, 1, 2])
    first, attention, second, third = network.layers
    h = F.avg_pool2d(conv(first.conv2, F.relu(conv(first.conv1, x))) + conv(first.skip, x), 2)
    h = attend(attention, h)
    inner = conv(second.conv2, F.relu(conv(second.conv1, F.relu(h))))
    h = F.avg_pool2d(inner + conv(second.skip, h), 2)
    h = h + conv(third.conv2, F.relu(conv(third.conv1, F.relu(h))))
    features = F.relu(h).sum((2, 3))
    logit = features @ network.linear.weight[0] + network.linear.bias
    logit = logit + (network.embedding.weight[labels] * features).sum(1)
    torch.testing.assert_close(network(x, labels), logit)
