"""The U-Net of improved-diffusion and guided-diffusion, and a classifier built from its encoder.

    x -- input_blocks ------------------- skips ------------------- output_blocks -- out
         each level: n x (ResBlock,              each level: (n + 1) x (ResBlock,
         attention), then down                          attention), then up
              +----------------------- middle_block ------------------------+

Parameters have the names and shapes of improved-diffusion and guided-diffusion, so
`load_state_dict` loads the checkpoints of these repositories. Two arguments of `UNet` are named
differently than in these repositories:

* `attention_resolutions` lists resolutions in pixels, whereas `attention_downsample` of `UNet`
  lists downsampling factors. For images of 32x32 pixels, `attention_resolutions="16,8"` becomes
  `attention_downsample=(2, 4)`.
* `use_new_attention_order=True` of guided-diffusion becomes `split_heads_first=False`.

Shapes: images are (B, C, H, W), and the embedding of noise level and condition is (B, E). Tokens of
a condition are (B, L, E), and their mask is (B, L).

Sources: Nichol & Dhariwal 2021, appendix A; Dhariwal & Nichol 2021, section 3 and appendix;
github.com/openai/improved-diffusion and github.com/openai/guided-diffusion, file unet.py.
"""

from collections import OrderedDict
from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_diffusion.networks.conditions import (
    Classes,
    ConditionKind,
    EmbeddedCondition,
    LabelEmbedding,
    Tokens,
    WordIds,
    embed_condition,
    resolve_condition,
)
from lit_diffusion.networks.fused_norm import group_norm_silu
from lit_diffusion.networks.layers import (
    TimestepMLP,
    TwoTimesMLP,
    check_divisible,
    check_image_size,
    check_levels,
    maybe_checkpoint,
    no_autocast,
    self_attention,
    zero_,
)
from lit_diffusion.protocols import Condition, check_positive


class GroupNorm32(nn.GroupNorm):
    """Group norm with optional scale and shift and optional SiLU, computed by `fused_norm`.

    Statistics are computed in float32 or better. The result has the input's dtype.

    Source: Wu & He 2018, Eq. 1 and 7, with eps = 1e-5.
    """

    def __init__(self, channels: int, groups: int = 32) -> None:
        check_positive(norm_groups=groups)
        if channels % groups:
            raise ValueError(
                f"Group norm needs channels divisible by its groups, got {channels} channels "
                f"and {groups} groups: change the widths of the network or the groups."
            )
        super().__init__(groups, channels)

    def forward(
        self,
        input: Tensor,
        scale: Tensor | None = None,
        shift: Tensor | None = None,
        offset: Tensor | None = None,
        *,
        silu: bool = False,
    ) -> Tensor:
        """(B, C, ...), (B, C), (B, C), (B, C) -> (B, C, ...)."""
        tensors = (input, self.weight, self.bias, scale, shift, offset)
        return group_norm_silu(*tensors, num_groups=self.num_groups, eps=self.eps, silu=silu)


class PointwiseLinear(nn.Conv1d):
    """A linear map of tokens, whose weight has the shape of a 1D convolution of kernel size 1.

    Published U-Nets have weights of this shape.
    """

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(in_channels, out_channels, kernel_size=1)

    def forward(self, input: Tensor) -> Tensor:
        """(B, N, in_channels) -> (B, N, out_channels)."""
        return F.linear(input, self.weight.squeeze(-1), self.bias)


class Conv3x3(nn.Conv2d):
    """A 3x3 convolution that keeps height and width."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(in_channels, out_channels, kernel_size=3, padding=1)

    def forward(self, input: Tensor, add_bias: bool = True) -> Tensor:
        """Convolve images (B, in_channels, H, W). If `add_bias` is False, leave out the bias."""
        return F.conv2d(input, self.weight, self.bias if add_bias else None, padding=1)


def conv_and_bias(conv: nn.Module, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Compute `conv(x)`. On CUDA, leave out the bias of a `Conv3x3`, and return it separately.

    The next group norm adds the bias while it reads the images, and also computes the gradient of
    the bias. This saves two passes over the images.

    Returns:
        For a `Conv3x3` on CUDA, the output without bias, and the bias (B, out_channels). Otherwise,
        `conv(x)` and None.
    """
    if not x.is_cuda or not isinstance(conv, Conv3x3) or conv.bias is None:
        return conv(x), None
    return conv(x, add_bias=False), conv.bias.expand(x.shape[0], -1)


class ResBlock(nn.Module):
    """Residual block `x + conv(norm(conv(norm(x))))`, which also takes an embedding.

    The embedding contains the noise level and the condition. With `scale_shift_norm`, the embedding
    determines the scale and shift of the second norm (adaptive group norm). Otherwise, the
    embedding is added to the input of the second norm.

    If `resample` is not None, it changes the resolution of x and of the input of the first
    convolution.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        emb_channels: int,
        dropout: float,
        scale_shift_norm: bool,
        norm_groups: int,
        resample: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.scale_shift_norm = scale_shift_norm
        self.resample = resample
        self.in_layers = nn.Sequential(
            GroupNorm32(in_channels, norm_groups), nn.SiLU(), Conv3x3(in_channels, out_channels)
        )
        self.emb_layers = nn.Sequential(
            nn.SiLU(), nn.Linear(emb_channels, (1 + scale_shift_norm) * out_channels)
        )
        self.out_layers = nn.Sequential(
            GroupNorm32(out_channels, norm_groups),
            nn.SiLU(),
            nn.Dropout(dropout),
            zero_(Conv3x3(out_channels, out_channels)),
        )
        self.skip_connection: nn.Module = nn.Identity()
        if in_channels != out_channels:
            self.skip_connection = nn.Conv2d(in_channels, out_channels, kernel_size=1)

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        """(B, in_channels, H, W), (B, E) -> (B, out_channels, H', W')."""
        norm, _, conv = self.in_layers
        h = norm(x, silu=True)  # (B, in_channels, H, W)
        if self.resample is not None:
            h, x = self.resample(h), self.resample(x)  # (B, in_channels, H', W')
        h, bias = conv_and_bias(conv, h)  # (B, out_channels, H', W'), and (B, out_channels) or None

        emb = self.emb_layers(emb)  # (B, 1 or 2 x out_channels)
        norm, _, dropout, conv = self.out_layers
        if self.scale_shift_norm:
            h = norm(h, *emb.chunk(2, dim=1), bias, silu=True)
        else:
            h = norm(h, offset=emb if bias is None else emb + bias, silu=True)
        h = conv(dropout(h))  # (B, out_channels, H', W')
        return self.skip_connection(x) + h


class AttentionBlock(nn.Module):
    """Residual block `x + attention(norm(x))`, in which every pixel attends to all pixels.

    Source: Ho et al. 2020, appendix B.
    """

    def __init__(
        self, channels: int, num_heads: int, split_heads_first: bool, norm_groups: int
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.split_heads_first = split_heads_first
        self.norm = GroupNorm32(channels, norm_groups)
        self.qkv = PointwiseLinear(channels, 3 * channels)
        self.proj_out = zero_(PointwiseLinear(channels, channels))

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C, H, W)."""
        qkv = self.qkv(self.norm(x).flatten(2).transpose(1, 2))  # (B, H W, 3 C)
        h = self_attention(qkv, self.num_heads, split_heads_first=self.split_heads_first)
        h = self.proj_out(h)  # (B, H W, C)
        return x + h.transpose(1, 2).reshape(x.shape)


class CrossAttentionBlock(nn.Module):
    """Residual block `x + attention(norm(x))`, in which pixels attend to the condition's tokens.

    Source: Rombach et al. 2022 (latent diffusion), section 3.3.
    """

    def __init__(
        self, channels: int, num_heads: int, token_channels: int, norm_groups: int
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm = GroupNorm32(channels, norm_groups)
        self.q = PointwiseLinear(channels, channels)
        self.kv = nn.Linear(token_channels, 2 * channels)
        self.proj_out = zero_(PointwiseLinear(channels, channels))

    def forward(self, x: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
        """(B, C, H, W), (B, L, E), (B, L) bool -> (B, C, H, W)."""
        q = self.q(self.norm(x).flatten(2).transpose(1, 2))  # (B, H W, C)
        k, v = self.kv(tokens).to(q.dtype).chunk(2, dim=2)  # (B, L, C) each
        q, k, v = (part.unflatten(2, (self.num_heads, -1)).transpose(1, 2) for part in (q, k, v))
        h = F.scaled_dot_product_attention(q, k, v, mask[:, None, None])  # (B, heads, H W, d)
        h = self.proj_out(h.transpose(1, 2).flatten(2))  # (B, H W, C)
        return x + h.transpose(1, 2).reshape(x.shape)


class AttentionPool(nn.Module):
    """Attention pooling: one vector per image, with the mean of all pixels as the query.

    Source: Radford et al. 2021 (CLIP), section 2.4.
    """

    def __init__(self, image_size: int, channels: int, num_heads: int, out_channels: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        positions = torch.randn(channels, image_size**2 + 1) / channels**0.5
        self.positional_embedding = nn.Parameter(positions)
        self.qkv_proj = PointwiseLinear(channels, 3 * channels)
        self.c_proj = PointwiseLinear(channels, out_channels)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, image_size, image_size) -> (B, out_channels)."""
        x = x.flatten(2)  # (B, C, N)
        x = torch.cat([x.mean(dim=2, keepdim=True), x], dim=2)  # (B, C, 1 + N)
        qkv = self.qkv_proj((x + self.positional_embedding).transpose(1, 2))  # (B, 1 + N, 3 C)
        h = self_attention(qkv, self.num_heads, split_heads_first=False)  # (B, 1 + N, C)
        return self.c_proj(h[:, 0])


class ConditionedSequential(nn.ModuleList):
    """Sequence of layers. ResBlocks also get an embedding, and cross-attention also gets tokens."""

    def forward(
        self, x: Tensor, emb: Tensor, tokens: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """(B, C, H, W), (B, E), (B, L, E), (B, L) -> (B, C', H', W')."""
        for layer in self:
            if isinstance(layer, ResBlock):
                x = layer(x, emb)
            elif isinstance(layer, CrossAttentionBlock):
                x = layer(x, tokens, mask)
            else:
                x = layer(x)
        return x


class ZeroNullLabelEmbedding(LabelEmbedding):
    """Embedding of labels: a learned vector for each class, and zeros for no class.

    Without a learned vector for no class, the state_dict has the same keys and shapes as published
    checkpoints.
    """

    def __init__(self, num_classes: int, width: int) -> None:
        super().__init__(num_classes, width, null_class=False)
        self.null_class = True  # though the table has no row for it

    def forward(self, labels: Tensor) -> EmbeddedCondition:
        """(B,) -> vector (B, E)."""
        rows = F.embedding(labels.clamp(min=0), self.weight)
        return EmbeddedCondition(vector=torch.where(labels[:, None] < 0, 0.0, rows))


class _Encoder(nn.Module):
    """Base class with the embedding of the noise level, the encoder and the middle block.

    The arguments are the same as in `UNet`. In addition, `cross_attention` adds the blocks that a
    condition of tokens or words needs.
    """

    out: nn.Sequential

    def __init__(
        self,
        in_channels: int,
        model_channels: int,
        channel_mult: Sequence[float],
        num_res_blocks: int,
        attention_downsample: Sequence[int],
        *,
        num_heads: int,
        head_channels: int | None,
        dropout: float,
        scale_shift_norm: bool,
        resblock_updown: bool,
        split_heads_first: bool,
        norm_groups: int,
        cross_attention: bool = False,
        gradient_checkpointing: bool = False,
        two_times: bool = False,
    ) -> None:
        super().__init__()
        check_levels(
            in_channels, model_channels, channel_mult, num_res_blocks, attention_downsample, dropout
        )
        levels = len(channel_mult)
        self.in_channels, self.emb_channels = in_channels, 4 * model_channels
        self.widths = [int(mult * model_channels) for mult in channel_mult]
        self.attends = [2**level in attention_downsample for level in range(levels)]
        self.head_channels, self.split_heads_first = head_channels, split_heads_first
        self.resblock_updown, self.norm_groups = resblock_updown, norm_groups
        self.cross_attention = cross_attention
        self.gradient_checkpointing = gradient_checkpointing
        self.res_block = partial(
            ResBlock,
            emb_channels=self.emb_channels,
            dropout=dropout,
            scale_shift_norm=scale_shift_norm,
            norm_groups=norm_groups,
        )

        embedding = TwoTimesMLP if two_times else TimestepMLP
        self.time_embed = embedding(model_channels, self.emb_channels)
        channels = self.widths[0]
        self.input_blocks = nn.ModuleList([ConditionedSequential([Conv3x3(in_channels, channels)])])
        self.skip_channels = [channels]  # channels of the output of each input block
        for level, width in enumerate(self.widths):
            for _ in range(num_res_blocks):
                self.input_blocks.append(
                    self._stage(channels, width, num_heads, attend=self.attends[level])
                )
                self.skip_channels.append(channels := width)
            if level < levels - 1:
                self.input_blocks.append(ConditionedSequential([self._down(width)]))
                self.skip_channels.append(width)
        self.middle_block = self._stage(channels, channels, num_heads, attend=True)
        self.middle_block.append(self.res_block(channels, channels))

    def _stage(
        self, in_channels: int, out_channels: int, num_heads: int, *, attend: bool
    ) -> ConditionedSequential:
        """Return a ResBlock and, with `attend`, self-attention (and cross-attention if used)."""
        layers: list[nn.Module] = [self.res_block(in_channels, out_channels)]
        if attend:
            heads = heads_for(out_channels, num_heads, self.head_channels)
            layers.append(
                AttentionBlock(out_channels, heads, self.split_heads_first, self.norm_groups)
            )
            if self.cross_attention:
                layers.append(
                    CrossAttentionBlock(out_channels, heads, self.emb_channels, self.norm_groups)
                )
        return ConditionedSequential(layers)

    def _down(self, channels: int) -> nn.Module:
        """(B, C, H, W) -> (B, C, H / 2, W / 2)."""
        if self.resblock_updown:
            return self.res_block(channels, channels, resample=nn.AvgPool2d(2))
        conv = nn.Conv2d(channels, channels, kernel_size=3, stride=2, padding=1)
        return nn.Sequential(OrderedDict(op=conv))

    def _up(self, channels: int) -> nn.Module:
        """(B, C, H, W) -> (B, C, 2 H, 2 W)."""
        repeat = nn.Upsample(scale_factor=2)
        if self.resblock_updown:
            return self.res_block(channels, channels, resample=repeat)
        return nn.Sequential(OrderedDict(repeat=repeat, conv=Conv3x3(channels, channels)))

    def _encode(
        self, x: Tensor, emb: Tensor, *context: Tensor | None
    ) -> tuple[Tensor, list[Tensor]]:
        """(B, C, H, W), (B, E) -> output of the middle block, list of the input blocks' outputs."""
        check_divisible(x, len(self.widths), type(self).__name__)
        skips, checkpointing = [], self.gradient_checkpointing
        for block in self.input_blocks:
            x = maybe_checkpoint(block, x, emb, *context, enabled=checkpointing)
            skips.append(x)  # (B, C_i, H / 2^level, W / 2^level)
        return maybe_checkpoint(self.middle_block, x, emb, *context, enabled=checkpointing), skips

    def _apply_out(self, x: Tensor) -> Tensor:
        """Apply the layers `out`, in the dtype of their weights even under autocast."""
        norm, _, last = self.out
        with no_autocast(x):
            return last(norm(x.to(next(norm.parameters()).dtype), silu=True))


class UNet(_Encoder):
    """Diffusion U-Net as in improved-diffusion and guided-diffusion. Initially, it outputs zero.

    The network adds the embedding of a label or vector to the embedding of the noise level. The
    label -1 (no class) adds zero. If the condition consists of tokens or words, every
    self-attention block is followed by a cross-attention block that attends to the tokens or words.

    Under autocast, the embedding of the noise level and the output layers still compute in the
    dtype of their weights, as in guided-diffusion's half-precision mode.

    Args:
        in_channels: channels of x.
        out_channels: channels of the output. They are the channels of x, or twice as many if the
            network also predicts the variance.
        model_channels: base width, even.
        channel_mult: width of each level, in units of `model_channels`. Level i = 0, 1, ... works
            on feature maps whose height and width are divided by `2**i`.
        num_res_blocks: ResBlocks per level of the encoder. The decoder has one more per level.
        attention_downsample: downsampling factors `2**i` of the levels i that have attention. The
            middle block always has attention.
        num_heads: number of attention heads.
        head_channels: channels of a head. If set, it determines the number of heads, and
            `num_heads` and `num_heads_upsample` are not used.
        num_heads_upsample: number of heads in the decoder, as in improved-diffusion. None uses
            `num_heads`.
        dropout: dropout probability in every ResBlock.
        num_classes: short form of `condition=Classes(num_classes)`.
        condition: kind of condition that the network takes: `Classes`, `Vectors`, `Tokens` or
            `WordIds` of `networks.conditions`. If it and `num_classes` are None, the network is
            unconditional.
        scale_shift_norm: whether the embedding of noise level and condition determines a scale and
            a shift after the second norm of a ResBlock (adaptive group norm). If False, the
            embedding is added to the input of this norm.
        resblock_updown: whether ResBlocks change the resolution. If False, convolutions do.
        split_heads_first: whether attention splits its features into heads first, and then into
            queries, keys and values. If False, the order is reversed. A checkpoint needs the order
            with which it was trained. If you train from scratch, the order does not matter.
        norm_groups: number of groups in every group norm, which must divide the width of every
            level. Published models have 32 groups. Groups of a single channel are slow on a CPU in
            channels_last format.
        gradient_checkpointing: whether to store only the inputs of each block in the forward pass,
            and compute its activations again in the backward pass. Training then needs less memory
            and takes about a third more time, with the same gradients.
        two_times: whether the network also takes an interval of noise levels, as `MeanFlow` needs.
            The noise label is then (B, 2): the noise level and the interval of each image. A noise
            label (B,) means that the intervals are 0.

    Raises:
        ValueError: if sizes do not fit together.

    Example:
        >>> network = UNet(in_channels=1, out_channels=1, model_channels=32, num_classes=10)
        >>> x, noise_label = torch.randn(2, 1, 8, 8), torch.tensor([0.0, 999.0])
        >>> network(x, noise_label, torch.tensor([7, -1])).shape
        torch.Size([2, 1, 8, 8])
    """

    block_names = ("input_blocks", "middle_block", "output_blocks")

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
        condition: ConditionKind | None = None,
        scale_shift_norm: bool = True,
        resblock_updown: bool = False,
        split_heads_first: bool = True,
        norm_groups: int = 32,
        gradient_checkpointing: bool = False,
        two_times: bool = False,
    ) -> None:
        condition = resolve_condition(condition, num_classes)
        check_positive(out_channels=out_channels, num_heads_upsample=num_heads_upsample)
        super().__init__(
            in_channels,
            model_channels,
            channel_mult,
            num_res_blocks,
            attention_downsample,
            num_heads=num_heads,
            head_channels=head_channels,
            dropout=dropout,
            scale_shift_norm=scale_shift_norm,
            resblock_updown=resblock_updown,
            split_heads_first=split_heads_first,
            norm_groups=norm_groups,
            cross_attention=isinstance(condition, Tokens | WordIds),
            gradient_checkpointing=gradient_checkpointing,
            two_times=two_times,
        )
        self.num_classes = getattr(condition, "num_classes", None)
        self.num_words = getattr(condition, "num_words", None)
        embedding: nn.Module | None = None
        if isinstance(condition, Classes) and condition.null_class:
            embedding = ZeroNullLabelEmbedding(condition.num_classes, self.emb_channels)
        elif condition is not None:
            embedding = condition.embedding(self.emb_channels)
        is_labels = isinstance(condition, Classes)  # only these have the published name label_emb
        self.label_emb = embedding if is_labels else None
        self.condition_emb = None if is_labels else embedding

        self.output_blocks = nn.ModuleList()
        channels, skip_channels = self.widths[-1], list(self.skip_channels)
        for level, width in reversed(list(enumerate(self.widths))):
            for i in range(num_res_blocks + 1):
                channels += skip_channels.pop()
                block = self._stage(
                    channels, width, num_heads_upsample or num_heads, attend=self.attends[level]
                )
                if level > 0 and i == num_res_blocks:
                    block.append(self._up(width))
                self.output_blocks.append(block)
                channels = width
        self.out = nn.Sequential(
            GroupNorm32(channels, norm_groups), nn.SiLU(), zero_(Conv3x3(channels, out_channels))
        )

    def forward(self, x: Tensor, noise_label: Tensor, condition: Condition = None) -> Tensor:
        """Compute the output of the network for noisy images.

        Args:
            x: (B, in_channels, H, W). H and W must be divisible by `2**(levels - 1)`.
            noise_label: (B,) noise level of each image, encoded by `Process.noise_label`, such as a
                time step, which may be fractional. The dtype is float32 or float64 even if x is
                bfloat16, because bfloat16 cannot represent 999.
            condition: condition of the images, of the type that this network accepts. For
                `Classes`, it is labels (B,) int64, with -1 for no class. None means that no image
                has a condition.

        Returns:
            (B, out_channels, H, W) in the dtype of the weights.

        Raises:
            ValueError: if the condition has the wrong kind, or if H or W is not divisible by
                `2**(levels - 1)`.
        """
        embedding = self.condition_emb if self.label_emb is None else self.label_emb
        embedded = embed_condition(embedding, condition, x, "UNet")
        emb = self.time_embed(noise_label)  # (B, E)
        if embedded.vector is not None:
            emb = emb + embedded.vector  # (B, E)
        context = (embedded.tokens, embedded.mask)  # (B, 1 + L, E), (B, 1 + L), or None
        x, skips = self._encode(x, emb, *context)  # (B, C, H / 2^(levels - 1), W / 2^(levels - 1))
        for block in self.output_blocks:
            x = torch.cat([x, skips.pop()], dim=1)  # (B, C_i + C_skip, H_i, W_i)
            x = maybe_checkpoint(block, x, emb, *context, enabled=self.gradient_checkpointing)
        return self._apply_out(x)  # (B, out_channels, H, W)


class EncoderUNet(_Encoder):
    """Classifier of noisy images: the encoder of the U-Net, then attention pooling.

    The network is the same as in the classifiers of guided-diffusion, which use
    `EncoderUNetModel` with pool="attention".

    Args:
        image_size: height and width of x. They are fixed, because the pooling learns an embedding
            of each position.
        in_channels: channels of x.
        out_channels: number of classes.
        model_channels: base width, even.
        channel_mult: width of each level, in units of `model_channels`.
        num_res_blocks: ResBlocks per level.
        attention_downsample: downsampling factors `2**i` of the levels i = 0, 1, ... that have
            attention. The middle block always has attention.
        head_channels: number of channels of an attention head, in the blocks and in the pooling.
        dropout: dropout probability in every ResBlock.
        scale_shift_norm: whether the embedding of the noise level determines a scale and a shift
            after the second norm of a ResBlock (adaptive group norm). If False, the embedding is
            added to the input of this norm.
        resblock_updown: whether ResBlocks reduce the resolution. If False, convolutions do.
        split_heads_first: whether the attention of the blocks splits its features into heads
            first, and then into queries, keys and values. If False, the order is reversed. The
            pooling always splits into queries, keys and values first.

    Raises:
        ValueError: if sizes do not fit together.

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
        check_positive(image_size=image_size, out_channels=out_channels)
        super().__init__(
            in_channels,
            model_channels,
            channel_mult,
            num_res_blocks,
            attention_downsample,
            num_heads=1,
            head_channels=head_channels,
            dropout=dropout,
            scale_shift_norm=scale_shift_norm,
            resblock_updown=resblock_updown,
            split_heads_first=split_heads_first,
            norm_groups=32,
        )
        self.image_size = image_size
        channels, reduction = self.widths[-1], 2 ** (len(self.widths) - 1)
        heads = heads_for(channels, 1, head_channels)
        pool = AttentionPool(image_size // reduction, channels, heads, out_channels)
        self.out = nn.Sequential(GroupNorm32(channels), nn.SiLU(), pool)

    def forward(self, x: Tensor, noise_label: Tensor) -> Tensor:
        """(B, in_channels, image_size, image_size), (B,) -> logits (B, out_channels)."""
        check_image_size(x, self.image_size, "EncoderUNet")
        x, _ = self._encode(x, self.time_embed(noise_label))  # (B, C, H / 2^(levels - 1), ...)
        return self._apply_out(x)  # (B, out_channels)


def heads_for(channels: int, num_heads: int, head_channels: int | None) -> int:
    """Return the number of attention heads of a block.

    The number is `num_heads` if `head_channels` is None, and `channels / head_channels` otherwise.

    Raises:
        ValueError: if the channels cannot be divided among the heads.

    Example:
        >>> heads_for(128, num_heads=4, head_channels=None), heads_for(128, 4, head_channels=64)
        (4, 2)
    """
    name, divisor = "num_heads", num_heads
    if head_channels is not None:
        name, divisor = "head_channels", head_channels
    if divisor < 1 or channels % divisor:
        raise ValueError(
            f"Attention needs widths divisible by {name}, got {channels} channels and "
            f"{name}={divisor}: change {name}, channel_mult or attention_downsample."
        )
    return num_heads if head_channels is None else channels // head_channels
