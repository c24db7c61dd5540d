"""Layers that several networks use.

Shapes: images are (B, C, H, W), contiguous or in channels_last format. Tokens are (B, N, D). Masks
are (B, N) bool, and False means that attention ignores a token.

Precision: the layers work in any floating-point dtype and under autocast. They always compute
norms, softmax and the sinusoids of the noise level in float32 or better.
"""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lit_diffusion.protocols import check_positive

_Module = TypeVar("_Module", bound=nn.Module)


def timestep_embedding(noise_label: Tensor, dim: int) -> Tensor:
    """Embed the noise level l as sinusoids: all `cos(f_k * l)`, then all `sin(f_k * l)`.

    The frequencies are `f_k = 10000**(-2 * k / dim)`. The function computes in float64, because the
    product `f_k * l` multiplies the rounding error of f_k by l.

    Args:
        noise_label: (B,) noise levels l, of an integer or floating-point dtype. They may be
            fractional, because solvers can evaluate a network between two time steps.
        dim: number of features, even.

    Returns:
        (B, dim) float64.

    Raises:
        ValueError: if `dim` is odd.

    Source: Vaswani et al. 2017, section 3.5. The cosines come first, as in
        openai/improved-diffusion.

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
    """Embedding of the noise level: `dim` sinusoids, Linear, SiLU, Linear.

    Under autocast, the module still computes in the dtype of its weights, because bfloat16 is too
    coarse for noise levels.
    """

    def __init__(self, dim: int, width: int, out_width: int | None = None) -> None:
        super().__init__(nn.Linear(dim, width), nn.SiLU(), nn.Linear(width, out_width or width))
        self.dim = dim

    def forward(self, noise_label: Tensor) -> Tensor:
        """(B,) -> (B, out_width)."""
        h = timestep_embedding(noise_label, self.dim).to(next(self.parameters()).dtype)
        with no_autocast(h):
            for layer in (self[0], self[1], self[2]):
                h = layer(h)
        return h


class TwoTimesMLP(TimestepMLP):
    """Embedding of a noise level and of an interval: the sum of two `TimestepMLP`s.

    The MLP of the interval is named `interval`, and outputs zero at initialization. The other
    parameters have the same names as in `TimestepMLP`.

    Source: Geng et al. 2025 (MeanFlow, arXiv 2505.13447), section 4.3, the variant that embeds
        (t, t - r). The zero initialization is ours. It lets training start from the weights of a
        network that was trained with flow matching.

    Example:
        >>> embed = TwoTimesMLP(dim=8, width=32)
        >>> embed(torch.tensor([[999.0, 500.0]])).equal(embed(torch.tensor([999.0])))
        True
    """

    two_times = True

    def __init__(self, dim: int, width: int) -> None:
        super().__init__(dim, width)
        self.interval = TimestepMLP(dim, width)
        zero_(self.interval[2])

    def forward(self, noise_label: Tensor) -> Tensor:
        """Embed noise levels and intervals (B, 2) as (B, D).

        If the input is only noise levels (B,), all intervals are 0.
        """
        if noise_label.ndim == 1:
            noise_label = torch.stack([noise_label, torch.zeros_like(noise_label)], dim=1)
        level, interval = noise_label.unbind(1)
        return super().forward(level) + self.interval(interval)


class LayerNorm32(nn.LayerNorm):
    """Layer norm, computed in float32 or better. The result has the input's dtype."""

    def forward(self, input: Tensor) -> Tensor:
        """(..., D) -> the same shape."""
        dtype = _norm_dtype(input)
        weight, bias = (p if p is None else p.to(dtype) for p in (self.weight, self.bias))
        with no_autocast(input) if dtype.itemsize < 4 else nullcontext():
            out = F.layer_norm(input.to(dtype), self.normalized_shape, weight, bias, self.eps)
        return out.to(input.dtype)


class RMSNorm32(nn.RMSNorm):
    """RMS norm `x / rms(x) * weight`, computed in float32 or better.

    The result has the input's dtype.

    Source: Zhang & Sennrich 2019, Eq. 4.
    """

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) -> the same shape."""
        dtype = _norm_dtype(x)
        weight = self.weight.to(dtype)
        with no_autocast(x) if dtype.itemsize < 4 else nullcontext():
            return F.rms_norm(x.to(dtype), self.normalized_shape, weight, self.eps).to(x.dtype)


def _norm_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype to which a norm converts its input and weights before it calls torch.

    The norm must compute in float32 or better. Torch's CUDA kernels do so for any input dtype, so x
    needs no copy in float32. In this case, the weights of the norm are rounded to the dtype of x,
    as autocast rounds the weights of linear maps. Compiled code converts x in registers, so float32
    needs no copy there either.
    """
    if x.is_cuda and not torch.compiler.is_compiling():
        return x.dtype
    return torch.promote_types(x.dtype, torch.float32)


def self_attention(
    qkv: Tensor, num_heads: int, *, split_heads_first: bool, mask: Tensor | None = None
) -> Tensor:
    """Compute `softmax(q @ k.T / sqrt(D / num_heads)) @ v` in every head.

    Args:
        qkv: (B, N, 3 D) queries, keys and values of all heads.
        num_heads: number of heads, which divides D.
        split_heads_first: whether the 3 D features are grouped by head. If True, queries, keys and
            values of the first head come first, then queries, keys and values of the second head,
            and so on. This order is the default in improved-diffusion and guided-diffusion. If
            False, the queries of all heads come first, then all keys, then all values, as in vision
            transformers and guided-diffusion's "new attention order".
        mask: (B, N) bool, False for tokens to ignore. None means that no token is ignored.

    Returns:
        (B, N, D), the features of the first head first.

    Source: Vaswani et al. 2017, Eq. 1.
    """
    batch, tokens, _ = qkv.shape
    # `unbind`, because its gradient takes a single copy into the layout of qkv.
    if split_heads_first:
        parts = qkv.reshape(batch, tokens, num_heads, 3, -1).unbind(3)
    else:
        parts = qkv.reshape(batch, tokens, 3, num_heads, -1).unbind(2)
    q, k, v = (part.transpose(1, 2) for part in parts)  # (B, heads, N, d) each
    attn_mask = None if mask is None else mask[:, None, None]  # (B, 1, 1, N)
    h = F.scaled_dot_product_attention(q, k, v, attn_mask)  # (B, heads, N, d)
    return h.transpose(1, 2).flatten(2)


class Attention(nn.Module):
    """Multi-head self-attention. `qkv` outputs all queries, then all keys, then all values."""

    def __init__(self, width: int, num_heads: int, qkv_bias: bool = True) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(width, 3 * width, bias=qkv_bias)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """(B, N, D), (B, N) -> (B, N, D)."""
        h = self_attention(self.qkv(x), self.num_heads, split_heads_first=False, mask=mask)
        return self.proj(h)


class MLP(nn.Module):
    """Linear, GELU, Linear. `approximate` is "none" or "tanh", as in `torch.nn.GELU`."""

    def __init__(self, width: int, hidden: int, approximate: str = "none") -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.approximate = approximate

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) -> the same shape."""
        return self.fc2(F.gelu(self.fc1(x), approximate=self.approximate))


class FinalLayer(nn.Module):
    """Adaptive norm and a linear map, the last layers of a transformer.

    The layer computes the shift and scale of the norm from c, the embedding of noise level and
    condition. Under autocast, the layer still computes in the dtype of its weights.

    Source: Peebles & Xie 2022 (DiT), section 3.2.
    """

    def __init__(self, norm: nn.Module, width: int, out_features: int) -> None:
        super().__init__()
        self.norm_final = norm
        self.linear = nn.Linear(width, out_features)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        """(B, N, D), (B, D) -> (B, N, out_features)."""
        with no_autocast(x):
            x, c = x.to(self.linear.weight.dtype), c.to(self.linear.weight.dtype)
            shift, scale = self.adaLN_modulation(c)[:, None].chunk(2, dim=2)  # (B, 1, D) each
            return self.linear(modulate(self.norm_final(x), shift, scale))


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Compute `x * (1 + scale) + shift`."""
    return x * (1 + scale) + shift


class PatchEmbed(nn.Module):
    """Convolution whose stride is the patch size. Tokens are in row-major order."""

    def __init__(self, in_channels: int, width: int, patch_size: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(in_channels, width, patch_size, stride=patch_size)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, N, D) with N = H W / p^2."""
        # Contiguous, because all residual sums inherit the layout of these tokens.
        return self.proj(x).flatten(2).transpose(1, 2).contiguous()


def patchify(x: Tensor, patch_size: int) -> Tensor:
    """Split images (B, C, H, W) into N patches (B, N, p * p * C), where p is the patch size.

    The features of a patch have the order (row, column, channel).
    """
    x = torch.unflatten(torch.unflatten(x, 3, (-1, patch_size)), 2, (-1, patch_size))
    return x.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)  # x: (B, C, H/p, p, W/p, p)


def unpatchify(tokens: Tensor, side: int, patch_size: int) -> Tensor:
    """Join patches (B, side * side, p * p * C) to images (B, C, H, W), the inverse of `patchify`.

    Example:
        >>> images = torch.randn(2, 3, 8, 8)
        >>> torch.equal(unpatchify(patchify(images, 4), side=2, patch_size=4), images)
        True
    """
    x = tokens.reshape(len(tokens), side, side, patch_size, patch_size, -1)
    return x.permute(0, 5, 1, 3, 2, 4).flatten(4).flatten(2, 3)


def grid_positions(side: int, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """Return the rows and the columns of the `side**2` patches of a square image, as int64.

    Example:
        >>> grid_positions(2)
        (tensor([0, 0, 1, 1]), tensor([0, 1, 0, 1]))
    """
    position = torch.arange(side * side, device=device)
    return position // side, position % side


def sincos_2d(side: int, width: int) -> Tensor:
    """Compute fixed position embeddings (1, side**2, width) of a grid of side x side patches.

    The first half of the features are sinusoids of the column, as in the code of the authors of
    MAE. The second half are sinusoids of the row.

    Source: He et al. 2022 (MAE), appendix A.1.
    """
    row, column = grid_positions(side)
    halves = [timestep_embedding(p, width // 2).roll(width // 4, 1) for p in (column, row)]
    return torch.cat(halves, 1)[None].to(torch.get_default_dtype())


class Patched(nn.Module):
    """Run a network at a lower resolution, to save compute, by moving patches into channels.

    The module turns images (B, C, H, W) into (B, size**2 * C, H / size, W / size), calls the
    network, and moves the channels of its output back into pixels.

    Args:
        network: network for images with `size**2 * C` channels. The network must have as many
            output channels as input channels, or twice as many if the network also predicts the
            variance.
        size: height and width of a patch, which must divide the height and width of the images.

    Source: Shi et al. 2016 (arXiv 1609.05158), section 3.2. The channels have the order
        of torch's `pixel_unshuffle`, which differs from the order in the paper.

    Example:
        >>> from lit_diffusion.networks.unet import UNet
        >>> network = Patched(UNet(16, 16, 32, (1,), 1, (1,), norm_groups=8), size=4)
        >>> network(torch.randn(2, 1, 28, 28), torch.tensor([3.0, 500.0]), None).shape
        torch.Size([2, 1, 28, 28])
    """

    def __init__(self, network: nn.Module, size: int = 2) -> None:
        super().__init__()
        check_positive(size=size)
        self.network = network
        self.size = size

    def forward(self, x: Tensor, noise_label: Tensor, condition: object) -> Tensor:
        """Images (B, C, H, W), noise labels (B,), condition -> (B, C or 2 C, H, W)."""
        if x.shape[2] % self.size or x.shape[3] % self.size:
            raise ValueError(
                f"Patched(size={self.size}) needs height and width divisible by {self.size}, got "
                f"images of shape {tuple(x.shape)}: resize them, or choose another size."
            )
        patches = F.pixel_unshuffle(x, self.size)  # (B, size^2 C, H / size, W / size)
        return F.pixel_shuffle(self.network(patches, noise_label, condition), self.size)


@torch.no_grad()
def zero_(module: _Module) -> _Module:
    """Set all parameters to 0 and return the module.

    If the last layer of a residual branch is zero, the residual block is the identity.
    """
    for parameter in module.parameters():
        parameter.zero_()
    return module


@torch.no_grad()
def xavier_uniform_(network: nn.Module) -> None:
    """Initialize all linear maps and convolutions with Xavier-uniform weights and zero biases."""
    for module in network.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            nn.init.xavier_uniform_(module.weight.flatten(1))
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def maybe_checkpoint(block: nn.Module, *inputs: Tensor | None, enabled: bool) -> Tensor:
    """Compute `block(*inputs)`, with gradient checkpointing if enabled."""
    if not (enabled and torch.is_grad_enabled()):  # in torch 2.11, checkpoint has no jvp
        return block(*inputs)
    return checkpoint(block, *inputs, use_reentrant=False)


def no_autocast(x: Tensor) -> AbstractContextManager[None]:
    """Return a context in which operations on the device of `x` keep the dtype of their inputs."""
    if x.is_meta:  # autocast does not exist for meta tensors
        # `torch.amp.is_autocast_available` would tell, but torch 2.11 cannot compile it.
        return nullcontext()
    return torch.autocast(x.device.type, enabled=False)


def check_sizes(
    image_size: int, patch_size: int, width: int, depth: int, num_heads: int, **others: float
) -> None:
    """Raise ValueError if sizes of a transformer do not fit together, or if a size is implausible.

    A width or image size above 100,000 is implausible, and so is a depth above 1,000. The sizes in
    `others` only need to be positive.
    """
    check_positive(image_size=image_size, width=width, depth=depth, **others)
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


def check_image_size(x: Tensor, image_size: int, network: str) -> None:
    """Raise ValueError unless the images x (B, C, H, W) are image_size x image_size."""
    if x.shape[2:] != (image_size, image_size):
        raise ValueError(
            f"{network}(image_size={image_size}) got images of shape {tuple(x.shape)}: resize "
            "them, or build the network for their size."
        )


def check_levels(
    in_channels: int,
    model_channels: int,
    channel_mult: Sequence[float],
    num_res_blocks: int,
    attention_downsample: Sequence[int],
    dropout: float,
) -> None:
    """Raise ValueError if sizes of a U-Net do not fit together, or if a size is implausible.

    More than 100,000 channels are implausible, and so are more than 1,000 blocks per level or more
    than 32 levels. The arguments are the same as in `UNet`.
    """
    levels = len(channel_mult)
    check_positive(
        in_channels=in_channels,
        model_channels=model_channels,
        num_res_blocks=num_res_blocks,
        **{"the length of channel_mult": levels},
    )
    if not 0 <= dropout <= 1:
        raise ValueError(f"dropout must be in [0, 1], got {dropout}.")
    if model_channels > 10**5 or num_res_blocks > 1000 or levels > 32:
        raise ValueError(
            "model_channels must be at most 100000, num_res_blocks 1000 and channel_mult 32 "
            f"numbers long, got {model_channels}, {num_res_blocks} and {levels}."
        )
    factors = [2**level for level in range(levels)]
    if not set(attention_downsample) <= set(factors):
        raise ValueError(
            f"attention_downsample={tuple(attention_downsample)} must be some of the "
            f"downsampling factors {factors} of a channel_mult of length {levels}."
        )
    for mult in channel_mult:
        check_positive(channel_mult=mult)
        if mult * model_channels < 1:
            raise ValueError(
                "channel_mult times model_channels must be at least 1, got "
                f"{mult} x {model_channels}: change one."
            )


def width_factor(width: int, base: int) -> float:
    """Return a factor for which `int(factor * base)` is `width`, also after rounding to floats."""
    factor = width / base
    return factor if int(factor * base) == width else math.nextafter(factor, math.inf)


def check_divisible(x: Tensor, levels: int, network: str) -> None:
    """Raise ValueError unless height and width of x (B, C, H, W) suit a U-Net with these levels."""
    reduction = 2 ** (levels - 1)
    if x.shape[2] % reduction or x.shape[3] % reduction:
        raise ValueError(
            f"{network} with {levels} levels needs height and width divisible by {reduction}, got "
            f"images of shape {tuple(x.shape)}: resize them, or shorten channel_mult."
        )
