"""Our U-Net as diffusers' UNet2DModel and back: arguments and names of weights.

The two are one architecture where all heads have one size (head_channels, or num_heads with
attention at a single width), channel_mult begins with 1, and the condition is labels or nothing.
Their labels have no "no class": an export has a last row of zeros for it, after the classes.
"""

import inspect
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from lit_diffusion.networks.unet import UNet

Json = dict[str, Any]

FIXED: Json = {
    "center_input_sample": False,
    "time_embedding_type": "positional",
    "time_embedding_dim": None,
    "freq_shift": 0,
    "flip_sin_to_cos": True,
    "mid_block_type": "UNetMidBlock2D",
    "mid_block_scale_factor": 1,
    "downsample_padding": 1,
    "act_fn": "silu",
    "norm_eps": 1e-5,
    "add_attention": True,
    "class_embed_type": None,
}
"""Arguments of UNet2DModel that have these values, their defaults, in every network of ours."""

# Our names of layers -> theirs: within a residual block, and outside of all blocks.
_RES_BLOCK = {
    "in_layers.0": "norm1",
    "in_layers.2": "conv1",
    "emb_layers.1": "time_emb_proj",
    "out_layers.0": "norm2",
    "out_layers.3": "conv2",
    "skip_connection": "conv_shortcut",
}
_OUTSIDE = {
    "time_embed.0": "time_embedding.linear_1",
    "time_embed.2": "time_embedding.linear_2",
    "input_blocks.0.0": "conv_in",
    "out.0": "conv_norm_out",
    "out.2": "conv_out",
}


def to_config(arguments: Mapping[str, Any]) -> Json:
    """Convert arguments of our UNet to those of UNet2DModel.

    Raises:
        ValueError: naming an argument that it has no equivalent of.
    """
    a = _with_defaults(arguments)
    if a["condition"] is not None:
        _refuse("condition", a["condition"], "labels or no condition")
    if a["channel_mult"][0] != 1:
        _refuse("channel_mult", a["channel_mult"], "a channel_mult that begins with 1")
    plain = "ResnetDownsampleBlock2D" if a["resblock_updown"] else "DownBlock2D"
    downs = ["AttnDownBlock2D" if attend else plain for attend in _attention_levels(a)]
    resample = "resnet" if a["resblock_updown"] else "conv"
    return {
        **FIXED,
        "in_channels": a["in_channels"],
        "out_channels": a["out_channels"],
        "block_out_channels": _widths(a),
        "layers_per_block": a["num_res_blocks"],
        "down_block_types": downs,
        "up_block_types": [name.replace("Down", "Up") for name in reversed(downs)],
        "downsample_type": resample,
        "upsample_type": resample,
        "dropout": a["dropout"],
        "attention_head_dim": _head_channels(a),
        "norm_num_groups": a["norm_groups"],
        "attn_norm_num_groups": a["norm_groups"],
        "resnet_time_scale_shift": "scale_shift" if a["scale_shift_norm"] else "default",
        "num_class_embeds": None if a["num_classes"] is None else a["num_classes"] + 1,
    }


def from_config(config: Mapping[str, Any]) -> Json:
    """Convert arguments of UNet2DModel to those of our UNet.

    Raises:
        ValueError: naming an argument that ours has no equivalent of.
    """
    for name, value in FIXED.items():
        if config.get(name, value) != value:
            raise ValueError(f"{name}={config[name]}: our UNet is built with {value} alone.")
    widths, groups = list(config["block_out_channels"]), config.get("norm_num_groups", 32)
    head, num_classes = config.get("attention_head_dim", 8), config.get("num_class_embeds")
    attends = [name.startswith("Attn") for name in config["down_block_types"]]
    scale_shift = config.get("resnet_time_scale_shift") == "scale_shift"
    arguments = {
        "in_channels": config.get("in_channels", 3),
        "out_channels": config.get("out_channels", 3),
        "model_channels": widths[0],
        "channel_mult": [width / widths[0] for width in widths],
        "num_res_blocks": config.get("layers_per_block", 2),
        "attention_downsample": [2**i for i, attend in enumerate(attends) if attend],
        "num_heads": 1,
        "head_channels": head,
        "dropout": config.get("dropout", 0.0),
        "num_classes": num_classes,
        "scale_shift_norm": scale_shift,
        "resblock_updown": config.get("downsample_type") == "resnet",
        "split_heads_first": False,
        "norm_groups": groups,
    }
    ours = to_config(arguments | {"head_channels": head or widths[-1]})
    ours |= {"num_class_embeds": num_classes, "attention_head_dim": head}
    defaults: Json = {"attn_norm_num_groups": None if scale_shift else groups}
    for name, value in (defaults | {"upsample_type": "conv"} | dict(config)).items():
        if name == "attn_norm_num_groups" and value is None and not scale_shift:
            value = groups
        if name in ours and value != ours[name]:
            raise ValueError(f"{name}={value}: our UNet of these sizes has {ours[name]}.")
    return arguments


def to_diffusers(state: Mapping[str, Tensor], arguments: Mapping[str, Any]) -> dict[str, Tensor]:
    """Convert weights of our UNet to those of UNet2DModel.

    Args:
        state: our weights by name.
        arguments: of our UNet.
    """
    a = _with_defaults(arguments)
    converted: dict[str, Tensor] = {}
    for kind in ("weight", "bias"):
        for ours, theirs in _plain_layers(a):
            if f"{ours}.{kind}" in state:  # no skip_connection between equal widths
                converted[f"{theirs}.{kind}"] = state[f"{ours}.{kind}"]
        for ours, theirs in _attention_blocks(a):
            qkv, out = (state[f"{ours}.{part}.{kind}"] for part in ("qkv", "proj_out"))
            if kind == "weight":  # of 1x1 convolutions
                qkv, out = qkv.squeeze(-1), out.squeeze(-1)
            if a["split_heads_first"]:  # (heads, q k v, head_channels) to (q k v, heads, ...)
                heads = qkv.reshape(-1, 3, _head_channels(a), *qkv.shape[1:])
                qkv = heads.transpose(0, 1).flatten(0, 2)
            for name, part in zip("qkv", qkv.chunk(3), strict=True):
                converted[f"{theirs}.to_{name}.{kind}"] = part
            converted[f"{theirs}.to_out.0.{kind}"] = out
    if "label_emb.weight" in state:
        rows = state["label_emb.weight"]
        converted["class_embedding.weight"] = torch.cat([rows, torch.zeros_like(rows[:1])])
    return converted


def from_diffusers(
    state: Mapping[str, Tensor], config: Mapping[str, Any]
) -> tuple[Json, dict[str, Tensor]]:
    """Convert weights of UNet2DModel to arguments and weights of our UNet.

    A last row of labels that is all 0 is taken for "no class", and left out.

    Args:
        state: their weights by name.
        config: arguments of UNet2DModel.
    """
    arguments = from_config(config)
    converted: dict[str, Tensor] = {}
    for kind in ("weight", "bias"):
        for ours, theirs in _plain_layers(arguments):
            if f"{theirs}.{kind}" in state:
                converted[f"{ours}.{kind}"] = state[f"{theirs}.{kind}"]
        for ours, theirs in _attention_blocks(arguments):
            qkv = torch.cat([state[f"{theirs}.to_{name}.{kind}"] for name in "qkv"])
            out = state[f"{theirs}.to_out.0.{kind}"]
            converted[f"{ours}.qkv.{kind}"] = qkv[..., None] if kind == "weight" else qkv
            converted[f"{ours}.proj_out.{kind}"] = out[..., None] if kind == "weight" else out
    if arguments["num_classes"] is not None:
        rows = state["class_embedding.weight"]
        arguments["num_classes"] = num_classes = len(rows) - (not rows[-1].any())
        converted["label_emb.weight"] = rows[:num_classes]
    return arguments, converted


def _with_defaults(arguments: Mapping[str, Any]) -> Json:
    parameters = inspect.signature(UNet).parameters.values()
    return {p.name: p.default for p in parameters} | dict(arguments)


def _widths(a: Json) -> list[int]:
    return [int(mult * a["model_channels"]) for mult in a["channel_mult"]]


def _attention_levels(a: Json) -> list[bool]:
    return [2**level in a["attention_downsample"] for level in range(len(a["channel_mult"]))]


def _head_channels(a: Json) -> int:
    """Channels of a head, of which UNet2DModel has one number."""
    if a["head_channels"] is not None:
        return int(a["head_channels"])
    if a["num_heads_upsample"] not in (None, a["num_heads"]):
        _refuse("num_heads_upsample", a["num_heads_upsample"], "one number of heads")
    widths = _widths(a)
    attending = {w for w, attend in zip(widths, _attention_levels(a), strict=True) if attend}
    if len(attending | {widths[-1]}) > 1:  # the middle block always attends
        _refuse("num_heads", a["num_heads"], "heads of one size, as head_channels gives them")
    return int(widths[-1] // a["num_heads"])


def _refuse(name: str, value: object, supported: str) -> NoReturn:
    raise ValueError(
        f"{name}={value}: diffusers' UNet2DModel has {supported}; export with --format "
        "safetensors, or train a network that it has."
    )


def _plain_layers(a: Json) -> Iterator[tuple[str, str]]:
    """(our name, their name) of all layers but labels and the linear maps of attention."""
    yield from _OUTSIDE.items()
    for kind, ours, theirs in _blocks(a):
        if kind == "res":
            yield from (
                (f"{ours}.{name}", f"{theirs}.{other}") for name, other in _RES_BLOCK.items()
            )
        elif kind == "attention":
            yield f"{ours}.norm", f"{theirs}.group_norm"
        else:
            yield ours, theirs


def _attention_blocks(a: Json) -> list[tuple[str, str]]:
    return [(ours, theirs) for kind, ours, theirs in _blocks(a) if kind == "attention"]


def _blocks(a: Json) -> Iterator[tuple[str, str, str]]:
    """(kind, our name, their name) of all blocks; a kind is "res", "attention" or "conv"."""
    attends, per_level = _attention_levels(a), a["num_res_blocks"] + 1
    last, updown = len(attends) - 1, a["resblock_updown"]
    for level, attend in enumerate(attends):
        theirs = f"down_blocks.{level}"
        for j in range(per_level - 1):
            yield from _stage(f"input_blocks.{1 + level * per_level + j}", theirs, j, attend)
        if level < last:
            ours, theirs = f"input_blocks.{(level + 1) * per_level}.0", f"{theirs}.downsamplers.0"
            yield ("res", ours, theirs) if updown else ("conv", f"{ours}.op", f"{theirs}.conv")
    yield from _stage("middle_block", "mid_block", 0, attend=True)
    yield "res", "middle_block.2", "mid_block.resnets.1"
    for up, attend in enumerate(reversed(attends)):
        theirs = f"up_blocks.{up}"
        for j in range(per_level):
            ours = f"output_blocks.{up * per_level + j}"
            yield from _stage(ours, theirs, j, attend)
        if up < last:
            ours, theirs = f"{ours}.{1 + attend}", f"{theirs}.upsamplers.0"
            yield ("res", ours, theirs) if updown else ("conv", f"{ours}.conv", f"{theirs}.conv")


def _stage(ours: str, theirs: str, i: int, attend: bool) -> Iterator[tuple[str, str, str]]:
    yield "res", f"{ours}.0", f"{theirs}.resnets.{i}"
    if attend:
        yield "attention", f"{ours}.1", f"{theirs}.attentions.{i}"
