"""Convert arguments and weights between our U-Net and diffusers' UNet2DModel.

The architectures are equal under these conditions:

- All attention heads have the same size: either `head_channels` is set, or all layers with
  attention have the same number of channels.
- The first entry of `channel_mult` is 1.
- The condition of the network is a class label, or there is no condition.

UNet2DModel has no label for "no class". Therefore, the class embedding of an exported network has
one row more than there are classes. This last row is zero and means "no class".
"""

import inspect
import re
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from lit_diffusion.networks.layers import width_factor
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
"""Arguments of UNet2DModel that our U-Net cannot change, with their default values."""

# Names of our layers -> names in diffusers, outside blocks and within a block.
_TOP_LAYERS = {
    "time_embed.0": "time_embedding.linear_1",
    "time_embed.2": "time_embedding.linear_2",
    "input_blocks.0.0": "conv_in",
    "out.0": "conv_norm_out",
    "out.2": "conv_out",
}
_ATTENTION_LAYERS = {"norm": "group_norm", "qkv": "to_q to_k to_v", "proj_out": "to_out.0"}
_BLOCK_LAYERS = _ATTENTION_LAYERS | {
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
    """Convert arguments of our UNet to arguments of UNet2DModel.

    Raises:
        ValueError: if an argument has no equivalent in diffusers. The message names the argument.

    Example:
        >>> config = to_config({"in_channels": 3, "out_channels": 3, "head_channels": 64})
        >>> config["block_out_channels"], config["attention_head_dim"]
        ([128, 256, 256, 256], 64)
    """
    args = _with_defaults(arguments)
    if args["condition"] is not None:
        _refuse("condition", args["condition"], "labels or no condition")
    if args["two_times"]:
        _refuse("two_times", True, "one noise level")
    if args["channel_mult"][0] != 1:
        _refuse("channel_mult", args["channel_mult"], "a channel_mult that begins with 1")
    block_type = "ResnetDownsampleBlock2D" if args["resblock_updown"] else "DownBlock2D"
    down_types = ["AttnDownBlock2D" if attend else block_type for attend in _attention_levels(args)]
    resample = "resnet" if args["resblock_updown"] else "conv"
    return {
        **FIXED,
        "in_channels": args["in_channels"],
        "out_channels": args["out_channels"],
        "block_out_channels": _widths(args),
        "layers_per_block": args["num_res_blocks"],
        "down_block_types": down_types,
        "up_block_types": [name.replace("Down", "Up") for name in reversed(down_types)],
        "downsample_type": resample,
        "upsample_type": resample,
        "dropout": args["dropout"],
        "attention_head_dim": _head_channels(args),
        "norm_num_groups": args["norm_groups"],
        "attn_norm_num_groups": args["norm_groups"],
        "resnet_time_scale_shift": "scale_shift" if args["scale_shift_norm"] else "default",
        "num_class_embeds": None if args["num_classes"] is None else args["num_classes"] + 1,
    }


def from_config(config: Mapping[str, Any]) -> Json:
    """Convert arguments of UNet2DModel to arguments of our UNet.

    Raises:
        ValueError: if an argument has no equivalent in our UNet. The message names the argument.
    """
    for name, value in FIXED.items():
        if config.get(name, value) != value:
            raise ValueError(f"{name}={config[name]}: our UNet supports only {value}.")
    widths, groups = list(config["block_out_channels"]), config.get("norm_num_groups", 32)
    head, num_classes = config.get("attention_head_dim", 8), config.get("num_class_embeds")
    has_attention = [name.startswith("Attn") for name in config["down_block_types"]]
    scale_shift = config.get("resnet_time_scale_shift") == "scale_shift"
    arguments = {
        "in_channels": config.get("in_channels", 3),
        "out_channels": config.get("out_channels", 3),
        "model_channels": widths[0],
        "channel_mult": [width_factor(width, widths[0]) for width in widths],
        "num_res_blocks": config.get("layers_per_block", 2),
        "attention_downsample": [2**i for i, attend in enumerate(has_attention) if attend],
        "num_heads": 1,
        "head_channels": head,
        "dropout": config.get("dropout", 0.0),
        "num_classes": num_classes,
        "scale_shift_norm": scale_shift,
        "resblock_updown": config.get("downsample_type") == "resnet",
        "split_heads_first": False,
        "norm_groups": groups,
    }
    round_trip = to_config(arguments | {"head_channels": head or widths[-1]})
    round_trip |= {"num_class_embeds": num_classes, "attention_head_dim": head}
    defaults: Json = {"attn_norm_num_groups": None if scale_shift else groups}
    for name, value in (defaults | {"upsample_type": "conv"} | dict(config)).items():
        if name == "attn_norm_num_groups" and value is None and not scale_shift:
            value = groups
        if name in round_trip and value != round_trip[name]:
            raise ValueError(f"{name}={value}: our UNet here supports only {round_trip[name]}.")
    return arguments


def to_diffusers(state: Mapping[str, Tensor], arguments: Mapping[str, Any]) -> dict[str, Tensor]:
    """Convert weights and arguments of our UNet to weights of UNet2DModel."""
    args = _with_defaults(arguments)
    converted: dict[str, Tensor] = {}
    for name, value in state.items():
        layer, _, kind = name.rpartition(".")
        if layer == "label_emb":
            no_class = torch.zeros_like(value[:1])
            converted["class_embedding.weight"] = torch.cat([value, no_class])
            continue
        targets = _diffusers_layers(layer, args["num_res_blocks"])
        if _is_linear(targets[0]) and kind == "weight":
            value = value.squeeze(-1)
        if len(targets) == 3 and args["split_heads_first"]:
            # (heads, q k v, head_channels, ...) to (q k v, heads, head_channels, ...)
            split_heads = value.reshape(-1, 3, _head_channels(args), *value.shape[1:])
            value = split_heads.transpose(0, 1).flatten(0, 2)
        for target, part in zip(targets, value.chunk(len(targets)), strict=True):
            converted[f"{target}.{kind}"] = part
    return converted


def from_diffusers(
    state: Mapping[str, Tensor], config: Mapping[str, Any]
) -> tuple[Json, dict[str, Tensor]]:
    """Convert weights and arguments of UNet2DModel to arguments and weights of our UNet.

    A last row of zeros in the class embedding is assumed to mean "no class" and is dropped.

    Raises:
        KeyError: if an argument or a weight of UNet2DModel is missing.
        ValueError: if an argument has no equivalent in our UNet.
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
        sources = _diffusers_layers(layer, arguments["num_res_blocks"])
        value = torch.cat([state[f"{source}.{kind}"] for source in sources])
        converted[name] = value[..., None] if _is_linear(sources[0]) and kind == "weight" else value
    return arguments, converted


def _diffusers_layers(layer: str, num_res_blocks: int) -> list[str]:
    """Names in UNet2DModel for one of our layers: three for a layer of q, k and v, else one."""
    if layer in _TOP_LAYERS:
        return [_TOP_LAYERS[layer]]
    match = re.fullmatch(r"(input|middle|output)_blocks?\.(?:(\d+)\.)?(\d)\.(.+)", layer)
    assert match is not None
    stack, i, j, within = match.groups()
    kind = "attentions" if within in _ATTENTION_LAYERS else "resnets"
    if stack == "middle":
        block = f"mid_block.{kind}.{int(j) // 2}"
    else:
        side = "down" if stack == "input" else "up"
        level, k = divmod(int(i) - (side == "down"), num_res_blocks + 1)
        # The last part of a level changes the resolution.
        is_resampling = k == num_res_blocks and kind == "resnets" and (side == "down" or j != "0")
        block = f"{side}_blocks.{level}.{f'{side}samplers.0' if is_resampling else f'{kind}.{k}'}"
    return [f"{block}.{name}" for name in _BLOCK_LAYERS[within].split()]


def _is_linear(their_layer: str) -> bool:
    """Whether a layer is linear in UNet2DModel, but a 1x1 convolution in our UNet (attention)."""
    return ".to_" in their_layer


def _with_defaults(arguments: Mapping[str, Any]) -> Json:
    parameters = inspect.signature(UNet).parameters.values()
    return {p.name: p.default for p in parameters} | dict(arguments)


def _widths(args: Json) -> list[int]:
    return [int(mult * args["model_channels"]) for mult in args["channel_mult"]]


def _attention_levels(args: Json) -> list[bool]:
    return [2**level in args["attention_downsample"] for level in range(len(args["channel_mult"]))]


def _head_channels(args: Json) -> int:
    """Channels per attention head. UNet2DModel supports only one value."""
    if args["head_channels"] is not None:
        return int(args["head_channels"])
    if args["num_heads_upsample"] not in (None, args["num_heads"]):
        _refuse("num_heads_upsample", args["num_heads_upsample"], "one number of heads")
    widths = _widths(args)
    attending = {w for w, attend in zip(widths, _attention_levels(args), strict=True) if attend}
    if len(attending | {widths[-1]}) > 1:  # the middle block always attends
        _refuse("num_heads", args["num_heads"], "heads of one size, as head_channels gives them")
    return int(widths[-1] // args["num_heads"])


def _refuse(name: str, value: object, supported: str) -> NoReturn:
    raise ValueError(
        f"{name}={value}: diffusers' UNet2DModel supports only {supported}; export with --format "
        "safetensors, or train a network that UNet2DModel supports."
    )
