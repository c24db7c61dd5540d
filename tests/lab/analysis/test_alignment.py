import pytest
import torch

from lit_diffusion.lab.analysis.alignment import aligned, hidden_units
from lit_diffusion.lab.analysis.weights import put_, state_of
from lit_diffusion.lab.gan.dcgan import DCGANDiscriminator, DCGANGenerator
from lit_diffusion.networks.dit import DiT
from lit_diffusion.networks.unet import UNet
from lit_diffusion.networks.uvit import UViT

SMALL = {"image_size": 8, "in_channels": 1, "out_channels": 1, "patch_size": 2, "width": 32}


def networks():
    torch.manual_seed(0)
    images, label = torch.randn(3, 1, 8, 8), torch.tensor([0.0, 10.0, 900.0])
    unet = UNet(1, 1, 8, (1, 2), num_res_blocks=1, norm_groups=4, num_heads=2)
    plain = UNet(1, 1, 8, (1, 2), num_res_blocks=1, norm_groups=4, scale_shift_norm=False)
    return {
        "unet": (unet, (images, label)),
        "unet without scale": (plain, (images, label)),
        "uvit": (UViT(**SMALL, depth=2, num_heads=2), (images, label)),
        "dit": (DiT(**SMALL, depth=2, num_heads=2), (images, label)),
        "generator": (DCGANGenerator(8, 1, 6, 8, smallest=1), (torch.randn(3, 6),)),
        "discriminator": (DCGANDiscriminator(8, 1, 8, smallest=1), (images,)),
    }


def varied(network):
    """No weight is 0 or alike, as those of new networks are."""
    with torch.no_grad():
        for value in network.state_dict().values():
            if value.is_floating_point():
                value += 0.3 * torch.rand_like(value)
    return network.double().eval()


def shuffled(state, units):
    """The same network with its hidden features in a random order that its norms allow."""
    found = dict(state)
    for each in units:
        name, dim, copies = each.places[0]
        size = state[name].shape[dim] // copies
        inside = size // each.groups
        order = torch.cat(
            [g * inside + torch.randperm(inside) for g in torch.randperm(each.groups).tolist()]
        )
        for name, dim, copies in each.places:
            rows = found[name].movedim(dim, 0).unflatten(0, (copies, -1))[:, order]
            found[name] = rows.flatten(0, 1).movedim(0, dim)
    return found


@pytest.mark.parametrize("name", networks())
def test_a_network_whose_features_were_shuffled_is_put_in_order_again(name):
    network, inputs = networks()[name]
    varied(network)
    own, units = state_of(network), hidden_units(network)
    other = shuffled(own, units)
    assert not all(torch.equal(other[n], own[n]) for n in own)
    expected = network(*(x.double() for x in inputs))
    put_(network, other)
    torch.testing.assert_close(network(*(x.double() for x in inputs)), expected)
    back = aligned(other, own, units)
    for n, value in own.items():
        torch.testing.assert_close(back[n], value)


def test_aligning_changes_no_output_and_brings_weights_nearer():
    a, b = (varied(networks()["uvit"][0]) for _ in range(2))
    torch.manual_seed(5)
    with torch.no_grad():
        for p in b.parameters():
            p.copy_(torch.randn_like(p))
    inputs = [x.double() for x in networks()["uvit"][1]]
    expected, before = b(*inputs), state_of(b)
    found = aligned(before, state_of(a), hidden_units(a))
    put_(b, found)
    torch.testing.assert_close(b(*inputs), expected)

    def apart(state):
        return sum((state[n] - value).square().sum() for n, value in state_of(a).items())

    assert apart(found) < apart(before)
