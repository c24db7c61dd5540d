"""DiT: a vision transformer whose layer norms adapt to noise level and condition (adaLN-Zero).

Parameters have the names and shapes of the published checkpoints, so `load_state_dict` loads these
checkpoints. As in these checkpoints, the state_dict also contains the fixed table `pos_embed`.

`DiTTransformer2DModel` of diffusers differs from this network in two defaults. In diffusers, the
sinusoids of the noise level have the frequencies `10000**(-k / 127)`, and the second norm of a
block has an eps of 1e-5. In this network, the frequencies are `10000**(-k / 128)`, and the eps is
1e-6.

Source: Peebles & Xie 2022, "Scalable Diffusion Models with Transformers" (arXiv 2212.09748).
"""

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
    TwoTimesMLP,
    check_image_size,
    check_sizes,
    maybe_checkpoint,
    modulate,
    sincos_2d,
    unpatchify,
    xavier_uniform_,
    zero_,
)
from lit_diffusion.networks.routing import Route, TokenRouting
from lit_diffusion.protocols import Condition


class DiTBlock(nn.Module):
    """A transformer block with adaptive layer norms (adaLN-Zero).

    `DiT` initializes the block so that it is the identity.

    Source: Peebles & Xie 2022, section 3.2.
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
        return x + gate2 * self.mlp(modulate(self.norm2(x), shift2, scale2))


class DiT(nn.Module):
    """Transformer on image patches with adaptive layer norms. Outputs zero at initialization.

    | size | width | depth | num_heads |
    |------|-------|-------|-----------|
    | S    | 384   | 12    | 6         |
    | B    | 768   | 12    | 12        |
    | L    | 1024  | 24    | 16        |
    | XL   | 1152  | 28    | 16        |

    The published models are DiT-XL/2 (patch_size=2) for latents of shape (4, 32, 32) and
    (4, 64, 64). They have num_classes=1000 and a learned variance, hence out_channels=8.

    The network adds the embedding of a label or vector to the embedding of the noise level. It
    appends the embeddings of tokens or words to the tokens of the patches.

    Under autocast, the embedding of the noise level and the final layer still compute in the dtype
    of their weights.

    Args:
        image_size: height and width of x.
        in_channels: channels of x.
        out_channels: channels of the output: `in_channels`, or twice as many if the network also
            predicts the variance.
        patch_size: height and width of a patch, which must divide `image_size`.
        width: number of features of a token, divisible by 4.
        depth: number of blocks.
        num_heads: number of attention heads, which must divide `width`.
        mlp_ratio: number of hidden features of an MLP, divided by `width`.
        num_classes: short form of `condition=Classes(num_classes)`.
        condition: kind of condition that the network takes: `Classes`, `Vectors`, `Tokens` or
            `WordIds` of `networks.conditions`. If it and `num_classes` are None, the network is
            unconditional.
        gradient_checkpointing: whether to store only the inputs of each block in the forward pass,
            and compute its activations again in the backward pass. Training then needs less memory
            and takes about a third more time, with the same gradients.
        token_routing: random tokens that skip some blocks in training, as in
            `networks.routing.TokenRouting`. None sends all tokens through all blocks.
        two_times: whether the network also takes an interval of noise levels, as `MeanFlow` needs.
            The noise label is then (B, 2), or (B,) for intervals of length 0.

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
        token_routing: TokenRouting | None = None,
        two_times: bool = False,
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
        self.token_routing = token_routing
        if token_routing is not None:
            token_routing.check_network(depth, self.side**2)

        self.x_embedder = PatchEmbed(in_channels, width, patch_size)
        self.t_embedder = nn.ModuleDict(
            {"mlp": TwoTimesMLP(256, width) if two_times else TimestepMLP(256, width)}
        )
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
        if isinstance(mlp := self.t_embedder["mlp"], TwoTimesMLP):
            zero_(mlp.interval[2])

    def forward(self, x: Tensor, noise_label: Tensor, condition: Condition = None) -> Tensor:
        """Compute the output of the network for noisy images.

        Args:
            x: (B, in_channels, image_size, image_size).
            noise_label: (B,) noise level of each image, encoded by `Process.noise_label`, in
                float32 or float64. In published models, noise labels range from 0 to 999.
            condition: condition of the images, of the type that this network accepts. For
                `Classes`, it is labels (B,) int64, with -1 for no class. None means that no image
                has a condition.

        Returns:
            (B, out_channels, image_size, image_size) in the dtype of the weights.

        Raises:
            ValueError: if the images have the wrong size, or if the condition has the wrong kind.
        """
        check_image_size(x, self.image_size, "DiT")
        embedding = self.y_embedder["embedding_table"] if self.y_embedder else None
        embedded = embed_condition(embedding, condition, x, "DiT")
        c = self.t_embedder["mlp"](noise_label)  # (B, D)
        if embedded.vector is not None:
            c = c + embedded.vector  # (B, D)
        x = self.x_embedder(x)  # (B, N, D)
        # Under autocast, the residual stream has autocast's dtype, as by default in Megatron-LM and
        # diffusers. Bfloat16 halves the memory traffic, and all layers that read the stream would
        # round it to this dtype anyway.
        x = x + self.pos_embed.to(x.dtype)  # (B, N, D)
        x, mask = concat_tokens(x, embedded)  # (B, N + 1 + L, D)
        route = Route(self.token_routing if self.training else None, self.side**2)
        for i, block in enumerate(self.blocks):
            x = route.before_block(i, x)  # (B, K + 1 + L, D) without routed tokens
            x = maybe_checkpoint(block, x, c, route.mask(mask), enabled=self.gradient_checkpointing)
        x = self.final_layer(x[:, : self.side**2], c)  # (B, N, p p out_channels)
        return unpatchify(x, self.side, self.patch_size)  # (B, out_channels, H, W)
