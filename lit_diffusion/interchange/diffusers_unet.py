"""Our U-Net in the words of diffusers' UNet2DModel, both ways.

The two are one architecture where all heads have one size (head_channels, or num_heads with
attention at a single width), channel_mult begins with 1, and the condition is labels or nothing.
Their labels have no "none": in an export it is a last row of zeros, after the classes.
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

_RES = {
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
    """The arguments of UNet2DModel for those of our UNet.

    Raises:
        ValueError: by the argument that it has no word for.
    """
    a = _complete(arguments)
    for name in ("context_dim", "vector_dim"):
        if a[name] is not None:
            _refuse(name, a[name], "labels or no condition")
    if a["channel_mult"][0] != 1:
        _refuse("channel_mult", a["channel_mult"], "a channel_mult that begins with 1")
    downs = [_block(attends, a["resblock_updown"]) for attends in _attends(a)]
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
        "attention_head_dim": _head_size(a),
        "norm_num_groups": a["norm_groups"],
        "attn_norm_num_groups": a["norm_groups"],
        "resnet_time_scale_shift": "scale_shift" if a["scale_shift_norm"] else "default",
        "num_class_embeds": None if a["num_classes"] is None else a["num_classes"] + 1,
    }


def from_config(config: Mapping[str, Any]) -> Json:
    """The arguments of our UNet for those of UNet2DModel.

    Raises:
        ValueError: by the argument that it has no word for.
    """
    for name, value in FIXED.items():
        if config.get(name, value) != value:
            raise ValueError(f"{name}={config[name]}: our UNet is built with {value} alone.")
    downs, widths = list(config["down_block_types"]), list(config["block_out_channels"])
    updown, scaled = (
        config.get(name) == value
        for name, value in (
            ("downsample_type", "resnet"),
            ("resnet_time_scale_shift", "scale_shift"),
        )
    )
    groups, head = config.get("norm_num_groups", 32), config.get("attention_head_dim", 8)
    made = {
        "in_channels": config.get("in_channels", 3),
        "out_channels": config.get("out_channels", 3),
        "model_channels": widths[0],
        "channel_mult": [width / widths[0] for width in widths],
        "num_res_blocks": config.get("layers_per_block", 2),
        "attention_downsample": [2**i for i, name in enumerate(downs) if name.startswith("Attn")],
        "num_heads": 1,
        "head_channels": head,
        "dropout": config.get("dropout", 0.0),
        "num_classes": config.get("num_class_embeds"),
        "scale_shift_norm": scaled,
        "resblock_updown": updown,
        "split_heads_first": False,
        "norm_groups": groups,
    }
    said = to_config(made | {"head_channels": head or widths[-1]})
    said |= {"num_class_embeds": made["num_classes"], "attention_head_dim": head}
    given = {"attn_norm_num_groups": None if scaled else groups, "upsample_type": "conv"}
    for name, value in (given | dict(config)).items():
        value = groups if name == "attn_norm_num_groups" and value is None and not scaled else value
        if name in said and value != said[name]:
            raise ValueError(f"{name}={value}: our UNet of these sizes is {said[name]}.")
    return made


def to_diffusers(state: Mapping[str, Tensor], arguments: Mapping[str, Any]) -> dict[str, Tensor]:
    """Our weights by their names."""
    a = _complete(arguments)
    found: dict[str, Tensor] = {}
    for ours, theirs in _renamed(a):
        if f"{ours}.weight" in state:  # no skip_connection between equal widths
            found |= {f"{theirs}.{kind}": state[f"{ours}.{kind}"] for kind in ("weight", "bias")}
    for ours, theirs in _attentions(a):
        for kind in ("weight", "bias"):
            qkv, out = (state[f"{ours}.{part}.{kind}"] for part in ("qkv", "proj_out"))
            qkv = qkv.flatten(1) if kind == "weight" else qkv
            if a["split_heads_first"]:
                split = qkv.reshape(-1, 3, _head_size(a), *qkv.shape[1:])
                qkv = split.transpose(0, 1).flatten(0, 2)
            for name, part in zip("qkv", qkv.chunk(3), strict=True):
                found[f"{theirs}.to_{name}.{kind}"] = part
            found[f"{theirs}.to_out.0.{kind}"] = out.flatten(1) if kind == "weight" else out
    if "label_emb.weight" in state:
        rows = state["label_emb.weight"]
        found["class_embedding.weight"] = torch.cat([rows, torch.zeros_like(rows[:1])])
    return found


def from_diffusers(
    state: Mapping[str, Tensor], config: Mapping[str, Any]
) -> tuple[Json, dict[str, Tensor]]:
    """The arguments of our UNet, and their weights by our names.

    A last row of labels that is 0 is taken for none.
    """
    arguments = from_config(config)
    found: dict[str, Tensor] = {}
    for ours, theirs in _renamed(arguments):
        if f"{theirs}.weight" in state:
            found |= {f"{ours}.{kind}": state[f"{theirs}.{kind}"] for kind in ("weight", "bias")}
    for ours, theirs in _attentions(arguments):
        for kind in ("weight", "bias"):
            qkv = torch.cat([state[f"{theirs}.to_{name}.{kind}"] for name in "qkv"])
            out = state[f"{theirs}.to_out.0.{kind}"]
            found[f"{ours}.qkv.{kind}"] = qkv[..., None] if kind == "weight" else qkv
            found[f"{ours}.proj_out.{kind}"] = out[..., None] if kind == "weight" else out
    if arguments["num_classes"] is not None:
        rows = state["class_embedding.weight"]
        arguments["num_classes"] = num = len(rows) - (not rows[-1].any())
        found["label_emb.weight"] = rows[:num]
    return arguments, found


def _complete(arguments: Mapping[str, Any]) -> Json:
    parameters = inspect.signature(UNet).parameters.values()
    return {p.name: p.default for p in parameters} | dict(arguments)


def _widths(a: Json) -> list[int]:
    return [int(mult * a["model_channels"]) for mult in a["channel_mult"]]


def _attends(a: Json) -> list[bool]:
    return [2**level in a["attention_downsample"] for level in range(len(a["channel_mult"]))]


def _block(attends: bool, updown: bool) -> str:
    return "AttnDownBlock2D" if attends else "ResnetDownsampleBlock2D" if updown else "DownBlock2D"


def _head_size(a: Json) -> int:
    """Channels of a head, of which UNet2DModel has one number."""
    if a["head_channels"] is not None:
        return int(a["head_channels"])
    if a["num_heads_upsample"] not in (None, a["num_heads"]):
        _refuse("num_heads_upsample", a["num_heads_upsample"], "one number of heads")
    widths = _widths(a)
    widths = [w for w, attends in zip(widths, _attends(a), strict=True) if attends] + widths[-1:]
    if len(set(widths)) > 1:
        _refuse("num_heads", a["num_heads"], "heads of one size, as head_channels gives them")
    return int(widths[0] // a["num_heads"])


def _refuse(name: str, value: object, known: str) -> NoReturn:
    raise ValueError(
        f"{name}={value}: diffusers' UNet2DModel has {known}; export with --format safetensors, or "
        "train a network that it has."
    )


def _renamed(a: Json) -> Iterator[tuple[str, str]]:
    """Layers by both names, but for attention's linear maps and labels."""
    yield from _OUTSIDE.items()
    for kind, ours, theirs in _layers(a):
        if kind == "res":
            yield from ((f"{ours}.{mine}", f"{theirs}.{other}") for mine, other in _RES.items())
        else:
            yield (
                (f"{ours}.norm", f"{theirs}.group_norm") if kind == "attention" else (ours, theirs)
            )


def _attentions(a: Json) -> list[tuple[str, str]]:
    return [(ours, theirs) for kind, ours, theirs in _layers(a) if kind == "attention"]


def _layers(a: Json) -> Iterator[tuple[str, str, str]]:
    """Blocks by both names, each "res", "attention" or "conv"."""
    attends, per_level = _attends(a), a["num_res_blocks"] + 1
    last, updown = len(attends) - 1, a["resblock_updown"]
    for level, attending in enumerate(attends):
        for j in range(per_level - 1):
            ours, theirs = f"input_blocks.{1 + level * per_level + j}", f"down_blocks.{level}"
            yield from _stage(ours, theirs, j, attending)
        if level < last:
            ours, theirs = f"input_blocks.{(level + 1) * per_level}.0", f"{theirs}.downsamplers.0"
            yield ("res", ours, theirs) if updown else ("conv", f"{ours}.op", f"{theirs}.conv")
    yield from _stage("middle_block", "mid_block", 0, attending=True)
    yield "res", "middle_block.2", "mid_block.resnets.1"
    for up, attending in enumerate(reversed(attends)):
        for j in range(per_level):
            ours, theirs = f"output_blocks.{up * per_level + j}", f"up_blocks.{up}"
            yield from _stage(ours, theirs, j, attending)
        if up < last:
            ours, theirs = f"{ours}.{1 + attending}", f"{theirs}.upsamplers.0"
            yield ("res", ours, theirs) if updown else ("conv", f"{ours}.conv", f"{theirs}.conv")


def _stage(ours: str, theirs: str, i: int, attending: bool) -> Iterator[tuple[str, str, str]]:
    yield "res", f"{ours}.0", f"{theirs}.resnets.{i}"
    if attending:
        yield "attention", f"{ours}.1", f"{theirs}.attentions.{i}"
