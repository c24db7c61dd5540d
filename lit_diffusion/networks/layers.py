"""The layers that networks are built of.

Precision: a network runs in any dtype and under autocast. The sums over many elements (group norm,
softmax) and the sinusoids of the noise level are in float32 or better whatever the dtype around.

Shapes: images (B, C, H, W) in either memory format, tokens (B, N, C).
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_Module = TypeVar("_Module", bound=nn.Module)


def timestep_embedding(noise_label: Tensor, dim: int) -> Tensor:
    """Sinusoids of the noise level, [cos(f_k l), sin(f_k l)] with f_k = 10000^(-2 k / dim).

    In float64, because float32 frequencies are off by more than a rounding error of the result: at
    l = 999 they move the output of a network by 4e-6.

    Args:
        noise_label: (B,) l, integer or real (respaced processes have fractional steps).
        dim: number of features, even.

    Returns:
        (B, dim) float64, the cosines first.

    Raises:
        ValueError: if `dim` is odd.

    Source: Vaswani et al. 2017, section 3.5; cosines first as in openai/improved-diffusion.

    Example:
        >>> timestep_embedding(torch.tensor([0.0, 999.75]), 4)[0]
        tensor([1., 1., 0., 0.], dtype=torch.float64)
    """
    if dim % 2:
        raise ValueError(f"timestep_embedding needs an even number of features, got dim={dim}.")
    k = torch.arange(dim // 2, dtype=torch.float64, device=noise_label.device)
    angles = noise_label.double()[:, None] * torch.exp(-2 * math.log(10_000) / dim * k)
    return torch.cat([angles.cos(), angles.sin()], dim=1)


class TimestepMLP(nn.Sequential):
    """Embedding of the noise level: sinusoids, Linear, SiLU, Linear.

    Stays in the dtype of its weights under autocast, as bfloat16 sinusoids would blur the level.

    Args:
        dim: number of sinusoids, even.
        width: of the hidden layer.
        out_width: of the result; None for `width`.
    """

    def __init__(self, dim: int, width: int, out_width: int | None = None) -> None:
        super().__init__(nn.Linear(dim, width), nn.SiLU(), nn.Linear(width, out_width or width))
        self.dim = dim

    def forward(self, noise_label: Tensor) -> Tensor:
        """(B,) -> (B, out_width)."""
        h = timestep_embedding(noise_label, self.dim).to(next(self.parameters()).dtype)
        with no_autocast(h):
            for layer in self:
                h = layer(h)
        return h


class GroupNorm32(nn.GroupNorm):
    """Group normalisation that computes in float32 or better; the result has the input's dtype.

    Args:
        channels: of the images.
        groups: divides `channels`.

    Raises:
        ValueError: if it does not.

    Source: Wu & He 2018, Eq. 1 and 7, with eps = 1e-5.
    """

    def __init__(self, channels: int, groups: int = 32) -> None:
        if channels % groups:
            raise ValueError(
                f"Group norm needs channels divisible by its groups, got {channels} channels "
                f"and {groups} groups: change the widths of the network or the groups."
            )
        super().__init__(groups, channels)

    def forward(self, input: Tensor) -> Tensor:
        """(B, C, ...) -> the same shape."""
        dtype = torch.promote_types(input.dtype, torch.float32)
        weight, bias = self.weight.to(dtype), self.bias.to(dtype)
        out = F.group_norm(input.to(dtype), self.num_groups, weight, bias, self.eps)
        return out.to(input.dtype)


class Pointwise(nn.Conv1d):
    """A linear map of tokens, stored as the 1x1 convolution that published U-Nets hold."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(in_channels, out_channels, kernel_size=1)

    def forward(self, input: Tensor) -> Tensor:
        """(B, N, in_channels) -> (B, N, out_channels)."""
        return F.linear(input, self.weight.squeeze(-1), self.bias)


def self_attention(
    qkv: Tensor, num_heads: int, *, split_heads_first: bool, mask: Tensor | None = None
) -> Tensor:
    """softmax(q k^T / sqrt(C / num_heads)) v in every head, by `scaled_dot_product_attention`.

    Args:
        qkv: (B, N, 3 C) queries, keys and values of all heads.
        num_heads: divides C.
        split_heads_first: order of the 3 C features. True for [head][q, k, v], which is that of
            improved-diffusion and guided-diffusion; False for [q, k, v][head], which is that of
            vision transformers and of guided-diffusion's "new attention order".
        mask: (B, N) bool, False for tokens that none attends to; None for none such.

    Returns:
        (B, N, C), head by head.

    Source: Vaswani et al. 2017, Eq. 1.

    Example:
        >>> self_attention(torch.randn(2, 16, 3 * 64), 4, split_heads_first=False).shape
        torch.Size([2, 16, 64])
    """
    batch, tokens, features = qkv.shape
    size = features // (3 * num_heads)
    if split_heads_first:
        q, k, v = qkv.reshape(batch, tokens, num_heads, 3, size).permute(3, 0, 2, 1, 4)
    else:
        q, k, v = qkv.reshape(batch, tokens, 3, num_heads, size).permute(2, 0, 3, 1, 4)
    keys = None if mask is None else mask[:, None, None]
    return F.scaled_dot_product_attention(q, k, v, keys).transpose(1, 2).flatten(2)


class ResBlock(nn.Module):
    """x + conv(norm(conv(norm(x)))), told the noise level and class between the two convolutions.

    Args:
        in_channels: of x.
        out_channels: of the result.
        emb_channels: of the embedding.
        dropout: probability before the last convolution.
        scale_shift_norm: whether the embedding gives scale and shift of the second norm (adaptive
            group norm), or is added before it.
        norm_groups: divides both numbers of channels.
        resample: `upsample` or `downsample`; changes x, and the branch before its convolutions.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        emb_channels: int,
        *,
        dropout: float,
        scale_shift_norm: bool,
        norm_groups: int,
        resample: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.scale_shift_norm = scale_shift_norm
        self.resample = resample
        self.in_layers = nn.Sequential(
            GroupNorm32(in_channels, norm_groups), nn.SiLU(), conv3(in_channels, out_channels)
        )
        self.emb_layers = nn.Sequential(
            nn.SiLU(), nn.Linear(emb_channels, (1 + scale_shift_norm) * out_channels)
        )
        self.out_layers = nn.Sequential(
            GroupNorm32(out_channels, norm_groups),
            nn.SiLU(),
            nn.Dropout(dropout),
            zero_(conv3(out_channels, out_channels)),
        )
        self.skip_connection: nn.Module = nn.Identity()
        if in_channels != out_channels:
            self.skip_connection = nn.Conv2d(in_channels, out_channels, kernel_size=1)

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        """(B, in_channels, H, W), (B, emb_channels) -> (B, out_channels, H', W')."""
        norm, activation, conv = self.in_layers
        h = activation(norm(x))
        if self.resample is not None:
            h, x = self.resample(h), self.resample(x)
        h = conv(h)
        condition = self.emb_layers(emb)[:, :, None, None]
        norm, activation, dropout, conv = self.out_layers
        if self.scale_shift_norm:
            scale, shift = condition.chunk(2, dim=1)
            h = torch.addcmul(shift, norm(h), 1 + scale)
        else:
            h = norm(h + condition)
        h = conv(dropout(activation(h)))
        out: Tensor = self.skip_connection(x) + h
        return out


class AttentionBlock(nn.Module):
    """x + self-attention among all pixels of norm(x).

    Args:
        channels: of x.
        num_heads: divides `channels`.
        split_heads_first: see `self_attention`.
        norm_groups: divides `channels`.

    Source: Ho et al. 2020, appendix B.
    """

    def __init__(
        self, channels: int, num_heads: int, *, split_heads_first: bool, norm_groups: int
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.split_heads_first = split_heads_first
        self.norm = GroupNorm32(channels, norm_groups)
        self.qkv = Pointwise(channels, 3 * channels)
        self.proj_out = zero_(Pointwise(channels, channels))

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C, H, W)."""
        qkv = self.qkv(self.norm(x).flatten(2).transpose(1, 2))
        h = self_attention(qkv, self.num_heads, split_heads_first=self.split_heads_first)
        out: Tensor = x + self.proj_out(h).transpose(1, 2).reshape(x.shape)
        return out


class CrossAttentionBlock(nn.Module):
    """x + attention of all pixels of norm(x) to tokens of a condition.

    Args:
        channels: of x.
        num_heads: divides `channels`.
        width: of the tokens.
        norm_groups: divides `channels`.

    Source: Rombach et al. 2022 (latent diffusion), section 3.3.
    """

    def __init__(self, channels: int, num_heads: int, width: int, norm_groups: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm = GroupNorm32(channels, norm_groups)
        self.q = Pointwise(channels, channels)
        self.kv = nn.Linear(width, 2 * channels)
        self.proj_out = zero_(Pointwise(channels, channels))

    def forward(self, x: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
        """(B, C, H, W), (B, L, width), (B, L) bool -> (B, C, H, W)."""
        q = self.q(self.norm(x).flatten(2).transpose(1, 2))
        k, v = self.kv(tokens).to(q.dtype).chunk(2, dim=2)
        q, k, v = (part.unflatten(2, (self.num_heads, -1)).transpose(1, 2) for part in (q, k, v))
        h = F.scaled_dot_product_attention(q, k, v, mask[:, None, None])
        h = self.proj_out(h.transpose(1, 2).flatten(2))
        out: Tensor = x + h.transpose(1, 2).reshape(x.shape)
        return out


class AttentionPool(nn.Module):
    """One vector per image: what its mean pixel attends to.

    Args:
        image_size: height and width of x.
        channels: of x.
        num_heads: divides `channels`.
        out_channels: of the result.

    Source: Radford et al. 2021 (CLIP), section 2.4.
    """

    def __init__(self, image_size: int, channels: int, num_heads: int, out_channels: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        positions = torch.randn(channels, image_size**2 + 1) / channels**0.5
        self.positional_embedding = nn.Parameter(positions)
        self.qkv_proj = Pointwise(channels, 3 * channels)
        self.c_proj = Pointwise(channels, out_channels)

    def forward(self, x: Tensor) -> Tensor:
        """(B, channels, image_size, image_size) -> (B, out_channels)."""
        pixels = x.flatten(2)
        tokens = torch.cat([pixels.mean(dim=2, keepdim=True), pixels], dim=2)
        qkv = self.qkv_proj((tokens + self.positional_embedding).transpose(1, 2))
        h = self_attention(qkv, self.num_heads, split_heads_first=False)
        out: Tensor = self.c_proj(h[:, 0])
        return out


class Downsample(nn.Module):
    """A convolution with stride 2."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.op = nn.Conv2d(channels, channels, kernel_size=3, stride=2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C, H/2, W/2)."""
        out: Tensor = self.op(x)
        return out


class Upsample(nn.Module):
    """Every pixel doubled, then a convolution."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = conv3(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C, 2 H, 2 W)."""
        out: Tensor = self.conv(upsample(x))
        return out


def upsample(x: Tensor) -> Tensor:
    """(B, C, H, W) -> (B, C, 2 H, 2 W), every pixel doubled."""
    return F.interpolate(x, scale_factor=2, mode="nearest")


def downsample(x: Tensor) -> Tensor:
    """(B, C, H, W) -> (B, C, H/2, W/2), the means of 2x2 pixels."""
    return F.avg_pool2d(x, 2)


def conv3(in_channels: int, out_channels: int) -> nn.Conv2d:
    """A 3x3 convolution that keeps height and width."""
    return nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=1)


@torch.no_grad()
def zero_(module: _Module) -> _Module:
    """Set the last layer of a residual branch to 0, so that it starts as nothing; returns it."""
    for parameter in module.parameters():
        parameter.zero_()
    return module


def no_autocast(x: Tensor) -> AbstractContextManager[None]:
    """Context in which operations on the device of `x` keep the dtype of their inputs."""
    if not torch.amp.is_autocast_available(x.device.type):  # the meta device
        return nullcontext()
    return torch.autocast(x.device.type, enabled=False)
