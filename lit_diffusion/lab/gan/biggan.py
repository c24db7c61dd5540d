"""BigGAN: residual generator and projection discriminator, conditional on classes.

    [z_0 | z_1 ... z_n], label -- linear 4x4 -- blocks up, told (z_i, label) by their norms -- tanh
    image, label -- blocks down -- sum over pixels -- linear + <embedding(label), features>

Weights are divided by their largest singular value, but for the generator's embedding. Parameter
names are our own.

Source: Brock et al. 2019 (BigGAN, arXiv 1809.11096), appendix B; Miyato & Koyama 2018 (projection);
Miyato et al. 2018 (spectral norm); Zhang et al. 2019 (SAGAN) for the attention.
"""

from collections.abc import Sequence
from typing import TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

M = TypeVar("M", bound=nn.Module)


def normed(module: M) -> M:
    """A module with orthogonal weight, under spectral norm with one power iteration a pass."""
    nn.init.orthogonal_(cast(Tensor, module.weight))
    if isinstance(bias := getattr(module, "bias", None), Tensor):
        nn.init.zeros_(bias)
    return cast(M, spectral_norm(module, eps=1e-6))


def _conv(channels: int, out: int, size: int, bias: bool = True) -> nn.Conv2d:
    return normed(nn.Conv2d(channels, out, size, padding=size // 2, bias=bias))


class ConditionalBatchNorm(nn.Module):
    """Batch norm whose gain, about 1, and bias are linear in a condition (B, condition_dim)."""

    def __init__(self, channels: int, condition_dim: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(channels, affine=False)
        self.gain = normed(nn.Linear(condition_dim, channels, bias=False))
        self.bias = normed(nn.Linear(condition_dim, channels, bias=False))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """(B, C, H, W), (B, condition_dim) -> (B, C, H, W)."""
        gain, bias = (part(condition)[:, :, None, None] for part in (self.gain, self.bias))
        out: Tensor = self.norm(x) * (1 + gain) + bias
        return out


class SelfAttention(nn.Module):
    """x + gain attention(x): queries of an eighth of the channels, keys of every second pixel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.query = _conv(channels, channels // 8, 1, bias=False)
        self.key = _conv(channels, channels // 8, 1, bias=False)
        self.value = _conv(channels, channels // 2, 1, bias=False)
        self.out = _conv(channels // 2, channels, 1, bias=False)
        self.gain = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C, H, W)."""
        pooled = (F.max_pool2d(part(x), 2) for part in (self.key, self.value))
        q, k, v = (each.flatten(2).transpose(1, 2) for each in (self.query(x), *pooled))
        seen = F.scaled_dot_product_attention(q, k, v, scale=1.0).transpose(1, 2)
        out: Tensor = x + self.gain * self.out(torch.unflatten(seen, 2, x.shape[2:]))
        return out


class _Up(nn.Module):
    """Norm, ReLU, doubling, convolution; norm, ReLU, convolution; and a doubled skip."""

    def __init__(self, channels: int, out: int, condition_dim: int) -> None:
        super().__init__()
        self.norm1 = ConditionalBatchNorm(channels, condition_dim)
        self.norm2 = ConditionalBatchNorm(out, condition_dim)
        self.conv1, self.conv2 = _conv(channels, out, 3), _conv(out, out, 3)
        self.skip = _conv(channels, out, 1)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        h = self.conv1(_doubled(F.relu(self.norm1(x, condition))))
        h = self.conv2(F.relu(self.norm2(h, condition)))
        out: Tensor = h + self.skip(_doubled(x))
        return out


class _Down(nn.Module):
    """ReLU, convolution, ReLU, convolution, halving; the first block has no ReLU to begin with."""

    def __init__(self, channels: int, out: int, *, halves: bool, first: bool) -> None:
        super().__init__()
        self.halves, self.first = halves, first
        self.conv1, self.conv2 = _conv(channels, out, 3), _conv(out, out, 3)
        self.skip = _conv(channels, out, 1) if halves or channels != out else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv2(F.relu(self.conv1(x if self.first else F.relu(x))))
        out: Tensor = h + self.skip(x)
        return F.avg_pool2d(out, 2) if self.halves else out


class BigGANGenerator(nn.Module):
    """Images of a class from latents; blocks double the side.

    Args:
        num_classes: how many classes there are.
        out_channels: of the images.
        widths: channels before each block and after the last, in units of `width`; 16, 16, 8, 4, 2
            and 1 make images of 128 x 128.
        width: 96 in the paper.
        latent_dim: of z, of which the first layer and each block see a part of their own.
        label_dim: of the embedding of a class, which all blocks share.
        attention_at: side of the feature maps with attention; 0 for none.
        smallest: side of the first feature map.

    Raises:
        ValueError: where z cannot be divided among the blocks, or no block has attention's size.

    Example:
        >>> network = BigGANGenerator(10, 3, widths=(4, 4, 4, 4), width=8, attention_at=0)
        >>> network(torch.randn(2, 120), torch.tensor([3, 7])).shape
        torch.Size([2, 3, 32, 32])
    """

    def __init__(
        self,
        num_classes: int,
        out_channels: int,
        widths: Sequence[int] = (16, 16, 8, 4, 2, 1),
        width: int = 96,
        latent_dim: int = 120,
        label_dim: int = 128,
        attention_at: int = 64,
        smallest: int = 4,
    ) -> None:
        super().__init__()
        blocks = len(widths) - 1
        if blocks < 1 or latent_dim % (blocks + 1):
            raise ValueError(
                "latent_dim must be divisible by the number of blocks and 1, which is "
                f"len(widths), got latent_dim={latent_dim} and widths={tuple(widths)}."
            )
        _refuse_unmet(attention_at, [smallest << i + 1 for i in range(blocks)])
        self.num_classes, self.latent_dim, self.smallest = num_classes, latent_dim, smallest
        part = latent_dim // (blocks + 1)
        channels = [width * each for each in widths]
        self.embedding = nn.Embedding(num_classes, label_dim)
        nn.init.orthogonal_(self.embedding.weight)
        self.first = normed(nn.Linear(part, channels[0] * smallest**2))
        self.blocks = nn.ModuleList(
            _Up(channels[i], channels[i + 1], label_dim + part) for i in range(blocks)
        )
        self.attention = nn.ModuleDict(
            {
                str(i): SelfAttention(channels[i + 1])
                for i in range(blocks)
                if smallest << i + 1 == attention_at
            }
        )
        self.norm = nn.BatchNorm2d(channels[-1])
        self.out = _conv(channels[-1], out_channels, 3)

    def forward(self, z: Tensor, labels: Tensor) -> Tensor:
        """(B, latent_dim) standard normal, (B,) int64 -> (B, out_channels, H, W) in [-1, 1]."""
        first, *parts = z.chunk(len(self.blocks) + 1, dim=1)
        label = self.embedding(labels)
        h = self.first(first).unflatten(1, (-1, self.smallest, self.smallest))
        for i, (block, part) in enumerate(zip(self.blocks, parts, strict=True)):
            h = block(h, torch.cat([label, part], dim=1))
            if str(i) in self.attention:
                h = self.attention[str(i)](h)
        out: Tensor = self.out(F.relu(self.norm(h))).tanh()
        return out


class BigGANDiscriminator(nn.Module):
    """How real images of a class look; all blocks but the last `unhalved` halve the side.

    Args:
        num_classes: how many classes there are.
        in_channels: of the images.
        widths: channels after each block, in units of `width`.
        width: 96 in the paper.
        unhalved: last blocks that keep the side.
        image_size: side of the images, to know where `attention_at` is.
        attention_at: side of the feature maps with attention; 0 for none.

    Raises:
        ValueError: where all blocks would keep the side, or none has attention's size.

    Example:
        >>> network = BigGANDiscriminator(10, 3, (4, 4, 4, 4), 8, unhalved=2, attention_at=0)
        >>> network(torch.randn(2, 3, 32, 32), torch.tensor([3, 7])).shape
        torch.Size([2])
    """

    def __init__(
        self,
        num_classes: int,
        in_channels: int,
        widths: Sequence[int] = (1, 2, 4, 8, 16, 16),
        width: int = 96,
        unhalved: int = 1,
        image_size: int = 128,
        attention_at: int = 64,
    ) -> None:
        super().__init__()
        self.num_classes = num_classes
        channels = [in_channels, *(width * each for each in widths)]
        halved = len(widths) - unhalved
        if not 0 < halved <= len(widths):
            raise ValueError(f"unhalved must be 0 to {len(widths) - 1}, got {unhalved}.")
        _refuse_unmet(attention_at, [image_size >> i + 1 for i in range(halved)])
        layers: list[nn.Module] = []
        for i in range(len(widths)):
            layers.append(_Down(*channels[i : i + 2], halves=i < halved, first=i == 0))
            if i < halved and image_size >> i + 1 == attention_at:
                layers.append(SelfAttention(channels[i + 1]))
        self.layers = nn.Sequential(*layers)
        self.linear = normed(nn.Linear(channels[-1], 1))
        self.embedding = normed(nn.Embedding(num_classes, channels[-1]))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """(B, C, H, W) in [-1, 1], (B,) int64 -> (B,) logits, above 0 for real."""
        features = F.relu(self.layers(x)).sum(dim=(2, 3))
        out: Tensor = self.linear(features)[:, 0] + (self.embedding(labels) * features).sum(1)
        return out


def _refuse_unmet(attention_at: int, sides: list[int]) -> None:
    if attention_at and attention_at not in sides:
        raise ValueError(f"attention_at must be 0 or one of {sides}, got {attention_at}.")


def _doubled(x: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=2)
