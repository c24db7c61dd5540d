"""DCGAN: an all-convolutional generator and discriminator.

    generator: z -- transposed convolution to smallest x smallest -- doubled to image_size -- tanh
    discriminator: image -- halved to smallest x smallest -- one convolution to a logit

Checkpoints of other implementations cannot be loaded, because their parameters have different
names.

Source: Radford et al. 2016 (DCGAN, arXiv 1511.06434), section 3. Widths and initialization are from
dcgan/main.py of pytorch/examples.
"""

import torch
from torch import Tensor, nn

from lit_diffusion.protocols import check_positive


def count_halvings(image_size: int, smallest: int) -> int:
    """Return how many times `image_size` must be halved to get `smallest`.

    Raises:
        ValueError: unless image_size is smallest times 2, 4, 8, ...

    Example:
        >>> count_halvings(64, 4), count_halvings(28, 7)
        (4, 2)
    """
    count = (image_size // smallest).bit_length() - 1 if smallest > 0 else 0
    if count < 1 or smallest << count != image_size:
        raise ValueError(
            f"image_size must be smallest times 2, 4, 8, ..., got image_size={image_size} and "
            f"smallest={smallest}."
        )
    return count


class DCGANGenerator(nn.Module):
    """Generates images from latents z, and ignores labels.

    Args:
        image_size: side of the square images in pixels, which is `smallest` times 2, 4, 8, ...
        out_channels: channels of the images.
        latent_dim: size of z.
        width: channels of the largest feature map, which is the input of the last layer. A feature
            map of half the side has twice as many channels.
        smallest: side of the first layer's output in pixels.

    Raises:
        ValueError: unless image_size is smallest times 2, 4, 8, ...

    Example:
        >>> DCGANGenerator(32, 3)(torch.randn(2, 100)).shape
        torch.Size([2, 3, 32, 32])
    """

    def __init__(
        self,
        image_size: int,
        out_channels: int,
        latent_dim: int = 100,
        width: int = 64,
        smallest: int = 4,
    ) -> None:
        super().__init__()
        check_positive(out_channels=out_channels, latent_dim=latent_dim, width=width)
        self.latent_dim = latent_dim
        last = count_halvings(image_size, smallest) - 1
        wide = width << last
        layers: list[nn.Module] = [
            nn.ConvTranspose2d(latent_dim, wide, smallest, bias=False),
            nn.BatchNorm2d(wide),
            nn.ReLU(),
        ]  # (B, wide, smallest, smallest)
        for i in reversed(range(last)):
            up = nn.ConvTranspose2d(width << i + 1, width << i, 4, 2, 1, bias=False)
            layers += [up, nn.BatchNorm2d(width << i), nn.ReLU()]  # (B, width << i, 2H, 2W)
        layers += [nn.ConvTranspose2d(width, out_channels, 4, 2, 1, bias=False), nn.Tanh()]
        self.layers = nn.Sequential(*layers)
        init_dcgan_(self)

    def forward(self, z: Tensor, labels: Tensor | None = None) -> Tensor:
        """Map z (B, latent_dim) to images (B, out_channels, H, W) in [-1, 1]."""
        return self.layers(z[:, :, None, None])


class DCGANDiscriminator(nn.Module):
    """Computes one logit per image, positive for real images, and ignores labels.

    Args:
        image_size: side of the square images in pixels, which is `smallest` times 2, 4, 8, ...
        in_channels: channels of the images.
        width: channels of the largest feature map, which is the output of the first layer. A
            feature map of half the side has twice as many channels.
        smallest: side in pixels of the input of the last layer.

    Raises:
        ValueError: unless image_size is smallest times 2, 4, 8, ...

    Example:
        >>> DCGANDiscriminator(32, 3)(torch.randn(2, 3, 32, 32)).shape
        torch.Size([2])
    """

    def __init__(
        self, image_size: int, in_channels: int, width: int = 64, smallest: int = 4
    ) -> None:
        super().__init__()
        check_positive(in_channels=in_channels, width=width)
        last = count_halvings(image_size, smallest) - 1
        first = nn.Conv2d(in_channels, width, 4, 2, 1, bias=False)
        layers: list[nn.Module] = [first, nn.LeakyReLU(0.2)]  # (B, width, H/2, W/2)
        for i in range(last):
            down = nn.Conv2d(width << i, width << i + 1, 4, 2, 1, bias=False)
            layers += [down, nn.BatchNorm2d(width << i + 1), nn.LeakyReLU(0.2)]
        layers.append(nn.Conv2d(width << last, 1, smallest, bias=False))  # (B, 1, 1, 1)
        self.layers = nn.Sequential(*layers)
        init_dcgan_(self)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        """Map images (B, C, H, W) in [-1, 1] to logits (B,)."""
        out: Tensor = self.layers(x)
        return out.flatten()


@torch.no_grad()
def init_dcgan_(network: nn.Module) -> None:
    """Initialize in place: `N(0, 0.02**2)` in convolutions, `N(1, 0.02**2)` in batch norm."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
            nn.init.normal_(module.weight, std=0.02)
        elif isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.weight, 1.0, 0.02)
