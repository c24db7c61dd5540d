"""Compute losses that depend only on a module's weights, at different sets of weights.

Images, noise levels and noise are fixed. Therefore, losses at different weights can be compared,
and a loss can be differentiated twice.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities import move_data_to_device
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from lit_diffusion.checkpoints.loading import LoadedModule
from lit_diffusion.metrics.images import evenly_spaced
from lit_diffusion.seeding import PerSampleNoise, index_uniforms

WeightState = dict[str, Tensor]
"""Floating-point parameters and buffers of a module, by name."""

Losses = Mapping[str, Callable[[], Tensor]]
"""Scalar losses at the current weights of a module, by name."""


def copy_weights(module: nn.Module) -> WeightState:
    """Copy all floating-point parameters and buffers, including running statistics."""
    return {
        name: value.detach().clone()
        for name, value in module.state_dict().items()
        if value.is_floating_point()
    }


@torch.no_grad()
def evaluate_losses(
    module: nn.Module, states: Iterable[Mapping[str, Tensor]], losses: Losses
) -> NDArray[np.float64]:
    """Evaluate losses of a module at several sets of weights, then restore the original weights.

    A weight that is missing in one of the `states` keeps its previous value.

    Returns:
        (number of losses, number of states).

    Example:
        >>> module = nn.Linear(1, 1, bias=False)
        >>> losses = {"square": lambda: module.weight.square().sum()}
        >>> evaluate_losses(module, [{"weight": torch.tensor([[3.0]])}], losses)
        array([[9.]])
    """
    original = copy_weights(module)
    columns = []
    try:
        for state in states:
            module.load_state_dict(state, strict=False)
            columns.append([loss().item() for loss in losses.values()])
    finally:
        module.load_state_dict(original, strict=False)
    return np.array(columns).T


class ExactSpectralNorm(nn.Module):
    """Divides a weight by its largest singular value, and differentiates through that value.

    In contrast, torch's spectral norm uses stored singular vectors from its last power iteration.
    If an analysis changes the weights, these vectors are wrong. Their derivatives are also missing
    from the Hessian, because torch treats them as constants. The weight is viewed as a matrix,
    with one row per index of the dimension `dim`.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, weight: Tensor) -> Tensor:
        """Return the normalized weight, with the same shape."""
        rows = weight.movedim(self.dim, 0).flatten(1)
        gram = rows @ rows.T if rows.shape[0] <= rows.shape[1] else rows.T @ rows
        values, vectors = torch.linalg.eigh(gram.detach())
        others, top = vectors[:, :-1], vectors[:, -1]
        gaps = values[-1] - values[:-1]
        gaps = gaps.where(gaps > 0, torch.inf)  # a repeated largest value has no derivative
        # This Newton step is 0, but its derivative is that of the eigenvector. In contrast to the
        # second derivative of svdvals, it is finite if the other singular values are equal.
        top = top + others @ (others.T @ gram @ top / gaps)
        return weight / (top @ gram @ top / top.square().sum()).sqrt()


def use_exact_spectral_norm_(module: nn.Module) -> None:
    """Replace each of torch's `parametrizations.spectral_norm` with `ExactSpectralNorm`.

    Raises:
        ValueError: if a submodule has the older, hook-based `torch.nn.utils.spectral_norm`.
    """
    for name, submodule in module.named_modules():
        parameters = {key for key, _ in submodule.named_parameters(recurse=False)}
        buffers = {key for key, _ in submodule.named_buffers(recurse=False)}
        if any(f"{key[:-2]}_orig" in parameters for key in buffers if key.endswith("_u")):
            raise ValueError(
                f"{name} has torch.nn.utils.spectral_norm, which is wrong after a change of the "
                "weights; build it with torch.nn.utils.parametrizations.spectral_norm."
            )
        if isinstance(submodule, ParametrizationList):
            for i, parametrization in enumerate(submodule):
                if {"_u", "_v"} <= dict(parametrization.named_buffers()).keys():
                    submodule[i] = ExactSpectralNorm(getattr(parametrization, "dim", 0))


def fixed_batch(module: Any, dataset: Any, num_images: int) -> tuple[Tensor, Any, Tensor]:
    """Read evenly spaced images of a data set, on the module's device.

    Returns:
        The images x0 (B, C, H, W), encoded by the module's codec; their labels; and their indices
        (B,) int64 in the data set.
    """
    rows = evenly_spaced(len(dataset), num_images)
    images, labels, index = dataset.fetch([0] * len(rows), rows)
    x0 = module.codec.encode(images.to(module.device))
    return x0, move_data_to_device(labels, module.device), index


def fixed_losses(module: Any, dataset: Any, num_images: int, levels: Sequence[float]) -> Losses:
    """Build mean losses over fixed images of a data set, with fixed noise.

    The index of an image determines its noise. For a GAN, there is one loss per network. For a
    diffusion model, there is one loss per noise level, in which all images have this noise level.
    In an additional loss, "all", the noise level of each image is also determined by its index.

    Args:
        module: DiffusionModule, GANModule, or another module with the same methods.
        dataset: training set with a method `fetch`, which returns batches by epoch and index.
        num_images: number of images, from 2 to the size of the set.
        levels: noise levels in [0, 1], where 1 is the noisiest.

    Returns:
        Functions without arguments that compute the losses, by name.

    Raises:
        ValueError: if `num_images` or a level is out of range, or if the module cannot compute
            these losses.
    """
    if not 2 <= num_images <= len(dataset):
        raise ValueError(f"--images must be 2 to {len(dataset)}, got {num_images}.")
    names = [f"u = {u:g}" for u in levels]
    if not levels or not all(0 <= u <= 1 for u in levels) or len({*names}) < len(names):
        raise ValueError(f"--levels must be different numbers in [0, 1], got {levels}.")
    x0, labels, index = fixed_batch(module, dataset, num_images)
    if hasattr(module, "generator_losses"):
        z = module.latents(index.tolist(), "validation").to(module.device)
        labels = labels if module.num_classes else None
        return {
            "discriminator": lambda: module.discriminator_losses(x0, labels, z).mean(),
            "generator": lambda: module.generator_losses(labels, z).mean(),
        }
    if lacking := [n for n in ("per_sample_loss", "process", "codec") if not hasattr(module, n)]:
        raise ValueError(
            "losses by level need a module with per_sample_loss, process and codec; "
            f"{type(module).__name__} lacks {' and '.join(lacking)}."
        )
    condition = labels if getattr(module, "conditioning", None) is not None else None
    noise = PerSampleNoise(index.tolist(), stream="validation").randn_like(x0)

    def loss_at(u: Tensor) -> Callable[[], Tensor]:
        t = module.process.from_unit(u.to(x0.device))
        return lambda: module.per_sample_loss(x0, condition, t, noise).mean()

    uniforms = [torch.full((len(x0),), u).double() for u in levels]
    losses = {name: loss_at(u) for name, u in zip(names, uniforms, strict=True)}
    return {**losses, "all": loss_at(index_uniforms(index))}


def describe_losses(module: nn.Module, num_images: int, statistics: str) -> str:
    """Describe the losses of `fixed_losses`, for figures and records.

    `statistics` says how running statistics of batch norms change with the weights: "interpolated"
    or "unchanged".
    """
    images = f"mean over {num_images} training images"
    if not hasattr(module, "generator_losses"):
        return (
            f"Training loss, {images} with fixed noise; u: noise level as a fraction of the "
            "process's range, 1 is the noisiest"
        )
    normalizes = any(name.endswith("running_mean") for name, _ in module.named_buffers())
    differences = ["without R1"] * (getattr(module, "r1", 0) > 0)
    differences += [f"batch norm with {statistics} running statistics"] * normalizes
    return ", ".join([f"GAN losses, {images}", *differences])


def network_of_loss(module: Any, name: str) -> nn.Module | None:
    """Return the network that a loss of `fixed_losses` trains; None for the whole module."""
    network = getattr(module, name, None)
    return network if isinstance(network, nn.Module) else None


LOSS_ARGUMENTS = ("process", "parameterization", "loss", "codec", "image_shape", "num_classes")


def check_same_losses(first: LoadedModule, *others: LoadedModule) -> None:
    """Raise ValueError unless all modules have the same weight shapes and loss settings."""
    shapes = {name: value.shape for name, value in copy_weights(first.module).items()}
    ours = first.checkpoint.get("hyper_parameters", {})
    for other in others:
        theirs = {name: value.shape for name, value in copy_weights(other.module).items()}
        if wrong := sorted(n for n in shapes | theirs if shapes.get(n) != theirs.get(n)):
            raise ValueError(
                "both models must have the same architecture, but they differ in "
                f"{wrong[0]} and {len(wrong) - 1} more."
            )
        arguments = other.checkpoint.get("hyper_parameters", {})
        for name in LOSS_ARGUMENTS:
            if ours.get(name) != arguments.get(name):
                raise ValueError(
                    f"all models must have the same {name}, but in {other.path} it is "
                    f"{arguments.get(name)!r:.200}, and in {first.path} {ours.get(name)!r:.200}."
                )
