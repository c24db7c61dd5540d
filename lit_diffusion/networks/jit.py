"""JiT: a transformer on large patches of pixels that predicts the clean image.

    patches p x p x C -- bottleneck -- blocks with adaLN-Zero -- patches -- image

The network uses DiT's blocks with components of language models: RMSNorm, SwiGLU and QK-norm. In
addition to DiT's fixed position embeddings, it has rotary positions (RoPE). In addition to DiT's
class embedding, it can have class tokens in the sequence.

Use this network with `lit_diffusion.parameterizations.Sample`, which makes the clean image the
target. A patch of 16 x 16 or 32 x 32 pixels can have more values than a token has features. Images
lie near a low-dimensional manifold and fit through this bottleneck. Noise does not, so the network
could not predict it.

The names of parameters differ from the names in the authors' code, github.com/LTH14/JiT, because
this file was written from the paper.

Source: Li & He 2025, "Back to Basics: Let Denoising Generative Models Denoise" (arXiv 2511.13720),
section 4; Su et al. 2021 (RoPE), Eq. 34; Shazeer 2020 (SwiGLU), Eq. 6; Henry et al. 2020 (QK-norm).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_diffusion.networks.conditions import (
    Classes,
    ConditionKind,
    LabelEmbedding,
    Vectors,
    concat_tokens,
    embed_condition,
    resolve_condition,
)
from lit_diffusion.networks.layers import (
    FinalLayer,
    RMSNorm32,
    TimestepMLP,
    check_image_size,
    check_sizes,
    grid_positions,
    maybe_checkpoint,
    modulate,
    patchify,
    sincos_2d,
    unpatchify,
    xavier_uniform_,
    zero_,
)
from lit_diffusion.networks.routing import Route, TokenRouting
from lit_diffusion.protocols import Condition


def rope_cos_sin(
    side: int, head_dim: int, num_extra: int, device: torch.device | None = None
) -> Tensor:
    """Compute cosines and sines of the angles by which RoPE rotates the features of image patches.

    RoPE rotates pairs of features. The first half of the pairs of a head has the angles
    `row * 10000**(-4 * k / head_dim)`, where row is the patch's row and k = 0, 1, ... is the index
    of the pair within its half. The second half has the same angles with the column instead of the
    row.

    Args:
        side: number of patches in a row and in a column.
        head_dim: features of a head, divisible by 4.
        num_extra: number of tokens after the patches. RoPE does not rotate these tokens.
        device: device of the result.

    Returns:
        (2, side**2 + num_extra, head_dim / 2) float64.
    """
    k = torch.arange(head_dim // 4, dtype=torch.float64, device=device)
    frequencies = 10_000 ** (-4 * k / head_dim)
    angles = torch.cat([p[:, None] * frequencies for p in grid_positions(side, device)], dim=1)
    angles = F.pad(angles, (0, 0, 0, num_extra))  # (N, head_dim / 2)
    return torch.stack([angles.cos(), angles.sin()])


def apply_rope(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotate each pair of features (k, k + head_dim / 2) of queries or keys x (..., head_dim).

    `cos_sin` is the result of `rope_cos_sin`, reshaped to (2, ..., head_dim / 2) so that it
    broadcasts against x. The function computes in the dtype of `cos_sin`. The result has the dtype
    of x.
    """
    (cos, sin), (a, b) = cos_sin, x.to(cos_sin.dtype).chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x.dtype)


class RoPEAttention(nn.Module):
    """Multi-head attention with normalized queries and keys (QK-norm) and rotary positions."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        head_dim = width // num_heads
        self.num_heads = num_heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.q_norm, self.k_norm = RMSNorm32(head_dim, eps=1e-6), RMSNorm32(head_dim, eps=1e-6)

    def forward(self, x: Tensor, cos_sin: Tensor, mask: Tensor | None) -> Tensor:
        """(B, N, D), (2, [B,] N, d / 2), (B, N) -> (B, N, D), with heads of d features."""
        q, k, v = self.qkv(x).unflatten(2, (3, self.num_heads, -1)).unbind(2)  # (B, N, heads, d)
        cos_sin = cos_sin[..., None, :]  # (2, [B,] N, 1, d / 2)
        q, k = apply_rope(self.q_norm(q), cos_sin), apply_rope(self.k_norm(k), cos_sin)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))  # (B, heads, N, d) each
        attn_mask = None if mask is None else mask[:, None, None]  # (B, 1, 1, N)
        h = F.scaled_dot_product_attention(q, k, v, attn_mask)  # (B, heads, N, d)
        return self.proj(h.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    """SwiGLU MLP: a linear map of `silu(gate) * value`, where gate and value are linear maps of x.

    It has as many parameters as a plain MLP with `hidden` hidden features.
    """

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_value = nn.Linear(width, 2 * (2 * hidden // 3))
        self.proj = nn.Linear(2 * hidden // 3, width)

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) -> the same shape."""
        gate, value = self.gate_value(x).chunk(2, dim=-1)
        return self.proj(F.silu(gate) * value)


class JiTBlock(nn.Module):
    """A transformer block with adaptive RMS norms (adaLN-Zero).

    `JiT` initializes the block so that it is the identity.
    """

    def __init__(self, width: int, num_heads: int, hidden: int) -> None:
        super().__init__()
        self.norm1 = RMSNorm32(width, eps=1e-6)
        self.attn = RoPEAttention(width, num_heads)
        self.norm2 = RMSNorm32(width, eps=1e-6)
        self.mlp = SwiGLU(width, hidden)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: Tensor, c: Tensor, cos_sin: Tensor, mask: Tensor | None) -> Tensor:
        """(B, N, D), (B, D), (2, [B,] N, d / 2), (B, N) -> (B, N, D)."""
        parts = self.adaLN_modulation(c)[:, None].chunk(6, dim=2)  # (B, 1, D) each
        shift1, scale1, gate1, shift2, scale2, gate2 = parts
        x = x + gate1 * self.attn(modulate(self.norm1(x), shift1, scale1), cos_sin, mask)
        return x + gate2 * self.mlp(modulate(self.norm2(x), shift2, scale2))


class JiT(nn.Module):
    """Transformer on large image patches with a bottleneck. Outputs zero at initialization.

    | size | width | depth | num_heads | bottleneck | in_context_start |
    |------|-------|-------|-----------|------------|------------------|
    | B    | 768   | 12    | 12        | 128        | 4                |
    | L    | 1024  | 24    | 16        | 128        | 8                |
    | H    | 1280  | 32    | 16        | 256        | 10               |
    | G    | 1664  | 40    | 16        | 256        | 10               |

    The published models have patch_size=16 for images of 256 x 256 pixels, and patch_size=32 for
    512 x 512 pixels. All of them have in_context_tokens=32.

    The network adds the embedding of a label or vector to the embedding of the noise level. From
    block `in_context_start` on, the network also appends `in_context_tokens` tokens that contain
    the embedding of the label or vector. If the condition consists of tokens or words, the network
    appends their embeddings to the tokens of the patches.

    Under autocast, the embedding of the noise level and the final layer still compute in the dtype
    of their weights.

    Args:
        image_size: height and width of x.
        in_channels: channels of x.
        out_channels: channels of the output. They are the channels of x, or twice as many if the
            network also predicts the variance.
        patch_size: height and width of a patch, which must divide `image_size`.
        width: number of features of a token. `width / num_heads` must be divisible by 4.
        depth: number of blocks.
        num_heads: number of attention heads, which must divide `width`.
        bottleneck: number of features to which a patch is reduced before it becomes a token.
        mlp_ratio: ratio that determines the size of a block's MLP. The MLP, a SwiGLU, has as many
            parameters as a plain MLP with `mlp_ratio * width` hidden features.
        in_context_tokens: number of tokens to append for a label or vector; 0 for none. Each token
            is the embedding of the label or vector plus a learned vector.
        in_context_start: index of the first block that gets these tokens.
        num_classes: short form of `condition=Classes(num_classes)`.
        condition: kind of condition that the network takes: `Classes`, `Vectors`, `Tokens` or
            `WordIds` of `networks.conditions`. If it and `num_classes` are None, the network is
            unconditional.
        gradient_checkpointing: whether to store only the inputs of each block in the forward pass,
            and compute its activations again in the backward pass. Training then needs less memory
            and takes about a third more time, with the same gradients.
        token_routing: random tokens that skip some blocks in training, as in
            `networks.routing.TokenRouting`. None sends all tokens through all blocks.

    Raises:
        ValueError: if sizes do not fit together.

    Example:
        >>> network = JiT(8, 1, 1, patch_size=4, width=32, depth=2, num_heads=2, bottleneck=8)
        >>> network(torch.randn(2, 1, 8, 8), torch.tensor([0.0, 999.0])).shape
        torch.Size([2, 1, 8, 8])
    """

    block_names = ("blocks",)
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
        condition: ConditionKind | None = None,
        gradient_checkpointing: bool = False,
        token_routing: TokenRouting | None = None,
    ) -> None:
        super().__init__()
        others = {"in_channels": in_channels, "out_channels": out_channels, "mlp_ratio": mlp_ratio}
        check_sizes(
            image_size, patch_size, width, depth, num_heads, bottleneck=bottleneck, **others
        )
        if width // num_heads % 4:
            raise ValueError(
                "RoPE needs heads of a width divisible by 4, got width / num_heads = "
                f"{width} / {num_heads}: change one."
            )
        condition = resolve_condition(condition, num_classes)
        if in_context_tokens and not isinstance(condition, Classes | Vectors):
            raise ValueError(
                f"in_context_tokens={in_context_tokens} needs a label or vector, got "
                f"condition={condition}: pass Classes or Vectors, or in_context_tokens=0."
            )
        if in_context_tokens and not 0 <= in_context_start < depth:
            raise ValueError(
                f"in_context_start must be the index of a block, 0 to {depth - 1}, got "
                f"{in_context_start}."
            )
        self.in_channels = in_channels
        self.num_classes = getattr(condition, "num_classes", None)
        self.num_words = getattr(condition, "num_words", None)
        self.image_size, self.patch_size = image_size, patch_size
        self.side, self.head_dim = image_size // patch_size, width // num_heads
        self.in_context_tokens, self.in_context_start = in_context_tokens, in_context_start
        self.gradient_checkpointing = gradient_checkpointing
        self.token_routing = token_routing
        if token_routing is not None:
            token_routing.check_network(depth, self.side**2)

        self.patch_embed = nn.Sequential(
            nn.Linear(patch_size**2 * in_channels, bottleneck, bias=False),
            nn.Linear(bottleneck, width),
        )
        self.register_buffer("pos_embed", sincos_2d(self.side, width))
        self.time_embed = TimestepMLP(256, width)
        self.condition = None if condition is None else condition.embedding(width)
        if in_context_tokens:
            self.in_context = nn.Parameter(0.02 * torch.randn(1, in_context_tokens, width))

        hidden = int(mlp_ratio * width)
        self.blocks = nn.ModuleList(JiTBlock(width, num_heads, hidden) for _ in range(depth))
        norm = RMSNorm32(width, eps=1e-6)
        self.final_layer = FinalLayer(norm, width, patch_size**2 * out_channels)
        self._initialize_weights()

    def _initialize_weights(self) -> None:
        """Xavier-uniform linear maps, normal embeddings of std 0.02, zeros for adaLN-Zero."""
        xavier_uniform_(self)
        for module in (*self.time_embed, self.condition):
            if isinstance(module, nn.Linear | LabelEmbedding):
                nn.init.normal_(module.weight, std=0.02)
        for layer in (*self.blocks, self.final_layer):
            zero_(layer.get_submodule("adaLN_modulation"))
        zero_(self.final_layer.linear)

    def forward(self, x: Tensor, noise_label: Tensor, condition: Condition = None) -> Tensor:
        """Compute the output of the network for noisy images.

        Args:
            x: (B, in_channels, image_size, image_size).
            noise_label: (B,) noise level of each image, encoded by `Process.noise_label`, in
                float32 or float64.
            condition: condition of the images, of the type that this network accepts. For
                `Classes`, it is labels (B,) int64, with -1 for no class. None means that no image
                has a condition.

        Returns:
            (B, out_channels, image_size, image_size) in the dtype of the weights.

        Raises:
            ValueError: if the images have the wrong size, or if the condition has the wrong kind.
        """
        check_image_size(x, self.image_size, "JiT")
        embedded = embed_condition(self.condition, condition, x, "JiT")
        c = self.time_embed(noise_label)  # (B, D)
        if embedded.vector is not None:
            c = c + embedded.vector  # (B, D)
        x = self.patch_embed(patchify(x, self.patch_size))  # (B, N, D)
        x = x + self.pos_embed.to(x.dtype)  # (B, N, D), under autocast in its dtype as in `dit`
        x, mask = concat_tokens(x, embedded)  # (B, N + 1 + L, D)

        # Computed in every call, because `.to(dtype)` would also round a buffer to that dtype.
        num_extra = x.shape[1] - self.side**2 + self.in_context_tokens
        cos_sin = rope_cos_sin(self.side, self.head_dim, num_extra, x.device)
        cos_sin = cos_sin.to(torch.promote_types(x.dtype, torch.float32))
        route = Route(self.token_routing if self.training else None, self.side**2)
        for i, block in enumerate(self.blocks):
            x = route.before_block(i, x)  # (B, K + 1 + L, D) without routed tokens
            if self.in_context_tokens and i == self.in_context_start:
                assert embedded.vector is not None
                in_context = self.in_context + embedded.vector[:, None]
                x = torch.cat([x, in_context.to(x.dtype)], dim=1)
            positions = route.rope(cos_sin)[..., : x.shape[1], :]
            x = maybe_checkpoint(
                block, x, c, positions, route.mask(mask), enabled=self.gradient_checkpointing
            )
        x = self.final_layer(x[:, : self.side**2], c)  # (B, N, p p out_channels)
        return unpatchify(x, self.side, self.patch_size)  # (B, out_channels, H, W)
