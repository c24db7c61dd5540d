"""What the transformers are built of: patches, positions, attention, and blocks with adaLN-Zero.

Precision: norms compute in float32 or better whatever the dtype around.

Shapes: images (B, C, H, W), square; tokens (B, N, width), one for each p x p patch, row by row;
masks (B, N) bool, False for tokens that none attends to.
"""

from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lit_diffusion.networks.conditions import LabelEmbedding
from lit_diffusion.networks.layers import (
    TimestepMLP,
    no_autocast,
    self_attention,
    timestep_embedding,
    zero_,
)


class LayerNorm32(nn.LayerNorm):
    """Layer normalisation in float32 or better; the result has the input's dtype."""

    def forward(self, input: Tensor) -> Tensor:
        """(..., width) -> the same shape."""
        dtype = torch.promote_types(input.dtype, torch.float32)
        weight, bias = (p if p is None else p.to(dtype) for p in (self.weight, self.bias))
        out = F.layer_norm(input.to(dtype), self.normalized_shape, weight, bias, self.eps)
        return out.to(input.dtype)


class RMSNorm32(nn.RMSNorm):
    """x / rms(x) * weight in float32 or better; the result has the input's dtype.

    Source: Zhang & Sennrich 2019, Eq. 4.
    """

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) -> the same shape."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        out = F.rms_norm(x.to(dtype), self.normalized_shape, self.weight.to(dtype), self.eps)
        return out.to(x.dtype)


class PatchEmbed(nn.Module):
    """A token per patch, by a convolution whose stride is its size."""

    def __init__(self, in_channels: int, width: int, patch_size: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(in_channels, width, patch_size, stride=patch_size)

    def forward(self, x: Tensor) -> Tensor:
        """(B, in_channels, H, W) -> (B, N, width)."""
        return cast(Tensor, self.proj(x)).flatten(2).transpose(1, 2)


class Attention(nn.Module):
    """Multi-head attention among all tokens; the features of qkv are [q, k, v][head]."""

    def __init__(self, width: int, num_heads: int, qkv_bias: bool = True) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(width, 3 * width, bias=qkv_bias)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """(B, N, width), (B, N) -> (B, N, width)."""
        heads = self_attention(self.qkv(x), self.num_heads, split_heads_first=False, mask=mask)
        out: Tensor = self.proj(heads)
        return out


class MLP(nn.Module):
    """Linear, GELU, Linear; `approximate` is GELU's own, "none" or "tanh"."""

    def __init__(self, width: int, hidden: int, approximate: str = "none") -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.approximate = approximate

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) -> the same shape."""
        out: Tensor = self.fc2(F.gelu(self.fc1(x), approximate=self.approximate))
        return out


class AdaLNBlock(nn.Module):
    """x + gate attn(norm(x)), then + gate mlp(norm(x)), all told c by scale, shift and gate.

    Args:
        width: of tokens and of c.
        norm: makes a norm of this width.
        attn: called with the tokens and what `forward` is given beside them.
        mlp: called with the tokens.

    Source: Peebles & Xie 2022 (DiT), section 3.2, adaLN-Zero.
    """

    def __init__(
        self, width: int, norm: Callable[[], nn.Module], attn: nn.Module, mlp: nn.Module
    ) -> None:
        super().__init__()
        self.norm1, self.attn = norm(), attn
        self.norm2, self.mlp = norm(), mlp
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: Tensor, c: Tensor, *where: Tensor | None) -> Tensor:
        """(B, N, width), (B, width) -> (B, N, width)."""
        parts = self.adaLN_modulation(c)[:, None].chunk(6, dim=2)
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = parts
        x = x + gate * self.attn(modulate(self.norm1(x), shift, scale), *where)
        out: Tensor = x + mlp_gate * self.mlp(modulate(self.norm2(x), mlp_shift, mlp_scale))
        return out


class FinalLayer(nn.Module):
    """Norm, told c by scale and shift, and a linear map; in the dtype of its weights."""

    def __init__(self, width: int, out_features: int, norm: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.norm_final = norm()
        self.linear = nn.Linear(width, out_features)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        """(B, N, width), (B, width) -> (B, N, out_features)."""
        with no_autocast(x):
            x, c = x.to(self.linear.weight.dtype), c.to(self.linear.weight.dtype)
            shift, scale = self.adaLN_modulation(c)[:, None].chunk(2, dim=2)
            out: Tensor = self.linear(modulate(self.norm_final(x), shift, scale))
        return out


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """x (1 + scale) + shift."""
    return x * (1 + scale) + shift


def patchify(x: Tensor, patch_size: int) -> Tensor:
    """(B, C, H, W) -> (B, N, p p C), the features of a patch in order (row, column, channel)."""
    batch, channels, height, width = x.shape
    rows, columns = height // patch_size, width // patch_size
    x = x.reshape(batch, channels, rows, patch_size, columns, patch_size)
    return x.permute(0, 2, 4, 3, 5, 1).reshape(batch, rows * columns, -1)


def unpatchify(tokens: Tensor, side: int, patch_size: int) -> Tensor:
    """The inverse of `patchify` on images of `side` x `side` patches."""
    x = tokens.reshape(len(tokens), side, side, patch_size, patch_size, -1)
    return x.permute(0, 5, 1, 3, 2, 4).flatten(4).flatten(2, 3)


def grid_positions(side: int, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """Row and column (N,) of each patch."""
    position = torch.arange(side * side, device=device)
    return position // side, position % side


def sincos_2d(side: int, width: int) -> Tensor:
    """Sines and cosines of the columns, then of the rows: (1, side^2, width), width in fours.

    Source: He et al. 2022 (MAE), appendix A.1, in which columns are first as well.
    """
    row, column = grid_positions(side)
    halves = [timestep_embedding(p, width // 2).roll(width // 4, 1) for p in (column, row)]
    return torch.cat(halves, 1)[None].to(torch.get_default_dtype())


@torch.no_grad()
def init_adaln_(network: nn.Module) -> None:
    """Xavier-uniform linear maps, biases 0; a new network is 0, and its blocks are identities.

    Source: Peebles & Xie 2022 (DiT), section 3.2, and Goyal et al. 2017 for the zeros.
    """
    for module in network.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            nn.init.xavier_uniform_(module.weight.flatten(1))
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    for module in network.modules():
        if isinstance(module, TimestepMLP | LabelEmbedding):
            for parameter in module.parameters():
                if parameter.ndim == 2:
                    nn.init.normal_(parameter, std=0.02)
        elif isinstance(module, AdaLNBlock | FinalLayer):
            zero_(module.adaLN_modulation)
            if isinstance(module, FinalLayer):
                zero_(module.linear)


def run(block: nn.Module, *inputs: Tensor | None, checkpointed: bool) -> Tensor:
    """block(*inputs), of which the inside is computed again in the backward pass if wanted."""
    if not checkpointed:
        return cast(Tensor, block(*inputs))
    return cast(Tensor, checkpoint(block, *inputs, use_reentrant=False))


def check_sizes(image_size: int, patch_size: int, width: int, depth: int, num_heads: int) -> None:
    """Raise ValueError for numbers that do not fit together."""
    if width > 10**5 or depth > 1000 or image_size > 10**5:
        raise ValueError(
            "width and image_size must be at most 100000 and depth 1000, got "
            f"{width}, {image_size} and {depth}."
        )
    if patch_size < 1 or image_size % patch_size:
        raise ValueError(
            f"patch_size must divide image_size, got {patch_size} and {image_size}: change one."
        )
    if num_heads < 1 or width % num_heads or width % 4:
        raise ValueError(
            f"width must be divisible by num_heads and by 4, got width={width} and "
            f"num_heads={num_heads}: change one."
        )


def check_images(x: Tensor, image_size: int, network: str) -> None:
    """Raise ValueError for images of another size, whose positions the network does not know."""
    if x.shape[2:] != (image_size, image_size):
        raise ValueError(
            f"{network}(image_size={image_size}) got images of shape {tuple(x.shape)}: resize "
            "them, or build the network for their size."
        )
