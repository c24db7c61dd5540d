"""U-ViT: a vision transformer in which noise level and condition are tokens, with long skips.

    [condition][noise level][patches] -- in_blocks -- mid_block -- out_blocks -- patches -- out
                                             +-------- skips --------+

Names and shapes of the parameters are those of the authors' repository: their checkpoints load with
`load_state_dict`. What its configurations call num_classes is 1 more than here where they drop
labels: 1001 there is num_classes=1000 here.

Sources: Bao et al. 2023, "All are Worth Words: A ViT Backbone for Diffusion Models" (arXiv
2209.12152); github.com/baofff/U-ViT, file libs/uvit.py.
"""

import torch
from torch import Tensor, nn

from lit_diffusion.networks.conditions import (
    Condition,
    GivesTokens,
    condition_embedding,
    joined,
    told,
)
from lit_diffusion.networks.layers import TimestepMLP, no_autocast, timestep_embedding
from lit_diffusion.networks.transformers import (
    MLP,
    Attention,
    LayerNorm32,
    PatchEmbed,
    check_images,
    check_sizes,
    run,
    unpatchify,
)


class _Block(nn.Module):
    """A pre-norm transformer block; one of the decoder joins the skip to its input first."""

    def __init__(
        self, width: int, num_heads: int, hidden: int, qkv_bias: bool, skip: bool = False
    ) -> None:
        super().__init__()
        if skip:
            self.skip_linear = nn.Linear(2 * width, width)
        self.norm1, self.attn = LayerNorm32(width), Attention(width, num_heads, qkv_bias)
        self.norm2, self.mlp = LayerNorm32(width), MLP(width, hidden)

    def forward(self, x: Tensor, mask: Tensor | None, skip: Tensor | None = None) -> Tensor:
        if skip is not None:
            x = self.skip_linear(torch.cat([x, skip], dim=2))
        x = x + self.attn(self.norm1(x), mask)
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class UViT(nn.Module):
    """Transformer on patches, with the skip connections of a U-Net.

    | size | width | depth | num_heads |
    |------|-------|-------|-----------|
    | S    | 512   | 12    | 8         |
    | M    | 768   | 16    | 12        |
    | L    | 1024  | 20    | 16        |
    | H    | 1152  | 28    | 16        |

    Published are S/2 on CIFAR-10 (patch_size=2), M/4 and L/4 on ImageNet-64, L/4 and H/4 on latents
    4x64x64, H/2 on latents 4x32x32; those of size H with final_conv=False.

    It wants continuous noise levels of 0 to 999, as the processes give them. At most one of
    `num_classes`, `context_dim`, `vector_dim` and `num_words` is given; see `conditions` for what
    each takes.

    Under autocast the output layers and norms stay in the dtype of their weights.

    Args:
        image_size: height and width of x.
        in_channels: channels of x.
        out_channels: channels of the result: the images', or twice that if the variance is learned.
        patch_size: height and width of a patch; divides `image_size`.
        width: of the tokens, divisible by 4.
        depth: number of blocks but for the middle one, even.
        num_heads: of attention; divides `width`.
        mlp_ratio: hidden width of an MLP, in units of `width`.
        qkv_bias: whether queries, keys and values have biases.
        mlp_time_embed: whether the sinusoids of the noise level pass through an MLP.
        final_conv: whether a 3x3 convolution ends the network.
        num_classes: number of classes, a token of the sequence.
        null_class: whether labels have a row for none; without one, labels must be given.
        context_dim: width of a condition's tokens, which are joined to the sequence.
        vector_dim: width of a condition's vector, a token of the sequence.
        num_words: of a condition's vocabulary; words are joined to the sequence.
        gradient_checkpointing: store only what enters a block and compute its inside again in the
            backward pass: less memory, about a third more time, the same gradients.

    Raises:
        ValueError: for numbers that do not fit together.

    Example:
        >>> network = UViT(8, 1, 1, patch_size=2, width=32, depth=2, num_heads=2, num_classes=10)
        >>> x, noise_label = torch.randn(2, 1, 8, 8), torch.tensor([0.0, 999.0])
        >>> network(x, noise_label, torch.tensor([7, -1])).shape
        torch.Size([2, 1, 8, 8])
    """

    def __init__(
        self,
        image_size: int,
        in_channels: int,
        out_channels: int,
        patch_size: int = 2,
        width: int = 512,
        depth: int = 12,
        num_heads: int = 8,
        mlp_ratio: float = 4.0,
        qkv_bias: bool = False,
        mlp_time_embed: bool = False,
        final_conv: bool = True,
        num_classes: int | None = None,
        null_class: bool = True,
        context_dim: int | None = None,
        vector_dim: int | None = None,
        num_words: int | None = None,
        gradient_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        check_sizes(image_size, patch_size, width, depth, num_heads)
        if depth % 2:
            raise ValueError(f"depth must be even, for each block a skip, got {depth}.")
        self.image_size, self.patch_size, self.width = image_size, patch_size, width
        self.num_classes, self.num_words = num_classes, num_words
        self.gradient_checkpointing = gradient_checkpointing

        self.time_embed = TimestepMLP(width, 4 * width, width) if mlp_time_embed else None
        self.label_emb = condition_embedding(  # of any condition, under the name that labels have
            width, num_classes, context_dim, vector_dim, num_words, null_class=null_class
        )
        has_vector = self.label_emb is not None and not isinstance(self.label_emb, GivesTokens)
        self.extras = 1 + has_vector
        self.side = image_size // patch_size
        self.patch_embed = PatchEmbed(in_channels, width, patch_size)
        self.pos_embed = nn.Parameter(torch.empty(1, self.extras + self.side**2, width))

        sizes = (width, num_heads, int(mlp_ratio * width), qkv_bias)
        half = range(depth // 2)
        self.in_blocks = nn.ModuleList(_Block(*sizes) for _ in half)
        self.mid_block = _Block(*sizes)
        self.out_blocks = nn.ModuleList(_Block(*sizes, skip=True) for _ in half)
        self.norm = LayerNorm32(width)
        self.decoder_pred = nn.Linear(width, patch_size**2 * out_channels)
        conv = nn.Conv2d(out_channels, out_channels, kernel_size=3, padding=1)
        self.final_layer = conv if final_conv else nn.Identity()
        self._initialise()

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
        h, mask = self._tokens(x, noise_label, condition)
        skips = []
        for block in self.in_blocks:
            h = run(block, h, mask, checkpointed=self.gradient_checkpointing)
            skips.append(h)
        h = run(self.mid_block, h, mask, checkpointed=self.gradient_checkpointing)
        for block in self.out_blocks:
            h = run(block, h, mask, skips.pop(), checkpointed=self.gradient_checkpointing)
        return self._image(h[:, self.extras : self.extras + self.side**2])

    def _tokens(
        self, x: Tensor, noise_label: Tensor, condition: Condition
    ) -> tuple[Tensor, Tensor | None]:
        """(B, N, width) [vector][noise level][patches][tokens], and which of them are there."""
        patches = self.patch_embed(x)
        if self.time_embed is None:
            level = timestep_embedding(noise_label, self.width).to(self.pos_embed.dtype)
        else:
            level = self.time_embed(noise_label)
        known = told(self.label_emb, condition, x, type(self).__name__)
        vectors = [level] if known.vector is None else [known.vector, level]
        tokens = torch.cat([torch.stack(vectors, dim=1), patches], dim=1) + self.pos_embed
        return joined(tokens, known)

    def _image(self, h: Tensor) -> Tensor:
        with no_autocast(h):
            patches = self.decoder_pred(self.norm(h.to(self.pos_embed.dtype)))
            out: Tensor = self.final_layer(unpatchify(patches, self.side, self.patch_size))
        return out

    def _initialise(self) -> None:
        """Linear maps and positions of standard deviation 0.02, as the authors'; biases 0."""
        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
