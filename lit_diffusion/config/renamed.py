"""Replace class paths and arguments of earlier versions with their present names.

The tables in this file have an entry for each moved class and each renamed argument, so that old
configs and checkpoints still load. Old names do not work in Python imports.
"""

from typing import Any

CLASS_PATHS = {
    "lit_diffusion.data.described": "lit_diffusion.data.digits",
    **{
        f"lit_diffusion.callbacks.{path}": "lit_diffusion.lab.shifting_gaussian.ShiftingGaussian"
        for path in ("ShiftingGaussian", "curriculum.ShiftingGaussian")
    },
    "lit_diffusion.networks.biggan": "lit_diffusion.lab.gan.biggan",
    "lit_diffusion.networks.dcgan": "lit_diffusion.lab.gan.dcgan",
    "lit_diffusion.networks.patched": "lit_diffusion.networks.layers",
    "lit_diffusion.modules.gan": "lit_diffusion.lab.gan.module",
    **{
        f"lit_diffusion.timesteps.{name}": f"lit_diffusion.grids.{name}"
        for name in ("Even", "Karras", "LogSNR", "Sections", "ShiftedGrid", "Stride")
    },
}
"""Old module, or old path of a class -> new module, or new path of the class."""

ARGUMENTS = {
    "FIDEvaluation": {"second_look": "auxiliary_metrics"},
    "DiffusionModule": {"draws": "uniforms"},
    "Embeddings": {"given_null": "null_embedding"},
}
"""Present class name -> {old argument: new argument}."""


def _merge_into_condition(arguments: dict[str, Any]) -> dict[str, Any]:
    """Replace context_dim, vector_dim, num_words and null_class of a network with `condition`."""
    arguments, condition = dict(arguments), None
    for old, kind, name in (
        ("context_dim", "Tokens", "dim"),
        ("vector_dim", "Vectors", "dim"),
        ("num_words", "WordIds", "num_words"),
    ):
        if (value := arguments.pop(old, None)) is not None:
            condition = kind, {name: value}
    num_classes = arguments.get("num_classes")
    if arguments.get("null_class", True):
        arguments.pop("null_class", None)
    elif num_classes is not None:
        condition = "Classes", {"num_classes": num_classes, "null_class": False}
        del arguments["num_classes"], arguments["null_class"]
    if condition is not None:
        path = f"lit_diffusion.networks.conditions.{condition[0]}"
        arguments["condition"] = {"class_path": path, "init_args": condition[1]}
    return arguments


REWRITTEN = dict.fromkeys(("UNet", "UViT", "DiT", "JiT"), _merge_into_condition)
"""Present class name -> function that converts old arguments of the class to present ones."""


def rename_class_path(path: str) -> str:
    """Return the present path of a class, given its present or an old path.

    Example:
        >>> rename_class_path("lit_diffusion.networks.dcgan.DCGANGenerator")
        'lit_diffusion.lab.gan.dcgan.DCGANGenerator'
    """
    parts = path.split(".")
    for end in range(len(parts), 1, -1):
        if new := CLASS_PATHS.get(".".join(parts[:end])):
            return ".".join([new, *parts[end:]])
    return path


def rename_config(config: Any) -> Any:
    """Return a config (nested dicts and lists) with old class paths and arguments replaced."""
    if isinstance(config, list):
        return [rename_config(entry) for entry in config]
    if isinstance(config, str):
        return rename_class_path(config)
    if not isinstance(config, dict):
        return config
    config = {key: rename_config(value) for key, value in config.items()}
    path, arguments = config.get("class_path"), config.get("init_args")
    if isinstance(path, str) and isinstance(arguments, dict):
        config["init_args"] = _rename_arguments(path, arguments)
    return config


def rename_checkpoint(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return a checkpoint with old names of classes and arguments replaced."""
    checkpoint = dict(checkpoint)
    for key in ("hyper_parameters", "datamodule_hyper_parameters"):
        if isinstance(saved := checkpoint.get(key), dict):
            saved = rename_config(saved)
            checkpoint[key] = _rename_arguments(str(saved.get("_class_path")), saved)
    return checkpoint


def _rename_arguments(class_path: str, arguments: dict[str, Any]) -> dict[str, Any]:
    name = class_path.rpartition(".")[2]
    if "." in class_path and not class_path.startswith("lit_diffusion."):
        return arguments  # a class of another package
    if name in REWRITTEN:
        arguments = REWRITTEN[name](arguments)
    table = ARGUMENTS.get(name, {})
    return {table.get(key, key): value for key, value in arguments.items()}
