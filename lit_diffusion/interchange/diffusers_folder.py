"""Folders of diffusers: a pipeline with our network and process, and networks of others."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from lit_diffusion.files import atomic_write_text
from lit_diffusion.gaussian import FixedLarge, LearnedRange
from lit_diffusion.grids import Sections
from lit_diffusion.interchange import diffusers_dit, diffusers_unet
from lit_diffusion.interchange.exported import folder_for, read_safetensors, read_tensors
from lit_diffusion.parameterizations import Epsilon, Sample, Velocity
from lit_diffusion.processes import DiscreteVP
from lit_diffusion.solvers import DDPM

_PREDICTIONS = {Epsilon: "epsilon", Sample: "sample", Velocity: "v_prediction"}
_VARIANCES = {FixedLarge: "fixed_large", LearnedRange: "learned_range"}
_WEIGHTS = "diffusion_pytorch_model"

Json = dict[str, Any]


def write_diffusers(
    folder: str | Path, module: Any, record: Json, state: Mapping[str, Tensor], vae: str | None
) -> list[str]:
    """Write a pipeline: DDPMPipeline with a UNet, DiTPipeline with a DiT.

    Args:
        folder: made if it is not there.
        module: whose process, parameterization and solver the scheduler is to have.
        record: with the class path and arguments of the network, and image_shape.
        state: the network's weights.
        vae: folder of an AutoencoderKL to copy, without which DiTPipeline cannot be loaded.

    Returns:
        What there is to say of it, in sentences.

    Raises:
        ValueError: by what cannot be said in diffusers' words.
    """
    name, arguments = record["network"]["class_path"], record["network"]["init_args"]
    name, sides = name.rpartition(".")[2], [int(side) for side in record["image_shape"][1:]]
    if name == "UNet":
        config = diffusers_unet.to_config(arguments)
        config |= {"sample_size": sides[0] if sides[0] == sides[1] else sides}
        weights = diffusers_unet.to_diffusers(state, arguments)
        part, made, pipeline, kind = "unet", "UNet2DModel", "DDPMPipeline", "DDPMScheduler"
    elif name == "DiT":
        config, weights = diffusers_dit.to_config(arguments), diffusers_dit.to_diffusers(state)
        part, made, pipeline = "transformer", "DiTTransformer2DModel", "DiTPipeline"
        kind = "DDIMScheduler"
    else:
        raise ValueError(f"diffusers has no {name}: export a UNet or DiT, or --format safetensors.")
    if vae is not None:
        _require_vae(Path(vae), name)
    scheduler = {"_class_name": kind, **scheduler_config(module)}
    out = folder_for(folder)
    write_model(out / part, {"_class_name": made, **config}, weights)
    _write_json(out / "scheduler" / "scheduler_config.json", scheduler)
    index = {part: ["diffusers", made], "scheduler": ["diffusers", kind]}
    if name == "DiT":
        index["vae"] = ["diffusers", "AutoencoderKL"]
    if vae is not None:
        shutil.copytree(vae, out / "vae", dirs_exist_ok=True)
    _write_json(out / "model_index.json", {"_class_name": pipeline, **index})
    return _remarks(name, arguments, vae)


def scheduler_config(module: Any) -> Json:
    """Arguments of diffusers' schedulers that make them the process and solver of a module.

    Raises:
        ValueError: by the part that they have no word for.
    """
    process, prediction = module.process, _PREDICTIONS.get(type(module.parameterization))
    if not isinstance(process, DiscreteVP):
        raise ValueError(f"diffusers' DDPMScheduler has betas, and {process} has none.")
    if process.rescale_labels and process.num_steps != 1000:
        raise ValueError(
            f"rescale_labels=True with {process.num_steps} steps: diffusers tells a network whole "
            "steps; export with --format safetensors."
        )
    if prediction is None:
        known = ", ".join(kind.__name__ for kind in _PREDICTIONS)
        raise ValueError(f"{module.parameterization}: diffusers' DDPMScheduler knows {known}.")
    variance = getattr(module.solver, "variance", None)
    learned = module.loss.output_factor == 2
    whole = isinstance(module.solver, DDPM) and module.solver.times in (None, Sections())
    return {
        "num_train_timesteps": process.num_steps,
        "trained_betas": process.betas.betas().tolist(),
        "prediction_type": prediction,
        "variance_type": "learned_range"
        if learned
        else _VARIANCES.get(type(variance), "fixed_small"),
        "clip_sample": bool(getattr(module.solver, "clip", True)),
        "timestep_spacing": "linspace" if whole else "leading",
    }


def write_model(folder: Path, config: Json, weights: Mapping[str, Tensor]) -> None:
    """A network's folder: its config and weights."""
    _write_json(folder / "config.json", config)
    whole = {name: value.detach().cpu().contiguous() for name, value in weights.items()}
    save_file(whole, folder / f"{_WEIGHTS}.safetensors", {"format": "pt"})


def read_model(folder: str | Path) -> tuple[Json, dict[str, Tensor]]:
    """Config and weights of the UNet2DModel in a folder, or in the pipeline that it is.

    Raises:
        FileNotFoundError: where there is none.
    """
    folder = Path(folder)
    folder = folder / "unet" if (folder / "unet").is_dir() else folder
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder} holds no config.json; name a folder of a UNet2DModel.")
    config = _read_json(folder / "config.json")
    if config.get("_class_name", "UNet2DModel") != "UNet2DModel":
        raise ValueError(f"{folder} is of a {config['_class_name']}, and must be of a UNet2DModel.")
    safe = folder / f"{_WEIGHTS}.safetensors"
    if safe.is_file():
        return config, read_safetensors(safe)
    return config, read_tensors(folder / f"{_WEIGHTS}.bin")


def _require_vae(folder: Path, name: str) -> None:
    if name != "DiT":
        raise ValueError(f"--vae {folder} is for a DiT, whose pipeline has one, and not a {name}.")
    path = folder / "config.json"
    if not path.is_file() or _read_json(path).get("_class_name") != "AutoencoderKL":
        raise ValueError(
            f"--vae {folder} must be the folder of an AutoencoderKL, as its save_pretrained "
            "writes it."
        )


def _read_json(path: Path) -> Json:
    try:
        found: Json = dict(json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is damaged: {error}; write or copy it again.") from None
    return found


def _remarks(name: str, arguments: Json, vae: str | None) -> list[str]:
    if name == "UNet":
        labelled = arguments.get("num_classes") is not None
        told = "The network takes labels, which DDPMPipeline gives to none: call `unet` with them."
        return [told] if labelled else []
    said = [f"For images equal to ours, set after loading:\n{diffusers_dit.SAME}"]
    return said if vae else [*said, "Put an AutoencoderKL into vae/, which DiTPipeline needs."]


def _write_json(path: Path, content: Json) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write_text(path, json.dumps(content, indent=2) + "\n")
