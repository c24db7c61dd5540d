"""Generate images from a checkpoint, with options for labels, solver, guidance and editing."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor
from torch.nn.functional import max_pool2d

from lit_diffusion import solvers
from lit_diffusion.checkpoints import loading
from lit_diffusion.cli.options import SamplingOptions, set_float32_precision, usable_device
from lit_diffusion.config.messages import parameter_names
from lit_diffusion.guidance import Autoguidance, ClassifierFree, ClassifierScore, ClassifierShift
from lit_diffusion.metrics.images import OVERVIEWS, read_image
from lit_diffusion.modules.checks import check_clipping, check_codec, check_sampling
from lit_diffusion.modules.classifier import NoisyClassifier
from lit_diffusion.protocols import Condition, Guidance, Solver, by_part
from lit_diffusion.seeding import classes_of
from lit_diffusion.solvers.editing import repaint_solver, truncate_solver


@dataclass(frozen=True)
class ImageGenerator:
    """A module on its device, ready to generate images."""

    loaded: loading.LoadedModule
    options: SamplingOptions
    labels: list[int] | None  # image i gets labels[i % len(labels)]; None: from the seeds
    condition: Condition  # labels or prompts; image i gets row i modulo N; None: from the seeds
    class_names: list[str]  # empty if the checkpoint has none
    init: Tensor | None = None  # (N, C, H, W) uint8; image i starts from init[i % N]; None: noise
    mask: Tensor | None = None  # (1, 1, h, w) like x0, 1 where `init` is preserved
    guided_by: dict[str, Any] | None = None  # source of the model of --weaker or --classifier

    def generate(self, numbers: Sequence[int]) -> Tensor:
        """Generate the images with these numbers, as (N, C, H, W) uint8 on the CPU.

        An image depends only on its number, which determines the seed, the condition and the
        initial image.
        """
        module: Any = self.loaded.module
        seeds = [self.options.seed + i for i in numbers]
        num_rows = len(self.options.prompt or self.labels or "-")
        condition = by_part(itemgetter([i % num_rows for i in numbers]), self.condition)
        if self.init is None:
            images: Tensor = module.generate(seeds, condition)
        else:
            init = self.init[torch.tensor([i % len(self.init) for i in numbers])]
            if self.mask is not None:
                images = module.inpaint(init, self.mask, seeds, condition)
            else:
                images = module.edit(init, seeds, condition, self.options.strength)
        return images.cpu()

    def image_labels(self, num: int) -> list[int] | None:
        """Labels of the first `num` images; None for a model without classes."""
        if self.labels:
            return [self.labels[i % len(self.labels)] for i in range(num)]
        num_classes: int | None = getattr(self.loaded.module, "num_classes", None)
        seeds = range(self.options.seed, self.options.seed + num)
        return classes_of(seeds, num_classes) if num_classes else None

    def record(self, num: int, total: int) -> dict[str, Any]:
        """The content of samples.json after `num` of `total` images are written."""
        module: Any = self.loaded.module
        options = self.options
        sampling = module.sampling_record() if hasattr(module, "sampling_record") else {}
        if options.init is not None:
            solver = editing_solver(module, options)
            sampling = {**sampling, "solver": repr(solver), "steps": solver.steps}
        record = {
            "checkpoint": str(self.loaded.path),
            "step": self.loaded.step,
            "weights": self.loaded.weights,
            "num": num,
            "of": total,
            "seeds": [options.seed, options.seed + num],
            "labels": self.labels,
            "prompts": options.prompt,
            "class_names": self.class_names,
            "sampling": sampling,
            "init": options.init,
            "strength": options.strength,
            "mask": options.mask,
            "guided_by": self.guided_by,
        }
        optional = ("prompts", "init", "strength", "mask", "guided_by")
        return {name: value for name, value in record.items() if value or name not in optional}


def load_generator(options: SamplingOptions, *, check: bool = True) -> ImageGenerator:
    """Load a checkpoint, and set the solver and guidance of the options.

    With `check=True`, the function raises ValueError if the options set a solver or a guidance that
    does not fit the module. Callers that will replace the solver pass `check=False`.
    """
    assert options.checkpoint is not None
    device = usable_device(options.device)
    set_float32_precision(options.float32_precision)
    loaded = loading.load_module(options.checkpoint, options.weights, trust=options.trust)
    module: Any = loaded.module
    kind = f"{type(module).__name__} in {loaded.path}"
    if not hasattr(module, "generate"):
        raise ValueError(f"{kind} has no `generate`; name a checkpoint of a generative model.")
    if options.init and not hasattr(module, "edit"):
        raise ValueError(f"{kind} has no `edit`, which --init needs; leave out --init.")
    module.to(device)
    guided_by = None
    if options.changes_solver or options.changes_guidance:
        trained_solver(loaded)  # raises for a module without a solver
        if options.changes_solver:
            module.solver = build_solver(loaded, options)
        if options.changes_guidance:
            module.guidance, guided_by = build_guidance(module, options)
        if check:
            solver = editing_solver(module, options)
            check_sampling(module.process, module.loss, solver, module.guidance)
            check_clipping(module.codec, module.solver, module.guidance)
    class_names = loading.read_class_names(loaded.checkpoint)
    labels: list[int] | None = None
    condition: Condition = None
    if options.labels is not None:
        num_classes = getattr(module, "num_classes", None)
        labels = read_labels(options.labels, num_classes, class_names)
        condition = torch.tensor(labels)
    elif options.prompt:
        condition = _encode_prompts(module, options.prompt)
    init = mask = None
    if options.init is not None:
        init, mask = _read_init_and_mask(module, options.init, options.mask)
    return ImageGenerator(loaded, options, labels, condition, class_names, init, mask, guided_by)


def read_labels(text: str, num_classes: int | None, names: Sequence[str]) -> list[int]:
    """Parse --labels: numbers or names of classes, separated by commas; -1 means no class.

    A class can be given by its label or by its name. As an exception, if the name of a class is a
    number that differs from its label, all classes must be given by name.

    Example:
        >>> read_labels("dog,-1,0", 2, ["cat", "dog"]), read_labels("5", 2, ["3", "5"])
        ([1, -1, 0], [1])
    """
    if num_classes is None:
        raise ValueError("--labels needs a model with classes, got one without; leave it out.")
    by_name = {name: label for label, name in enumerate(names[:num_classes])}
    is_ambiguous = any(name.isdecimal() and name != str(label) for name, label in by_name.items())
    by_number = {} if is_ambiguous else {str(label): label for label in range(num_classes)}
    labels = by_number | by_name | {"-1": -1}
    parts = [part.strip() for part in text.split(",")]
    if unknown := [part for part in parts if part not in labels]:
        choices = [f"in 0..{num_classes - 1}"] * bool(by_number)
        choices += [f"one of {', '.join(names[:20])}{', ...' * (len(names) > 20)}"] * bool(names)
        raise ValueError(f"--labels must be {' or '.join([*choices, '-1'])}, got {unknown[0]!r}.")
    return [labels[part] for part in parts]


def _encode_prompts(module: Any, prompts: Sequence[str]) -> Condition:
    """Encode the prompts, stacked along the first dimension."""
    encode = getattr(getattr(module, "conditioning", None), "encode", None)
    if encode is None:
        raise ValueError(
            f"--prompt needs a model with text conditioning, got {type(module).__name__} without "
            "`conditioning.encode`; use --labels for classes."
        )
    return by_part(lambda *rows: torch.stack(rows), *map(encode, prompts))


# The solver


SOLVERS = {name.lower(): name for name in solvers.__all__}
"""Name in lower case -> name of a solver of this library."""


def parse_solver(text: str) -> dict[str, Any]:
    """Parse the value of --solver, and return the class path and arguments of the solver.

    The value is YAML, a class path, or the name of a solver. The case of the name is ignored.
    """
    spec = {"class_path": text}
    if text.lstrip().startswith("{"):
        with suppress(yaml.YAMLError, ValueError):  # also an integer of thousands of digits
            spec = yaml.safe_load(text)
    if not isinstance(spec.get("init_args", {}), dict):
        raise ValueError(f"init_args of --solver must be NAME: VALUE pairs, got {text!r}.")
    name = str(spec.get("class_path"))
    if "." in name:
        return spec
    if name.lower() not in SOLVERS:
        raise ValueError(
            f"--solver must be one of {', '.join(solvers.__all__)}, or a class path, got {text!r}."
        )
    return spec | {"class_path": f"lit_diffusion.solvers.{SOLVERS[name.lower()]}"}


def trained_solver(loaded: loading.LoadedModule) -> dict[str, Any]:
    """Class path and arguments of the solver in the checkpoint."""
    spec: dict[str, Any] | None = loaded.checkpoint["hyper_parameters"].get("solver")
    if spec is None:
        kind = type(loaded.module).__name__
        raise ValueError(f"{kind} has no solver; leave out options of the solver and guidance.")
    return spec


def build_solver(loaded: loading.LoadedModule, options: SamplingOptions) -> Any:
    """Build the solver of --solver, --solver.NAME and --steps, as `fit` would build it.

    Arguments that are not set come from the solver in the checkpoint. If --solver names a different
    class, only `steps`, `clip` and `times` come from the checkpoint. Those that the new class does
    not have are left out. If the new class is DDPM and no variance is set, the loss determines the
    variance: `LearnedRange` for a loss that trains the variance, and `FixedSmall` for any other
    loss.
    """
    module: Any = loaded.module
    current = trained_solver(loaded)
    spec = current if options.solver is None else parse_solver(options.solver)
    arguments = list(options.solver_options)
    if options.steps is not None:
        arguments.append(f"--solver.steps={options.steps}")

    def build(*specs: dict[str, Any]) -> Any:
        return loading.instantiate(
            specs, Solver, options.trust, "--solver", arguments, key="solver"
        )

    if spec["class_path"] == current["class_path"]:
        return build(current, spec)
    init_args = spec.get("init_args", {})
    if spec["class_path"] == "lit_diffusion.solvers.DDPM":
        learned = module.loss.output_factor == 2
        init_args = {"variance": "LearnedRange" if learned else "FixedSmall"} | init_args
    build(spec | {"init_args": init_args})  # imports the class, so that its arguments are known
    names = {"steps", "times", "clip"}.intersection(parameter_names(spec["class_path"]))
    trained = current.get("init_args", {})
    inherited = {name: trained[name] for name in names & trained.keys()}
    return build(spec | {"init_args": inherited | init_args})


def editing_solver(module: Any, options: SamplingOptions) -> Any:
    """Return the solver that generates or edits the images.

    With --init and --mask, the solver is RePaint with the time steps of the module's solver. With
    --init alone, it is the module's solver without its first steps. Without --init, it is the
    module's solver.
    """
    if options.init is None:
        return module.solver
    if options.mask:
        return repaint_solver(module.solver, module.process, torch.empty(0), torch.empty(0))
    assert options.strength is not None
    return truncate_solver(module.solver, options.strength, module.process)


# Guidance


def build_guidance(
    module: Any, options: SamplingOptions
) -> tuple[Guidance | None, dict[str, Any] | None]:
    """Build the guidance of --guidance, --weaker and --classifier.

    The module must already be on its final device, and have its final solver.

    Returns:
        The guidance, and a record of the model that --weaker or --classifier names. The guidance is
        None for classifier-free guidance with a scale of 1, which has no effect.
    """
    scale = options.guidance
    interval = {"interval": options.guidance_interval} if options.guidance_interval else {}
    if options.weaker:
        weaker, record = _load_guiding_model("weaker", options.weaker, module, options)
        return Autoguidance(weaker.denoise_for, 2.0 if scale is None else scale, **interval), record
    if options.classifier:
        scale = 1.0 if scale is None else scale
        classifier, record = _load_guiding_model("classifier", options.classifier, module, options)
        gradient = classifier.gradient(scale)
        guidance: Guidance = ClassifierScore(gradient, clip=module.codec.bounded)
        if isinstance(module.solver, solvers.DDPM) and not options.mask:  # a mask replaces DDPM
            guidance = ClassifierShift(gradient)
        return guidance, record | {"scale": scale}
    assert scale is not None
    conditioning = getattr(module, "conditioning", getattr(module, "num_classes", None))
    if conditioning is None or module.label_dropout == 0:
        raise ValueError(
            "--guidance needs a conditional model that was trained with label_dropout, got the "
            f"conditioning {conditioning} and label_dropout={module.label_dropout}."
        )
    if scale == 1:
        return None, None
    return ClassifierFree(scale, rescale=options.guidance_rescale, **interval), None


def _load_guiding_model(
    kind: str, source: str, module: Any, options: SamplingOptions
) -> tuple[Any, dict[str, Any]]:
    """Load the model of --weaker or --classifier to the module's device; also return its record."""
    path, weights = loading.split_weights_suffix(source)
    loaded = loading.load_module(path, weights or options.weights, trust=options.trust)
    if kind == "classifier" and not isinstance(loaded.module, NoisyClassifier):
        got = type(loaded.module).__name__
        raise ValueError(f"--classifier {source} must be a NoisyClassifier, got a {got}.")
    if kind == "weaker" and not hasattr(loaded.module, "denoise_for"):
        got = type(loaded.module).__name__
        raise ValueError(f"--weaker {source} must be a DiffusionModule, got a {got}.")
    for name in ("process", "image_shape", "num_classes"):
        ours, theirs = (repr(getattr(each, name, None)) for each in (module, loaded.module))
        if ours != theirs:
            raise ValueError(
                f"--{kind} {source} must have the {name} of the model, {ours}, got {theirs}."
            )
    check_codec(module.codec, loaded.checkpoint)
    record = {kind: str(loaded.path), "step": loaded.step, "weights": loaded.weights}
    return loaded.module.to(module.device), record


# Images to start from


def _read_init_and_mask(module: Any, init: str, mask: str | None) -> tuple[Tensor, Tensor | None]:
    """Read `ImageGenerator.init` and `mask` from the files of --init and --mask."""
    channels, height, width = module.image_shape
    channels = getattr(module.codec, "image_channels", channels)
    # 64 is a multiple of the downsampling factor of every codec.
    _, encoded_height, _ = module.codec.encoded_shape((channels, 64 * height, 64 * width))
    factor = 64 * height // encoded_height
    images = _read_images(Path(init), (channels, factor * height, factor * width))
    if mask is None:
        return images, None
    if Path(mask).is_dir():
        raise ValueError(f"--mask must be one image, got the folder {mask}; name a file.")
    pixels = _read_images(Path(mask), (1, *images.shape[2:]))
    # A latent is preserved if all its pixels are white.
    return images, 1 - max_pool2d((pixels <= 127).float(), factor)


def _read_images(path: Path, shape: tuple[int, ...]) -> Tensor:
    """Read an image, or the PNG files of a folder, as (N, *shape) uint8."""
    files = [path]
    if path.is_dir():
        files = sorted(file for file in path.glob("*.png") if file.name not in OVERVIEWS)
    if not files or not files[0].is_file():
        raise ValueError(f"{path} must be an image or a folder of PNG files; name another.")
    images = [read_image(file) for file in files]
    for file, image in zip(files, images, strict=True):
        if image.shape != shape:
            raise ValueError(
                f"{file} must have the shape {shape} (channels, height, width; a mask has one "
                f"channel), got {tuple(image.shape)}; resize or convert it."
            )
    return torch.stack(images)
