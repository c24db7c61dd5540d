"""The guidance that --guidance, --weaker and --classifier describe."""

import math
from typing import Any

from lit_diffusion.checkpoints.loading import LoadedModule, load_module, split_weights_suffix
from lit_diffusion.cli.options import SamplingOptions
from lit_diffusion.guidance import Autoguidance, ClassifierFree, ClassifierScore, ClassifierShift
from lit_diffusion.modules.checks import check_codec
from lit_diffusion.modules.classifier import NoisyClassifier
from lit_diffusion.protocols import Guidance
from lit_diffusion.solvers import DDPM

GuidedBy = dict[str, Any]
"""Path, step and weights of the second model, for the record of the images."""


def build_guidance(
    module: Any, options: SamplingOptions
) -> tuple[Guidance | None, GuidedBy | None]:
    """The guidance that the options describe, and the second model that it uses, if any.

    Args:
        module: that is to be guided, on its device, with the solver that it will use.
        options: of which `changes_guidance` is True.

    Raises:
        ValueError: for options that exclude each other, or a module that cannot be guided so.
    """
    if options.weaker:
        return _autoguidance(module, options)
    if options.classifier:
        return _classifier_guidance(module, options)
    if options.guidance is None:
        raise ValueError("--guidance_interval and --guidance_rescale need --guidance S.")
    conditioning = getattr(module, "conditioning", getattr(module, "num_classes", None))
    if conditioning is None or module.label_dropout == 0:
        raise ValueError(
            "--guidance needs a model with classes, or another conditioning, that was trained "
            f"with label_dropout, got {conditioning} and label_dropout={module.label_dropout}."
        )
    if options.guidance == 1:
        return None, None
    rescale = options.guidance_rescale
    return ClassifierFree(options.guidance, rescale=rescale, **_interval(options)), None


def _autoguidance(module: Any, options: SamplingOptions) -> tuple[Guidance, GuidedBy]:
    _refuse_rescale(options)
    loaded = _load_second("--weaker", str(options.weaker), module, options)
    weaker: Any = loaded.module
    guidance = Autoguidance(weaker.denoise_for, _scale(options, 2.0), **_interval(options))
    return guidance, {"weaker": str(loaded.path), "step": loaded.step, "weights": loaded.weights}


def _classifier_guidance(module: Any, options: SamplingOptions) -> tuple[Guidance, GuidedBy]:
    _refuse_rescale(options)
    if options.guidance_interval:
        raise ValueError("--guidance_interval goes with --guidance or --weaker.")
    loaded = _load_second("--classifier", str(options.classifier), module, options)
    classifier: Any = loaded.module
    scale = _scale(options, 1.0)
    gradient = classifier.gradient(scale)
    guidance: Guidance = ClassifierScore(gradient, clip=module.codec.bounded)
    if isinstance(module.solver, DDPM) and not options.mask:  # RePaint takes its place
        guidance = ClassifierShift(gradient)
    return guidance, {
        "classifier": str(loaded.path),
        "step": loaded.step,
        "weights": loaded.weights,
        "scale": scale,
    }


def _load_second(option: str, source: str, module: Any, options: SamplingOptions) -> LoadedModule:
    """The model of --weaker or --classifier, on the device of the module that it must fit."""
    path, weights = split_weights_suffix(source)
    loaded = load_module(path, weights or options.weights, trust=options.trust)
    if option == "--classifier" and not isinstance(loaded.module, NoisyClassifier):
        raise ValueError(f"--classifier {source} is a {type(loaded.module).__name__}.")
    for name in ("process", "image_shape", "num_classes"):
        ours, theirs = (repr(getattr(each, name, None)) for each in (module, loaded.module))
        if ours != theirs:
            raise ValueError(f"{option} {source} has the {name} {theirs}, but the model {ours}.")
    check_codec(module.codec, loaded.checkpoint)
    loaded.module.to(module.device)
    return loaded


def _scale(options: SamplingOptions, default: float) -> float:
    scale = default if options.guidance is None else options.guidance
    if not math.isfinite(scale):
        raise ValueError(f"--guidance must be finite, got {scale}.")
    return scale


def _interval(options: SamplingOptions) -> dict[str, Any]:
    return {"interval": options.guidance_interval} if options.guidance_interval else {}


def _refuse_rescale(options: SamplingOptions) -> None:
    if options.guidance_rescale:
        raise ValueError("--guidance_rescale goes with classifier-free --guidance alone.")
