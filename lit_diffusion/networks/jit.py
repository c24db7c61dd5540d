"""JiT: a transformer on large patches of pixels, for networks that predict clean images.

    patches p x p x C -- bottleneck -- blocks told noise level and condition -- patches -- image

It has a DiT's blocks with the parts of language models: RMSNorm, SwiGLU, queries and keys that are
normed, rotary positions beside the fixed ones of DiT, and the class as tokens too. What makes
patches of 16 x 16 or 32 x 32 pixels work, far wider than the network, is the target: an image lies
near a manifold that the bottleneck can hold, noise does not. So give it
`lit_diffusion.parameterizations.Sample`.

Written from the paper: parameters have not the names of the authors' code, github.com/LTH14/JiT.

Source: Li & He 2025, "Back to Basics: Let Denoising Generative Models Denoise" (arXiv 2511.13720),
section 4; Su et al. 2021 (RoPE), Eq. 34; Shazeer 2020 (SwiGLU), Eq. 6; Henry et al. 2020 (QK-norm).
"""

from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_diffusion.networks.conditions import (
    Condition,
    GivesTokens,
    condition_embedding,
    joined,
    told,
)
from lit_diffusion.networks.layers import TimestepMLP
from lit_diffusion.networks.transformers import (
    AdaLNBlock,
    FinalLayer,
    RMSNorm32,
    check_images,
    check_sizes,
    grid_positions,
    init_adaln_,
    patchify,
    run,
    sincos_2d,
    unpatchify,
)


def rotary_angles(side: int, size: int, extra: int, device: torch.device | None = None) -> Tensor:
    """By how much a head turns its pairs of features at each position.

    A quarter of the features is turned by the row times 10000^(-4 k / size), a quarter by the
    column.

    Args:
        side: patches per row and column.
        size: of a head, in fours.
        extra: tokens after the patches, which are nowhere and not turned.
        device: of the result.

    Returns:
        (side^2 + extra, size / 2) float64.
    """
    k = torch.arange(size // 4, dtype=torch.float64, device=device)
    frequencies = 10_000 ** (-4 * k / size)
    angles = [position[:, None] * frequencies for position in grid_positions(side, device)]
    return F.pad(torch.cat(angles, dim=1), (0, 0, 0, extra))


def rotated(x: Tensor, turns: Tensor) -> Tensor:
    """Each pair of features (k, k + size / 2) of x turned, in the dtype of the turns.

    Args:
        x: (..., N, size).
        turns: (2, N, size / 2) cosine and sine of each angle.

    Returns:
        (..., N, size) in the dtype of x.
    """
    (cos, sin), (a, b) = turns, x.to(turns.dtype).chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x.dtype)


class _Attention(nn.Module):
    """Attention of normed queries and keys that know where they are."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        size = width // num_heads
        self.num_heads = num_heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.q_norm, self.k_norm = RMSNorm32(size, eps=1e-6), RMSNorm32(size, eps=1e-6)

    def forward(self, x: Tensor, turns: Tensor, mask: Tensor | None) -> Tensor:
        qkv = self.qkv(x).unflatten(2, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = rotated(self.q_norm(qkv[0]), turns), rotated(self.k_norm(qkv[1]), turns)
        keys = None if mask is None else mask[:, None, None]
        heads = F.scaled_dot_product_attention(q, k, qkv[2], keys)
        out: Tensor = self.proj(heads.transpose(1, 2).flatten(2))
        return out


class _SwiGLU(nn.Module):
    """Linear map of silu(gate) * value, as many parameters as an MLP of hidden width `hidden`."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_value = nn.Linear(width, 2 * (2 * hidden // 3))
        self.proj = nn.Linear(2 * hidden // 3, width)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.gate_value(x).chunk(2, dim=-1)
        out: Tensor = self.proj(F.silu(gate) * value)
        return out


class JiT(nn.Module):
    """Transformer on large patches, which go through a bottleneck. A new one says 0.

    | size | width | depth | num_heads | bottleneck | in_context_start |
    |------|-------|-------|-----------|------------|------------------|
    | B    | 768   | 12    | 12        | 128        | 4                |
    | L    | 1024  | 24    | 16        | 128        | 8                |
    | H    | 1280  | 32    | 16        | 256        | 10               |
    | G    | 1664  | 40    | 16        | 256        | 10               |

    Published are patch_size=16 at 256 pixels and 32 at 512, with in_context_tokens=32.

    At most one of `num_classes`, `context_dim`, `vector_dim` and `num_words` is given; see
    `conditions` for what each takes. Labels and vectors are added to the embedding of the noise
    level and are tokens from a block on, tokens and words are joined to the tokens of the patches.

    Under autocast the embedding of the noise level and the final layer stay in the dtype of their
    weights.

    Args:
        image_size: height and width of x.
        in_channels: channels of x.
        out_channels: channels of the result: the images', or twice that if the variance is learned.
        patch_size: height and width of a patch; divides `image_size`.
        width: of the tokens, such that a head has a width divisible by 4.
        depth: number of blocks.
        num_heads: of attention; divides `width`.
        bottleneck: width that a patch is reduced to before it is a token.
        mlp_ratio: hidden width of an MLP with as many parameters, in units of `width`.
        in_context_tokens: copies of a label's or vector's embedding, each with a learned addition,
            that are joined to the sequence; 0 for none.
        in_context_start: number of the block that sees them first.
        num_classes: number of classes; there is a row more, for none.
        context_dim: width of a condition's tokens.
        vector_dim: width of a condition's vector.
        num_words: of a condition's vocabulary.
        gradient_checkpointing: store only what enters a block and compute its inside again in the
            backward pass: less memory, about a third more time, the same gradients.

    Raises:
        ValueError: for numbers that do not fit together.

    Example:
        >>> network = JiT(8, 1, 1, patch_size=4, width=32, depth=2, num_heads=2, bottleneck=8)
        >>> network(torch.randn(2, 1, 8, 8), torch.tensor([0.0, 999.0])).shape
        torch.Size([2, 1, 8, 8])
    """

    pos_embed: Tensor

    def __init__(
        self,
        image_size: int,
        in_channels: int,
        out_channels: int,
        patch_size: int = 16,
        width: int = 768,
        depth: int = 12,
        num_heads: int = 12,
        bottleneck: int = 128,
        mlp_ratio: float = 4.0,
        in_context_tokens: int = 0,
        in_context_start: int = 4,
        num_classes: int | None = None,
        context_dim: int | None = None,
        vector_dim: int | None = None,
        num_words: int | None = None,
        gradient_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        check_sizes(image_size, patch_size, width, depth, num_heads)
        if width // num_heads % 4:
            raise ValueError(
                "JiT turns the features of a head in fours, got width / num_heads = "
                f"{width} / {num_heads}: change one."
            )
        self.image_size, self.patch_size = image_size, patch_size
        self.side, self.head_size = image_size // patch_size, width // num_heads
        self.num_classes, self.num_words = num_classes, num_words
        self.gradient_checkpointing = gradient_checkpointing
        self.in_context_start = in_context_start

        self.patch_embed = nn.Sequential(
            nn.Linear(patch_size**2 * in_channels, bottleneck, bias=False),
            nn.Linear(bottleneck, width),
        )
        self.register_buffer("pos_embed", sincos_2d(self.side, width))
        self.time_embed = TimestepMLP(256, width)
        self.condition = condition_embedding(width, num_classes, context_dim, vector_dim, num_words)
        self.in_context = None
        if in_context_tokens:
            self._check_in_context(in_context_tokens, depth)
            self.in_context = nn.Parameter(0.02 * torch.randn(1, in_context_tokens, width))

        norm = partial(RMSNorm32, width, eps=1e-6)
        hidden = int(mlp_ratio * width)
        self.blocks = nn.ModuleList(
            AdaLNBlock(width, norm, _Attention(width, num_heads), _SwiGLU(width, hidden))
            for _ in range(depth)
        )
        self.final_layer = FinalLayer(width, patch_size**2 * out_channels, norm)
        init_adaln_(self)

    def forward(self, x: Tensor, noise_label: Tensor, condition: Condition = None) -> Tensor:
        """What the network says of noisy images.

        Args:
            x: (B, in_channels, image_size, image_size).
            noise_label: (B,) noise levels, float32 or float64.
            condition: labels, vectors, tokens or words as in `conditions`; None for none anywhere.

        Returns:
            (B, out_channels, image_size, image_size) in the dtype of the weights.

        Raises:
            ValueError: for images of another size, or a condition of another kind.
        """
        check_images(x, self.image_size, type(self).__name__)
        known = told(self.condition, condition, x, type(self).__name__)
        c = self.time_embed(noise_label)
        if known.vector is not None:
            c = c + known.vector
        patches = self.patch_embed(patchify(x, self.patch_size)) + self.pos_embed
        h, mask = joined(patches, known)
        turns = self._turns(h)
        for i, block in enumerate(self.blocks):
            if self.in_context is not None and i == self.in_context_start:
                h = torch.cat([h, self.in_context + cast(Tensor, known.vector)[:, None]], dim=1)
                turns = self._turns(h)
            h = run(block, h, c, turns, mask, checkpointed=self.gradient_checkpointing)
        patches = self.final_layer(h[:, : self.side**2], c)
        return unpatchify(patches, self.side, self.patch_size)

    def _turns(self, h: Tensor) -> Tensor:
        """Computed anew, since a buffer would be cast with the weights."""
        extra = h.shape[1] - self.side**2
        angles = rotary_angles(self.side, self.head_size, extra, h.device)
        dtype = torch.promote_types(h.dtype, torch.float32)
        return torch.stack([angles.cos(), angles.sin()]).to(dtype)

    def _check_in_context(self, tokens: int, depth: int) -> None:
        if self.condition is None or isinstance(self.condition, GivesTokens):
            raise ValueError(
                f"in_context_tokens={tokens} repeat a label or vector, which the network is not "
                "given: pass num_classes or vector_dim, or in_context_tokens=0."
            )
        if not 0 <= self.in_context_start < depth:
            raise ValueError(
                f"in_context_start must name a block, 0 to {depth - 1}, got "
                f"{self.in_context_start}."
            )
