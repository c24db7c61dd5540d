import pytest
import torch
from torch import nn

from lit_diffusion.networks.biggan import (
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
    """Table 4 of the paper's appendix: 70.43 M of the generator, 87.98 M of the discriminator."""
    generator = BigGANGenerator(1000, 3)
    assert count(generator) / 1e6 == pytest.approx(70.43, rel=0.01)
    assert count(BigGANDiscriminator(1000, 3)) / 1e6 == pytest.approx(87.98, rel=0.01)


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
