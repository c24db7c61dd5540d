"""Validation of the arguments, data, checkpoints and samples of modules."""

import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lit_diffusion.guidance import ClassifierFree, ClassifierScore, ClassifierShift
from lit_diffusion.parameterizations import ContrastCorrection
from lit_diffusion.protocols import (
    AuxiliaryLoss,
    Codec,
    Conditioning,
    Denoise,
    Denoised,
    Guidance,
    Loss,
    NonFiniteSamples,
    Parameterization,
    Process,
    Solver,
    describe_condition,
)
from lit_diffusion.solvers import DDPM
from lit_diffusion.solvers.steps import solver_times


def check_channels(network: nn.Module, image_shape: tuple[int, ...]) -> None:
    """Raise ValueError if the network's `in_channels` is not C, the number of channels of x0."""
    in_channels = getattr(network, "in_channels", image_shape[0])
    if in_channels != image_shape[0]:
        raise ValueError(
            f"image_shape is {image_shape} in the module, but in_channels is {in_channels} in "
            f"{type(network).__name__}; change one of them."
        )


def check_conditioning(
    network: nn.Module,
    conditioning: Conditioning | None,
    num_classes: int | None,
    label_dropout: float,
    guidance: Guidance | None,
) -> None:
    """Raise ValueError if the conditioning does not fit the network, label dropout or guidance.

    Label dropout and classifier-free guidance need a conditioning. The conditioning and the network
    must have the same number of classes or words. `num_classes` must be None or equal the number of
    classes of the conditioning. The function warns if classifier-free guidance is used without
    label dropout, because the unconditional prediction would then never be trained.
    """
    if not 0 <= label_dropout < 1:
        raise ValueError(f"label_dropout must be in [0, 1), got {label_dropout}.")
    needs_dropout = isinstance(guidance, ClassifierFree)
    if conditioning is None and (label_dropout > 0 or needs_dropout):
        raise ValueError(
            f"label_dropout={label_dropout} and guidance={guidance} need labels; pass num_classes "
            "or another conditioning, or label_dropout=0 for images without classes."
        )
    if isinstance(guidance, ClassifierFree) and guidance.scale != 1 and label_dropout == 0:
        warnings.warn(
            f"{guidance} uses the network's prediction without labels, which is never trained with "
            "label_dropout=0.",
            stacklevel=4,
        )
    if num_classes not in (None, getattr(conditioning, "num_classes", None)):
        raise ValueError(
            f"num_classes is {num_classes}, but the conditioning is {conditioning}; leave one out."
        )
    for name in ("num_classes", "num_words"):
        in_network = getattr(network, name, None)
        unknown = in_network if name == "num_words" else None  # a conditioning may not have it
        in_module = getattr(conditioning, name, unknown)
        if in_network is not None and in_network != in_module:
            raise ValueError(
                f"{name} is {in_module} in the module, but {in_network} in "
                f"{type(network).__name__}; change one of them."
            )


def check_objective(
    process: Process,
    parameterization: Parameterization,
    loss: Loss,
    solver: Solver,
    guidance: Guidance | None,
) -> None:
    """Raise ValueError if process, parameterization, loss, solver and guidance do not fit together.

    The function checks that x0 can be recovered from the network's output, that the weight of the
    loss is finite and not negative at both ends of the process, and that sampling is possible.
    """
    ends = torch.tensor([process.t_min, process.t_max], dtype=torch.float64)
    alpha, sigma = process.alpha_sigma(ends)
    output_scale = parameterization.output_scale(alpha, sigma)
    network_input = parameterization.network_input(torch.ones_like(alpha), alpha, sigma)
    if not (output_scale * network_input).isfinite().all():
        raise ValueError(
            f"{parameterization} divides by alpha, so it can't recover x0 from pure noise, and "
            f"{process} ends in pure noise (SNR = 0); use Velocity or Sample."
        )
    if loss.output_factor == 2 and process.num_steps is None:
        raise ValueError(
            f"{loss} needs a process in discrete steps, got {process}; use DiscreteVP."
        )
    weight = loss.weighting.weight(alpha, sigma, output_scale, None)
    if not weight.isfinite().all():
        raise ValueError(
            f"the weight must be finite at every noise level, got {weight.tolist()} at the ends of "
            f"{process} from {loss.weighting} with {parameterization}; use Velocity or Sample."
        )
    if not ((weight >= 0).all() and weight.any()):
        raise ValueError(
            "the weight must be >= 0, and > 0 at one end of the process at least, got "
            f"{weight.tolist()} at the ends of {process} from {loss.weighting}; change its "
            "arguments."
        )
    check_sampling(process, loss, solver, guidance)


def check_correction(
    parameterization: Parameterization, auxiliary_loss: AuxiliaryLoss | None
) -> None:
    """Raise ValueError if training does not cause the bias that a `ContrastCorrection` expects.

    A positive weight removes the bias of `ContrastiveFlow`, so the network must be trained with
    this loss and the same weight. A negative weight adds the bias to a network without it.
    """
    if not isinstance(parameterization, ContrastCorrection):
        return
    weight = parameterization.weight
    bias_weight = getattr(auxiliary_loss, "bias_weight", 0.0)
    if bias_weight != max(weight, 0.0):
        loss = f"ContrastiveFlow(weight={weight})" if weight > 0 else "no ContrastiveFlow"
        actual = f"{type(auxiliary_loss).__name__} with bias_weight={bias_weight}"
        raise ValueError(
            f"{parameterization} needs {loss} in training, got auxiliary_loss="
            f"{None if auxiliary_loss is None else actual}; change one of them, "
            f"or use {parameterization.base}."
        )


def check_noise_labels(network: nn.Module, process: Process) -> None:
    """Raise ValueError if a network's `fourier_bandwidth` does not suit the noise labels.

    The check has an effect only for networks with this attribute. Between the ends of the process,
    a typical Fourier feature must turn more than 0.1 times, or the network could not tell noise
    levels apart, and less than 100 times, or it could not interpolate between them. Labels that
    are constant, or infinite at an end of the process, are not checked.
    """
    bandwidth = getattr(network, "fourier_bandwidth", None)
    if bandwidth is None:
        return
    ends = torch.tensor([process.t_min, process.t_max], dtype=torch.float64)
    low, high = sorted(process.noise_label(ends).tolist())
    if not 0 < high - low < math.inf:
        return
    if not 0.1 < bandwidth * (high - low) < 100:
        raise ValueError(
            f"fourier_bandwidth={bandwidth} of {type(network).__name__} does not suit {process}, "
            f"whose noise labels go from {low:.3g} to {high:.3g}; use about "
            f"{3 / (high - low):.1g}."
        )


def check_sampling(process: Process, loss: Loss, solver: Solver, guidance: Guidance | None) -> None:
    """Raise ValueError if solver, process, guidance and loss cannot be used together."""
    try:
        solver.check(process)
    except ValueError as error:
        solver_name, process_name = type(solver).__name__, type(process).__name__
        raise ValueError(f"{solver_name} does not fit {process_name}: {error}") from None
    check_shift(solver, guidance)
    if isinstance(guidance, ClassifierScore) and not _keeps_signal(process, solver):
        raise ValueError(
            f"{guidance} needs alpha > 0, but {solver} starts at alpha = 0 on {process} (SNR = 0); "
            "pass times=LogSNR(noisiest=-10) to the solver."
        )
    if getattr(getattr(solver, "variance", None), "learned", False) and loss.output_factor != 2:
        raise ValueError(
            f"{solver} needs a learned variance, which {loss} does not train; use HybridLoss."
        )


def check_shift(solver: Solver, guidance: Guidance | None) -> None:
    """Raise ValueError if the guidance is `ClassifierShift` and the solver is not `DDPM`.

    Only `DDPM` adds the classifier's gradient (`Denoised.shift`) to its steps.
    """
    if isinstance(guidance, ClassifierShift) and not isinstance(solver, DDPM):
        raise ValueError(
            f"{guidance} shifts the mean of DDPM's steps, and {solver} would ignore it; use "
            "ClassifierScore."
        )


def _keeps_signal(process: Process, solver: Solver) -> bool:
    """Return whether alpha > 0 at every time at which the solver evaluates the network."""
    if process.alpha_sigma(torch.tensor(process.t_max))[0] > 0:
        return True
    return bool((process.alpha_sigma(solver_times(solver, process))[0] > 0).all())


def check_clipping(codec: Codec, *clipping: Solver | Guidance | None) -> None:
    """Raise ValueError if a solver or guidance clamps x0, although the codec's x0 is unbounded."""
    for clipper in clipping:
        if getattr(clipper, "clip", False) and not codec.bounded:
            raise ValueError(
                f"{clipper} clamps x0 to [-1, 1], but x0 of {type(codec).__name__} can be outside "
                "this range; use clip=False."
            )


def check_device(device: torch.device) -> None:
    """Raise ValueError if the device is MPS, because noise levels are float64."""
    if device.type == "mps":
        raise ValueError("MPS has no float64; use --trainer.accelerator=cpu.")


def check_data(
    data: object, codec: Codec, image_shape: tuple[int, ...], num_classes: int | None
) -> None:
    """Raise ValueError if module and data module differ in image shape, VAE or number of classes.

    The function checks only attributes that the data module has. After encoding, the data must have
    the shape `image_shape` of the module's x0. If `num_classes` is None, the module does not use
    labels, so the data may have any number of classes.
    """
    if (vae_sha256 := getattr(data, "vae_sha256", None)) not in (None, _sha256(codec)):
        raise ValueError(
            f"the latents of {type(data).__name__} come from a VAE with SHA-256 {vae_sha256}, but "
            f"the codec is {codec!r} with {_sha256(codec)}; give the module the VAECodec that "
            "encoded the latents."
        )
    shape = getattr(data, "image_shape", None)
    encoded = image_shape if shape is None else codec.encoded_shape(shape)
    classes = num_classes and getattr(data, "num_classes", num_classes)
    for name, ours, theirs in (
        ("image_shape", image_shape, encoded),
        ("num_classes", num_classes, classes),
    ):
        if theirs != ours:
            raise ValueError(
                f"{name} is {ours} in the module, but {theirs} in {type(data).__name__}; change "
                "one of them."
            )


def codec_record(codec: Codec) -> dict[str, Any]:
    """Return the checkpoint entry that identifies a codec's weights; {} if it has no weights."""
    sha256, folder = _sha256(codec), getattr(codec, "folder", None)
    return {} if sha256 is None else {"codec": {"name": Path(folder or "").name, "sha256": sha256}}


def check_codec(codec: Codec, checkpoint: Mapping[str, Any]) -> None:
    """Raise ValueError if `codec` has different weights than the codec of the checkpoint's run."""
    saved = checkpoint.get("codec")
    if isinstance(saved, Mapping) and (theirs := saved.get("sha256")) != _sha256(codec):
        raise ValueError(
            f"the checkpoint was trained on latents of the VAE {saved.get('name')} with SHA-256 "
            f"{theirs}, but the codec is {codec!r} with {_sha256(codec)}; put the checkpoint's VAE "
            "into the codec's folder."
        )


def _sha256(codec: Codec) -> str | None:
    return getattr(codec, "sha256", None)


def check_shape(x0: Tensor, image_shape: tuple[int, ...]) -> None:
    """Raise ValueError if encoded images x0 (B, C, H, W) do not have the module's `image_shape`."""
    if x0.shape[1:] != image_shape:
        raise ValueError(
            f"image_shape is {image_shape}, but x0 of the data has the shape "
            f"{tuple(x0.shape[1:])}; change one of them."
        )


def check_batch(batch: object, takes_condition: bool) -> None:
    """Raise ValueError unless a batch is a tuple (images, labels or other condition, index).

    If the module takes no condition, the second item must be integer labels, which it ignores.
    """
    if not (isinstance(batch, tuple | list) and len(batch) == 3):
        parts: Sequence[Any] = batch if isinstance(batch, Sequence) else [batch]
        got = ", ".join(map(describe_condition, parts))
        raise ValueError(
            "batches must be (images uint8 (B, C, H, W), labels (B,) or another condition, index "
            f"(B,) of each image in its data set), got ({got}); write a data set or collate_fn "
            "that returns such batches."
        )
    _, labels, index = batch
    if not isinstance(index, Tensor) or index.ndim != 1 or index.is_floating_point():
        raise ValueError(
            "the third part of a batch must be the index (B,) int64 of each image in its data set, "
            f"which seeds the noise of validation, got {describe_condition(index)}."
        )
    are_labels = isinstance(labels, Tensor) and labels.ndim == 1 and not labels.is_floating_point()
    if not takes_condition and not are_labels:
        raise ValueError(
            f"the batches have a condition, {describe_condition(labels)}, but this module takes "
            "none: pass conditioning=... to the module, or use batches with labels of -1."
        )


def unused_classes(data: object) -> str | None:
    """Return a hint that unconditional models ignore the data's classes; None without classes."""
    names = getattr(data, "class_names", ())
    if not isinstance(names, Sequence) or not names:
        return None
    examples = ", ".join(map(str, names[:5])) + ", ..." * (len(names) > 5)
    return (
        f"The data have {len(names)} classes ({examples}), which this model does not use; to use "
        f"them, set num_classes={len(names)} in the module and in its network."
    )


class FiniteDenoise:
    """A denoise function that records the time at which each sample first became non-finite.

    The recorded times stay on the device, so recording does not slow sampling down. The function
    tests the estimate of x0 before the solver clamps it, because clamping would hide an infinity.
    """

    def __init__(self, denoise: Denoise) -> None:
        self._denoise = denoise
        self._failed_at: Tensor | None = None  # (B,) times; nan for samples that are finite so far

    def __call__(self, x_t: Tensor, t: Tensor) -> Denoised:
        """Denoise x_t (B, C, H, W) at times t (B,)."""
        denoised = self._denoise(x_t, t)
        bad = ~denoised.x0.isfinite().flatten(1).all(1)
        failed_at = torch.full_like(t, torch.nan) if self._failed_at is None else self._failed_at
        self._failed_at = torch.where(bad & failed_at.isnan(), t, failed_at)
        return denoised

    def raise_if_non_finite(self, x0: Tensor, seeds: Sequence[int], step: int | None) -> None:
        """Raise NonFiniteSamples if a sample x0 (B, ...) or an estimate of x0 was not finite.

        The error message contains `step`, the number of completed optimizer steps, unless it is
        None.
        """
        assert self._failed_at is not None
        bad = ~self._failed_at.isnan() | ~x0.isfinite().flatten(1).all(1)
        if bad.any():
            bad_seeds = [seed for seed, is_bad in zip(seeds, bad.tolist(), strict=True) if is_bad]
            first = self._failed_at[bad].nan_to_num(-torch.inf).max().item()
            where = f"t = {first:g}" if first > -torch.inf else "the last step"
            raise NonFiniteSamples(bad_seeds, step, where)
