"""Any network on patches: large images at the price of small ones."""

import torch.nn.functional as F
from torch import Tensor, nn


class Patched(nn.Module):
    """A network that sees each patch of size x size pixels as one position.

    A position costs as much as before, and there are fewer of them. For images of C channels
    `network` has size^2 C channels in, and as many or twice as many out.

    Args:
        network: `forward(x, noise_label, labels)` -> (B, channels, H / size, W / size).
        size: pixels on a side of a patch; it divides height and width.

    Raises:
        ValueError: In `forward`, if `size` does not divide height and width.

    Source: Shi et al. 2016 (arXiv 1609.05158), section 3.2, for the order of pixels.

    Example:
        >>> import torch
        >>> from lit_diffusion.networks.unet import UNet
        >>> network = Patched(UNet(16, 16, 32, (1,), 1, (1,), norm_groups=8), size=4)
        >>> network(torch.randn(2, 1, 28, 28), torch.tensor([3.0, 500.0]), None).shape
        torch.Size([2, 1, 28, 28])
    """

    def __init__(self, network: nn.Module, size: int = 2) -> None:
        super().__init__()
        if size < 1:
            raise ValueError(f"size must be > 0, got {size}.")
        self.network = network
        self.size = size

    def forward(self, x: Tensor, noise_label: Tensor, labels: Tensor | None) -> Tensor:
        """Images (B, C, H, W), noise labels (B,), labels -> (B, C or 2C, H, W)."""
        if x.shape[2] % self.size or x.shape[3] % self.size:
            raise ValueError(
                f"Patched of size {self.size} needs height and width divisible by it, got images "
                f"of shape {tuple(x.shape)}: resize them, or choose another size."
            )
        patches = F.pixel_unshuffle(x, self.size)
        return F.pixel_shuffle(self.network(patches, noise_label, labels), self.size)
