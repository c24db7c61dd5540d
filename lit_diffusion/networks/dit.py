"""DiT: a vision transformer conditioned on noise level and condition by adaLN-Zero.

Parameters have the names and shapes of the published checkpoints, which load with
`load_state_dict`. As in the published checkpoints, pos_embed is a fixed table. The
DiTTransformer2DModel of diffusers differs in two defaults. Its sinusoids have the frequencies
`10000**(-k / 127)` instead of `10000**(-k / 128)`. Its second norm has an eps of 1e-5 instead of
1e-6.

Source: Peebles & Xie 2022, "Scalable Diffusion Models with Transformers" (arXiv 2212.09748).
"""

from typing import cast

from torch import Tensor, nn

from lit_diffusion.networks.conditions import (
    ConditionKind,
    LabelEmbedding,
    concat_tokens,
    embed_condition,
    resolve_condition,
)
from lit_diffusion.networks.layers import (
    MLP,
    Attention,
    FinalLayer,
    LayerNorm32,
    PatchEmbed,
    TimestepMLP,
    check_image_size,
    check_sizes,
    maybe_checkpoint,
    modulate,
    sincos_2d,
    unpatchify,
    xavier_uniform_,
    zero_,
)
from lit_diffusion.protocols import Condition


class DiTBlock(nn.Module):
    """A transformer block with adaptive layer norms (adaLN-Zero).

    `DiT` initializes it as the identity.

    Source: Peebles & Xie 2022, section 3.2.

    Example:
        >>> block = DiTBlock(width=32, num_heads=2, hidden=64)
        >>> block(torch.randn(2, 16, 32), torch.randn(2, 32)).shape
        torch.Size([2, 16, 32])
    """

    def __init__(self, width: int, num_heads: int, hidden: int) -> None:
        super().__init__()
        self.norm1 = LayerNorm32(width, eps=1e-6, elementwise_affine=False)
        self.attn = Attention(width, num_heads)
        self.norm2 = LayerNorm32(width, eps=1e-6, elementwise_affine=False)
        self.mlp = MLP(width, hidden, approximate="tanh")
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: Tensor, c: Tensor, mask: Tensor | None = None) -> Tensor:
        """(B, N, D), (B, D), (B, N) -> (B, N, D)."""
        parts = self.adaLN_modulation(c)[:, None].chunk(6, dim=2)  # (B, 1, D) each
        shift1, scale1, gate1, shift2, scale2, gate2 = parts
        x = x + gate1 * self.attn(modulate(self.norm1(x), shift1, scale1), mask)  # (B, N, D)
        return cast(Tensor, x + gate2 * self.mlp(modulate(self.norm2(x), shift2, scale2)))


class DiT(nn.Module):
    """Transformer on patches with adaptive layer norms. It outputs zero at initialization.

    | size | width | depth | num_heads |
    |------|-------|-------|-----------|
    | S    | 384   | 12    | 6         |
    | B    | 768   | 12    | 12        |
    | L    | 1024  | 24    | 16        |
    | XL   | 1152  | 28    | 16        |

    The published models are XL/2 (patch_size=2) on latents 4x32x32 and 4x64x64, with
    num_classes=1000 and a learned variance (out_channels=8).

    Labels and vectors are added to the embedding of the noise level. Tokens and words are appended
    to the tokens of the patches.

    Under autocast, the embedding of the noise level and the final layer stay in the dtype of their
    weights.

    Args:
        image_size: height and width of x.
        in_channels: channels of x.
        out_channels: channels of the output. If the variance is learned, twice the channels of the
            images.
        patch_size: height and width of a patch, which must divide `image_size`.
        width: features of a token, divisible by 4.
        depth: number of blocks.
        num_heads: number of attention heads, which must divide `width`.
        mlp_ratio: hidden width of an MLP, in units of `width`.
        num_classes: short form of condition=Classes(num_classes).
        condition: `Classes`, `Vectors`, `Tokens` or `WordIds` of `networks.conditions`.
        gradient_checkpointing: whether to store only the inputs of each block and compute its
            activations again in the backward pass. This needs less memory and about a third more
            time. The gradients are the same.

    Raises:
        ValueError: if sizes do not fit together.

    Example:
        >>> network = DiT(8, 1, 1, patch_size=2, width=32, depth=2, num_heads=2, num_classes=10)
        >>> x, noise_label = torch.randn(2, 1, 8, 8), torch.tensor([0.0, 999.0])
        >>> network(x, noise_label, torch.tensor([7, -1])).shape
        torch.Size([2, 1, 8, 8])
    """

    block_names = ("blocks",)
    pos_embed: Tensor

    def __init__(
        self,
        image_size: int,
        in_channels: int,
        out_channels: int,
        patch_size: int = 2,
        width: int = 384,
        depth: int = 12,
        num_heads: int = 6,
        mlp_ratio: float = 4.0,
        num_classes: int | None = None,
        condition: ConditionKind | None = None,
        gradient_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        others = {"in_channels": in_channels, "out_channels": out_channels, "mlp_ratio": mlp_ratio}
        check_sizes(image_size, patch_size, width, depth, num_heads, **others)
        condition = resolve_condition(condition, num_classes)
        self.in_channels = in_channels
        self.num_classes = getattr(condition, "num_classes", None)
        self.num_words = getattr(condition, "num_words", None)
        self.image_size, self.patch_size = image_size, patch_size
        self.side = image_size // patch_size
        self.gradient_checkpointing = gradient_checkpointing

        self.x_embedder = PatchEmbed(in_channels, width, patch_size)
        self.t_embedder = nn.ModuleDict({"mlp": TimestepMLP(256, width)})
        self.y_embedder = nn.ModuleDict()
        if condition is not None:
            self.y_embedder["embedding_table"] = condition.embedding(width)
        self.register_buffer("pos_embed", sincos_2d(self.side, width))

        hidden = int(mlp_ratio * width)
        self.blocks = nn.ModuleList(DiTBlock(width, num_heads, hidden) for _ in range(depth))
        norm = LayerNorm32(width, eps=1e-6, elementwise_affine=False)
        self.final_layer = FinalLayer(norm, width, patch_size**2 * out_channels)
        self._initialize_weights()

    def _initialize_weights(self) -> None:
        """Xavier-uniform linear maps, normal embeddings of std 0.02, zeros for adaLN-Zero."""
        xavier_uniform_(self)
        for module in (*self.t_embedder["mlp"].children(), *self.y_embedder.values()):
            if isinstance(module, nn.Linear | LabelEmbedding):
                nn.init.normal_(module.weight, std=0.02)
        for layer in (*self.blocks, self.final_layer):
            zero_(layer.get_submodule("adaLN_modulation"))
        zero_(self.final_layer.linear)

    def forward(self, x: Tensor, noise_label: Tensor, condition: Condition = None) -> Tensor:
        """Predict from noisy images.

        Args:
            x: (B, in_channels, image_size, image_size).
            noise_label: (B,) noise levels, from 0 to 999 in published models, float32 or float64.
            condition: condition of the images, of the kind that the network was built for. Labels
                are (B,) int64, with -1 for no class. None means no condition for all images.

        Returns:
            (B, out_channels, image_size, image_size) in the dtype of the weights.

        Raises:
            ValueError: if the images have the wrong size, or the condition has the wrong kind.
        """
        check_image_size(x, self.image_size, "DiT")
        embedding = self.y_embedder["embedding_table"] if self.y_embedder else None
        embedded = embed_condition(embedding, condition, x, "DiT")
        c = self.t_embedder["mlp"](noise_label)  # (B, D)
        if embedded.vector is not None:
            c = c + embedded.vector  # (B, D)
        x = self.x_embedder(x)  # (B, N, D)
        # Under autocast the residual stream has autocast's dtype, which is also the default of
        # Megatron-LM and diffusers. It halves the memory traffic, and all layers that read the
        # stream would round it to this dtype anyway.
        x = x + self.pos_embed.to(x.dtype)  # (B, N, D)
        x, mask = concat_tokens(x, embedded)  # (B, N + 1 + L, D)
        for block in self.blocks:
            x = maybe_checkpoint(block, x, c, mask, enabled=self.gradient_checkpointing)
        x = self.final_layer(x[:, : self.side**2], c)  # (B, N, p p out_channels)
        return unpatchify(x, self.side, self.patch_size)  # (B, out_channels, H, W)
