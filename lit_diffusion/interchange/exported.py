"""Write and read exported networks: folders with network.safetensors and network.json.

The record, network.json, contains the class path and the arguments of the network. It also
describes the module, with its process and solver, so that `lit_diffusion.load` accepts the folder
as a checkpoint.

`load_network` needs only torch and safetensors. It builds only the classes in `NETWORKS` and
`CONDITIONS`, and imports nothing that a record names.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from lit_diffusion import __version__
from lit_diffusion.config.renamed import rename_config
from lit_diffusion.files import (
    atomic_write,
    atomic_write_text,
    check_archive,
    check_regular,
    checked_read,
    sha256_of,
)
from lit_diffusion.networks.conditions import Classes, Tokens, Vectors, WordIds
from lit_diffusion.networks.dit import DiT
from lit_diffusion.networks.jit import JiT
from lit_diffusion.networks.layers import Patched
from lit_diffusion.networks.magnitude_preserving import MagnitudePreservingUNet
from lit_diffusion.networks.unet import EncoderUNet, UNet
from lit_diffusion.networks.uvit import UViT

Json = dict[str, Any]

RECORD, WEIGHTS = "network.json", "network.safetensors"
_TOP_LEVEL = ("network", "process", "parameterization", "image_shape", "num_classes")
"""Arguments of a module that are at the top level of a record. Others are in its entry "module"."""
_CLASSES: tuple[type[nn.Module], ...] = (
    *(UNet, EncoderUNet, MagnitudePreservingUNet, UViT, DiT, JiT),
    Patched,
)
NETWORKS = {f"{each.__module__}.{each.__name__}": each for each in _CLASSES}
"""Networks that `load_network` can build, by class path."""
CONDITIONS = {f"{c.__module__}.{c.__name__}": c for c in (Classes, Vectors, Tokens, WordIds)}
"""Condition embeddings that `load_network` can build, by class path."""


def write_network(
    folder: str | Path, state: Mapping[str, Tensor], record: Json, dtype: torch.dtype | None = None
) -> Path:
    """Write the weights and the record of a network to a folder.

    The version of this library and the SHA-256 of the weights are added to the record.

    Args:
        folder: folder of the exported network. It is created if it does not exist. If it already
            contains an exported network, the files are replaced.
        state: state_dict of the network.
        record: dictionary with "network": {"class_path": ..., "init_args": ...}, and any other
            entries to store.
        dtype: dtype to which floating-point weights are converted; None keeps their dtype.

    Raises:
        ValueError: if `folder` is a file, or if a finite weight is too large for `dtype`.
    """
    state = {name: _convert(value, dtype, name) for name, value in state.items()}
    pointers = set[int]()
    for name, value in state.items():  # safetensors refuses tensors that share memory
        state[name] = value.clone() if value.data_ptr() in pointers else value
        pointers.add(value.data_ptr())
    folder = create_folder(folder)
    data = save(state)
    with atomic_write(folder / WEIGHTS) as file:
        file.write(data)
    library, sha256 = f"lit-diffusion {__version__}", hashlib.sha256(data).hexdigest()
    text = json.dumps({"library": library, **record, "sha256": sha256}, indent=2)
    atomic_write_text(folder / RECORD, text + "\n")
    return folder


def _convert(value: Tensor, dtype: torch.dtype | None, name: str) -> Tensor:
    """Move a weight to the CPU and, if it has a floating-point dtype, convert it to `dtype`."""
    value = value.detach().cpu().contiguous()
    if dtype is None or not value.is_floating_point():
        return value
    converted = value.to(dtype)
    if not torch.equal(converted.isfinite(), value.isfinite()):
        raise ValueError(f"{name} has weights too large for {dtype}; export it as float32.")
    return converted


def module_record(spec: Mapping[str, Any]) -> Json:
    """Return the entries of a record that describe a module, from its class_path and init_args."""
    arguments = spec["init_args"]
    others = {name: value for name, value in arguments.items() if name not in _TOP_LEVEL}
    top_level = {name: arguments[name] for name in _TOP_LEVEL if name in arguments}
    return {**top_level, "module": {"class_path": spec["class_path"], "init_args": others}}


def read_as_checkpoint(folder: str | Path) -> tuple[Json, str]:
    """Read an exported network as a checkpoint, from which its module can be built.

    Returns:
        A checkpoint, as a dictionary, and the name of the weights. The content may come from a
        stranger, so the caller must check it like the content of any checkpoint.

    Raises:
        FileNotFoundError: if the folder contains no exported network.
        ValueError: if the files are damaged, or if the record describes a network but no
            LightningModule.
    """
    record, state = read_exported(folder)
    module = record.get("module")
    if not (isinstance(module, dict) and isinstance(module.get("init_args"), dict)):
        raise ValueError(
            f"{folder} holds a network alone, without process and solver, because it was imported, "
            "or exported by version 0.1; use load_network or `fit --init_weights`, or export it "
            "again."
        )
    arguments = {name: record[name] for name in _TOP_LEVEL if name in record}
    arguments = {**module["init_args"], **arguments, "_class_path": module.get("class_path")}
    entries = {
        "state_dict": {f"network.{name}": value for name, value in state.items()},
        "hyper_parameters": arguments,
        "global_step": record.get("step", 0),
    }
    entries |= {name: record[name] for name in ("codec", "class_names", "data") if name in record}
    return entries, record.get("weights", "raw")


def create_folder(path: str | Path) -> Path:
    """Create the folder that --out names, if it does not exist."""
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--out {folder} is a file; name a folder.")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def is_exported(path: str | Path) -> bool:
    """Whether a folder has an exported network."""
    return (Path(path) / RECORD).exists()


def read_exported(folder: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read the record and the weights of an exported network.

    Raises:
        FileNotFoundError: if the folder contains no exported network.
        ValueError: if the record is damaged, or if the SHA-256 of the weights differs from the
            SHA-256 in the record.
    """
    folder = Path(folder)
    if not is_exported(folder):
        raise FileNotFoundError(
            f"{folder} holds no {RECORD}; write it with `lit-diffusion convert export`."
        )
    with checked_read(folder / RECORD, "record of a network", "export it again") as file:
        record = rename_config(json.loads(file.read_text()))
        expected, network = record["sha256"], record["network"]
        is_spec = isinstance(network, dict) and isinstance(network.get("init_args"), dict)
        if not is_spec or not isinstance(record.get("weights", ""), str):
            raise ValueError("it has values of other types")
    path = folder / WEIGHTS
    if (sha256 := sha256_of(path)) != expected:
        raise ValueError(
            f"{path} has SHA-256 {sha256}, but {RECORD} says {expected}: the files are from "
            "different exports or damaged; export again."
        )
    return record, read_safetensors(path)


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a safetensors file to the CPU."""
    with checked_read(path, "safetensors file") as file:
        return dict(load_file(file))


def read_state_dict(path: Path) -> dict[str, Tensor]:
    """Read a state_dict from a file of `torch.save`, without running code in it.

    If the file contains several state_dicts in a dictionary, the function reads "ema" if there is
    one, otherwise "model", otherwise "state_dict".

    Returns:
        Tensors by name, on the CPU. Floating-point tensors are converted to float32.
    """
    path = check_regular(path)
    try:
        check_archive(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many types for broken files
        # From None: torch advises to run the code in the file, which a traceback would show.
        cause = f" ({(str(error) or type(error).__name__).splitlines()[0]:.100})"
        is_opcode = isinstance(error, KeyError)  # its message is only the number of the opcode
        reason = f"is damaged or has another format{'' if is_opcode else cause}"
        if "GLOBAL" in str(error):
            reason = "contains pickled code, which is never run"
        raise ValueError(f"{path} {reason}; save the state_dict alone with torch.save.") from None
    for name in ("ema", "model", "state_dict"):
        content = content.get(name, content) if isinstance(content, dict) else content
    is_plain = isinstance(content, dict) and all(isinstance(name, str) for name in content)
    if not (is_plain and all(isinstance(value, Tensor) for value in content.values())):
        raise ValueError(f"{path} holds no state_dict, which is a dictionary of tensors.")
    size = sum(value.numel() * value.element_size() for value in content.values())
    if size > 4 * path.stat().st_size:  # views of few numbers, which a copy would write out
        raise ValueError(
            f"{path} would unpack to {size:,} bytes; save contiguous copies of its tensors."
        )
    return {
        name.removeprefix("module."): value.float() if value.is_floating_point() else value
        for name, value in content.items()
    }


def load_network(folder: str | Path) -> nn.Module:
    """Load a network in eval mode from a folder that `convert` has written.

    This works with folders from `convert export` and from `convert import`.

    Args:
        folder: folder with network.json and network.safetensors.

    Raises:
        FileNotFoundError: if the folder does not exist or contains no exported network.
        ValueError: if network.json and network.safetensors do not match, or if the network is not
            one of `NETWORKS`.

    Example:
        >>> network = load_network("exported/digits")  # doctest: +SKIP
    """
    record, state = read_exported(folder)
    spec = record.get("network") or {}
    network_class = NETWORKS.get(str(spec.get("class_path")))
    if network_class is None:
        raise ValueError(
            f"{folder} is of class {spec.get('class_path')}, but load_network builds only "
            f"{', '.join(sorted(NETWORKS))}; build it yourself, and load {WEIGHTS} into it."
        )
    check_state_dict(network_class, spec["init_args"], state, str(folder))
    network = build_network(network_class, spec["init_args"])
    network.load_state_dict(state)
    return network.eval()


def build_network(network_class: type[nn.Module], arguments: Mapping[str, Any]) -> nn.Module:
    """Build a network from JSON arguments.

    The argument `condition` of a network and the argument `network` of `Patched` are objects. In
    JSON, such an object is a dictionary with class_path and init_args. Only classes in `NETWORKS`
    and `CONDITIONS` are built.

    Example:
        >>> classes = {"class_path": "lit_diffusion.networks.conditions.Classes",
        ...     "init_args": {"num_classes": 10}}
        >>> sizes = {"image_size": 8, "in_channels": 1, "out_channels": 1, "depth": 1}
        >>> type(build_network(DiT, sizes | {"condition": classes})).__name__
        'DiT'
    """
    condition = arguments.get("condition")
    if condition is not None:
        condition = CONDITIONS[condition["class_path"]](**condition["init_args"])
        arguments = {**arguments, "condition": condition}
    inner = arguments.get("network")
    if network_class is Patched and isinstance(inner, Mapping):
        network = build_network(NETWORKS[inner["class_path"]], inner["init_args"])
        arguments = {**arguments, "network": network}
    return network_class(**arguments)


def check_state_dict(
    network_class: type[nn.Module],
    arguments: Mapping[str, Any],
    state: Mapping[str, Tensor],
    source: str,
) -> None:
    """Raise ValueError unless a network with these arguments can load the weights in `state`.

    To compare names and shapes, the network is built on the meta device, which allocates no memory.
    Error messages begin with `source`, the name of the file with the weights.
    """
    name = network_class.__name__
    try:
        with torch.device("meta"):
            network = build_network(network_class, arguments)
    except Exception as error:  # unknown or odd arguments may raise anything
        reason = str(error).rstrip(".")
        raise ValueError(
            f"{source}: {name} cannot be built: {reason} (its arguments are {dict(arguments)})."
        ) from None
    try:
        network.load_state_dict(state, assign=True)
    except RuntimeError as error:  # lists the mismatches
        reason = " ".join(str(error).split())
        text = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        raise ValueError(f"{source} does not fit {name}({text}): {reason:.300}") from None
