"""Magnitude-preserving U-Net, whose activations, weights and updates keep their size in training.

    x, 1 -- conv_in -- encoder_blocks -- middle_blocks -- decoder_blocks -- conv_out -- out
              |               |                                 |
              +---------------+------------- skips -------------+

The network is config G of EDM2. The magnitude of a tensor is its root mean square. Every layer is
scaled such that its output has magnitude 1 if its input consists of independent numbers of
magnitude 1. There are no group norms and no biases. Instead, x has an additional channel of ones.

The magnitudes of weights are fixed as well. A layer divides the weights of each output by their
norm, so the magnitude of the weights has no effect on the output. But weights grow in training,
because updates are orthogonal to them. The larger the weights are, the less an update changes them,
relative to their magnitude. Therefore, after each optimizer step, the weights of each output are
scaled to magnitude 1 (forced weight normalization). The learning rate then determines the relative
change of the weights per update, and only a learning-rate schedule lowers this change.

Shapes: images are (B, C, H, W), and the embedding of noise level and condition is (B, E).

Source: Karras et al. 2024, "Analyzing and Improving the Training Dynamics of Diffusion Models"
(EDM2, arXiv 2312.02696), section 2 and appendix B. The names of parameters differ from those of the
authors' code, because this file was written from the paper.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_diffusion.networks.conditions import EmbeddedCondition, LabelEmbedding, embed_condition
from lit_diffusion.networks.layers import (
    check_divisible,
    check_levels,
    maybe_checkpoint,
    no_autocast,
)
from lit_diffusion.networks.unet import heads_for
from lit_diffusion.protocols import Condition, check_positive

BRANCH_SHARE = 0.3
"""Share of a residual branch in its sum with the main path: `t` of `mp_sum`."""

SILU_MAGNITUDE = 0.596
"""Magnitude of silu(z) for a standard normal z, as in the paper."""

EPS = 1e-4
"""Smallest magnitude by which `normalize` divides."""


# Functions without parameters


def normalize(x: Tensor, dim: int | Sequence[int]) -> Tensor:
    """Divide a tensor by its magnitude over some dimensions.

    The magnitude is computed in float32 or better. The result has the dtype of x. If the magnitude
    is below 1e-4, the function divides by 1e-4. The paper adds a small number to the magnitude
    instead, but then the result depends on the scale of x.

    Source: Karras et al. 2024, Eq. 47 for weights; Karras et al. 2018 (ProGAN, arXiv 1710.10196),
        section 4.2, for pixels.

    Example:
        >>> normalize(torch.tensor([[3.0, 3.0], [5.0, -5.0]]), dim=1)
        tensor([[ 1.,  1.],
                [ 1., -1.]])
    """
    return (x / _magnitude(x, dim).clamp(min=EPS)).to(x.dtype)


def _magnitude(x: Tensor, dim: int | Sequence[int]) -> Tensor:
    dims = (dim,) if isinstance(dim, int) else tuple(dim)
    dtype = torch.promote_types(x.dtype, torch.float32)
    norm = torch.linalg.vector_norm(x, dim=dims, keepdim=True, dtype=dtype)
    return norm / math.sqrt(math.prod([x.shape[d] for d in dims]))


def mp_silu(x: Tensor) -> Tensor:
    """Compute `silu(x) / 0.596`, which has magnitude 1 if x is standard normal.

    Source: Karras et al. 2024, Eq. 81.

    Example:
        >>> round(mp_silu(torch.randn(10**6)).square().mean().sqrt().item(), 2)
        1.0
    """
    return F.silu(x) / SILU_MAGNITUDE


def mp_sum(a: Tensor, b: Tensor, t: float) -> Tensor:
    """Compute `((1 - t) * a + t * b) / sqrt((1 - t)**2 + t**2)`.

    If a and b are uncorrelated and have magnitude 1, so does the result.

    Source: Karras et al. 2024, Eq. 88.

    Example:
        >>> mp_sum(torch.tensor([2.0]), torch.tensor([4.0]), t=0.0)
        tensor([2.])
    """
    norm = math.hypot(1 - t, t)
    return torch.add(a * ((1 - t) / norm), b, alpha=t / norm)


def mp_cat(a: Tensor, b: Tensor, t: float = 0.5) -> Tensor:
    """Concatenate the channels of images such that t determines the contribution of b.

    The factors on a and b are `c * (1 - t) / sqrt(n_a)` and `c * t / sqrt(n_b)`, where n_a and n_b
    are the numbers of channels. The common factor c is chosen such that the result has magnitude 1
    if a and b have magnitude 1. With t = 1/2, a and b contribute equally to the output of the next
    layer, even if one of them has more channels.

    Args:
        a: (B, n_a, H, W).
        b: (B, n_b, H, W).
        t: contribution of b, in [0, 1].

    Source: Karras et al. 2024, Eq. 103.

    Example:
        >>> mp_cat(torch.ones(1, 4, 8, 8), torch.ones(1, 1, 8, 8))[0, :, 0, 0]
        tensor([0.7906, 0.7906, 0.7906, 0.7906, 1.5811])
    """
    n_a, n_b = a.shape[1], b.shape[1]
    c = math.sqrt(n_a + n_b) / math.hypot(1 - t, t)
    return torch.cat([a * (c * (1 - t) / math.sqrt(n_a)), b * (c * t / math.sqrt(n_b))], dim=1)


# Layers with parameters


class MPLinear(nn.Linear):
    """A linear map without bias, which divides the weights of each output by their norm.

    Source: Karras et al. 2024, Eq. 47.

    Example:
        >>> layer, x = MPLinear(64, 32), torch.randn(2, 64)
        >>> y = layer(x)
        >>> with torch.no_grad():
        ...     layer.weight *= 3
        >>> torch.allclose(layer(x), y, atol=1e-6)
        True
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        """Draw standard normal weights."""
        nn.init.normal_(self.weight)

    def forward(self, input: Tensor, gain: Tensor | float = 1.0) -> Tensor:
        """(..., in_features), scalar -> (..., out_features), the linear map times the gain."""
        return F.linear(input, _unit_norm(self.weight, gain))


class MPConv(nn.Conv2d):
    """A convolution without bias, which divides the weights of each output by their norm.

    The kernel size is odd. Height and width do not change. At the border, images are padded with
    zeros, so the outputs there have a smaller magnitude.

    Source: Karras et al. 2024, Eq. 47.

    Example:
        >>> MPConv(3, 8, kernel_size=3)(torch.randn(2, 3, 16, 16)).shape
        torch.Size([2, 8, 16, 16])
    """

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int) -> None:
        padding = kernel_size // 2
        super().__init__(in_channels, out_channels, kernel_size, padding=padding, bias=False)

    def reset_parameters(self) -> None:
        """Draw standard normal weights."""
        nn.init.normal_(self.weight)

    def forward(self, input: Tensor, gain: Tensor | float = 1.0) -> Tensor:
        """(B, in_channels, H, W), scalar -> (B, out_channels, H, W), the convolution times gain."""
        return F.conv2d(input, _unit_norm(self.weight, gain), padding=self.padding)


def _unit_norm(weight: Tensor, gain: Tensor | float = 1.0) -> Tensor:
    """Weights (out, ...) whose norm is `gain` for each output."""
    return normalize(weight, range(1, weight.ndim)) * (gain / math.sqrt(weight[0].numel()))


class MPLabelEmbedding(LabelEmbedding):
    """Embedding of labels: a magnitude-preserving linear map of the one-hot vector of the label.

    "No class" is one more class. With N classes in total, the one-hot vector is multiplied by
    sqrt(N), so that its magnitude is 1.

    Source: Karras et al. 2024, appendix B. The null class is ours.

    Example:
        >>> MPLabelEmbedding(10, width=16)(torch.tensor([7, -1])).vector.shape
        torch.Size([2, 16])
    """

    def __init__(self, num_classes: int, width: int) -> None:
        super().__init__(num_classes, width)
        self.weight = nn.Parameter(torch.randn(width, num_classes + 1))

    def forward(self, labels: Tensor) -> EmbeddedCondition:
        """(B,) -> vector (B, E)."""
        table = _unit_norm(self.weight, math.sqrt(self.num_classes + 1)).T  # (classes + 1, E)
        return EmbeddedCondition(vector=F.embedding(self.rows(labels), table))


class MPFourier(nn.Module):
    """Fourier features `sqrt(2) * cos(2 * pi * (f * l + phi))` of the noise label l.

    The frequencies f are normal with standard deviation `bandwidth`, and the phases phi are uniform
    in [0, 1]. Both are drawn at initialization and are constant from then on. The features are
    computed in float64.

    Source: Karras et al. 2024, Eq. 75, with bandwidth = 1.

    Example:
        >>> MPFourier(16, bandwidth=1.0)(torch.tensor([0.0, 1.5])).shape
        torch.Size([2, 16])
    """

    frequencies: Tensor
    phases: Tensor

    def __init__(self, dim: int, bandwidth: float) -> None:
        super().__init__()
        self.register_buffer("frequencies", bandwidth * torch.randn(dim))
        self.register_buffer("phases", torch.rand(dim))

    def forward(self, noise_label: Tensor) -> Tensor:
        """(B,) -> (B, dim) float64."""
        turns = noise_label.double()[:, None] * self.frequencies.double() + self.phases.double()
        return math.sqrt(2) * (2 * math.pi * turns).cos()


class CosineAttention(nn.Module):
    """`mp_sum` of x and self-attention of all pixels, with normalized queries, keys and values.

    Source: Karras et al. 2024, section 2.1 (config C), with the sum of config G.
    """

    def __init__(self, channels: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = MPLinear(channels, 3 * channels)
        self.proj = MPLinear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C, H, W)."""
        tokens = x.flatten(2).transpose(1, 2)  # (B, H W, C)
        heads = self.qkv(tokens).unflatten(2, (3, self.num_heads, -1))  # (B, H W, 3, heads, d)
        q, k, v = (part.transpose(1, 2) for part in normalize(heads, dim=4).unbind(2))
        h = F.scaled_dot_product_attention(q, k, v)  # (B, heads, H W, d)
        h = self.proj(h.transpose(1, 2).flatten(2))  # (B, H W, C)
        return mp_sum(x, h.transpose(1, 2).reshape(x.shape), BRANCH_SHARE)


class ResidualBranch(nn.Module):
    """Two convolutions with SiLUs. The embedding scales the input of the second SiLU.

    The scale is `1 + gain * linear(emb)`, where the learned scalar `gain` is 0 at initialization.
    """

    def __init__(
        self, in_channels: int, out_channels: int, emb_channels: int, dropout: float
    ) -> None:
        super().__init__()
        self.conv1 = MPConv(in_channels, out_channels, kernel_size=3)
        self.emb_linear = MPLinear(emb_channels, out_channels)
        self.emb_gain = nn.Parameter(torch.zeros(1))
        self.dropout = nn.Dropout(dropout)
        self.conv2 = MPConv(out_channels, out_channels, kernel_size=3)

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        """(B, in_channels, H, W), (B, E) -> (B, out_channels, H, W)."""
        h = self.conv1(mp_silu(x))  # (B, out_channels, H, W)
        scale = 1 + self.emb_linear(emb, self.emb_gain)  # (B, out_channels)
        h = mp_silu(h * scale.to(h.dtype)[..., None, None])
        return self.conv2(self.dropout(h))


class _Block(nn.Module):
    """The parts of a block of the encoder or decoder."""

    projects_first: ClassVar[bool]
    """Whether the residual branch is applied to the output of `proj`, not to its input."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        emb_channels: int,
        dropout: float,
        num_heads: int | None = None,
        resample: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.resample = nn.Identity() if resample is None else resample
        self.resamples = resample is not None
        self.proj: nn.Module = nn.Identity()
        if in_channels != out_channels:
            self.proj = MPConv(in_channels, out_channels, kernel_size=1)
        branch_channels = out_channels if self.projects_first else in_channels
        self.branch = ResidualBranch(branch_channels, out_channels, emb_channels, dropout)
        self.attention: nn.Module = nn.Identity()
        if num_heads is not None:
            self.attention = CosineAttention(out_channels, num_heads)


class EncoderBlock(_Block):
    """Pixel norm, then `mp_sum` of x and a residual branch, then attention if the block has heads.

    With pixel norm, every pixel has magnitude 1, so activations cannot grow from block to block.

    Source: Karras et al. 2024, appendix B, figure of config G.
    """

    projects_first = True

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        """(B, in_channels, H, W), (B, E) -> (B, out_channels, H', W')."""
        x = normalize(self.proj(self.resample(x)), dim=1)  # (B, out_channels, H', W')
        x = mp_sum(x, self.branch(x, emb), BRANCH_SHARE)
        return self.attention(x)


class DecoderBlock(_Block):
    """`mp_sum` of x and a residual branch, then attention if the block has heads.

    Source: Karras et al. 2024, appendix B, figure of config G.
    """

    projects_first = False

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        """(B, in_channels, H, W), (B, E) -> (B, out_channels, H', W')."""
        x = self.resample(x)  # (B, in_channels, H', W')
        x = mp_sum(self.proj(x), self.branch(x, emb), BRANCH_SHARE)  # (B, out_channels, H', W')
        return self.attention(x)


class MagnitudePreservingUNet(nn.Module):
    """Magnitude-preserving U-Net with forced weight normalization. Initially, it outputs zero.

    The network is config G of EDM2. In the paper, it is trained with `EDMPreconditioning`,
    `EDMProcess` and a learning rate that decays with the inverse square root of the step
    (`lr_schedules.WarmupInverseSqrt`). It works with all other parameterizations and processes,
    too. Images x should have magnitude 1, as network inputs of `EDMPreconditioning` have.

    `DiffusionModule` calls `normalize_weights` after each optimizer step. In a training loop of
    your own, call it yourself.

    Under autocast, the embedding of the noise level and the output layer still compute in the dtype
    of their weights.

    Args:
        in_channels: channels of x.
        out_channels: channels of the output. They are the channels of x, or twice as many if the
            network also predicts the variance.
        fourier_bandwidth: standard deviation of the frequencies of `MPFourier`. The paper has 1,
            which is right for the noise labels of `EDMProcess`, from -1.6 to 1.1. For labels from 0
            to 999, choose a number near 0.005.
        model_channels: base width.
        channel_mult: width of each level, in units of `model_channels`. Level i = 0, 1, ... works
            on feature maps whose height and width are divided by `2**i`.
        num_res_blocks: blocks per level of the encoder. The decoder has one more per level. Blocks
            that change the resolution come in addition.
        attention_downsample: downsampling factors `2**i` of the levels i that have attention. The
            first of the two middle blocks always has attention.
        head_channels: channels of an attention head.
        dropout: dropout probability in every residual branch.
        num_classes: number of classes. None means that the network is unconditional. Labels are
            0, ..., num_classes - 1, or -1 for no class.
        gradient_checkpointing: whether to store only the inputs of each block in the forward pass,
            and compute its activations again in the backward pass. Training then needs less memory
            and takes about a third more time, with the same gradients.

    Raises:
        ValueError: if sizes do not fit together.

    Source: Karras et al. 2024 (EDM2, arXiv 2312.02696), config G. The defaults are those of model S
        without dropout. The null class is ours. The authors' code also clips the output of each
        block to [-256, 256].

    Example:
        >>> network = MagnitudePreservingUNet(1, 1, 0.005, model_channels=64, num_classes=10)
        >>> x, noise_label = torch.randn(2, 1, 8, 8), torch.tensor([0.0, 999.0])
        >>> network(x, noise_label, torch.tensor([7, -1])).shape
        torch.Size([2, 1, 8, 8])
    """

    block_names = ("encoder_blocks", "middle_blocks", "decoder_blocks")

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        fourier_bandwidth: float,
        model_channels: int = 192,
        channel_mult: tuple[float, ...] = (1, 2, 3, 4),
        num_res_blocks: int = 3,
        attention_downsample: tuple[int, ...] = (4, 8),
        head_channels: int = 64,
        dropout: float = 0.0,
        num_classes: int | None = None,
        gradient_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        check_positive(
            out_channels=out_channels,
            fourier_bandwidth=fourier_bandwidth,
            head_channels=head_channels,
            num_classes=num_classes,
        )
        check_levels(
            in_channels, model_channels, channel_mult, num_res_blocks, attention_downsample, dropout
        )
        self.in_channels, self.num_classes = in_channels, num_classes
        self.fourier_bandwidth = fourier_bandwidth
        self.levels, self.gradient_checkpointing = len(channel_mult), gradient_checkpointing
        widths = [int(mult * model_channels) for mult in channel_mult]
        heads = [
            heads_for(width, 1, head_channels) if 2**level in attention_downsample else None
            for level, width in enumerate(widths)
        ]
        encoder_block = partial(EncoderBlock, emb_channels=max(widths), dropout=dropout)
        decoder_block = partial(DecoderBlock, emb_channels=max(widths), dropout=dropout)

        self.fourier = MPFourier(widths[0], fourier_bandwidth)
        self.noise_linear = MPLinear(widths[0], max(widths))
        self.label_emb = None if num_classes is None else MPLabelEmbedding(num_classes, max(widths))
        self.conv_in = MPConv(in_channels + 1, widths[0], kernel_size=3)
        channels, skip_channels = widths[0], [widths[0]]
        self.encoder_blocks = nn.ModuleList()
        for level, width in enumerate(widths):
            if level > 0:
                down = encoder_block(channels, channels, resample=nn.AvgPool2d(2))
                self.encoder_blocks.append(down)
                skip_channels.append(channels)
            for _ in range(num_res_blocks):
                self.encoder_blocks.append(encoder_block(channels, width, num_heads=heads[level]))
                skip_channels.append(channels := width)
        self.middle_blocks = nn.ModuleList(
            decoder_block(channels, channels, num_heads=num_heads)
            for num_heads in (heads_for(channels, 1, head_channels), None)
        )
        self.decoder_blocks = nn.ModuleList()
        for level, width in reversed(list(enumerate(widths))):
            if level < self.levels - 1:
                up = decoder_block(channels, channels, resample=nn.Upsample(scale_factor=2))
                self.decoder_blocks.append(up)
            for _ in range(num_res_blocks + 1):
                channels += skip_channels.pop()
                self.decoder_blocks.append(decoder_block(channels, width, num_heads=heads[level]))
                channels = width
        self.conv_out = MPConv(channels, out_channels, kernel_size=3)
        self.out_gain = nn.Parameter(torch.zeros(1))
        self.normalize_weights()

    @torch.no_grad()
    def normalize_weights(self) -> None:
        """Scale the weights of each output of each layer to magnitude 1, in place.

        Weights that do not require a gradient do not change. Weights whose magnitude is 1 up to
        four rounding errors do not change in any bit.

        Source: Karras et al. 2024, Eq. 66. There, the forward pass normalizes the weights before it
            uses them. Here, the forward pass changes no weights, because compiled graphs lost such
            changes (torch 2.14, convolutions on a CPU).
        """
        for weight in self.parameters():
            if weight.ndim > 1 and weight.requires_grad:  # not a gain
                magnitude = _magnitude(weight, range(1, weight.ndim))
                is_unit = (magnitude - 1).abs() < 4 * torch.finfo(weight.dtype).eps
                weight.div_(torch.where(is_unit, 1.0, magnitude.clamp(min=EPS)))

    def forward(self, x: Tensor, noise_label: Tensor, condition: Condition = None) -> Tensor:
        """Compute the output of the network for noisy images.

        Args:
            x: (B, in_channels, H, W). H and W must be divisible by `2**(levels - 1)`.
            noise_label: (B,) noise level of each image, encoded by `Process.noise_label`, in
                float32 or float64.
            condition: labels (B,) int64, with -1 for no class. None means that no image has a
                class.

        Returns:
            (B, out_channels, H, W) in the dtype of the weights.

        Raises:
            ValueError: if the condition has the wrong kind, or if H or W is not divisible by
                `2**(levels - 1)`.
        """
        check_divisible(x, self.levels, type(self).__name__)
        embedded = embed_condition(self.label_emb, condition, x, type(self).__name__)
        emb = self._embed(noise_label, embedded.vector)  # (B, E)
        x = self.conv_in(F.pad(x, (0, 0, 0, 0, 0, 1), value=1.0))  # (B, C, H, W)
        skips, checkpointing = [x], self.gradient_checkpointing
        for block in self.encoder_blocks:
            x = maybe_checkpoint(block, x, emb, enabled=checkpointing)
            skips.append(x)  # (B, C_i, H / 2^level, W / 2^level)
        for block in self.middle_blocks:
            x = maybe_checkpoint(block, x, emb, enabled=checkpointing)
        for block in self.decoder_blocks:
            if not block.resamples:
                x = mp_cat(x, skips.pop())  # (B, C_i + C_skip, H_i, W_i)
            x = maybe_checkpoint(block, x, emb, enabled=checkpointing)
        with no_autocast(x):
            x = x.to(self.conv_out.weight.dtype)
            return self.conv_out(x, self.out_gain)  # (B, out_channels, H, W)

    def _embed(self, noise_label: Tensor, label_vector: Tensor | None) -> Tensor:
        """Embed noise labels (B,), and add the embedding of class labels (B, E)."""
        features = self.fourier(noise_label).to(self.noise_linear.weight.dtype)
        with no_autocast(features):
            emb = self.noise_linear(features)  # (B, E)
            if label_vector is not None:
                emb = mp_sum(emb, label_vector, t=0.5)
            return mp_silu(emb)
