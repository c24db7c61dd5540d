"""Checkpoints of runs as exported networks."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lit_diffusion.checkpoints.loading import Loaded, load_with_record, model_spec
from lit_diffusion.interchange.diffusers_folder import write_diffusers
from lit_diffusion.interchange.exported import write_network

_OF_MODEL = ("process", "parameterization", "image_shape", "num_classes")


def export(
    checkpoint: str | Path,
    out: str | Path,
    weights: str = "ema",
    form: str = "safetensors",
    vae: str | None = None,
    trust: Iterable[str] = (),
) -> tuple[Loaded, list[str]]:
    """Write the network of a checkpoint as a folder; what was loaded, and what there is to say.

    Args:
        checkpoint: file, or run folder.
        out: the folder.
        weights: as in `checkpoints.load`.
        form: "safetensors", see `interchange.exported`; "diffusers", see `diffusers_folder`.
        vae: folder of the AutoencoderKL of a latent DiT, for the form "diffusers".
        trust: packages that class paths in the checkpoint may name.

    Raises:
        ValueError: for a checkpoint that is no network of one, or that diffusers cannot express.
    """
    if vae is not None and form != "diffusers":
        raise ValueError(f"--vae {vae} belongs to --format diffusers; leave it out.")
    loaded = load_with_record(checkpoint, weights, trust=trust)
    record, state = described(loaded)
    if form == "diffusers":
        return loaded, write_diffusers(out, loaded.module, record, state, vae)
    write_network(out, state, record)
    return loaded, []


def described(loaded: Loaded) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What is to be known of the network of a checkpoint, and its weights."""
    spec = model_spec(loaded.checkpoint)
    arguments = {} if spec is None else spec["init_args"]
    network = getattr(loaded.module, "network", None)
    if not isinstance(network, nn.Module) or not isinstance(arguments.get("network"), dict):
        raise ValueError(
            f"{loaded.path} does not say of which class and arguments its network is; export a run "
            "of a config whose model has a network."
        )
    record = {name: arguments[name] for name in _OF_MODEL if name in arguments}
    record |= {"network": arguments["network"], "step": loaded.step, "weights": loaded.weights}
    return record, dict(network.state_dict())
