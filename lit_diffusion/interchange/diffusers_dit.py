"""Our DiT as diffusers' DiTTransformer2DModel: arguments and names of weights.

One thing differs that its config cannot express: the frequencies of its sinusoids are
10000^(-k / 127) for 10000^(-k / 128). The code in `FIX_FREQUENCIES` corrects a loaded pipeline.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

FIX_FREQUENCIES = """for block in pipeline.transformer.transformer_blocks:
    block.norm1.emb.time_proj.downscale_freq_shift = 0"""

# Our names of layers -> theirs: outside of blocks, shared by all blocks, within a block.
_OUTSIDE = {
    "x_embedder.proj": "pos_embed.proj",
    "final_layer.adaLN_modulation.1": "proj_out_1",
    "final_layer.linear": "proj_out_2",
}
_SHARED = {
    "t_embedder.mlp.0": "norm1.emb.timestep_embedder.linear_1",
    "t_embedder.mlp.2": "norm1.emb.timestep_embedder.linear_2",
    "y_embedder.embedding_table": "norm1.emb.class_embedder.embedding_table",
}
_BLOCK = {
    "attn.qkv": "attn1.to_q attn1.to_k attn1.to_v",
    "attn.proj": "attn1.to_out.0",
    "mlp.fc1": "ff.net.0.proj",
    "mlp.fc2": "ff.net.2",
    "adaLN_modulation.1": "norm1.linear",
}


def to_config(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Convert arguments of our DiT to those of DiTTransformer2DModel.

    Raises:
        ValueError: naming an argument that it has no equivalent of.
    """
    a = {"patch_size": 2, "width": 384, "depth": 12, "num_heads": 6, "mlp_ratio": 4} | dict(
        arguments
    )
    condition, num_classes = a.get("condition"), a.get("num_classes")
    if condition is not None or num_classes is None:
        raise ValueError(
            f"condition={condition}, num_classes={num_classes}: diffusers' DiTTransformer2DModel "
            "has labels, and nothing else; export with --format safetensors."
        )
    if a["mlp_ratio"] != 4:
        raise ValueError(f"mlp_ratio={a['mlp_ratio']}: diffusers' DiTTransformer2DModel has 4.")
    return {
        "num_attention_heads": a["num_heads"],
        "attention_head_dim": a["width"] // a["num_heads"],
        "in_channels": a["in_channels"],
        "out_channels": a["out_channels"],
        "num_layers": a["depth"],
        "sample_size": a["image_size"],
        "patch_size": a["patch_size"],
        "num_embeds_ada_norm": num_classes,
        "norm_type": "ada_norm_zero",
        "norm_eps": 1e-6,
    }


def to_diffusers(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert weights of our DiT to theirs, in which each block has an embedding of its own.

    The table of positions is left out, as they compute it.
    """
    depth = len({name.split(".")[1] for name in state if name.startswith("blocks.")})
    converted: dict[str, Tensor] = {}
    for name, value in state.items():
        layer, _, kind = name.rpartition(".")
        if layer in _OUTSIDE:
            converted[f"{_OUTSIDE[layer]}.{kind}"] = value
        elif layer in _SHARED:
            for i in range(depth):
                converted[f"transformer_blocks.{i}.{_SHARED[layer]}.{kind}"] = value.clone()
        elif layer.startswith("blocks."):
            _, block, within = layer.split(".", 2)
            theirs = _BLOCK[within].split()
            for other, part in zip(theirs, value.chunk(len(theirs)), strict=True):
                converted[f"transformer_blocks.{block}.{other}.{kind}"] = part
    return converted
