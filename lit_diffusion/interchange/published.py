"""Import published checkpoints, and infer the network's arguments from the weights' shapes.

Some arguments cannot be inferred from shapes and must be passed: the number of attention heads, the
order of the heads in the weights of q, k and v, and whether the label embedding has a row for "no
class". If the name or shape of any weight does not fit the inferred network, an error is raised.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import isqrt
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lit_diffusion.interchange.diffusers_folder import read_model
from lit_diffusion.interchange.diffusers_unet import from_diffusers
from lit_diffusion.interchange.exported import (
    NETWORKS,
    WEIGHTS,
    check_state_dict,
    read_state_dict,
    write_network,
)
from lit_diffusion.networks.conditions import Classes
from lit_diffusion.networks.dit import DiT
from lit_diffusion.networks.layers import width_factor
from lit_diffusion.networks.unet import EncoderUNet, UNet
from lit_diffusion.networks.uvit import UViT

Json = dict[str, Any]
_MODULES = (
    "lit_diffusion.modules.diffusion.DiffusionModule",
    "lit_diffusion.modules.classifier.NoisyClassifier",
)
State = Mapping[str, Tensor]
NetworkClass = type[nn.Module]


def convert(file: str | Path, kind: str, out: str | Path, overrides: Mapping[str, Any]) -> Json:
    """Convert a published checkpoint to an exported network, and write it to a folder.

    Args:
        file: file with published weights. For the kind "diffusers-unet", a folder that diffusers
            wrote.
        kind: "diffusers-unet" or a key of `KINDS`.
        out: folder for the exported network.
        overrides: arguments of the network that cannot be inferred from shapes, or that replace
            inferred arguments.

    Returns:
        A dictionary with "class_path" and "init_args" of the network.

    Raises:
        FileNotFoundError: if `file` does not exist.
        ValueError: if the file does not have the format of `kind`, if weights are not finite
            numbers, if an argument is missing or wrong, or if `out` would replace `file`.
    """
    file = Path(file)
    if file.exists() and file.resolve() == (Path(out) / WEIGHTS).resolve():
        raise ValueError(f"--out {out} would replace {file} itself; choose another folder.")
    if kind == "diffusers-unet":
        config, diffusers_state = read_model(file)
        check_weights(diffusers_state, str(file))
        with _explained(kind, str(file)):
            arguments, state = from_diffusers(diffusers_state, config)
        network_class: NetworkClass = UNet
        arguments |= overrides
        check_state_dict(network_class, arguments, state, str(file))
    else:
        state = read_state_dict(file)
        check_weights(state, str(file))
        network_class, arguments = infer(state, kind, overrides, str(file))
    path = f"{network_class.__module__}.{network_class.__name__}"
    spec = {"class_path": path, "init_args": arguments}
    write_network(out, state, {"network": spec, "weights": "raw", "source": file.name})
    return spec


def model_config(spec: Json) -> Json:
    """Return a config of an imported network, to be added to a config with all other settings.

    The returned config contains all arguments of the network, even arguments with default values.
    It therefore overrides all arguments of the network in a config to which it is added. It also
    contains the number of classes, and the image shape if the network supports only one image size.
    The argument `spec` is the result of `convert`.
    """
    network_class, arguments = NETWORKS[spec["class_path"]], spec["init_args"]
    is_classifier = network_class is EncoderUNet
    parameters = inspect.signature(network_class).parameters
    defaults = {name: p.default for name, p in parameters.items() if p.default is not p.empty}
    init_args: Json = {}
    if "image_size" in arguments:
        init_args["image_shape"] = [arguments["in_channels"], *[arguments["image_size"]] * 2]
    labels = (arguments.get("condition") or {"init_args": arguments})["init_args"]
    init_args["num_classes"] = (
        arguments["out_channels"] if is_classifier else labels.get("num_classes")
    )
    values = {n: list(v) if isinstance(v, tuple) else v for n, v in (defaults | arguments).items()}
    init_args["network"] = {**spec, "init_args": values}
    return {"class_path": _MODULES[is_classifier], "init_args": init_args}


def check_weights(state: State, source: str) -> None:
    """Raise ValueError unless all weights are dense, real, floating-point and finite.

    `convert` checks every published checkpoint with this function. The error message contains
    `source` and the name of the first weight that fails the check.
    """
    for name, value in state.items():
        is_dense = value.layout is torch.strided and not (value.is_quantized or value.is_meta)
        if not (is_dense and value.is_floating_point()):
            raise ValueError(
                f"{source}: weights must be dense floating-point numbers, and {name} is "
                f"{value.dtype}, {value.layout}; save them as float32."
            )
        if bad := int((~value.float().isfinite()).sum()):
            raise ValueError(
                f"{source}: weights must be finite, and {bad} of {value.numel()} numbers of {name} "
                "are not; the file is damaged, or the training diverged: use another file."
            )


@contextmanager
def _explained(kind: str, source: str) -> Iterator[None]:
    """Context in which any error becomes a ValueError that says that the file has another kind."""
    try:
        yield
    except Exception as error:
        reason = f"it lacks {error.args[0]}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{source} is not of --kind {kind}: {reason.rstrip('.')}.") from error


def infer(
    state: State, kind: str, overrides: Mapping[str, Any], source: str = "the file"
) -> tuple[NetworkClass, Json]:
    """Infer the class and the arguments of a network from the names and shapes of its weights.

    Args:
        state: weights by the names in the published file.
        kind: a key of `KINDS`.
        overrides: arguments of the network that cannot be inferred, or that replace inferred
            arguments.
        source: name of the published file, for error messages.

    Raises:
        ValueError: if the weights do not have the format of `kind`, or if an argument is missing or
            wrong.
    """
    matches: list[Json] = []
    mismatch = ValueError(f"{source} is not of --kind {kind}.")
    with _explained(kind, source):
        network_class, candidates = KINDS[kind](state, overrides)
    _require_arguments(network_class, kind, state, overrides)
    for i, candidate in enumerate(candidates):
        arguments = candidate | dict(overrides)
        if network_class is UViT:
            arguments.pop("null_class", None)  # it is in `condition`
        try:
            check_state_dict(network_class, arguments, state, source)
        except ValueError as error:
            mismatch = error if i == 0 else mismatch
        else:
            matches += [arguments] * (arguments not in matches)
    if not matches:
        raise mismatch
    if len(matches) > 1:
        numbers = " or ".join(str(arguments["num_res_blocks"]) for arguments in matches)
        raise ValueError(
            f"{source}: its shapes fit num_res_blocks of {numbers}; choose one with "
            "--network.num_res_blocks=VALUE."
        )
    return network_class, matches[0]


_HINTS = {
    "num_heads": "See the flags of the published network, or the table of its sizes.",
    "head_channels": "It is num_head_channels in the published flags. A classifier has 64.",
    "split_heads_first": "It is false where the published flags say use_new_attention_order True.",
    "null_class": "It is true if labels were dropped in training; the last row is for no class.",
}


def _require_arguments(
    network_class: NetworkClass, kind: str, state: State, overrides: Mapping[str, Any]
) -> None:
    """Raise ValueError if `overrides` lacks an argument that cannot be inferred from shapes."""
    required: list[tuple[str, ...]] = [("num_heads",)]  # one name of each tuple is required
    if network_class is UViT and "label_emb.weight" in state:
        required.append(("null_class",))
    if kind == "guided-diffusion":
        heads = ("num_heads", "head_channels") if network_class is UNet else ("head_channels",)
        required = [heads, ("split_heads_first",)]
    for names in required:
        if not set(names) & overrides.keys():
            options = " or ".join(f"--network.{name}=VALUE" for name in names)
            raise ValueError(
                f"{names[0]} cannot be inferred from shapes: pass {options}. {_HINTS[names[0]]}"
            )


def _infer_unet(state: State, overrides: Mapping[str, Any]) -> tuple[NetworkClass, list[Json]]:
    """Class, and candidates for the arguments: one per possible number of blocks per level."""
    is_classifier = "out.2.positional_embedding" in state
    block = "middle_block.0"
    fixed: Json = {
        "in_channels": state["input_blocks.0.0.weight"].shape[1],
        "out_channels": len(state["out.2.c_proj.weight" if is_classifier else "out.2.weight"]),
        "model_channels": state["time_embed.0.weight"].shape[1],
        "scale_shift_norm": len(state[f"{block}.emb_layers.1.weight"])
        == 2 * len(state[f"{block}.in_layers.2.weight"]),
        "resblock_updown": not any(".op." in name for name in state),
    }
    if not is_classifier and "label_emb.weight" in state:
        fixed["num_classes"] = len(state["label_emb.weight"])
    candidates = []
    num_inputs = len({n.split(".")[1] for n in state if n.startswith("input_blocks.")})
    for per_level in range(2, num_inputs + 1):  # number of ResBlocks, plus one for downsampling
        level_starts = [f"input_blocks.{i}" for i in range(1, num_inputs, per_level)]
        names = [f"{start}.0.in_layers.2.weight" for start in level_starts]
        if num_inputs % per_level or not state.keys() >= set(names):
            continue
        mults = [width_factor(len(state[name]), fixed["model_channels"]) for name in names]
        has_attention = [f"{start}.1.qkv.weight" in state for start in level_starts]
        arguments = fixed | {
            "num_res_blocks": per_level - 1,
            "channel_mult": [int(mult) if mult == int(mult) else mult for mult in mults],
            "attention_downsample": [2**i for i, attends in enumerate(has_attention) if attends],
        }
        if is_classifier:
            pool = state["out.2.positional_embedding"]
            arguments["image_size"] = isqrt(pool.shape[1] - 1) * 2 ** (len(level_starts) - 1)
        candidates.append(arguments)
    return (EncoderUNet if is_classifier else UNet), candidates


def _infer_transformer(state: State, embed: str, head: str, blocks: str) -> tuple[Json, int]:
    """Arguments that U-ViT and DiT have in common, and the number of blocks in `blocks`."""
    width, channels, patch, _ = state[f"{embed}.weight"].shape
    side = isqrt(state["pos_embed"].shape[1])  # isqrt ignores U-ViT's one or two extra tokens
    num_blocks = len({name.split(".")[1] for name in state if name.startswith(f"{blocks}.")})
    return {
        "image_size": side * patch,
        "in_channels": channels,
        "out_channels": len(state[f"{head}.weight"]) // patch**2,
        "patch_size": patch,
        "width": width,
        "mlp_ratio": width_factor(len(state[f"{blocks}.0.mlp.fc1.weight"]), width),
    }, num_blocks


def _infer_uvit(state: State, overrides: Mapping[str, Any]) -> tuple[NetworkClass, list[Json]]:
    table = state.get("label_emb.weight")
    arguments, num_in_blocks = _infer_transformer(
        state, "patch_embed.proj", "decoder_pred", "in_blocks"
    )
    arguments |= {
        "depth": 2 * num_in_blocks,
        "qkv_bias": "mid_block.attn.qkv.bias" in state,
        "mlp_time_embed": "time_embed.0.weight" in state,
        "final_conv": "final_layer.weight" in state,
    }
    if table is not None and overrides.get("null_class"):
        arguments["num_classes"] = len(table) - 1
    elif table is not None:
        labels = {"num_classes": len(table), "null_class": False}
        path = f"{Classes.__module__}.{Classes.__name__}"
        arguments["condition"] = {"class_path": path, "init_args": labels}
    return UViT, [arguments]


def _infer_dit(state: State, overrides: Mapping[str, Any]) -> tuple[NetworkClass, list[Json]]:
    arguments, depth = _infer_transformer(state, "x_embedder.proj", "final_layer.linear", "blocks")
    num_rows = len(state["y_embedder.embedding_table.weight"])
    return DiT, [arguments | {"depth": depth, "num_classes": num_rows - 1}]


KINDS: dict[str, Callable[[State, Mapping[str, Any]], tuple[NetworkClass, list[Json]]]] = {
    "improved-diffusion": _infer_unet,
    "guided-diffusion": _infer_unet,
    "uvit": _infer_uvit,
    "dit": _infer_dit,
}
"""Kind of checkpoint -> function that infers the class of the network and argument candidates."""
