import pytest
import torch

from lit_diffusion.networks.dcgan import DCGANDiscriminator, DCGANGenerator, halvings


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


def test_weights_begin_as_in_the_paper():
    torch.manual_seed(0)
    generator = DCGANGenerator(64, 3)
    stds = [p.std().item() for p in generator.parameters() if p.ndim == 4]
    assert stds == pytest.approx([0.02] * len(stds), rel=0.1)


@pytest.mark.parametrize("sizes", [(30, 7), (7, 7), (28, 0)])
def test_sizes_that_are_no_doublings_are_refused(sizes):
    with pytest.raises(ValueError, match="image_size must be smallest times 2, 4, 8"):
        halvings(*sizes)
