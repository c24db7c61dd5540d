"""What a module refuses: arguments that do not go together, losses that are not finite."""

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lit_diffusion.guidance import ClassifierFree, ClassifierShift
from lit_diffusion.protocols import Guidance, Loss, Parameterization, Process, Solver
from lit_diffusion.solvers import DDPM


def check_labels(
    network: nn.Module, num_classes: int | None, label_dropout: float, guidance: Guidance | None
) -> None:
    """Raise ValueError where labels are wanted and there are none, or others."""
    if not 0 <= label_dropout < 1:
        raise ValueError(f"label_dropout must be in [0, 1), got {label_dropout}.")
    needs_dropout = isinstance(guidance, ClassifierFree)
    if num_classes is None and (label_dropout > 0 or needs_dropout):
        raise ValueError(
            f"label_dropout={label_dropout} and guidance={guidance} need labels; pass num_classes."
        )
    if needs_dropout and label_dropout == 0:
        warnings.warn(
            f"{guidance} compares with the prediction without labels, which label_dropout=0 "
            "never trains.",
            stacklevel=4,
        )
    known = getattr(network, "num_classes", None)
    if known is not None and known != num_classes:
        raise ValueError(
            f"num_classes is {num_classes} in the module, but {known} in "
            f"{type(network).__name__}; change one of them."
        )


def check_objective(
    process: Process,
    parameterization: Parameterization,
    loss: Loss,
    solver: Solver,
    guidance: Guidance | None,
) -> None:
    """Raise ValueError where the network could not be trained, or sampled from, as it is asked."""
    ends = torch.tensor([process.t_min, process.t_max], dtype=torch.float64)
    alpha, sigma = process.alpha_sigma(ends)
    told = parameterization.network_input(torch.ones_like(alpha), alpha, sigma)
    if not (parameterization.gain(alpha, sigma) * told).isfinite().all():
        raise ValueError(
            f"{parameterization} divides by alpha and can't recover x0 from pure noise, where "
            f"{process} ends (SNR = 0); use Velocity or Sample."
        )
    loss.check(process, parameterization)
    solver.check(process)
    if isinstance(guidance, ClassifierShift) and not isinstance(solver, DDPM):
        raise ValueError(
            f"{guidance} shifts the steps of DDPM, and {solver} has none to shift; use "
            "ClassifierScore."
        )
    if getattr(getattr(solver, "variance", None), "learned", False) and loss.output_factor != 2:
        raise ValueError(
            f"solver {solver} needs a learned variance, which {loss} does not train; use "
            "HybridLoss."
        )


def check_device(device: torch.device) -> None:
    """Raise ValueError for a device without float64, which noise levels are computed in."""
    if device.type == "mps":
        raise ValueError("MPS has no float64; use --trainer.accelerator=cpu.")


def check_data(data: object, image_shape: tuple[int, ...] | None, num_classes: int | None) -> None:
    """Raise ValueError for a data module of another shape or with other classes.

    Args:
        data: a data module; one without `image_shape` or `num_classes` fits.
        image_shape: the module's (C, H, W); None fits all.
        num_classes: the module's; None fits all, as labels are not used then.
    """
    for name, ours in (("image_shape", image_shape), ("num_classes", num_classes)):
        theirs = getattr(data, name, ours)
        if ours is not None and theirs != ours:
            raise ValueError(
                f"{name} is {ours} in the module, but {theirs} in {type(data).__name__}; change "
                "one of them."
            )


def labels_of(
    seeds: Sequence[int], labels: Tensor | None, num_classes: int | None
) -> Tensor | None:
    """The labels to generate with, checked before a GPU could die of a wrong one.

    Args:
        seeds: of the samples.
        labels: (N,) int64, as the user gave them; None takes seed modulo `num_classes`.
        num_classes: of the module; None has no labels, which -1 may say too.

    Example:
        >>> labels_of([3, 12], None, 10).tolist(), labels_of([3], torch.tensor([-1]), None)
        ([3, 2], None)
    """
    if not len(seeds):
        raise ValueError("generate needs at least one seed, got none.")
    if labels is None and num_classes is not None:
        return torch.tensor([seed % num_classes for seed in seeds])
    if labels is None or labels.is_floating_point():
        return labels
    if labels.shape != (len(seeds),):
        raise ValueError(
            f"labels must be one per seed, ({len(seeds)},), got {tuple(labels.shape)}."
        )
    if bool(((labels < -1) | (labels >= (num_classes or 0))).any()):
        known = f"0..{num_classes - 1} or -1" if num_classes else "-1, without num_classes"
        raise ValueError(f"labels must be {known}, got {sorted(set(labels.tolist()))[:10]}.")
    return None if num_classes is None else labels
