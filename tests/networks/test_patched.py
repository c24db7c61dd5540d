import pytest
import torch
from torch import Tensor, nn

from lit_diffusion.networks.patched import Patched
from lit_diffusion.networks.unet import UNet


class Same(nn.Module):
    """Gives back what it sees, `copies` times."""

    def __init__(self, copies: int) -> None:
        super().__init__()
        self.copies = copies

    def forward(self, x: Tensor, noise_label: Tensor, labels: Tensor | None) -> Tensor:
        return torch.cat([x] * self.copies, 1)


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_pixels_come_back_where_they_were_both_halves_in_order(size, copies):
    x = torch.randn(2, 3, 8, 12)
    out = Patched(Same(copies), size)(x, torch.zeros(2), None)
    assert torch.equal(out, torch.cat([x] * copies, 1))


def test_a_patch_is_one_position():
    seen = []
    network = Same(1)
    network.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0]))
    x = torch.randn(1, 1, 28, 28)
    Patched(network, 4)(x, torch.zeros(1), None)
    assert seen[0].shape == (1, 16, 7, 7)
    assert torch.equal(seen[0][0, :, 2, 3], x[0, 0, 8:12, 12:16].flatten())


def test_every_parameter_gets_a_gradient():
    network = Patched(UNet(4, 4, 8, (1,), 1, (1,), norm_groups=4, num_classes=3), 2)
    for parameter in network.parameters():
        nn.init.normal_(parameter, std=0.1)
    network(torch.randn(3, 1, 4, 4), torch.rand(3), torch.tensor([0, 2, -1])).sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in network.parameters())


def test_other_sizes_of_images_and_patches_are_refused():
    with pytest.raises(ValueError, match="size must be > 0, got 0"):
        Patched(Same(1), 0)
    with pytest.raises(ValueError, match=r"divisible by it, got images of shape \(1, 1, 8, 6\)"):
        Patched(Same(1), 4)(torch.zeros(1, 1, 8, 6), torch.zeros(1), None)
