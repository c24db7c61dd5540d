"""Triton kernels for the forward and backward pass of group norm, scale and shift, and SiLU.

This file needs Triton. Therefore, `fused_norm` imports it only when it gets the first CUDA tensor.

Each Triton program handles all P pixels of one image in one or more groups of channels. It passes
over the pixels twice. The first pass computes sums over the pixels, and the second pass computes
the output. The second pass runs in reverse order, so it finds most of the pixels in the caches.

In channels_last format, a program handles at least 32 adjacent channels if the number of groups
allows it, because the GPU reads memory at full speed only in units of 64 bytes or more. In
contiguous format, this minimum is not necessary, because the pixels of a channel are adjacent.

The kernels use neither atomic operations nor autotuning. Therefore, the same input gives
bit-identical output.

Shapes: x (N, C, P) in either format; mean and rstd (N, G) float32 of G groups.
"""

import math
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lit_diffusion.networks.fused_norm import separate_group_norm_silu

CHANNELS = 32  # target for the minimum number of channels per program in channels_last format
ELEMENTS = 4096  # pixels x channels in a tile
NUM_WARPS = 8


class GroupNormSiLU(torch.autograd.Function):
    """`group_norm_silu` as an autograd function that runs the Triton kernels."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *arguments: Any) -> Tensor:
        """Compute the output. The arguments are the same as in `separate_group_norm_silu`."""
        y, mean, rstd = torch.ops.lit_diffusion.group_norm_silu.default(x, *arguments)
        ctx.save_for_backward(x, *arguments[:5], mean, rstd)
        ctx.options = arguments[5:]
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Return one value per argument of `forward`.

        For x, weight, bias, scale, shift and offset, the method returns the gradient. For
        num_groups, eps and silu, it returns None.
        """
        *inputs, mean, rstd = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True
            return (*_differentiable_gradients(inputs, ctx.options, dy), None, None, None)
        dx, sums, *others = torch.ops.lit_diffusion.group_norm_silu_backward.default(
            dy, *inputs, mean, rstd, ctx.options[2]
        )
        _, weight, bias, *optional = inputs
        dbias, dweight = sums.sum(1).unbind()
        others = [None if t is None else g for t, g in zip(optional, others, strict=True)]
        return (dx, dweight.to(weight.dtype), dbias.to(bias.dtype), *others, None, None, None)


def _differentiable_gradients(
    inputs: list[Tensor | None], options: tuple[Any, ...], dy: Tensor
) -> list[Tensor | None]:
    """Compute gradients that can be differentiated again, with torch's operations."""
    # Each input is replaced by a view, because one input may depend on another one (for example, if
    # a norm is applied twice), and the gradient of each must not flow through the other.
    inputs = [t if t is None else t.view_as(t) for t in inputs]
    y = separate_group_norm_silu(*inputs, *options)  # type: ignore[arg-type]
    needed = [t for t in inputs if t is not None and t.requires_grad]
    gradients = iter(torch.autograd.grad(y, needed, dy, create_graph=True))
    return [next(gradients) if t is not None and t.requires_grad else None for t in inputs]


def _forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    offset: Tensor | None,
    num_groups: int,
    eps: float,
    silu: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output, which has the shape of x, and mean and 1 / std, (N, groups) float32."""
    memory_format = _memory_format(x)
    x = x.contiguous(memory_format=memory_format)
    y = torch.empty_like(x)
    mean, rstd = (x.new_empty((len(x), num_groups), dtype=torch.float32) for _ in range(2))
    scale, shift, offset = (_unit_stride(t) for t in (scale, shift, offset))
    channels, pixels = x.shape[1], math.prod(x.shape[2:])
    blocks = _blocks(channels, pixels, num_groups, memory_format == torch.channels_last)
    with torch.cuda.device_of(x):
        _forward_kernel[(len(x) * num_groups // blocks["GROUPS"],)](
            *(x, y, weight, bias, scale, shift, offset, mean, rstd),
            *(_row_stride(scale), _row_stride(shift), _row_stride(offset)),
            *(channels, pixels, num_groups, eps),
            **blocks,
            HAS_SCALE=scale is not None,
            HAS_OFFSET=offset is not None,
            SILU=silu,
        )
    return y, mean, rstd


def _backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    offset: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    silu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return gradients of x, of (bias, weight) per image (2, N, C), of scale, shift and offset."""
    memory_format = _memory_format(x)
    x, dy = (t.contiguous(memory_format=memory_format) for t in (x, dy))
    dx = torch.empty_like(x)
    sums = x.new_empty((2, *x.shape[:2]), dtype=torch.float32)
    dscale, dshift, doffset = (_empty_like_row(t, x) for t in (scale, shift, offset))
    scale, shift, offset = (_unit_stride(t) for t in (scale, shift, offset))
    channels, pixels, num_groups = x.shape[1], math.prod(x.shape[2:]), mean.shape[1]
    blocks = _blocks(channels, pixels, num_groups, memory_format == torch.channels_last)
    with torch.cuda.device_of(x):
        _backward_kernel[(len(x) * num_groups // blocks["GROUPS"],)](
            *(dy, x, dx, weight, bias, scale, shift, offset, mean, rstd, *sums.unbind()),
            *(dscale, dshift, doffset),
            *(_row_stride(scale), _row_stride(shift), _row_stride(offset)),
            *(channels, pixels, num_groups),
            **blocks,
            HAS_SCALE=scale is not None,
            HAS_OFFSET=offset is not None,
            SILU=silu,
        )
    return dx, sums, dscale, dshift, doffset


def _memory_format(x: Tensor) -> torch.memory_format:
    """The memory format in which the kernels read x."""
    if x.ndim == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last):
        return torch.channels_last
    return torch.contiguous_format


def _unit_stride(rows: Tensor | None) -> Tensor | None:
    """Return (N, C) with a stride of 1 between channels. The stride between rows is arbitrary."""
    return rows if rows is None or rows.stride(1) == 1 else rows.contiguous()


def _row_stride(rows: Tensor | None) -> int:
    return 0 if rows is None else rows.stride(0)


def _empty_like_row(rows: Tensor | None, x: Tensor) -> Tensor:
    """Allocate a gradient of `rows` (N, C), or an empty tensor if `rows` is None."""
    return x.new_empty(0) if rows is None else x.new_empty(rows.shape, dtype=rows.dtype)


@cache
def _blocks(channels: int, pixels: int, num_groups: int, channels_last: bool) -> dict[str, int]:
    """Compute the tile sizes of a program, as the kernels' compile-time arguments."""
    group_channels = channels // num_groups
    group_block = triton.next_power_of_2(group_channels)
    pixel_block = min(triton.next_power_of_2(pixels), max(ELEMENTS // group_block, 1))
    at_least = max(CHANNELS if channels_last else 1, ELEMENTS // pixel_block)
    groups = 1  # groups per program: a power of 2 that divides num_groups
    while groups * group_block < at_least and num_groups % (2 * groups) == 0:
        groups *= 2
    return {
        "GROUPS": groups,
        "GROUP_CHANNELS": group_channels,
        "GROUP_BLOCK": group_block,
        "PIXEL_BLOCK": min(pixel_block, max(ELEMENTS // (groups * group_block), 1)),
        "CHANNELS_LAST": channels_last,
        "num_warps": NUM_WARPS,
    }


@triton.jit
def _load(row, channel, exists):
    """Load channels of a row (C,) as float32, with 0 where no channel exists."""
    return tl.load(row + channel, exists, other=0.0).to(tl.float32)


@triton.jit
def _sum_groups(values, GROUPS: tl.constexpr, GROUP_BLOCK: tl.constexpr):
    """Sum over the channels of each group, for each channel: (channels,) -> (channels,)."""
    sums = tl.sum(tl.reshape(values, (GROUPS, GROUP_BLOCK)), 1)
    sums = tl.broadcast_to(sums[:, None], (GROUPS, GROUP_BLOCK))
    return tl.reshape(sums, (GROUPS * GROUP_BLOCK,))


@triton.jit
def _channels(
    num_groups, GROUPS: tl.constexpr, GROUP_CHANNELS: tl.constexpr, GROUP_BLOCK: tl.constexpr
):
    """Return the image of this program, its channels, a mask of existing channels, their groups."""
    blocks = num_groups // GROUPS
    image, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    k = tl.arange(0, GROUPS * GROUP_BLOCK)
    group = block * GROUPS + k // GROUP_BLOCK
    channel = group * GROUP_CHANNELS + k % GROUP_BLOCK
    if GROUP_CHANNELS == GROUP_BLOCK:  # tells the compiler that the channels are adjacent
        channel = block * GROUPS * GROUP_BLOCK + k
    return image.to(tl.int64), channel, k % GROUP_BLOCK < GROUP_CHANNELS, group


@triton.jit
def _tile(
    start,
    channel,
    exists,
    num_channels,
    num_pixels,
    PIXEL_BLOCK: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
    IS_FULL: tl.constexpr,
):
    """Return the memory offsets (pixels, channels) of a tile, and a mask of those that exist."""
    pixel = start + tl.arange(0, PIXEL_BLOCK)
    mask = (pixel < num_pixels)[:, None]
    if not IS_FULL:
        mask = mask & exists[None, :]
    if CHANNELS_LAST:
        return pixel[:, None] * num_channels + channel[None, :], mask
    return channel[None, :] * num_pixels + pixel[:, None], mask


@triton.jit
def _forward_kernel(
    x,
    y,
    weight,
    bias,
    scale,
    shift,
    offset,
    mean,
    rstd,
    scale_stride,
    shift_stride,
    offset_stride,
    num_channels,
    num_pixels,
    num_groups,
    eps,
    GROUPS: tl.constexpr,
    GROUP_CHANNELS: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    PIXEL_BLOCK: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    SILU: tl.constexpr,
):
    IS_FULL: tl.constexpr = GROUP_CHANNELS == GROUP_BLOCK
    CHANNEL_BLOCK: tl.constexpr = GROUPS * GROUP_BLOCK
    image, channel, exists, group = _channels(num_groups, GROUPS, GROUP_CHANNELS, GROUP_BLOCK)
    x += image * num_channels * num_pixels
    y += image * num_channels * num_pixels

    # Subtract the mean of the first tile from all pixels, so that a large mean costs no precision.
    at, mask = _tile(
        0, channel, exists, num_channels, num_pixels, PIXEL_BLOCK, CHANNELS_LAST, IS_FULL
    )
    first = tl.load(x + at, mask, other=0.0).to(tl.float32)
    pivot = tl.sum(first, 0) / tl.minimum(num_pixels, PIXEL_BLOCK)
    sums = tl.zeros((PIXEL_BLOCK, CHANNEL_BLOCK), tl.float32)
    squares = tl.zeros((PIXEL_BLOCK, CHANNEL_BLOCK), tl.float32)
    for start in range(0, num_pixels, PIXEL_BLOCK):
        at, mask = _tile(
            start, channel, exists, num_channels, num_pixels, PIXEL_BLOCK, CHANNELS_LAST, IS_FULL
        )
        difference = tl.load(x + at, mask, other=0.0).to(tl.float32) - pivot[None, :]
        difference = tl.where(mask, difference, 0.0)
        sums += difference
        squares += difference * difference
    mean_difference = tl.sum(sums, 0) / num_pixels
    channel_var = tl.sum(squares, 0) / num_pixels - mean_difference * mean_difference
    channel_mean = pivot + mean_difference  # 0 where there is no channel
    if HAS_OFFSET:
        added = _load(offset + image * offset_stride, channel, exists)
        channel_mean += added

    # The variance of a group is the mean of its channels' variances, plus the variance of the
    # channels' means (law of total variance).
    group_mean = _sum_groups(channel_mean, GROUPS, GROUP_BLOCK) / GROUP_CHANNELS
    between = tl.where(exists, channel_mean - group_mean, 0.0)
    var = _sum_groups(channel_var + between * between, GROUPS, GROUP_BLOCK) / GROUP_CHANNELS
    group_rstd = 1 / tl.sqrt(tl.maximum(var, 0.0) + eps)
    tl.store(
        mean + image * num_groups + group, group_mean, exists & (channel == group * GROUP_CHANNELS)
    )
    tl.store(
        rstd + image * num_groups + group, group_rstd, exists & (channel == group * GROUP_CHANNELS)
    )

    w, b, centre = _load(weight, channel, exists), _load(bias, channel, exists), group_mean
    if HAS_OFFSET:
        centre -= added
    if HAS_SCALE:
        factor = 1 + _load(scale + image * scale_stride, channel, exists)
        w, b = w * factor, b * factor + _load(shift + image * shift_stride, channel, exists)
    w *= group_rstd
    steps = tl.cdiv(num_pixels, PIXEL_BLOCK)
    for step in range(steps):
        start = (steps - 1 - step) * PIXEL_BLOCK
        at, mask = _tile(
            start, channel, exists, num_channels, num_pixels, PIXEL_BLOCK, CHANNELS_LAST, IS_FULL
        )
        z = (tl.load(x + at, mask, other=0.0).to(tl.float32) - centre[None, :]) * w[None, :]
        z += b[None, :]
        if SILU:
            z *= tl.sigmoid(z)
        tl.store(y + at, z, mask)


@triton.jit
def _centred_and_dz(dy, x, at, mask, centre, w, b, SILU: tl.constexpr):
    """Return `x + offset - mean` of a tile, and the gradient with respect to SiLU's input."""
    centred = tl.load(x + at, mask, other=0.0).to(tl.float32) - centre[None, :]
    dz = tl.load(dy + at, mask, other=0.0).to(tl.float32)
    if SILU:
        z = centred * w[None, :] + b[None, :]
        sigmoid = tl.sigmoid(z)
        dz *= sigmoid * (1 + z * (1 - sigmoid))
    return centred, dz


@triton.jit
def _backward_kernel(
    dy,
    x,
    dx,
    weight,
    bias,
    scale,
    shift,
    offset,
    mean,
    rstd,
    bias_sums,
    weight_sums,
    dscale,
    dshift,
    doffset,
    scale_stride,
    shift_stride,
    offset_stride,
    num_channels,
    num_pixels,
    num_groups,
    GROUPS: tl.constexpr,
    GROUP_CHANNELS: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    PIXEL_BLOCK: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    SILU: tl.constexpr,
):
    IS_FULL: tl.constexpr = GROUP_CHANNELS == GROUP_BLOCK
    CHANNEL_BLOCK: tl.constexpr = GROUPS * GROUP_BLOCK
    image, channel, exists, group = _channels(num_groups, GROUPS, GROUP_CHANNELS, GROUP_BLOCK)
    x += image * num_channels * num_pixels
    dy += image * num_channels * num_pixels
    dx += image * num_channels * num_pixels
    row = image * num_channels + channel
    centre = tl.load(mean + image * num_groups + group)
    group_rstd = tl.load(rstd + image * num_groups + group)
    if HAS_OFFSET:
        centre -= _load(offset + image * offset_stride, channel, exists)
    norm_w, norm_b = _load(weight, channel, exists), _load(bias, channel, exists)
    w, b, factor = norm_w, norm_b, 1.0
    if HAS_SCALE:
        factor = 1 + _load(scale + image * scale_stride, channel, exists)
        w, b = w * factor, b * factor + _load(shift + image * shift_stride, channel, exists)
    w *= group_rstd

    sums = tl.zeros((PIXEL_BLOCK, CHANNEL_BLOCK), tl.float32)
    products = tl.zeros((PIXEL_BLOCK, CHANNEL_BLOCK), tl.float32)
    for start in range(0, num_pixels, PIXEL_BLOCK):
        at, mask = _tile(
            start, channel, exists, num_channels, num_pixels, PIXEL_BLOCK, CHANNELS_LAST, IS_FULL
        )
        centred, dz = _centred_and_dz(dy, x, at, mask, centre, w, b, SILU)
        sums += dz
        products += dz * centred
    dz_sum, product_sum = tl.sum(sums, 0), tl.sum(products, 0) * group_rstd  # (channels,)
    tl.store(bias_sums + row, dz_sum * factor, exists)
    tl.store(weight_sums + row, product_sum * factor, exists)
    if HAS_SCALE:
        tl.store(dscale + row, product_sum * norm_w + dz_sum * norm_b, exists)
        tl.store(dshift + row, dz_sum, exists)

    # The norm's gradient is dz * w minus its projections on the constant and on the normalized x.
    count = GROUP_CHANNELS * num_pixels
    constant = _sum_groups(dz_sum * w, GROUPS, GROUP_BLOCK) / count
    along = _sum_groups(product_sum * w, GROUPS, GROUP_BLOCK) / count * group_rstd
    if HAS_OFFSET:
        sums = tl.zeros((PIXEL_BLOCK, CHANNEL_BLOCK), tl.float32)
    steps = tl.cdiv(num_pixels, PIXEL_BLOCK)
    for step in range(steps):
        start = (steps - 1 - step) * PIXEL_BLOCK
        at, mask = _tile(
            start, channel, exists, num_channels, num_pixels, PIXEL_BLOCK, CHANNELS_LAST, IS_FULL
        )
        centred, dz = _centred_and_dz(dy, x, at, mask, centre, w, b, SILU)
        gradient = dz * w[None, :] - constant[None, :] - centred * along[None, :]
        tl.store(dx + at, gradient, mask)
        if HAS_OFFSET:
            sums += tl.where(mask, gradient, 0.0)
    if HAS_OFFSET:
        tl.store(doffset + row, tl.sum(sums, 0), exists)


# Registered as torch operators, the kernels work in compiled code, with fake tensors and under
# dispatch modes.
_LIBRARY = torch.library.Library("lit_diffusion", "DEF")
_LIBRARY.define(
    "group_norm_silu(Tensor x, Tensor weight, Tensor bias, Tensor? scale, Tensor? shift,"
    " Tensor? offset, int num_groups, float eps, bool silu) -> (Tensor, Tensor, Tensor)"
)
_LIBRARY.define(
    "group_norm_silu_backward(Tensor dy, Tensor x, Tensor weight, Tensor bias, Tensor? scale,"
    " Tensor? shift, Tensor? offset, Tensor mean, Tensor rstd, bool silu)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_LIBRARY.impl("group_norm_silu", _forward, "CompositeExplicitAutograd")
_LIBRARY.impl("group_norm_silu_backward", _backward, "CompositeExplicitAutograd")


@torch.library.register_fake("lit_diffusion::group_norm_silu", lib=_LIBRARY)
def _(x, weight, bias, scale, shift, offset, num_groups, eps, silu):
    mean = x.new_empty((x.shape[0], num_groups), dtype=torch.float32)
    return torch.empty_like(x, memory_format=_memory_format(x)), mean, torch.empty_like(mean)


@torch.library.register_fake("lit_diffusion::group_norm_silu_backward", lib=_LIBRARY)
def _(dy, x, weight, bias, scale, shift, offset, mean, rstd, silu):
    sums = x.new_empty((2, *x.shape[:2]), dtype=torch.float32)
    dx = torch.empty_like(x, memory_format=_memory_format(x))
    dscale, dshift, doffset = (_empty_like_row(t, x) for t in (scale, shift, offset))
    return dx, sums, dscale, dshift, doffset
