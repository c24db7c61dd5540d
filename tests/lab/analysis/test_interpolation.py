import numpy as np
import pytest
import torch

from lit_diffusion.lab.analysis.fixed_losses import copy_weights
from lit_diffusion.lab.analysis.interpolation import align_features, barrier, find_hidden_features
from lit_diffusion.lab.gan.dcgan import DCGANDiscriminator, DCGANGenerator
from lit_diffusion.networks.dit import DiT
from lit_diffusion.networks.unet import UNet
from lit_diffusion.networks.uvit import UViT


def test_a_barrier_is_how_far_it_rises_above_the_line():
    alphas = np.linspace(0, 1, 11)
    assert barrier(alphas, 5 + 3 * alphas - (2 * alphas - 1) ** 2) == pytest.approx(1)
    assert barrier(alphas, alphas**2) == 0


SMALL = {"image_size": 8, "in_channels": 1, "out_channels": 1, "patch_size": 2, "width": 32}
IMAGES = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))
LABEL = torch.tensor([0.0, 10.0, 900.0])
NETWORKS = {
    "unet": lambda: UNet(1, 1, 8, (1, 2), num_res_blocks=1, norm_groups=4, num_heads=2),
    "unet without scale": lambda: UNet(
        1, 1, 8, (1, 2), num_res_blocks=1, norm_groups=4, scale_shift_norm=False
    ),
    "uvit": lambda: UViT(**SMALL, depth=2, num_heads=2),
    "dit": lambda: DiT(**SMALL, depth=2, num_heads=2),
    "generator": lambda: DCGANGenerator(8, 1, 6, 8, smallest=1),
    "discriminator": lambda: DCGANDiscriminator(8, 1, 8, smallest=1),
}
INPUTS = {"generator": (IMAGES.flatten(1)[:, :6],), "discriminator": (IMAGES,)}


def build(name):
    """A network without weights that are 0 or equal, as those of new networks are."""
    torch.manual_seed(0)
    module = NETWORKS[name]()
    with torch.no_grad():
        for value in module.state_dict().values():
            if value.is_floating_point():
                value += 0.3 * torch.rand_like(value)
    return module.double().eval()


def outputs(module, name):
    return module(*(x.double() for x in INPUTS.get(name, (IMAGES, LABEL))))


def shuffle(state, features):
    """The same network with its hidden features in a random order that its norms allow."""
    state = dict(state)
    for layer in features:
        first = layer.axes[0]
        num_groups = 4 if "out_layers" in layer.axes[-1].name else 1  # only a U-Net's are normed
        size = first.rows(state[first.name]).shape[1] // num_groups
        groups = torch.randperm(num_groups).tolist()
        order = torch.cat([g * size + torch.randperm(size) for g in groups])
        for axis in layer.axes:
            rows = state[axis.name].movedim(axis.dim, 0).unflatten(0, (axis.copies, -1))[:, order]
            state[axis.name] = rows.flatten(0, 1).movedim(0, axis.dim)
    return state


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_whose_features_were_shuffled_is_put_in_order_again(name):
    module = build(name)
    state, features = copy_weights(module), find_hidden_features(module)
    other = shuffle(state, features)
    assert not all(torch.equal(other[n], state[n]) for n in state)
    expected = outputs(module, name)
    module.load_state_dict(other, strict=False)
    torch.testing.assert_close(outputs(module, name), expected)
    back = align_features(other, state, features)
    for n, value in state.items():
        torch.testing.assert_close(back[n], value)
