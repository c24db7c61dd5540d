"""A network as a folder: network.safetensors, and network.json that says how it is built.

Reading one needs torch and safetensors alone, and imports nothing that a file names.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from lit_diffusion import __version__
from lit_diffusion.files import atomic_write, atomic_write_text
from lit_diffusion.networks.dit import DiT
from lit_diffusion.networks.jit import JiT
from lit_diffusion.networks.unet import EncoderUNet, UNet
from lit_diffusion.networks.uvit import UViT

RECORD, WEIGHTS = "network.json", "network.safetensors"
KNOWN = {f"{kind.__module__}.{kind.__name__}": kind for kind in (UNet, EncoderUNet, UViT, DiT, JiT)}
"""What `load_network` builds, by its class path."""


def write_network(folder: str | Path, state: Mapping[str, Tensor], record: dict[str, Any]) -> Path:
    """Write weights, and the record of them with its library and their SHA-256.

    Args:
        folder: made if it is not there; an export in it is replaced.
        state: the network's state_dict.
        record: "network" {"class_path", "init_args"}, and whatever is known besides.

    Raises:
        ValueError: where `folder` is a file.
    """
    folder = folder_for(folder)
    data = save({name: value.detach().cpu().contiguous() for name, value in state.items()})
    with atomic_write(folder / WEIGHTS) as file:
        file.write(data)
    signed = {
        "library": f"lit-diffusion {__version__}",
        **record,
        "sha256": hashlib.sha256(data).hexdigest(),
    }
    atomic_write_text(folder / RECORD, json.dumps(signed, indent=2) + "\n")
    return folder


def folder_for(path: str | Path) -> Path:
    """A folder to write into, made where it is not there."""
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--out {folder} is a file; name a folder.")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def is_exported(path: str | Path) -> bool:
    """Whether a folder holds an exported network."""
    return (Path(path) / RECORD).is_file()


def read_exported(folder: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Record and weights of an exported network.

    Raises:
        FileNotFoundError: where there is none.
        ValueError: where the weights are not those that the record was written for.
    """
    folder = Path(folder)
    if not is_exported(folder):
        raise FileNotFoundError(
            f"{folder} holds no {RECORD}; write it with `lit-diffusion convert export`."
        )
    try:
        record = json.loads((folder / RECORD).read_text())
        digest = record["sha256"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder / RECORD} is damaged: {error!r}; export it again.") from None
    path = folder / WEIGHTS
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != digest:
        raise ValueError(
            f"{path} has SHA-256 {found}, and {RECORD} says {digest}: the files are of different "
            "exports or damaged; export again."
        )
    return record, read_safetensors(path)


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, on the CPU."""
    try:
        return dict(load_file(path))
    except SafetensorError as error:
        raise ValueError(f"{path} is truncated, damaged or no safetensors file: {error}.") from None


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors in a file of `torch.save`, whose code is not run; of several sets, averages."""
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {path}.")
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # what torch says of a broken file is of many types
        # From None: torch advises to run the code in the file, which a traceback would tell.
        code = "GLOBAL" in str(error)
        why = (
            "holds pickled code, which is never run" if code else "is damaged or of no such format"
        )
        raise ValueError(f"{path} {why}; save the state_dict alone, by torch.save.") from None
    for name in ("ema", "model", "state_dict"):
        found = found.get(name, found) if isinstance(found, dict) else found
    if not (isinstance(found, dict) and all(isinstance(v, Tensor) for v in found.values())):
        raise ValueError(f"{path} holds no state_dict, of tensors alone by name.")
    return {
        name.removeprefix("module."): value.float() if value.is_floating_point() else value
        for name, value in found.items()
    }


def load_network(folder: str | Path) -> nn.Module:
    """The network in a folder that `convert export` or `convert import` wrote, in eval mode.

    Args:
        folder: with network.json and network.safetensors.

    Raises:
        FileNotFoundError: where there is no such folder.
        ValueError: where its files do not fit together, or it is a network of somebody else's.

    Example:
        >>> network = load_network("exported/digits")  # doctest: +SKIP
    """
    record, state = read_exported(folder)
    spec = record.get("network") or {}
    kind = KNOWN.get(str(spec.get("class_path")))
    if kind is None:
        raise ValueError(
            f"{folder} is of class {spec.get('class_path')}, and load_network builds "
            f"{', '.join(sorted(KNOWN))}; build it yourself, and load {WEIGHTS} into it."
        )
    check_fits(kind, spec["init_args"], state, str(folder))
    network = kind(**spec["init_args"])
    network.load_state_dict(state)
    return network.eval()


def check_fits(
    kind: type[nn.Module], arguments: Mapping[str, Any], state: Mapping[str, Tensor], source: str
) -> None:
    """Refuse weights that a network of these arguments has not, before it takes any memory."""
    try:
        with torch.device("meta"):
            shapes = kind(**arguments).state_dict()
    except TypeError as error:  # an argument that the class has not
        raise ValueError(f"{source}: {kind.__name__} cannot be built: {error}.") from None
    if wrong := differences(shapes, state):
        raise ValueError(
            f"{source} is no {kind.__name__} of {dict(arguments)}: {'; '.join(wrong[:3])}"
            f"{f' and {len(wrong) - 3} more' * (len(wrong) > 3)}."
        )


def differences(expected: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> list[str]:
    """How weights differ from those of a network in name and shape, one phrase a tensor."""
    missing = [f"the file lacks {name}" for name in expected if name not in state]
    unknown = [f"the network lacks {name}" for name in state if name not in expected]
    return (
        missing
        + unknown
        + [
            f"{name} is {tuple(state[name].shape)} in the file, {tuple(value.shape)} in the network"
            for name, value in expected.items()
            if name in state and state[name].shape != value.shape
        ]
    )
