"""The U-Net of improved-diffusion and guided-diffusion, and the classifier made of its encoder.

    x -- input_blocks ------------------- skips ------------------- output_blocks -- out
         each level: n x (ResBlock,              each level: (n + 1) x (ResBlock,
         attention), then down                          attention), then up
              +----------------------- middle_block ------------------------+

Names and shapes of the parameters are those of the two repositories: their checkpoints load with
`load_state_dict`. Their `attention_resolutions` "16,8" at `image_size` 32 are
`attention_downsample=(2, 4)` here, and `use_new_attention_order` is `split_heads_first=False`.

Sources: Nichol & Dhariwal 2021, appendix A; Dhariwal & Nichol 2021, section 3 and appendix;
github.com/openai/improved-diffusion and github.com/openai/guided-diffusion, file unet.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lit_diffusion.networks.conditions import Condition, condition_embedding, told
from lit_diffusion.networks.layers import (
    AttentionBlock,
    AttentionPool,
    CrossAttentionBlock,
    Downsample,
    GroupNorm32,
    ResBlock,
    TimestepMLP,
    Upsample,
    conv3,
    downsample,
    no_autocast,
    upsample,
    zero_,
)


class _Stage(nn.ModuleList):
    """Layers in a row: ResBlocks are given the embedding, cross-attention tokens and mask."""

    def forward(self, x: Tensor, emb: Tensor, *context: Tensor) -> Tensor:
        for layer in self:
            if isinstance(layer, ResBlock):
                x = layer(x, emb)
            else:
                x = layer(x, *context) if isinstance(layer, CrossAttentionBlock) else layer(x)
        return x


@dataclass(frozen=True)
class _Blocks:
    """Makes the blocks of one network, which differ in their widths alone."""

    emb_channels: int
    dropout: float
    scale_shift_norm: bool
    resblock_updown: bool
    num_heads: int
    head_channels: int | None
    split_heads_first: bool
    norm_groups: int
    has_context: bool = False

    def res(
        self, channels: int, out: int, resample: Callable[[Tensor], Tensor] | None = None
    ) -> ResBlock:
        return ResBlock(
            channels,
            out,
            self.emb_channels,
            dropout=self.dropout,
            scale_shift_norm=self.scale_shift_norm,
            norm_groups=self.norm_groups,
            resample=resample,
        )

    def attention(self, channels: int) -> AttentionBlock:
        return AttentionBlock(
            channels,
            _heads(channels, self.num_heads, self.head_channels),
            split_heads_first=self.split_heads_first,
            norm_groups=self.norm_groups,
        )

    def down(self, channels: int) -> nn.Module:
        if self.resblock_updown:
            return self.res(channels, channels, downsample)
        return Downsample(channels)

    def up(self, channels: int) -> nn.Module:
        if self.resblock_updown:
            return self.res(channels, channels, upsample)
        return Upsample(channels)

    def stage(self, channels: int, out: int, attend: bool) -> _Stage:
        made: list[nn.Module] = [self.res(channels, out)]
        if attend:
            made.append(self.attention(out))
        if attend and self.has_context:
            heads = _heads(out, self.num_heads, self.head_channels)
            made.append(CrossAttentionBlock(out, heads, self.emb_channels, self.norm_groups))
        return _Stage(made)


class _Trunk(nn.Module):
    """Embedding of the noise level, encoder and middle: what the two networks share."""

    gradient_checkpointing = False

    def __init__(
        self,
        blocks: _Blocks,
        in_channels: int,
        model_channels: int,
        channel_mult: Sequence[float],
        num_res_blocks: int,
        attention_downsample: Sequence[int],
    ) -> None:
        super().__init__()
        _check_attention(attention_downsample, len(channel_mult))
        self.reduction = 2 ** (len(channel_mult) - 1)
        self.widths = [int(mult * model_channels) for mult in channel_mult]
        self.skip_channels = [channels := self.widths[0]]
        self.time_embed = TimestepMLP(model_channels, blocks.emb_channels)
        self.input_blocks = nn.ModuleList([_Stage([conv3(in_channels, channels)])])
        for level, width in enumerate(self.widths):
            attend = 2**level in attention_downsample
            for _ in range(num_res_blocks):
                self.input_blocks.append(blocks.stage(channels, width, attend))
                self.skip_channels.append(channels := width)
            if 2**level < self.reduction:
                self.input_blocks.append(_Stage([blocks.down(width)]))
                self.skip_channels.append(width)
        self.middle_block = blocks.stage(channels, channels, attend=True)
        self.middle_block.append(blocks.res(channels, channels))

    def _encode(self, x: Tensor, *told: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The output of the middle and those of the encoder's stages."""
        if x.shape[2] % self.reduction or x.shape[3] % self.reduction:
            raise ValueError(
                f"{type(self).__name__} with {len(self.widths)} levels needs height and width "
                f"divisible by {self.reduction}, got images of shape {tuple(x.shape)}: "
                "resize them, or shorten channel_mult."
            )
        skips = []
        for stage in self.input_blocks:
            x = self._run(stage, x, *told)
            skips.append(x)
        return self._run(self.middle_block, x, *told), skips

    def _run(self, stage: nn.Module, x: Tensor, *told: Tensor) -> Tensor:
        if not self.gradient_checkpointing:
            return cast(Tensor, stage(x, *told))
        return cast(Tensor, checkpoint(stage, x, *told, use_reentrant=False))


class UNet(_Trunk):
    """Diffusion U-Net of the improved-diffusion and guided-diffusion family.

    No class: label -1 adds nothing to the embedding of the noise level; None is -1 for every image.
    A learned null row could express no more, because what all classes share has a parameter
    already, the last bias of `time_embed`; and without it the state_dict is the published one. So
    label dropout and classifier-free guidance need nothing but `num_classes`.

    Labels are not range-checked, since a GPU would have to wait for the result: num_classes or
    more fails inside the embedding (IndexError on the CPU), any negative number means no class.

    Under autocast the noise embedding and the output layers stay in the dtype of their weights, as
    in guided-diffusion's half-precision mode.

    Args:
        in_channels: channels of x.
        out_channels: channels of the result: the images', or twice that if the variance is learned.
        model_channels: base width, even.
        channel_mult: width of each level, in units of `model_channels`; level i has resolution
            1 / 2^i.
        num_res_blocks: ResBlocks per level of the encoder. The decoder has one more.
        attention_downsample: levels with attention, named by the factor that their resolution is
            reduced by. The middle always has it.
        num_heads: attention heads.
        head_channels: channels of a head. If given, it decides the number of heads, and
            `num_heads` and `num_heads_upsample` are not used.
        num_heads_upsample: heads in the decoder (improved-diffusion); None for `num_heads`.
        dropout: probability in every ResBlock.
        num_classes: number of classes; None for an unconditional network.
        scale_shift_norm: whether the embedding scales and shifts the second norm of a ResBlock, or
            is added before it.
        resblock_updown: whether ResBlocks change the resolution, or plain convolutions.
        split_heads_first: order of the qkv features in a checkpoint, see `layers.self_attention`;
            either will do for training.
        norm_groups: groups of every group norm, a divisor of all widths; 32 in published models.
            Groups of a single channel are slow on a CPU in channels_last format.
        gradient_checkpointing: store only what enters a stage and compute its inside again in the
            backward pass: less memory, about a third more time, the same gradients.
        context_dim: of the tokens of a condition, which every level with attention attends to; None
            for no tokens.
        vector_dim: of the vector of a condition, which is added to the embedding; None for none.
        num_words: of the vocabulary of a condition of words, which are attended to as tokens are.

    Raises:
        ValueError: for numbers that do not fit together.

    Example:
        >>> network = UNet(in_channels=1, out_channels=1, model_channels=32, num_classes=10)
        >>> x, noise_label = torch.randn(2, 1, 8, 8), torch.tensor([0.0, 999.0])
        >>> network(x, noise_label, torch.tensor([7, -1])).shape
        torch.Size([2, 1, 8, 8])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        model_channels: int = 128,
        channel_mult: tuple[float, ...] = (1, 2, 2, 2),
        num_res_blocks: int = 2,
        attention_downsample: tuple[int, ...] = (2,),
        num_heads: int = 4,
        head_channels: int | None = None,
        num_heads_upsample: int | None = None,
        dropout: float = 0.0,
        num_classes: int | None = None,
        scale_shift_norm: bool = True,
        resblock_updown: bool = False,
        split_heads_first: bool = True,
        norm_groups: int = 32,
        gradient_checkpointing: bool = False,
        context_dim: int | None = None,
        vector_dim: int | None = None,
        num_words: int | None = None,
    ) -> None:
        _refuse_endless(model_channels, num_res_blocks, len(channel_mult))
        blocks = _Blocks(
            emb_channels=4 * model_channels,
            dropout=dropout,
            scale_shift_norm=scale_shift_norm,
            resblock_updown=resblock_updown,
            num_heads=num_heads,
            head_channels=head_channels,
            split_heads_first=split_heads_first,
            norm_groups=norm_groups,
            has_context=(context_dim, num_words) != (None, None),
        )
        super().__init__(
            blocks, in_channels, model_channels, channel_mult, num_res_blocks, attention_downsample
        )
        self.gradient_checkpointing = gradient_checkpointing
        self.num_classes, self.num_words = num_classes, num_words
        if num_classes is not None:
            self.label_emb = nn.Embedding(num_classes, blocks.emb_channels)
        others = (context_dim, vector_dim, num_words)
        if num_classes is None or others != (None, None, None):
            self.condition_emb = condition_embedding(blocks.emb_channels, num_classes, *others)

        blocks = replace(blocks, num_heads=num_heads_upsample or num_heads)
        self.output_blocks = nn.ModuleList()
        channels, skip_channels = self.widths[-1], list(self.skip_channels)
        for level, width in reversed(list(enumerate(self.widths))):
            attend = 2**level in attention_downsample
            for _ in range(num_res_blocks + 1):
                stage = blocks.stage(channels + skip_channels.pop(), width, attend)
                self.output_blocks.append(stage)
                channels = width
            if level > 0:
                stage.append(blocks.up(width))
        self.out = nn.Sequential(
            GroupNorm32(channels, norm_groups), nn.SiLU(), zero_(conv3(channels, out_channels))
        )

    def forward(self, x: Tensor, noise_label: Tensor, condition: Condition = None) -> Tensor:
        """What the network says of noisy images.

        Args:
            x: (B, in_channels, H, W); H and W divisible by 2^(levels - 1).
            noise_label: (B,) noise levels as the process names them, such as steps, with fractions;
                in float32 or float64 whatever the dtype of x, for bfloat16 has no 999.
            condition: labels (B,) int64, -1 for no class; with context_dim tokens (B, L,
                context_dim) and their mask (B, L), with vector_dim vectors (B, vector_dim) and
                which of them are there (B,), with num_words words (B, L) int64, see `conditions`;
                None for none anywhere.

        Returns:
            (B, out_channels, H, W) in the dtype of the weights.

        Raises:
            ValueError: for another condition than the network's, or sizes that cannot be halved.
        """
        emb: Tensor = self.time_embed(noise_label)
        context: list[Tensor] = []
        if self.num_classes is not None:
            emb = self._with_class(emb, condition)
        else:
            seen = told(self.condition_emb, condition, x, "UNet")
            emb = emb if seen.vector is None else emb + seen.vector
            context = [part for part in (seen.tokens, seen.mask) if part is not None]
        h, skips = self._encode(x, emb, *context)
        for stage in self.output_blocks:
            h = self._run(stage, torch.cat([h, skips.pop()], dim=1), emb, *context)
        return _without_autocast(self.out, h)

    def _with_class(self, emb: Tensor, labels: Condition) -> Tensor:
        if labels is None:  # DDP wants a gradient for every parameter
            labels = torch.full_like(emb[:, 0], -1, dtype=torch.int64)
        if not isinstance(labels, Tensor):
            raise ValueError(f"UNet with num_classes={self.num_classes} takes labels (B,) int64.")
        rows = self.label_emb(labels.clamp(min=0))
        return emb + torch.where(labels[:, None] < 0, 0.0, rows)


class EncoderUNet(_Trunk):
    """Classifier of noisy images: the encoder of the U-Net, then attention pooling.

    It is guided-diffusion's `EncoderUNetModel` with pool "attention", its default.

    Args:
        image_size: height and width of x. The pooling has a parameter per position.
        in_channels: channels of x.
        out_channels: number of classes.
        model_channels: base width, like all that follow as in `UNet`.
        channel_mult: width of each level, in units of `model_channels`.
        num_res_blocks: ResBlocks per level.
        attention_downsample: levels with attention.
        head_channels: channels of a head, in the blocks and in the pooling.
        dropout: probability in every ResBlock.
        scale_shift_norm: how the ResBlocks are told the noise level.
        resblock_updown: how the resolution is reduced.
        split_heads_first: order of the qkv features in the blocks; the pooling has the other.

    Raises:
        ValueError: for numbers that do not fit together.

    Source: Dhariwal & Nichol 2021, section 4.3.

    Example:
        >>> network = EncoderUNet(image_size=8, in_channels=1, out_channels=10, model_channels=64)
        >>> network(torch.randn(2, 1, 8, 8), torch.tensor([0.0, 999.0])).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        image_size: int,
        in_channels: int,
        out_channels: int,
        model_channels: int = 128,
        channel_mult: tuple[float, ...] = (1, 2, 3, 4),
        num_res_blocks: int = 2,
        attention_downsample: tuple[int, ...] = (2, 4, 8),
        head_channels: int = 64,
        dropout: float = 0.0,
        scale_shift_norm: bool = True,
        resblock_updown: bool = True,
        split_heads_first: bool = True,
    ) -> None:
        blocks = _Blocks(
            emb_channels=4 * model_channels,
            dropout=dropout,
            scale_shift_norm=scale_shift_norm,
            resblock_updown=resblock_updown,
            num_heads=1,
            head_channels=head_channels,
            split_heads_first=split_heads_first,
            norm_groups=32,
        )
        super().__init__(
            blocks, in_channels, model_channels, channel_mult, num_res_blocks, attention_downsample
        )
        self.image_size = image_size
        channels = self.widths[-1]
        size, heads = image_size // self.reduction, _heads(channels, 1, head_channels)
        pool = AttentionPool(size, channels, heads, out_channels)
        self.out = nn.Sequential(GroupNorm32(channels), nn.SiLU(), pool)

    def forward(self, x: Tensor, noise_label: Tensor) -> Tensor:
        """(B, in_channels, image_size, image_size), (B,) -> logits (B, out_channels)."""
        if x.shape[2:] != (self.image_size, self.image_size):
            raise ValueError(
                f"EncoderUNet(image_size={self.image_size}) got images of shape {tuple(x.shape)}: "
                "resize them, or build the network for their size."
            )
        h, _ = self._encode(x, self.time_embed(noise_label))
        return _without_autocast(self.out, h)


def _without_autocast(module: nn.Module, x: Tensor) -> Tensor:
    """module(x) in the dtype of the module's weights."""
    with no_autocast(x):
        out: Tensor = module(x.to(next(module.parameters()).dtype))
    return out


def _heads(channels: int, num_heads: int, head_channels: int | None) -> int:
    """Number of heads in a block of this many channels."""
    name, divisor = "num_heads", num_heads
    if head_channels is not None:
        name, divisor = "head_channels", head_channels
    if divisor < 1 or channels % divisor:
        raise ValueError(
            f"Attention needs widths divisible by {name}, got {channels} channels and "
            f"{name}={divisor}: change {name}, channel_mult or attention_downsample."
        )
    return num_heads if head_channels is None else channels // head_channels


def _refuse_endless(model_channels: int, num_res_blocks: int, levels: int) -> None:
    """A number too many digits long would build until the memory is full."""
    if model_channels > 10**5 or num_res_blocks > 1000 or levels > 32:
        raise ValueError(
            "model_channels must be at most 100000, num_res_blocks 1000 and channel_mult 32 "
            f"numbers long, got {model_channels}, {num_res_blocks} and {levels}."
        )


def _check_attention(attention_downsample: Sequence[int], levels: int) -> None:
    factors = [2**level for level in range(levels)]
    if not set(attention_downsample) <= set(factors):
        raise ValueError(
            f"attention_downsample={tuple(attention_downsample)} must name levels by their factor, "
            f"which are {factors} for a channel_mult of length {levels}."
        )
