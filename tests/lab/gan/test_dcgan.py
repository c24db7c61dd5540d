import pytest
import torch
import torch.nn.functional as F

from lit_diffusion.lab.gan.dcgan import DCGANDiscriminator, DCGANGenerator, count_halvings


def count(network):
    return sum(p.numel() for p in network.parameters())


def test_dcgan_has_as_many_parameters_as_pytorch_s_example():
    assert count(DCGANGenerator(64, 3)) == 3_576_704
    assert count(DCGANDiscriminator(64, 3)) == 2_765_568
    assert count(DCGANGenerator(32, 3)) == 1_068_928
    assert count(DCGANDiscriminator(32, 3)) == 663_296


def test_images_are_in_range_and_logits_one_each():
    torch.manual_seed(0)
    images = DCGANGenerator(28, 1, smallest=7)(torch.randn(3, 100))
    assert images.shape == (3, 1, 28, 28)
    assert images.abs().max() <= 1
    assert DCGANDiscriminator(28, 1, smallest=7)(images).shape == (3,)


@torch.no_grad()
def test_both_networks_are_what_their_formulas_say():
    torch.manual_seed(0)
    generator = DCGANGenerator(16, 1, latent_dim=5, width=4).eval()
    first, second = generator.layers[0].weight, generator.layers[3].weight
    norm = generator.layers[1]
    z = torch.randn(3, 5)
    h = F.conv_transpose2d(z[:, :, None, None], first)
    h = F.relu(F.batch_norm(h, norm.running_mean, norm.running_var, norm.weight, norm.bias))
    h = F.conv_transpose2d(h, second, stride=2, padding=1)
    norm = generator.layers[4]
    h = F.relu(F.batch_norm(h, norm.running_mean, norm.running_var, norm.weight, norm.bias))
    h = F.conv_transpose2d(h, generator.layers[6].weight, stride=2, padding=1)
    images = generator(z)
    torch.testing.assert_close(images, torch.tanh(h))
    network = DCGANDiscriminator(16, 1, width=4).eval()
    one, two, last = network.layers[0], network.layers[2], network.layers[5]
    h = F.leaky_relu(F.conv2d(images, one.weight, stride=2, padding=1), 0.2)
    h, norm = F.conv2d(h, two.weight, stride=2, padding=1), network.layers[3]
    h = F.batch_norm(h, norm.running_mean, norm.running_var, norm.weight, norm.bias)
    logits = F.conv2d(F.leaky_relu(h, 0.2), last.weight).flatten()
    torch.testing.assert_close(network(images), logits)


def test_weights_begin_as_in_the_paper():
    torch.manual_seed(0)
    generator = DCGANGenerator(64, 3)
    stds = [p.std().item() for p in generator.parameters() if p.ndim == 4]
    assert stds == pytest.approx([0.02] * len(stds), rel=0.1)


@pytest.mark.parametrize("sizes", [(30, 7), (7, 7), (28, 0)])
def test_sizes_that_are_no_doublings_are_refused(sizes):
    with pytest.raises(ValueError, match="image_size must be smallest times 2, 4, 8"):
        count_halvings(*sizes)
