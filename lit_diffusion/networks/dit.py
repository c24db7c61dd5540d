"""DiT: a vision transformer whose blocks are told noise level and condition by adaLN-Zero.

Names and shapes of the parameters are those of the published checkpoints, which load with
`load_state_dict`; their pos_embed is a table, which is not trained. Where diffusers'
DiTTransformer2DModel differs, it is in two defaults: its sinusoids have frequencies
10000^(-k / 127) for 10000^(-k / 128), and its second norm an eps of 1e-5 for 1e-6.

Source: Peebles & Xie 2022, "Scalable Diffusion Models with Transformers" (arXiv 2212.09748).
"""

from functools import partial
from typing import cast

from torch import Tensor, nn

from lit_diffusion.networks.conditions import (
    Condition,
    Embedding,
    condition_embedding,
    joined,
    told,
)
from lit_diffusion.networks.layers import TimestepMLP
from lit_diffusion.networks.transformers import (
    MLP,
    AdaLNBlock,
    Attention,
    FinalLayer,
    LayerNorm32,
    PatchEmbed,
    check_images,
    check_sizes,
    init_adaln_,
    run,
    sincos_2d,
    unpatchify,
)

FREQUENCIES = 256
"""Sinusoids of the noise level, at any width."""


class DiT(nn.Module):
    """Transformer on patches with adaptive layer norms. A new one says 0.

    | size | width | depth | num_heads |
    |------|-------|-------|-----------|
    | S    | 384   | 12    | 6         |
    | B    | 768   | 12    | 12        |
    | L    | 1024  | 24    | 16        |
    | XL   | 1152  | 28    | 16        |

    Published are XL/2 (patch_size=2) on latents 4x32x32 and 4x64x64, with num_classes=1000 and a
    learned variance (out_channels=8).

    At most one of `num_classes`, `context_dim`, `vector_dim` and `num_words` is given; see
    `conditions` for what each takes. Labels and vectors are added to the embedding of the noise
    level, tokens and words are joined to the tokens of the patches.

    Under autocast the embedding of the noise level and the final layer stay in the dtype of their
    weights.

    Args:
        image_size: height and width of x.
        in_channels: channels of x.
        out_channels: channels of the result: the images', or twice that if the variance is learned.
        patch_size: height and width of a patch; divides `image_size`.
        width: of the tokens, divisible by 4.
        depth: number of blocks.
        num_heads: of attention; divides `width`.
        mlp_ratio: hidden width of an MLP, in units of `width`.
        num_classes: number of classes; there is a row more, for none.
        context_dim: width of a condition's tokens.
        vector_dim: width of a condition's vector.
        num_words: of a condition's vocabulary.
        gradient_checkpointing: store only what enters a block and compute its inside again in the
            backward pass: less memory, about a third more time, the same gradients.

    Raises:
        ValueError: for numbers that do not fit together.

    Example:
        >>> network = DiT(8, 1, 1, patch_size=2, width=32, depth=2, num_heads=2, num_classes=10)
        >>> x, noise_label = torch.randn(2, 1, 8, 8), torch.tensor([0.0, 999.0])
        >>> network(x, noise_label, torch.tensor([7, -1])).shape
        torch.Size([2, 1, 8, 8])
    """

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
        context_dim: int | None = None,
        vector_dim: int | None = None,
        num_words: int | None = None,
        gradient_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        check_sizes(image_size, patch_size, width, depth, num_heads)
        self.image_size, self.patch_size = image_size, patch_size
        self.side = image_size // patch_size
        self.num_classes, self.num_words = num_classes, num_words
        self.gradient_checkpointing = gradient_checkpointing

        self.x_embedder = PatchEmbed(in_channels, width, patch_size)
        self.t_embedder = nn.ModuleDict({"mlp": TimestepMLP(FREQUENCIES, width)})
        embedding = condition_embedding(width, num_classes, context_dim, vector_dim, num_words)
        self.y_embedder = nn.ModuleDict({"embedding_table": embedding} if embedding else {})
        self.register_buffer("pos_embed", sincos_2d(self.side, width))

        norm = partial(LayerNorm32, width, eps=1e-6, elementwise_affine=False)
        hidden = int(mlp_ratio * width)
        self.blocks = nn.ModuleList(
            AdaLNBlock(width, norm, Attention(width, num_heads), MLP(width, hidden, "tanh"))
            for _ in range(depth)
        )
        self.final_layer = FinalLayer(width, patch_size**2 * out_channels, norm)
        init_adaln_(self)

    def forward(self, x: Tensor, noise_label: Tensor, condition: Condition = None) -> Tensor:
        """What the network says of noisy images.

        Args:
            x: (B, in_channels, image_size, image_size).
            noise_label: (B,) noise levels, of 0 to 999 in published models, float32 or float64.
            condition: labels, vectors, tokens or words as in `conditions`; None for none anywhere.

        Returns:
            (B, out_channels, image_size, image_size) in the dtype of the weights.

        Raises:
            ValueError: for images of another size, or a condition of another kind.
        """
        check_images(x, self.image_size, type(self).__name__)
        known = told(self._embedding, condition, x, type(self).__name__)
        c = self.t_embedder["mlp"](noise_label)
        if known.vector is not None:
            c = c + known.vector
        h, mask = joined(self.x_embedder(x) + self.pos_embed, known)
        for block in self.blocks:
            h = run(block, h, c, mask, checkpointed=self.gradient_checkpointing)
        patches = self.final_layer(h[:, : self.side**2], c)
        return unpatchify(patches, self.side, self.patch_size)

    @property
    def _embedding(self) -> Embedding | None:
        return cast(Embedding, self.y_embedder["embedding_table"]) if self.y_embedder else None
