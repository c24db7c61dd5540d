"""Write a module as a pipeline folder of diffusers, and read the folder of a UNet2DModel."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from lit_diffusion.files import atomic_write, atomic_write_text, check_regular, checked_read
from lit_diffusion.gaussian import FixedLarge, LearnedRange
from lit_diffusion.grids import Sections
from lit_diffusion.interchange import diffusers_dit, diffusers_unet
from lit_diffusion.interchange.exported import create_folder, read_safetensors, read_state_dict
from lit_diffusion.parameterizations import Epsilon, Sample, Velocity
from lit_diffusion.processes import DiscreteVP
from lit_diffusion.seeding import PerSampleNoise, classes_of
from lit_diffusion.solvers import DDPM

_PREDICTIONS = {Epsilon: "epsilon", Sample: "sample", Velocity: "v_prediction"}
_VARIANCES = {FixedLarge: "fixed_large", LearnedRange: "learned_range"}
_WEIGHTS_STEM = "diffusion_pytorch_model"

Json = dict[str, Any]


def write_diffusers(
    folder: str | Path, module: Any, record: Json, state: Mapping[str, Tensor], vae: str | None
) -> list[str]:
    """Write a module as a pipeline of diffusers: a UNet as DDPMPipeline, a DiT as DiTPipeline.

    Args:
        folder: folder of the pipeline. It is created if it does not exist.
        module: module whose process, parameterization and solver determine the scheduler.
        record: dictionary with "network" (class path and arguments) and "image_shape".
        state: weights of the network by name.
        vae: folder of an AutoencoderKL to copy into the pipeline. If None, the pipeline has no
            AutoencoderKL, and a DiTPipeline cannot be loaded.

    Returns:
        Remarks for the user, as sentences.

    Raises:
        ValueError: if a part of the module has no equivalent in diffusers. The message names the
            part.
    """
    name = record["network"]["class_path"].rpartition(".")[2]
    arguments = _classes_as_number(record["network"]["init_args"])
    remarks = []
    if name == "UNet":
        height, width = (int(side) for side in record["image_shape"][1:])
        config = diffusers_unet.to_config(arguments)
        config |= {"sample_size": height if height == width else [height, width]}
        weights = diffusers_unet.to_diffusers(state, arguments)
        part, model, scheduler, pipeline = "unet", "UNet2DModel", "DDPMScheduler", "DDPMPipeline"
        if arguments.get("num_classes") is not None:
            remarks = ["The network takes labels, which DDPMPipeline never passes; call `unet`."]
    elif name == "DiT":
        config, weights = diffusers_dit.to_config(arguments), diffusers_dit.to_diffusers(state)
        part, model, scheduler = "transformer", "DiTTransformer2DModel", "DDIMScheduler"
        pipeline = "DiTPipeline"
        code = diffusers_dit.FIX_FREQUENCIES
        remarks = [f"To get the same images as here, run this after loading the pipeline:\n{code}"]
        if vae is None:
            remarks.append("Put an AutoencoderKL into vae/, which DiTPipeline needs.")
    else:
        raise ValueError(f"diffusers has no {name}: export a UNet or DiT, or --format safetensors.")
    vae_files: list[Path] = []
    vae_config: Json = {}
    if vae is not None:
        vae_files = _list_vae_files(Path(vae), name)
        vae_config, shift = _scaled_config(Path(vae), module.codec, Path(folder) / "vae")
        if shift:
            remarks.append(f"DiTPipeline decodes without the codec's shift of {shift:g}.")
    schedule = {"_class_name": scheduler, **scheduler_config(module)}

    out = create_folder(folder)
    for file in vae_files:  # copied first, because what follows may write to the VAE's folder
        target = out / "vae" / file.name
        target.parent.mkdir(exist_ok=True)
        with check_regular(file).open("rb") as original, atomic_write(target) as copy:
            shutil.copyfileobj(original, copy)
    if vae_config:
        _write_json(out / "vae" / "config.json", vae_config)
    write_model(out / part, {"_class_name": model, **config}, weights)
    _write_json(out / "scheduler" / "scheduler_config.json", schedule)
    index = {part: ["diffusers", model], "scheduler": ["diffusers", scheduler]}
    if name == "DiT":
        index["vae"] = ["diffusers", "AutoencoderKL"]
    _write_json(out / "model_index.json", {"_class_name": pipeline, **index})
    return remarks


@torch.no_grad()
def compare_with_pipeline(folder: str | Path, module: Any) -> str:
    """Compare images of a module with images of the pipeline that `write_diffusers` wrote from it.

    The pipeline and the module start from the noise of the seeds 0 and 1, take the same number of
    steps, and use the class labels that `generate` assigns to the seeds. The pipeline uses no
    guidance. If the images are latents, they are not decoded for the comparison. The module must be
    in eval mode on the CPU.

    Returns:
        Sentences that name the solvers of the pipeline and of the module, and give the maximum and
        the mean difference between their images.
    """
    folder, seeds = Path(folder), (0, 1)
    index = _read_json(folder / "model_index.json")
    part = "unet" if "unet" in index else "transformer"
    kind, scheduler_kind = index[part][1], index["scheduler"][1]
    ours = f"{index['_class_name']} samples by {scheduler_kind}, this run by {module.solver}"
    try:
        import diffusers
    except ModuleNotFoundError as error:
        return f"{ours}. Their images were not compared: {error}."
    network = getattr(diffusers, kind).from_config(_read_json(folder / part / "config.json")).eval()
    network.load_state_dict(read_safetensors(folder / part / f"{_WEIGHTS_STEM}.safetensors"))
    for block in getattr(network, "transformer_blocks", []):  # as in `FIX_FREQUENCIES`
        block.norm1.emb.time_proj.downscale_freq_shift = 0
    config = _read_json(folder / "scheduler" / "scheduler_config.json")
    scheduler = getattr(diffusers, scheduler_kind).from_config(config)
    labels = torch.tensor(classes_of(seeds, module.num_classes)) if module.num_classes else None

    noise = PerSampleNoise(seeds)
    start = noise.draw(module.image_shape)
    x0 = module.solver.sample(
        module.denoise_for(labels), module.process, start, noise.randn_like
    ).float()
    noise = PerSampleNoise(seeds)
    x_t, steps = noise.draw(module.image_shape), module.solver.steps
    is_ddpm = scheduler_kind == "DDPMScheduler"
    scheduler.set_timesteps(steps)
    for t in scheduler.timesteps:
        output = network(x_t, t.expand(len(x_t)), class_labels=labels).sample
        if not is_ddpm:
            output = output[:, : x_t.shape[1]]  # DDIMScheduler takes no variance
        options = {"generator": noise.generators} if is_ddpm else {}
        x_t = scheduler.step(output, t, x_t, **options).prev_sample
    if module.codec.bounded:
        x0, x_t = x0.clamp(-1, 1), x_t.clamp(-1, 1)
    difference, kind, unit = (x0 - x_t).abs(), "latents", "of 1, their usual standard deviation"
    is_same = difference.max() < 0.01
    if module.codec.bounded:
        difference, kind, unit = 127.5 * difference, "images", "of 255 levels"
        is_same = difference.max() < 1
    return (
        f"{ours}. In {steps} steps from seeds 0, 1 their {kind} are "
        f"{'the same' if is_same else 'not the same'}: they differ by at most "
        f"{difference.max():.2g} and on average {difference.mean():.2g} {unit}."
    )


def scheduler_config(module: Any) -> Json:
    """Return the arguments of a diffusers scheduler that fits a module's process and solver.

    Raises:
        ValueError: if a part of the module has no equivalent in diffusers. The message names the
            part.
    """
    process, prediction = module.process, _PREDICTIONS.get(type(module.parameterization))
    if not isinstance(process, DiscreteVP):
        raise ValueError(f"diffusers' DDPMScheduler needs betas, but {process} has none.")
    if process.rescale_labels and process.num_steps != 1000:
        raise ValueError(
            f"rescale_labels=True with {process.num_steps} steps: diffusers passes integer steps "
            "to a network; export with --format safetensors."
        )
    if prediction is None:
        supported = ", ".join(kind.__name__ for kind in _PREDICTIONS)
        raise ValueError(f"{module.parameterization}: DDPMScheduler only has {supported}.")
    variance = _VARIANCES.get(type(getattr(module.solver, "variance", None)), "fixed_small")
    is_linspace = isinstance(module.solver, DDPM) and module.solver.times in (None, Sections())
    return {
        "num_train_timesteps": process.num_steps,
        "trained_betas": process.betas.betas().tolist(),
        "prediction_type": prediction,
        "variance_type": "learned_range" if module.loss.output_factor == 2 else variance,
        "clip_sample": bool(getattr(module.solver, "clip", True)),
        "timestep_spacing": "linspace" if is_linspace else "leading",
    }


def write_model(folder: Path, config: Json, weights: Mapping[str, Tensor]) -> None:
    """Write the config and the weights of a network into a folder."""
    _write_json(folder / "config.json", config)
    weights = {name: value.detach().cpu().contiguous() for name, value in weights.items()}
    with atomic_write(folder / f"{_WEIGHTS_STEM}.safetensors") as file:
        file.write(save(weights, {"format": "pt"}))


def read_model(folder: str | Path) -> tuple[Json, dict[str, Tensor]]:
    """Read config and weights of a UNet2DModel.

    Args:
        folder: folder of the model, or of a pipeline that contains it.

    Raises:
        FileNotFoundError: if the folder contains no model.
        ValueError: if the model is not a UNet2DModel.
    """
    folder = Path(folder)
    folder = folder / "unet" if (folder / "unet").is_dir() else folder
    if not (folder / "config.json").exists():
        raise FileNotFoundError(f"{folder} holds no config.json; name the folder of a UNet2DModel.")
    config = _read_json(folder / "config.json")
    if config.get("_class_name", "UNet2DModel") != "UNet2DModel":
        raise ValueError(f"{folder} holds a {config['_class_name']}, but must hold a UNet2DModel.")
    file = folder / f"{_WEIGHTS_STEM}.safetensors"
    if file.exists():
        return config, read_safetensors(file)
    return config, read_state_dict(folder / f"{_WEIGHTS_STEM}.bin")


def _classes_as_number(arguments: Json) -> Json:
    """Replace condition=Classes(n) with num_classes=n in the arguments of a network."""
    condition = arguments.get("condition") or {}
    labels = condition.get("init_args", {})
    if condition.get("class_path", "").endswith(".Classes") and labels.get("null_class", True):
        return arguments | {"num_classes": labels["num_classes"], "condition": None}
    return arguments


def _list_vae_files(folder: Path, network: str) -> list[Path]:
    """Paths of the config and the weights in the folder of an AutoencoderKL, for a DiT.

    Raises:
        ValueError: if the folder contains a different model, if one of the files is not a regular
            file, or if the network is not a DiT.
    """
    if network != "DiT":
        raise ValueError(
            f"--vae {folder} is only for a DiT, whose pipeline has a VAE, not for a {network}."
        )
    path, weights = folder / "config.json", sorted(folder.glob(f"{_WEIGHTS_STEM}*"))
    is_vae = path.exists() and _read_json(path).get("_class_name") == "AutoencoderKL"
    if not is_vae or not weights:
        raise ValueError(
            f"--vae {folder} must be the folder of an AutoencoderKL, as its save_pretrained "
            "writes it."
        )
    return [check_regular(file) for file in (path, *weights)]


def _scaled_config(vae: Path, codec: Any, target: Path) -> tuple[Json, float]:
    """Config of a VAE, with the scale and shift of a codec that has them; and the shift.

    Raises:
        ValueError: if the changed config would replace the config in the folder `vae`.
    """
    config = _read_json(vae / "config.json")
    factors = {"scaling_factor": "scale", "shift_factor": "shift"}
    changes = {key: getattr(codec, name) for key, name in factors.items() if hasattr(codec, name)}
    usual = {"scaling_factor": 0.18215, "shift_factor": 0.0}
    is_changed = any((config.get(key) or usual[key]) != value for key, value in changes.items())
    if is_changed and target.resolve() == vae.resolve():
        raise ValueError(
            f"the scale and shift of {codec} would replace those in {vae}: export into another "
            "folder, so that only the copied VAE gets them."
        )
    return config | changes if is_changed else config, float(changes.get("shift_factor", 0.0))


def _read_json(path: Path) -> Json:
    with checked_read(path, "config of diffusers") as file:
        return dict(json.loads(file.read_text()))


def _write_json(path: Path, content: Json) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write_text(path, json.dumps(content, indent=2) + "\n")
