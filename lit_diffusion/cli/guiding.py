"""What --guidance and its companions make of a module's guidance."""

import math
from argparse import Namespace
from typing import Any

from lit_diffusion.checkpoints.loading import Loaded, load_with_record, path_and_weights
from lit_diffusion.guidance import Autoguidance, ClassifierFree, ClassifierScore, ClassifierShift
from lit_diffusion.modules.checks import check_codec
from lit_diffusion.modules.classifier import NoisyClassifier
from lit_diffusion.protocols import Guidance
from lit_diffusion.solvers import DDPM


def change_guidance(module: Any, args: Namespace) -> None:
    """Give a module the guidance that the options ask for; `args.guided_by` says by whom.

    Raises:
        ValueError: for options that do not go together, or a module that cannot be guided so.
    """
    args.guided_by = None
    if args.weaker and args.classifier:
        raise ValueError("give --weaker or --classifier, not both.")
    if args.weaker:
        module.guidance = _autoguidance(module, args)
    elif args.classifier:
        module.guidance = _by_classifier(module, args)
    elif args.guidance is not None:
        module.guidance = _classifier_free(module, args)
    elif args.guidance_interval or args.guidance_rescale:
        raise ValueError("--guidance_interval and --guidance_rescale need --guidance S.")


def guidance_options(args: Namespace) -> bool:
    """Whether any of them is given."""
    names = ("guidance", "guidance_interval", "weaker", "classifier")
    return bool(args.guidance_rescale) or any(getattr(args, name) is not None for name in names)


def _scale(args: Namespace, default: float) -> float:
    scale = default if args.guidance is None else float(args.guidance)
    if not math.isfinite(scale):
        raise ValueError(f"--guidance must be finite, got {scale}.")
    return scale


def _options(args: Namespace) -> dict[str, Any]:
    return {"interval": args.guidance_interval} if args.guidance_interval else {}


def _classifier_free(module: Any, args: Namespace) -> Guidance | None:
    conditioning = getattr(module, "conditioning", getattr(module, "num_classes", None))
    if conditioning is None or module.label_dropout == 0:
        raise ValueError(
            "--guidance needs a model with classes, or another conditioning, that was trained "
            f"with label_dropout, got {conditioning} and label_dropout={module.label_dropout}."
        )
    if args.guidance == 1:
        return None
    return ClassifierFree(args.guidance, rescale=args.guidance_rescale, **_options(args))


def _autoguidance(module: Any, args: Namespace) -> Guidance:
    _refuse_rescale(args)
    loaded = _loaded(args.weaker, args)
    other: Any = loaded.module
    _refuse_other("--weaker", args.weaker, module, loaded)
    args.guided_by = {"weaker": str(loaded.path), "step": loaded.step, "weights": loaded.weights}
    return Autoguidance(other.to(module.device).denoise_for, _scale(args, 2.0), **_options(args))


def _by_classifier(module: Any, args: Namespace) -> Guidance:
    _refuse_rescale(args)
    if args.guidance_interval:
        raise ValueError("--guidance_interval goes with --guidance or --weaker.")
    loaded = _loaded(args.classifier, args)
    classifier = loaded.module
    if not isinstance(classifier, NoisyClassifier):
        raise ValueError(f"--classifier {args.classifier} is a {type(classifier).__name__}.")
    _refuse_other("--classifier", args.classifier, module, loaded)
    scale, weights = _scale(args, 1.0), loaded.weights
    told = {"classifier": str(loaded.path), "step": loaded.step, "weights": weights}
    args.guided_by = told | {"scale": scale}
    gradient = classifier.to(module.device).gradient(scale)
    if isinstance(module.solver, DDPM) and not args.mask:  # which RePaint fills
        return ClassifierShift(gradient)
    return ClassifierScore(gradient, clip=module.codec.bounded)


def _loaded(source: str, args: Namespace) -> Loaded:
    path, weights = path_and_weights(source)
    return load_with_record(path, weights or args.weights, trust=args.trust)


def _refuse_other(option: str, path: str, module: Any, loaded: Loaded) -> None:
    for name in ("process", "image_shape", "num_classes"):
        ours, theirs = (repr(getattr(each, name, None)) for each in (module, loaded.module))
        if ours != theirs:
            raise ValueError(f"{option} {path} has the {name} {theirs}, but the model {ours}.")
    check_codec(module.codec, loaded.checkpoint)


def _refuse_rescale(args: Namespace) -> None:
    if args.guidance_rescale:
        raise ValueError("--guidance_rescale goes with classifier-free --guidance alone.")
