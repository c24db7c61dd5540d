"""U-ViT: a vision transformer with long skip connections. Noise level and condition are tokens.

    [condition][noise level][patches] -- in_blocks -- mid_block -- out_blocks -- patches -- out
                                             +-------- skips --------+

Parameters have the names and shapes of the authors' repository, so `load_state_dict` loads their
checkpoints. If the authors' configuration drops labels in training, its num_classes includes the
null class. In this case, subtract 1 for `UViT`: their num_classes=1001 becomes num_classes=1000.

Sources: Bao et al. 2023, "All are Worth Words: A ViT Backbone for Diffusion Models" (arXiv
2209.12152); github.com/baofff/U-ViT, file libs/uvit.py.
"""

import torch
from torch import Tensor, nn

from lit_diffusion.networks.conditions import (
    Classes,
    ConditionKind,
    Vectors,
    concat_tokens,
    embed_condition,
    resolve_condition,
)
from lit_diffusion.networks.layers import (
    MLP,
    Attention,
    LayerNorm32,
    PatchEmbed,
    TimestepMLP,
    check_image_size,
    check_sizes,
    maybe_checkpoint,
    no_autocast,
    timestep_embedding,
    unpatchify,
)
from lit_diffusion.protocols import Condition


class UViTBlock(nn.Module):
    """A pre-norm transformer block.

    With skip=True, the block first merges its input with the output of the corresponding block in
    the first half of the network.
    """

    def __init__(
        self, width: int, num_heads: int, hidden: int, qkv_bias: bool, skip: bool = False
    ) -> None:
        super().__init__()
        if skip:
            self.skip_linear = nn.Linear(2 * width, width)
        self.norm1, self.attn = LayerNorm32(width), Attention(width, num_heads, qkv_bias)
        self.norm2, self.mlp = LayerNorm32(width), MLP(width, hidden)

    def forward(self, x: Tensor, mask: Tensor | None, skip: Tensor | None = None) -> Tensor:
        """(B, N, D), (B, N), (B, N, D) -> (B, N, D)."""
        if skip is not None:
            x = self.skip_linear(torch.cat([x, skip], dim=2))  # (B, N, D)
        x = x + self.attn(self.norm1(x), mask)  # (B, N, D)
        return x + self.mlp(self.norm2(x))


class UViT(nn.Module):
    """Transformer on image patches, with the skip connections of a U-Net.

    | size | width | depth | num_heads |
    |------|-------|-------|-----------|
    | S    | 512   | 12    | 8         |
    | M    | 768   | 16    | 12        |
    | L    | 1024  | 20    | 16        |
    | H    | 1152  | 28    | 16        |

    Published models are named by size and patch_size. They include S/2 for CIFAR-10, M/4 and L/4
    for ImageNet at 64 x 64 pixels, L/4 and H/4 for latents of shape (4, 64, 64), and H/2 for
    latents of shape (4, 32, 32). Models of size H have final_conv=False, and their noise labels are
    the time steps 1 to 1000. The noise labels of the other models are real numbers from 0 to 999.

    The embedding of a label or vector is the first token of the sequence. The embeddings of tokens
    or words come last.

    Under autocast, norms and output layers still compute in the dtype of their weights.

    Args:
        image_size: height and width of x.
        in_channels: channels of x.
        out_channels: channels of the output: `in_channels`, or twice as many if the network also
            predicts the variance.
        patch_size: height and width of a patch, which must divide `image_size`.
        width: number of features of a token, divisible by 4.
        depth: number of blocks, not counting the middle block. The number must be even.
        num_heads: number of attention heads, which must divide `width`.
        mlp_ratio: number of hidden features of an MLP, divided by `width`.
        qkv_bias: whether queries, keys and values have biases.
        mlp_time_embed: whether the sinusoids of the noise level pass through an MLP.
        final_conv: whether the last layer is a 3x3 convolution.
        num_classes: short form of `condition=Classes(num_classes)`.
        condition: kind of condition that the network takes: `Classes`, `Vectors`, `Tokens` or
            `WordIds` of `networks.conditions`. If `condition` and `num_classes` are None, the
            network is unconditional. For published models that never drop labels, use
            `Classes(num_classes, null_class=False)`.
        gradient_checkpointing: whether to store only the inputs of each block in the forward pass,
            and compute its activations again in the backward pass. Training then needs less memory
            and takes about a third more time, with the same gradients.

    Raises:
        ValueError: if sizes do not fit together.

    Example:
        >>> network = UViT(8, 1, 1, patch_size=2, width=32, depth=2, num_heads=2, num_classes=10)
        >>> x, noise_label = torch.randn(2, 1, 8, 8), torch.tensor([0.0, 999.0])
        >>> network(x, noise_label, torch.tensor([7, -1])).shape
        torch.Size([2, 1, 8, 8])
    """

    block_names = ("in_blocks", "mid_block", "out_blocks")

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
        condition: ConditionKind | None = None,
        gradient_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        others = {"in_channels": in_channels, "out_channels": out_channels, "mlp_ratio": mlp_ratio}
        check_sizes(image_size, patch_size, width, depth, num_heads, **others)
        if depth % 2:
            raise ValueError(
                f"depth must be even, because skips connect pairs of blocks, got {depth}."
            )
        condition = resolve_condition(condition, num_classes)
        self.in_channels = in_channels
        self.num_classes = getattr(condition, "num_classes", None)
        self.num_words = getattr(condition, "num_words", None)
        self.image_size, self.patch_size, self.width = image_size, patch_size, width
        self.side = image_size // patch_size
        self.gradient_checkpointing = gradient_checkpointing

        self.time_embed = TimestepMLP(width, 4 * width, width) if mlp_time_embed else None
        # All kinds of conditions use the published name of the label embedding.
        self.label_emb = None if condition is None else condition.embedding(width)
        self.num_prefix = 1 + isinstance(condition, Classes | Vectors)  # tokens before the patches
        self.patch_embed = PatchEmbed(in_channels, width, patch_size)
        self.pos_embed = nn.Parameter(torch.empty(1, self.num_prefix + self.side**2, width))

        sizes = (width, num_heads, int(mlp_ratio * width), qkv_bias)
        half = range(depth // 2)
        self.in_blocks = nn.ModuleList(UViTBlock(*sizes) for _ in half)
        self.mid_block = UViTBlock(*sizes)
        self.out_blocks = nn.ModuleList(UViTBlock(*sizes, skip=True) for _ in half)
        self.norm = LayerNorm32(width)
        self.decoder_pred = nn.Linear(width, patch_size**2 * out_channels)
        conv = nn.Conv2d(out_channels, out_channels, kernel_size=3, padding=1)
        self.final_layer = conv if final_conv else nn.Identity()
        self._initialize_weights()

    def _initialize_weights(self) -> None:
        """Initialize linear maps and positions with a standard deviation of 0.02, biases with 0."""
        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

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
        check_image_size(x, self.image_size, "UViT")
        embedded = embed_condition(self.label_emb, condition, x, "UViT")
        x = self.patch_embed(x)  # (B, N, D)
        if self.time_embed is None:
            level = timestep_embedding(noise_label, self.width).to(self.pos_embed.dtype)  # (B, D)
        else:
            level = self.time_embed(noise_label)  # (B, D)
        prefix = [level] if embedded.vector is None else [embedded.vector, level]
        x = torch.cat([torch.stack(prefix, dim=1), x], dim=1) + self.pos_embed  # (B, 1 or 2 + N, D)
        x, mask = concat_tokens(x, embedded)  # (B, 1 or 2 + N + 1 + L, D)

        skips, checkpointing = [], self.gradient_checkpointing
        for block in self.in_blocks:
            x = maybe_checkpoint(block, x, mask, enabled=checkpointing)
            skips.append(x)
        x = maybe_checkpoint(self.mid_block, x, mask, enabled=checkpointing)
        for block in self.out_blocks:
            x = maybe_checkpoint(block, x, mask, skips.pop(), enabled=checkpointing)

        x = x[:, self.num_prefix : self.num_prefix + self.side**2]  # (B, N, D)
        with no_autocast(x):
            x = self.decoder_pred(self.norm(x.to(self.pos_embed.dtype)))  # (B, N, p p out_channels)
            x = unpatchify(x, self.side, self.patch_size)  # (B, out_channels, H, W)
            return self.final_layer(x)
