"""BigGAN: a class-conditional GAN with a residual generator and a projection discriminator.

    generator: z_0 -- linear to 4x4 -- blocks that upsample, norms conditioned on label, z_i -- tanh
    discriminator: image -- blocks that downsample -- features, summed over pixels
        -- logit = linear(features) + <embedding(label), features>

The latent z is split into equal parts z_0, z_1, ..., z_n. The linear layer gets z_0, and the norms
of block i are conditioned on z_i.

All linear, convolutional and embedding layers have spectral norm, except the generator's class
embedding. Checkpoints of other implementations cannot be loaded, because their parameters have
different names.

Source: Brock et al. 2019 (BigGAN, arXiv 1809.11096), appendix B; Miyato & Koyama 2018 (projection
discriminator); Miyato et al. 2018 (spectral norm); Zhang et al. 2019 (SAGAN) for the attention.
"""

from collections.abc import Sequence
from typing import TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from lit_diffusion.protocols import check_positive

M = TypeVar("M", bound=nn.Module)


def orthogonal_spectral_norm(module: M) -> M:
    """Initialize a layer with an orthogonal weight and zero bias, and apply spectral norm to it.

    In training mode, each forward pass updates the estimate of the spectral norm with one power
    iteration.
    """
    nn.init.orthogonal_(cast(Tensor, module.weight))
    if isinstance(bias := getattr(module, "bias", None), Tensor):
        nn.init.zeros_(bias)
    return cast(M, spectral_norm(module, eps=1e-6))


def _conv(channels: int, out: int, size: int, bias: bool = True) -> nn.Conv2d:
    return orthogonal_spectral_norm(nn.Conv2d(channels, out, size, padding=size // 2, bias=bias))


class ConditionalBatchNorm(nn.Module):
    """Batch norm whose scale and shift depend on a condition vector.

    The scale is `1 + gain(condition)` and the shift is `bias(condition)`. The layers `gain` and
    `bias` are linear.
    """

    def __init__(self, channels: int, condition_dim: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(channels, affine=False)
        self.gain = orthogonal_spectral_norm(nn.Linear(condition_dim, channels, bias=False))
        self.bias = orthogonal_spectral_norm(nn.Linear(condition_dim, channels, bias=False))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """(B, C, H, W), (B, condition_dim) -> (B, C, H, W)."""
        gain = self.gain(condition)[:, :, None, None]  # (B, C, 1, 1)
        bias = self.bias(condition)[:, :, None, None]  # (B, C, 1, 1)
        return self.norm(x) * (1 + gain) + bias


class SelfAttention(nn.Module):
    """Residual self-attention `x + gain * attention(x)`, where the scalar `gain` starts at 0.

    For an input with C channels, queries and keys have C/8 channels, and values have C/2 channels.
    Max pooling halves the height and width of keys and values.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.query = _conv(channels, channels // 8, 1, bias=False)
        self.key = _conv(channels, channels // 8, 1, bias=False)
        self.value = _conv(channels, channels // 2, 1, bias=False)
        self.out = _conv(channels // 2, channels, 1, bias=False)
        self.gain = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C, H, W)."""
        q = self.query(x).flatten(2).transpose(1, 2)  # (B, HW, C/8)
        k = F.max_pool2d(self.key(x), 2).flatten(2).transpose(1, 2)  # (B, HW/4, C/8)
        v = F.max_pool2d(self.value(x), 2).flatten(2).transpose(1, 2)  # (B, HW/4, C/2)
        h = F.scaled_dot_product_attention(q, k, v, scale=1.0).transpose(1, 2)  # (B, C/2, HW)
        return x + self.gain * self.out(torch.unflatten(h, 2, x.shape[2:]))


class GeneratorBlock(nn.Module):
    """Residual block of the generator, which doubles the resolution."""

    def __init__(self, channels: int, out: int, condition_dim: int) -> None:
        super().__init__()
        self.norm1 = ConditionalBatchNorm(channels, condition_dim)
        self.norm2 = ConditionalBatchNorm(out, condition_dim)
        self.conv1, self.conv2 = _conv(channels, out, 3), _conv(out, out, 3)
        self.skip = _conv(channels, out, 1)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """(B, C, H, W), (B, condition_dim) -> (B, out, 2H, 2W)."""
        h = F.relu(self.norm1(x, condition))  # (B, C, H, W)
        h = self.conv1(F.interpolate(h, scale_factor=2))  # (B, out, 2H, 2W)
        h = self.conv2(F.relu(self.norm2(h, condition)))  # (B, out, 2H, 2W)
        return h + self.skip(F.interpolate(x, scale_factor=2))


class DiscriminatorBlock(nn.Module):
    """Residual block of the discriminator, which `halves` the resolution or keeps it.

    The `first` block has no ReLU before its first convolution.
    """

    def __init__(self, channels: int, out: int, *, halves: bool, first: bool) -> None:
        super().__init__()
        self.halves, self.first = halves, first
        self.conv1, self.conv2 = _conv(channels, out, 3), _conv(out, out, 3)
        self.skip = _conv(channels, out, 1) if halves or channels != out else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, out, H/2, W/2), or (B, out, H, W)."""
        h = self.conv1(x if self.first else F.relu(x))  # (B, out, H, W)
        h = self.conv2(F.relu(h))  # (B, out, H, W)
        out: Tensor = h + self.skip(x)
        return F.avg_pool2d(out, 2) if self.halves else out


class BigGANGenerator(nn.Module):
    """Generates images from latents z and class labels. Each block doubles the resolution.

    Args:
        num_classes: number of classes.
        out_channels: channels of the images.
        widths: channels before each block, then channels after the last block, in units of
            `width`. The number of blocks is one less than the length of `widths`. With the default,
            five blocks generate images of 128 x 128 pixels.
        width: base width, by which all `widths` are multiplied; 96 in the paper.
        latent_dim: size of z. The first layer and each block get an equal part of z.
        label_dim: size of the class embedding. All blocks share one embedding.
        attention_at: attention follows the block whose output has this side in pixels. 0 means no
            attention.
        smallest: side in pixels of the input of the first block.

    Raises:
        ValueError: if `latent_dim` is not divisible by `len(widths)`, or if no block has an output
            with the side `attention_at`.

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
        check_positive(num_classes=num_classes, out_channels=out_channels, width=width)
        check_positive(latent_dim=latent_dim, label_dim=label_dim, smallest=smallest)
        blocks = len(widths) - 1
        if blocks < 1 or latent_dim % (blocks + 1):
            raise ValueError(
                "widths must have at least two numbers, and latent_dim must be divisible by "
                f"len(widths), got latent_dim={latent_dim} and widths={tuple(widths)}."
            )
        sides = [smallest << i + 1 for i in range(blocks)]  # of the blocks' outputs
        _check_attention(attention_at, sides)
        self.num_classes, self.latent_dim, self.smallest = num_classes, latent_dim, smallest
        part = latent_dim // (blocks + 1)
        channels = [width * factor for factor in widths]
        self.embedding = nn.Embedding(num_classes, label_dim)
        nn.init.orthogonal_(self.embedding.weight)
        self.first = orthogonal_spectral_norm(nn.Linear(part, channels[0] * smallest**2))
        self.blocks = nn.ModuleList(
            GeneratorBlock(channels[i], channels[i + 1], label_dim + part) for i in range(blocks)
        )
        indices = [i for i, side in enumerate(sides) if side == attention_at]
        self.attention = nn.ModuleDict({str(i): SelfAttention(channels[i + 1]) for i in indices})
        self.norm = nn.BatchNorm2d(channels[-1])
        self.out = _conv(channels[-1], out_channels, 3)

    def forward(self, z: Tensor, labels: Tensor) -> Tensor:
        """Map z (B, latent_dim) and labels (B,) to images (B, out_channels, H, W) in [-1, 1]."""
        first, *parts = z.chunk(len(self.blocks) + 1, dim=1)  # (B, latent_dim / (blocks + 1)) each
        label = self.embedding(labels)  # (B, label_dim)
        h = self.first(first).unflatten(1, (-1, self.smallest, self.smallest))  # (B, C, 4, 4)
        for i, (block, part) in enumerate(zip(self.blocks, parts, strict=True)):
            h = block(h, torch.cat([label, part], dim=1))  # (B, C_i, 2H, 2W)
            if str(i) in self.attention:
                h = self.attention[str(i)](h)
        return self.out(F.relu(self.norm(h))).tanh()


class BigGANDiscriminator(nn.Module):
    """Computes one logit per image and class label, positive for real images.

    Each block halves the resolution, except the last `unhalved` blocks.

    Args:
        num_classes: number of classes.
        in_channels: channels of the images.
        widths: channels after each block, in units of `width`.
        width: base width, by which all `widths` are multiplied; 96 in the paper.
        unhalved: number of blocks at the end that keep the resolution.
        image_size: side of the images in pixels. It only determines where attention is inserted.
        attention_at: attention follows the block whose output has this side in pixels. 0 means no
            attention.

    Raises:
        ValueError: if `unhalved` is negative, if no block halves the resolution, or if no halving
            block has an output with the side `attention_at`.

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
        check_positive(num_classes=num_classes, in_channels=in_channels, width=width)
        self.num_classes = num_classes
        channels = [in_channels, *(width * factor for factor in widths)]
        halved = len(widths) - unhalved
        if not 0 < halved <= len(widths):
            raise ValueError(f"unhalved must be 0 to {len(widths) - 1}, got {unhalved}.")
        _check_attention(attention_at, [image_size >> i + 1 for i in range(halved)])
        layers: list[nn.Module] = []
        for i in range(len(widths)):
            layers.append(DiscriminatorBlock(*channels[i : i + 2], halves=i < halved, first=i == 0))
            if i < halved and image_size >> i + 1 == attention_at:
                layers.append(SelfAttention(channels[i + 1]))
        self.layers = nn.Sequential(*layers)
        self.linear = orthogonal_spectral_norm(nn.Linear(channels[-1], 1))
        self.embedding = orthogonal_spectral_norm(nn.Embedding(num_classes, channels[-1]))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """Map images (B, C, H, W) in [-1, 1] and labels int64 (B,) to logits (B,)."""
        h = F.relu(self.layers(x)).sum(dim=(2, 3))  # (B, C)
        return self.linear(h)[:, 0] + (self.embedding(labels) * h).sum(1)  # (B,)


def _check_attention(attention_at: int, sides: list[int]) -> None:
    if attention_at and attention_at not in sides:
        raise ValueError(f"attention_at must be 0 or one of {sides}, got {attention_at}.")
