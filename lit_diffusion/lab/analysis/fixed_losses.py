"""Models of checkpoints, and losses that are functions of their weights alone."""

from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor

from lit_diffusion.checkpoints.loading import LoadedModule, load_module
from lit_diffusion.cli.options import usable_device
from lit_diffusion.cli.run_data import data_of_run
from lit_diffusion.lab.analysis.interpolation import Losses
from lit_diffusion.lab.analysis.weights import between, exact_spectral_norms_, state_of
from lit_diffusion.metrics.images import evenly_spaced
from lit_diffusion.seeding import PerSampleNoise, index_uniforms


def opened(path: str, args: Namespace) -> LoadedModule:
    """The module of a checkpoint, on its device."""
    loaded = load_module(path, args.weights, trust=args.trust)
    loaded.module.to(usable_device(args.device))
    return loaded


def movable(path: str, args: Namespace) -> LoadedModule:
    """As `opened`, for weights that move: spectral norm is exact, and follows them."""
    loaded = opened(path, args)
    exact_spectral_norms_(loaded.module)
    return loaded


KINDS = ("process", "parameterization", "loss", "codec", "image_shape", "num_classes")


def refuse_other_losses(first: LoadedModule, others: Sequence[LoadedModule]) -> None:
    """Raise ValueError where a loss of the first means another one for the weights of others."""
    for other in others:
        between(state_of(first.module), state_of(other.module), 0.5)  # refuses other architectures
        kinds = [each.checkpoint.get("hyper_parameters", {}) for each in (first, other)]
        for name in KINDS:
            a, b = (each.get(name) for each in kinds)
            if a != b:
                raise ValueError(
                    f"only weights of one kind of model lie on a line, and the {name} of "
                    f"{other.path} is {b!r:.200}, that of {first.path} {a!r:.200}."
                )


def training_data(loaded: LoadedModule, args: Namespace) -> Any:
    """The data of --data, or of the run of a checkpoint.

    Raises:
        ValueError: where neither names data with splits.
    """
    data = data_of_run(loaded.path, args.data, args.trust)
    if data is None:
        named = args.data or loaded.path
        raise ValueError(f"{named} names no data with splits to take images from.")
    return data


def fixed_batch(module: Any, dataset: Any, num: int) -> tuple[Tensor, Any, Tensor]:
    """Images, evenly over a set and encoded, with labels and indices: (x0, labels, index)."""
    chosen = evenly_spaced(len(dataset), num)
    images, labels, index = dataset.fetch([0] * len(chosen), chosen)
    x0 = module.codec.encode(images.to(module.device))
    return x0, move_data_to_device(labels, module.device), index


def fixed_losses(module: Any, data: Any, args: Namespace) -> Losses:
    """Losses of the weights in place on training images, with noise by their place in the set.

    Of a diffusion model one for each of --levels, uniforms of which 1 is the noisiest, and one over
    all levels. Of a GAN that of each network.

    Raises:
        ValueError: for a module that has neither, or more images than there are.
    """
    dataset = data.dataset("train")
    if not 2 <= args.images <= len(dataset):
        raise ValueError(f"--images must be 2 to {len(dataset)}, got {args.images}.")
    if not (args.levels and all(0 <= u <= 1 for u in args.levels)) or len(
        {f"{u:g}" for u in args.levels}
    ) < len(args.levels):
        raise ValueError(f"--levels must be different numbers in [0, 1], got {args.levels}.")
    x0, labels, index = fixed_batch(module, dataset, args.images)
    if hasattr(module, "generator_losses"):
        z = module.latents(index.tolist(), "validation").to(module.device)
        told = labels if module.num_classes else None
        return {
            "discriminator": lambda: module.discriminator_losses(x0, told, z).mean(),
            "generator": lambda: module.generator_losses(told, z).mean(),
        }
    if lacking := [n for n in ("per_sample_loss", "process", "codec") if not hasattr(module, n)]:
        raise ValueError(
            "losses by level need a module with per_sample_loss, process and codec; "
            f"{type(module).__name__} lacks {' and '.join(lacking)}."
        )
    condition = labels if getattr(module, "conditioning", None) is not None else None
    noise = PerSampleNoise(index.tolist(), stream="validation").randn_like(x0)

    def at(u: Tensor) -> Callable[[], Tensor]:
        t = module.process.from_unit(u.to(x0.device))
        return lambda: module.per_sample_loss(x0, condition, t, noise).mean()

    levels = {f"u = {u:g}": at(torch.full((len(x0),), u).double()) for u in args.levels}
    return {**levels, "all": at(index_uniforms(index))}
