"""Convert arguments and weights of our DiT to diffusers' DiTTransformer2DModel.

The config of diffusers cannot express one difference between the two networks. The frequencies of
the timestep embedding are `10000**(-k / 128)` in our DiT, and `10000**(-k / 127)` in diffusers. The
code in `FIX_FREQUENCIES` gives a loaded pipeline our frequencies.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

FIX_FREQUENCIES = """for block in pipeline.transformer.transformer_blocks:
    block.norm1.emb.time_proj.downscale_freq_shift = 0"""

# Names of our layers -> names in diffusers. Each block in diffusers has a copy of "shared" layers.
_TOP_LAYERS = {
    "x_embedder.proj": "pos_embed.proj",
    "final_layer.adaLN_modulation.1": "proj_out_1",
    "final_layer.linear": "proj_out_2",
}
_SHARED_LAYERS = {
    "t_embedder.mlp.0": "norm1.emb.timestep_embedder.linear_1",
    "t_embedder.mlp.2": "norm1.emb.timestep_embedder.linear_2",
    "y_embedder.embedding_table": "norm1.emb.class_embedder.embedding_table",
}
_BLOCK_LAYERS = {
    "attn.qkv": "attn1.to_q attn1.to_k attn1.to_v",
    "attn.proj": "attn1.to_out.0",
    "mlp.fc1": "ff.net.0.proj",
    "mlp.fc2": "ff.net.2",
    "adaLN_modulation.1": "norm1.linear",
}


def to_config(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Convert arguments of our DiT to arguments of DiTTransformer2DModel.

    Raises:
        ValueError: if an argument has no equivalent in diffusers. The message names the argument.

    Example:
        >>> config = to_config({"image_size": 32, "in_channels": 4, "out_channels": 8,
        ...     "patch_size": 2, "width": 384, "depth": 12, "num_heads": 6, "num_classes": 1000})
        >>> config["num_layers"], config["attention_head_dim"]
        (12, 64)
    """
    args = {"patch_size": 2, "width": 384, "depth": 12, "num_heads": 6, "mlp_ratio": 4} | dict(
        arguments
    )
    condition, num_classes = args.get("condition"), args.get("num_classes")
    if condition is not None or num_classes is None:
        raise ValueError(
            f"condition={condition}, num_classes={num_classes}: diffusers' DiTTransformer2DModel "
            "supports only class labels; export with --format safetensors."
        )
    if args.get("two_times"):
        raise ValueError(
            "two_times=True: diffusers' DiTTransformer2DModel takes one noise level; export with "
            "--format safetensors."
        )
    if args["mlp_ratio"] != 4:
        raise ValueError(
            f"mlp_ratio={args['mlp_ratio']}: diffusers' DiTTransformer2DModel only has 4; export "
            "with --format safetensors."
        )
    return {
        "num_attention_heads": args["num_heads"],
        "attention_head_dim": args["width"] // args["num_heads"],
        "in_channels": args["in_channels"],
        "out_channels": args["out_channels"],
        "num_layers": args["depth"],
        "sample_size": args["image_size"],
        "patch_size": args["patch_size"],
        "num_embeds_ada_norm": num_classes,
        "norm_type": "ada_norm_zero",
        "norm_eps": 1e-6,
    }


def to_diffusers(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the weights of our DiT to the names in diffusers.

    In diffusers, each block has its own embeddings of the timestep and the class. Therefore, the
    embeddings of our DiT are copied to each block. The position embedding is left out, because
    diffusers computes it.
    """
    depth = len({name.split(".")[1] for name in state if name.startswith("blocks.")})
    converted: dict[str, Tensor] = {}
    for name, value in state.items():
        layer, _, kind = name.rpartition(".")
        if layer in _TOP_LAYERS:
            converted[f"{_TOP_LAYERS[layer]}.{kind}"] = value
        elif layer in _SHARED_LAYERS:
            for i in range(depth):
                converted[f"transformer_blocks.{i}.{_SHARED_LAYERS[layer]}.{kind}"] = value.clone()
        elif layer.startswith("blocks."):
            _, block, within = layer.split(".", 2)
            targets = _BLOCK_LAYERS[within].split()
            for target, part in zip(targets, value.chunk(len(targets)), strict=True):
                converted[f"transformer_blocks.{block}.{target}.{kind}"] = part
    return converted
