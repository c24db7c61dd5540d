"""Our U-Net as diffusers' UNet2DModel and back: arguments and names of weights.

The two are one architecture where all heads have one size (head_channels, or num_heads with
attention at a single width), channel_mult begins with 1, and the condition is labels or nothing.
Their labels have no "no class": an export has a last row of zeros for it, after the classes.
"""

import inspect
import re
from collections.abc import Mapping
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

# Our names of layers -> theirs: outside of blocks, and within one.
_OUTSIDE = {
    "time_embed.0": "time_embedding.linear_1",
    "time_embed.2": "time_embedding.linear_2",
    "input_blocks.0.0": "conv_in",
    "out.0": "conv_norm_out",
    "out.2": "conv_out",
}
_ATTENTION = {"norm": "group_norm", "qkv": "to_q to_k to_v", "proj_out": "to_out.0"}
_LAYERS = _ATTENTION | {
    "in_layers.0": "norm1",
    "in_layers.2": "conv1",
    "emb_layers.1": "time_emb_proj",
    "out_layers.0": "norm2",
    "out_layers.3": "conv2",
    "skip_connection": "conv_shortcut",
    "op": "conv",
    "conv": "conv",
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
    for name, value in state.items():
        layer, _, kind = name.rpartition(".")
        if layer == "label_emb":
            no_class = torch.zeros_like(value[:1])
            converted["class_embedding.weight"] = torch.cat([value, no_class])
            continue
        theirs = _their_layers(layer, a["num_res_blocks"])
        if _is_linear(theirs[0]) and kind == "weight":
            value = value.squeeze(-1)
        if len(theirs) == 3 and a["split_heads_first"]:
            # (heads, q k v, head_channels, ...) to (q k v, heads, head_channels, ...)
            heads = value.reshape(-1, 3, _head_channels(a), *value.shape[1:])
            value = heads.transpose(0, 1).flatten(0, 2)
        for their_layer, part in zip(theirs, value.chunk(len(theirs)), strict=True):
            converted[f"{their_layer}.{kind}"] = part
    return converted


def from_diffusers(
    state: Mapping[str, Tensor], config: Mapping[str, Any]
) -> tuple[Json, dict[str, Tensor]]:
    """Convert weights of UNet2DModel to arguments and weights of our UNet.

    A last row of labels that is all 0 is taken for "no class", and left out.

    Args:
        state: their weights by name.
        config: arguments of UNet2DModel.

    Raises:
        KeyError: if an argument or a weight is missing.
    """
    arguments = from_config(config)
    if arguments["num_classes"] is not None:
        rows = state["class_embedding.weight"]
        arguments["num_classes"] = len(rows) - (not rows[-1].any())
    with torch.device("meta"):
        names = UNet(**arguments).state_dict()
    converted: dict[str, Tensor] = {}
    for name in names:
        layer, _, kind = name.rpartition(".")
        if layer == "label_emb":
            converted[name] = rows[: arguments["num_classes"]]
            continue
        theirs = _their_layers(layer, arguments["num_res_blocks"])
        value = torch.cat([state[f"{their_layer}.{kind}"] for their_layer in theirs])
        converted[name] = value[..., None] if _is_linear(theirs[0]) and kind == "weight" else value
    return arguments, converted


def _their_layers(layer: str, num_res_blocks: int) -> list[str]:
    """Name of our layer in UNet2DModel, or of three where ours has q, k and v in one."""
    if layer in _OUTSIDE:
        return [_OUTSIDE[layer]]
    match = re.fullmatch(r"(input|middle|output)_blocks?\.(?:(\d+)\.)?(\d)\.(.+)", layer)
    assert match is not None
    stack, i, j, within = match.groups()
    kind = "attentions" if within in _ATTENTION else "resnets"
    if stack == "middle":
        block = f"mid_block.{kind}.{int(j) // 2}"
    else:
        side = "down" if stack == "input" else "up"
        level, k = divmod(int(i) - (side == "down"), num_res_blocks + 1)
        # The last part of a level is smaller or larger than the others.
        resamples = k == num_res_blocks and kind == "resnets" and (side == "down" or j != "0")
        block = f"{side}_blocks.{level}.{f'{side}samplers.0' if resamples else f'{kind}.{k}'}"
    return [f"{block}.{name}" for name in _LAYERS[within].split()]


def _is_linear(their_layer: str) -> bool:
    """Whether a layer is a linear map of attention, which is a convolution of one pixel in ours."""
    return ".to_" in their_layer


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
