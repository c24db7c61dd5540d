"""The dispersive loss against its formula, and the features of blocks, also if compiled."""

import math

import pytest
import torch
from torch import nn

from lit_diffusion.auxiliary_losses import Dispersive
from lit_diffusion.auxiliary_losses.features import BlockFeatures
from lit_diffusion.networks.dit import DiT
from lit_diffusion.networks.unet import UNet


def loss_of(z, **arguments):
    network = nn.Sequential(nn.Identity())
    loss = Dispersive("0", **arguments)
    loss.attach(network)
    network(z)
    return loss.compute(None, None)


def test_it_is_the_log_of_the_mean_kernel_over_all_pairs():
    z = torch.randn(5, 3, 4)
    pairs = [((a - b).square().sum() / 12).item() for a in z for b in z]
    mean = sum(math.exp(-distance / 0.3) for distance in pairs) / 25
    expected = torch.tensor(2 * math.log(mean))
    torch.testing.assert_close(loss_of(z, weight=2.0, temperature=0.3), expected)


def test_equal_features_have_the_highest_loss_and_distant_ones_the_lowest():
    z = torch.randn(4, 1, 3).repeat_interleave(2, 1)
    torch.testing.assert_close(loss_of(z[:1].expand(4, -1, -1)), torch.zeros(()))
    lowest = torch.tensor(0.5 * math.log(1 / 4))  # only the pairs of an image with itself count
    torch.testing.assert_close(loss_of(1e3 * z), lowest)


def test_a_step_along_the_gradient_moves_features_apart_and_equal_ones_have_none():
    z = torch.randn(6, 2, 2, requires_grad=True)
    loss_of(z).backward()
    moved = (z - z.grad).detach()
    assert torch.pdist(moved.flatten(1)).mean() > torch.pdist(z.detach().flatten(1)).mean()
    equal = torch.ones(3, 2, 2, requires_grad=True)
    loss_of(equal).backward()
    assert torch.equal(equal.grad, torch.zeros_like(equal))


def test_the_default_is_the_kernel_of_the_distance_per_feature():
    z = torch.randn(5, 3, 4)
    distances = torch.cdist(z.flatten(1).double(), z.flatten(1).double()).square() / 12
    torch.testing.assert_close(loss_of(z), (0.5 * (-distances).exp().mean().log()).float())


def test_features_that_all_images_share_change_nothing_also_under_autocast():
    """Of 300, bfloat16 resolves only 2, and float32 loses digits of the square."""
    z, shared = torch.randn(16, 8, 32), torch.zeros(32)
    shared[0] = 300.0
    inputs = (z, z + shared, z + shared)
    plain, offset, under_autocast = (each.clone().requires_grad_() for each in inputs)
    expected = loss_of(plain)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = loss_of(under_autocast)
    losses = (expected, loss_of(offset), rounded)
    gradients = [
        torch.autograd.grad(loss, each)[0]
        for loss, each in zip(losses, (plain, offset, under_autocast), strict=True)
    ]
    for loss, gradient in zip(losses[1:], gradients[1:], strict=True):
        torch.testing.assert_close(loss, expected, rtol=1e-4, atol=0)
        torch.testing.assert_close(gradient, gradients[0], rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_features_of_a_block_are_its_output_with_gradients(compiled):
    network = DiT(8, 1, 1, depth=2, width=32, num_heads=2)
    features, outputs = BlockFeatures("blocks.0"), []
    features.attach(network)
    x, noise_label = torch.randn(2, 1, 8, 8), torch.tensor([1.0, 2.0])
    if compiled:
        network.compile(backend="aot_eager", fullgraph=True, dynamic=False)
    else:
        network.blocks[0].register_forward_hook(lambda *args: outputs.append(args[2]))
    network(x, noise_label)
    taken = features.take()
    assert taken.shape == (2, 16, 32)
    assert compiled or taken is outputs[0]
    taken.sum().backward()
    assert network.x_embedder.proj.weight.grad.any()


def test_features_are_those_of_training_alone():
    network, features = UNet(1, 1, model_channels=32), BlockFeatures("middle_block")
    features.attach(network)
    x, noise_label = torch.randn(2, 1, 8, 8), torch.tensor([1.0, 2.0])
    network.eval()(x, noise_label)
    with pytest.raises(RuntimeError, match="'middle_block' has not run in training mode"):
        features.take()
    network.train()(x, noise_label)
    assert features.take().shape == (2, 64, 1, 1)
    with pytest.raises(RuntimeError, match="has not run"):
        features.take()


def test_a_block_that_does_not_exist_is_named_with_those_that_do():
    with pytest.raises(ValueError, match=r"UNet has no block 'blocks.3'; it has .*middle_block"):
        Dispersive("blocks.3").attach(UNet(1, 1, model_channels=32))


@pytest.mark.parametrize("name", ["weight", "temperature"])
def test_numbers_are_positive(name):
    with pytest.raises(ValueError, match=f"{name} must be above 0 and finite, got 0"):
        Dispersive("0", **{name: 0.0})
