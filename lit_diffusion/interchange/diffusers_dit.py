"""Our DiT in the words of diffusers' DiTTransformer2DModel.

One thing is not the same there, and cannot be said in its config: the frequencies of its sinusoids
are 10000^(-k / 127) for 10000^(-k / 128). `SAME` makes a loaded network's ours.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

SAME = """for block in pipeline.transformer.transformer_blocks:
    block.norm1.emb.time_proj.downscale_freq_shift = 0"""

_OUTSIDE = {
    "x_embedder.proj": "pos_embed.proj",
    "final_layer.adaLN_modulation.1": "proj_out_1",
    "final_layer.linear": "proj_out_2",
}
_EMBEDDING = {
    "t_embedder.mlp.0": "norm1.emb.timestep_embedder.linear_1",
    "t_embedder.mlp.2": "norm1.emb.timestep_embedder.linear_2",
}
_BLOCK = {
    "attn.proj": "attn1.to_out.0",
    "mlp.fc1": "ff.net.0.proj",
    "mlp.fc2": "ff.net.2",
    "adaLN_modulation.1": "norm1.linear",
}


def to_config(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of DiTTransformer2DModel for those of our DiT.

    Raises:
        ValueError: by the argument that it has no word for.
    """
    a = {"patch_size": 2, "width": 384, "depth": 12, "num_heads": 6, "mlp_ratio": 4} | dict(
        arguments
    )
    for name, known in (("num_classes", True), ("context_dim", False), ("vector_dim", False)):
        if (a.get(name) is not None) != known:
            raise ValueError(
                f"{name}={a.get(name)}: diffusers' DiTTransformer2DModel has labels, and nothing "
                "else; export with --format safetensors."
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
        "num_embeds_ada_norm": a["num_classes"],
        "norm_type": "ada_norm_zero",
        "norm_eps": 1e-6,
    }


def to_diffusers(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our weights by their names: each of their blocks has an embedding of its own."""
    depth = len({name.split(".")[1] for name in state if name.startswith("blocks.")})
    found: dict[str, Tensor] = {}
    for kind in ("weight", "bias"):
        found |= {f"{theirs}.{kind}": state[f"{ours}.{kind}"] for ours, theirs in _OUTSIDE.items()}
        for i in range(depth):
            here, there = f"blocks.{i}", f"transformer_blocks.{i}"
            names = _EMBEDDING | {f"{here}.{ours}": theirs for ours, theirs in _BLOCK.items()}
            for ours, theirs in names.items():
                found[f"{there}.{theirs}.{kind}"] = state[f"{ours}.{kind}"].clone()
            qkv = state[f"{here}.attn.qkv.{kind}"].chunk(3)
            found |= {f"{there}.attn1.to_{n}.{kind}": p for n, p in zip("qkv", qkv, strict=True)}
    for i in range(depth):
        table = f"transformer_blocks.{i}.norm1.emb.class_embedder.embedding_table.weight"
        found[table] = state["y_embedder.embedding_table.weight"].clone()
    return found
