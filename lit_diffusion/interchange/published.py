"""Published checkpoints: how their networks are built, from the shapes of their weights.

What shapes cannot tell is asked for: the heads of attention, their order, whether labels have a
row for none. The rest is proved by the names and shapes of all weights.
"""

from collections.abc import Callable, Iterator, Mapping
from math import isqrt
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lit_diffusion.interchange.diffusers_folder import read_model
from lit_diffusion.interchange.diffusers_unet import from_diffusers
from lit_diffusion.interchange.exported import check_fits, read_tensors, write_network
from lit_diffusion.networks.dit import DiT
from lit_diffusion.networks.unet import EncoderUNet, UNet
from lit_diffusion.networks.uvit import UViT

Json = dict[str, Any]
State = Mapping[str, Tensor]
Kind = type[nn.Module]


def convert(file: str | Path, kind: str, out: str | Path, given: Mapping[str, Any]) -> Json:
    """Write the network of a published file in our format; returns its class and arguments.

    Args:
        file: of weights as published; of kind "diffusers-unet" a folder.
        kind: a key of `KINDS`.
        out: the folder.
        given: arguments of the network that its shapes cannot tell, or that win over them.

    Raises:
        FileNotFoundError: where there is no such file.
        ValueError: where it is of another kind, or an argument is lacking or does not fit.
    """
    file = Path(file)
    read = _of_folder if kind == "diffusers-unet" else _of_file
    made, arguments, state = read(file, kind, given)
    spec = {"class_path": f"{made.__module__}.{made.__name__}", "init_args": arguments}
    write_network(out, state, {"network": spec, "weights": "raw", "source": file.name})
    return spec


def _of_folder(file: Path, kind: str, given: Mapping[str, Any]) -> tuple[Kind, Json, State]:
    config, theirs = read_model(file)
    try:
        arguments, state = from_diffusers(theirs, config)
    except KeyError as error:
        raise ValueError(f"{file} is not of --kind {kind}: it lacks {error.args[0]}.") from None
    arguments |= given
    check_fits(UNet, arguments, state, str(file))
    return UNet, arguments, state


def _of_file(file: Path, kind: str, given: Mapping[str, Any]) -> tuple[Kind, Json, State]:
    state = read_tensors(file)
    return *infer(state, kind, given, str(file)), state


def infer(
    state: State, kind: str, given: Mapping[str, Any], source: str = "the file"
) -> tuple[Kind, Json]:
    """Class and arguments of the network whose weights these are.

    Args:
        state: weights by their published names.
        kind: a key of `KINDS`.
        given: arguments that win over what the shapes tell.
        source: for messages.

    Raises:
        ValueError: where the weights are of another kind, or an argument is lacking or wrong.
    """
    try:
        made, candidates = KINDS[kind](state, given)
        _require(made, kind, state, given)
        fitting, why = _fitting(made, [c | dict(given) for c in candidates], state, source)
    except KeyError as error:
        raise ValueError(f"{source} is not of --kind {kind}: it lacks {error.args[0]}.") from None
    if not fitting:
        raise why or ValueError(f"{source} is not of --kind {kind}.")
    if len(fitting) > 1:
        numbers = " or ".join(str(arguments["num_res_blocks"]) for arguments in fitting)
        raise ValueError(
            f"{source}: its shapes fit num_res_blocks of {numbers}; say which, as "
            "--network.num_res_blocks=VALUE."
        )
    return made, fitting[0]


def _fitting(
    made: Kind, candidates: list[Json], state: State, source: str
) -> tuple[list[Json], ValueError | None]:
    """The arguments that fit the weights, and why the first of the others do not."""
    fitting: list[Json] = []
    why = None
    for arguments in candidates:
        try:
            check_fits(made, arguments, state, source)
        except ValueError as error:
            why = why or error
        else:
            fitting += [arguments] * (arguments not in fitting)
    return fitting, why


def _require(made: Kind, kind: str, state: State, given: Mapping[str, Any]) -> None:
    """Refuse to guess what no shape tells."""
    wanted: list[tuple[str, ...]] = [("num_heads",)]
    if made is UViT and "label_emb.weight" in state:
        wanted.append(("null_class",))
    if kind == "guided-diffusion":
        heads = ("num_heads", "head_channels") if made is UNet else ("head_channels",)
        wanted = [heads, ("split_heads_first",)]
    for names in wanted:
        if not set(names) & given.keys():
            asked = " or ".join(f"--network.{name}=VALUE" for name in names)
            raise ValueError(f"shapes cannot tell {names[0]}: give {asked}. {_HINTS[names[0]]}")


_HINTS = {
    "num_heads": "It is in the flags or the size's table of the published network.",
    "head_channels": "It is num_head_channels in the published flags.",
    "split_heads_first": "It is false where the published flags say use_new_attention_order True.",
    "null_class": "It is true where labels were dropped in training, and the last row is for none.",
}
_HINTS["head_channels"] += " A classifier has 64."


def _unet(state: State, given: Mapping[str, Any]) -> tuple[Kind, Iterator[Json]]:
    """Of UNet or EncoderUNet, for every number of blocks per level that there may be."""
    classifies = "out.2.positional_embedding" in state
    fixed: Json = {
        "in_channels": state["input_blocks.0.0.weight"].shape[1],
        "out_channels": len(state["out.2.c_proj.weight" if classifies else "out.2.weight"]),
        "model_channels": state["time_embed.0.weight"].shape[1],
        "scale_shift_norm": _is_scaled(state),
        "resblock_updown": not any(".op." in name for name in state),
    }
    if not classifies and "label_emb.weight" in state:
        fixed["num_classes"] = len(state["label_emb.weight"])
    return (EncoderUNet if classifies else UNet), _levels(state, fixed)


def _is_scaled(state: State) -> bool:
    block = "middle_block.0"
    told = state[f"{block}.emb_layers.1.weight"].shape[0]
    return bool(told == 2 * state[f"{block}.in_layers.2.weight"].shape[0])


def _levels(state: State, fixed: Json) -> Iterator[Json]:
    stages = 1 + max(int(n.split(".")[1]) for n in state if n.startswith("input_blocks."))
    for per_level in range(2, stages + 1):
        if stages % per_level:
            continue
        firsts = [f"input_blocks.{i}" for i in range(1, stages, per_level)]
        weights = [state.get(f"{first}.0.in_layers.2.weight") for first in firsts]
        if any(weight is None for weight in weights):
            continue
        mults = [len(w) / fixed["model_channels"] for w in weights if w is not None]
        attends = [f"{first}.1.qkv.weight" in state for first in firsts]
        arguments = fixed | {
            "num_res_blocks": per_level - 1,
            "channel_mult": [int(mult) if mult == int(mult) else mult for mult in mults],
            "attention_downsample": [2**i for i, on in enumerate(attends) if on],
        }
        pool = state.get("out.2.positional_embedding")
        if pool is not None:
            arguments["image_size"] = isqrt(pool.shape[1] - 1) * 2 ** (len(firsts) - 1)
        yield arguments


def _transformer(state: State, embed: str, head: str, blocks: str, extras: int) -> tuple[Json, int]:
    """What the transformers have in common, and the number of their `blocks`."""
    width, channels, patch, _ = state[f"{embed}.weight"].shape
    side = isqrt(state["pos_embed"].shape[1] - extras)
    depth = len({name.split(".")[1] for name in state if name.startswith(f"{blocks}.")})
    return {
        "image_size": side * patch,
        "in_channels": channels,
        "out_channels": len(state[f"{head}.weight"]) // patch**2,
        "patch_size": patch,
        "width": width,
        "mlp_ratio": len(state[f"{blocks}.0.mlp.fc1.weight"]) / width,
    }, depth


def _uvit(state: State, given: Mapping[str, Any]) -> tuple[Kind, Iterator[Json]]:
    rows = state.get("label_emb.weight")
    extras = 1 + (rows is not None)
    made, half = _transformer(state, "patch_embed.proj", "decoder_pred", "in_blocks", extras)
    made |= {
        "depth": 2 * half,
        "qkv_bias": "mid_block.attn.qkv.bias" in state,
        "mlp_time_embed": "time_embed.0.weight" in state,
        "final_conv": "final_layer.weight" in state,
    }
    if rows is not None:
        made["num_classes"] = len(rows) - bool(given.get("null_class"))
    return UViT, iter([made])


def _dit(state: State, given: Mapping[str, Any]) -> tuple[Kind, Iterator[Json]]:
    made, depth = _transformer(state, "x_embedder.proj", "final_layer.linear", "blocks", 0)
    rows = len(state["y_embedder.embedding_table.weight"])
    return DiT, iter([made | {"depth": depth, "num_classes": rows - 1}])


KINDS: dict[str, Callable[[State, Mapping[str, Any]], tuple[Kind, Iterator[Json]]]] = {
    "improved-diffusion": _unet,
    "guided-diffusion": _unet,
    "uvit": _uvit,
    "dit": _dit,
}
"""How networks are found out from weights, by the program that published them."""
