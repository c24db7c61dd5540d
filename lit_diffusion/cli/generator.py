"""A checkpoint that generates images as the command line says: labels, solver, guidance, edits."""

import json
from argparse import ArgumentError
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
import yaml
from jsonargparse import ArgumentParser
from torch import Tensor
from torch.nn.functional import max_pool2d

from lit_diffusion.checkpoints.loading import LoadedModule, load_module, read_class_names
from lit_diffusion.cli.guidance_options import build_guidance
from lit_diffusion.cli.options import SamplingOptions, usable_device
from lit_diffusion.config.messages import explain_parse_error
from lit_diffusion.config.trust import allow_class_paths, short_names
from lit_diffusion.metrics.images import OVERVIEWS, read_image
from lit_diffusion.modules.checks import check_clipping, check_sampling
from lit_diffusion.protocols import Condition, Solver, by_part
from lit_diffusion.seeding import classes_of
from lit_diffusion.solvers.editing import repaint_solver, truncate_solver


@dataclass(frozen=True)
class ImageGenerator:
    """A module on its device, ready to generate images.

    Attributes:
        loaded: the module, with the path, step and weights of its checkpoint.
        options: how images are generated.
        labels: classes of the images, in turn; None takes them from the seeds.
        condition: labels or encoded prompts, N rows that the images have in turn; None likewise.
        class_names: names of the classes; empty where the checkpoint has none.
        init: uint8 (N, C, H, W) images to start from or to keep parts of, in turn; None is noise.
        mask: (1, 1, h, w) in the size of x0, 1 where `init` is kept; None to edit all of it.
        guided_by: record of the model of --weaker or --classifier; None without.
    """

    loaded: LoadedModule
    options: SamplingOptions
    labels: list[int] | None
    condition: Condition
    class_names: list[str]
    init: Tensor | None = None
    mask: Tensor | None = None
    guided_by: dict[str, Any] | None = None

    def generate(self, numbers: Sequence[int]) -> Tensor:
        """Images uint8 (N, C, H, W) on the CPU; each depends on its own number alone."""
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
        """The content of samples.json when `num` of `total` images are written."""
        module: Any = self.loaded.module
        options = self.options
        sampling = module.sampling_record() if hasattr(module, "sampling_record") else {}
        if options.init is not None:
            solver = editing_solver(module, options)
            sampling = {**sampling, "solver": repr(solver), "steps": solver.steps}
        optional = {
            "init": options.init,
            "strength": options.strength,
            "mask": options.mask,
            "guided_by": self.guided_by,
        }
        return {
            "checkpoint": str(self.loaded.path),
            "step": self.loaded.step,
            "weights": self.loaded.weights,
            "num": num,
            "of": total,
            "seeds": [options.seed, options.seed + num],
            "labels": self.labels,
            **({"prompts": options.prompt} if options.prompt else {}),
            "class_names": self.class_names,
            "sampling": sampling,
            **{name: value for name, value in optional.items() if value},
        }


def load_generator(options: SamplingOptions, *, check: bool = True) -> ImageGenerator:
    """Load a checkpoint, and change its solver and guidance as the options say.

    Args:
        options: how images are generated.
        check: whether solver and guidance must fit each other; False where other solvers follow.

    Raises:
        FileNotFoundError: where there is no checkpoint.
        ValueError: for options that the model cannot follow.
    """
    device = usable_device(options.device)
    if options.solver is not None:
        parse_solver(options.solver)  # a wrong name is told before the checkpoint is read
    loaded = load_module(options.checkpoint, options.weights, trust=options.trust)
    module: Any = loaded.module
    kind = f"{type(module).__name__} in {loaded.path}"
    if not hasattr(module, "generate"):
        raise ValueError(f"{kind} cannot generate images.")
    if options.init and not hasattr(module, "edit"):
        raise ValueError(f"{kind} takes no --init.")
    module.to(device)
    guided_by = None
    if options.changes_solver or options.changes_guidance:
        trained_solver(loaded)  # refuses a module without
        if options.changes_solver:
            module.solver = build_solver(loaded, options)
        if options.changes_guidance:
            module.guidance, guided_by = build_guidance(module, options)
        if check:
            solver = editing_solver(module, options)
            check_sampling(module.process, module.loss, solver, module.guidance)
            check_clipping(module.codec, module.solver, module.guidance)
    class_names = read_class_names(loaded.checkpoint)
    labels: list[int] | None = None
    condition: Condition = None
    if options.labels is not None:
        num_classes = getattr(module, "num_classes", None)
        labels = read_labels(options.labels, num_classes, class_names)
        condition = torch.tensor(labels)
    elif options.prompt:
        condition = _encode_prompts(module, options.prompt)
    init, mask = _read_init_and_mask(module, options)
    return ImageGenerator(loaded, options, labels, condition, class_names, init, mask, guided_by)


# Labels and prompts


def read_labels(text: str, num_classes: int | None, names: Sequence[str]) -> list[int]:
    """The labels that --labels lists by number or name; by name alone where names are numbers.

    Args:
        text: of the option, separated by commas; -1 is no class.
        num_classes: of the model; None where it has no classes.
        names: of the classes; empty where they have none.

    Example:
        >>> read_labels("dog,-1,0", 2, ["cat", "dog"]), read_labels("5", 2, ["3", "5"])
        ([1, -1, 0], [1])
    """
    if num_classes is None:
        raise ValueError("--labels needs a model with classes, and this one has none.")
    by_name = {name: label for label, name in enumerate(names[:num_classes])}
    misleads = any(name.isdecimal() and name != str(label) for name, label in by_name.items())
    by_number = {} if misleads else {str(label): label for label in range(num_classes)}
    labels = by_number | by_name | {"-1": -1}
    parts = [part.strip() for part in text.split(",")]
    if unknown := [part for part in parts if part not in labels]:
        choices = [f"in 0..{num_classes - 1}"] * bool(by_number)
        choices += [f"one of {', '.join(names[:20])}{', ...' * (len(names) > 20)}"] * bool(names)
        raise ValueError(f"--labels must be {' or '.join([*choices, '-1'])}, got {unknown[0]!r}.")
    return [labels[part] for part in parts]


def _encode_prompts(module: Any, prompts: Sequence[str]) -> Condition:
    """The condition of one image for each text, stacked along the first dimension."""
    encode = getattr(getattr(module, "conditioning", None), "encode", None)
    if encode is None:
        raise ValueError(
            f"--prompt needs a model of texts, whose conditioning has `encode`, and that of "
            f"{type(module).__name__} has none; --labels names classes."
        )
    return by_part(lambda *rows: torch.stack(rows), *map(encode, prompts))


# The solver


def shipped_solvers() -> dict[str, str]:
    """Class paths of the solvers of this library, by class name."""
    return {
        name: path
        for name, path in short_names().items()
        if path == f"lit_diffusion.solvers.{name}"
    }


def parse_solver(text: str) -> dict[str, Any]:
    """Class path and arguments of a solver from YAML, a class path, or a name in any case."""
    spec = {"class_path": text}
    if text.lstrip().startswith("{"):
        with suppress(yaml.YAMLError):
            spec = yaml.safe_load(text)
    name, shipped = str(spec.get("class_path")), shipped_solvers()
    if "." in name:
        return spec
    paths = {each.lower(): path for each, path in shipped.items()}
    paths["dpmpp"] = shipped["DPMSolverPP"]
    if name.lower() not in paths:
        raise ValueError(
            f"--solver must be one of {', '.join(shipped)}, or a class path with arguments as in "
            f"YAML, got {text}."
        )
    return spec | {"class_path": paths[name.lower()]}


def trained_solver(loaded: LoadedModule) -> dict[str, Any]:
    """Class path and arguments of the solver that the checkpoint names."""
    spec: dict[str, Any] | None = loaded.checkpoint["hyper_parameters"].get("solver")
    if spec is None:
        raise ValueError(f"{type(loaded.module).__name__} takes no other solver or guidance.")
    return spec


def build_solver(loaded: LoadedModule, options: SamplingOptions) -> Solver:
    """The solver that --solver, --solver.NAME and --steps describe, as `fit` would build it.

    What they leave open is as in the checkpoint. A solver of another class inherits the number of
    steps, clip and a grid that is named, and nothing else; DDPM gets the variance that the loss
    trains.
    """
    current = trained_solver(loaded)
    spec = parse_solver(options.solver) if options.solver is not None else None
    arguments = list(options.solver_options)
    if options.steps is not None:
        arguments.append(f"--solver.steps={options.steps}")
    is_other = spec is not None and spec["class_path"] != current["class_path"]
    parser = ArgumentParser(exit_on_error=False)
    with allow_class_paths(options.trust):
        # with `current` as the default, another class would get the defaults of its arguments too
        parser.add_argument("--solver", type=Solver, default=None if is_other else current)
        try:
            if spec is not None and is_other:
                spec = _with_inherited(spec, current, parser, arguments, loaded.module)
            if spec is not None:
                arguments.insert(0, f"--solver={json.dumps(spec)}")
            solver: Solver = parser.instantiate(parser.parse_args(arguments)).solver
        except (ArgumentError, ValueError) as error:
            message = explain_parse_error(error)
            dashes = "--" if message.startswith("solver") else ""
            raise ValueError(dashes + message) from error
    return solver


def _with_inherited(
    spec: dict[str, Any],
    current: dict[str, Any],
    parser: ArgumentParser,
    arguments: Sequence[str],
    module: Any,
) -> dict[str, Any]:
    """A solver of another class, with what it inherits of the current one as far as it takes it."""
    init_args = dict(spec.get("init_args", {}))
    if spec["class_path"] == short_names()["DDPM"]:
        variance = "LearnedRange" if module.loss.output_factor == 2 else "FixedSmall"
        init_args = {"variance": variance, **init_args}
    option = f"--solver={json.dumps(spec | {'init_args': init_args})}"
    accepted = parser.parse_args([option, *arguments]).solver.get("init_args", {})
    current_args = current.get("init_args", {})
    inherited = {
        name: current_args[name]
        for name in ("steps", "times", "clip")
        if name in current_args and name in accepted
    }
    return spec | {"init_args": inherited | init_args}


def editing_solver(module: Any, options: SamplingOptions) -> Any:
    """The solver that generates: the module's, with --init its last steps, with --mask RePaint."""
    if options.init is None:
        return module.solver
    if options.mask:
        return repaint_solver(module.solver, torch.empty(0), torch.empty(0))
    assert options.strength is not None
    return truncate_solver(module.solver, options.strength)


# Images to start from


def _read_init_and_mask(
    module: Any, options: SamplingOptions
) -> tuple[Tensor | None, Tensor | None]:
    """`ImageGenerator.init` and `mask` from the files of --init and --mask."""
    if options.init is None:
        return None, None

    def in_pixels(shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape that an image must have, given the shape that it has; also of latents."""
        channels, height, width = module.image_shape
        factor = shape[1] // module.codec.encoded_shape(shape)[1]
        channels = getattr(module.codec, "image_channels", channels)
        return channels, factor * height, factor * width

    init = _read_images(Path(options.init), in_pixels)
    if options.mask is None:
        return init, None
    if Path(options.mask).is_dir():
        raise ValueError(f"--mask {options.mask} is a folder; name one picture, for all images.")
    mask = _read_images(Path(options.mask), lambda _: (1, *init.shape[2:]))
    # Latents are kept where all their pixels are white.
    factor = mask.shape[-1] // module.image_shape[-1]
    return init, 1 - max_pool2d((mask <= 127).float(), factor)


def _read_images(path: Path, expected: Callable[[tuple[int, ...]], tuple[int, ...]]) -> Tensor:
    """uint8 (N, C, H, W) of an image, or of the PNG files of a folder.

    Args:
        path: of the file, or folder.
        expected: the shape (C, H, W) that an image must have, given that it has.
    """
    files = [path]
    if path.is_dir():
        files = sorted(file for file in path.glob("*.png") if file.name not in OVERVIEWS)
    if not files or not files[0].is_file():
        raise ValueError(f"{path} is no picture, and no folder of PNG files.")
    images = [read_image(file) for file in files]
    for file, image in zip(files, images, strict=True):
        shape = tuple(image.shape)
        try:
            wanted = expected(shape)
        except ValueError as error:  # of the codec, which does not know the file
            raise ValueError(f"{file}: {error}") from error
        if shape != wanted:
            raise ValueError(
                f"{file} is {shape}, and must be {wanted}, as the model's images are "
                "(channels, height, width; a mask has one channel): resize or convert it."
            )
    return torch.stack(images)
