"""Images of a checkpoint: the module with what options change, and the PNG files."""

import json
import os
import time
from argparse import ArgumentError, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
import yaml
from jsonargparse import ArgumentParser
from PIL import Image
from torch import Tensor
from torchvision.transforms.functional import pil_to_tensor, to_pil_image

from lit_diffusion.callbacks.progress import pace
from lit_diffusion.callbacks.sample_grid import class_captions, image_grid
from lit_diffusion.checkpoints.content import is_count
from lit_diffusion.checkpoints.loading import Loaded, class_names_in, load_with_record
from lit_diffusion.checkpoints.reading import first_line
from lit_diffusion.cli.editing import check_editing, editing_record, editing_solver, generator
from lit_diffusion.cli.guiding import change_guidance, guidance_options
from lit_diffusion.cli.trajectory import SEEDS, write_trajectory
from lit_diffusion.config.messages import innermost
from lit_diffusion.config.short_names import short_names
from lit_diffusion.config.trust import trusting
from lit_diffusion.files import atomic_write, atomic_write_text
from lit_diffusion.modules.checks import check_clipping, check_sampling
from lit_diffusion.protocols import Condition, Solver, by_part
from lit_diffusion.seeding import classes_of
from lit_diffusion.signals import defer_signals, print_error

RECORD = "samples.json"


def folder_of_images(path: str) -> Path:
    """A folder without images but a stopped call's, made if need be: those of two never mix."""
    out = Path(path)
    if out.is_file():
        raise ValueError(f"--out {out} is a file; name a folder.")
    if any(out.glob("*.png")) and not unfinished(out):
        raise ValueError(f"--out {out} already holds images; choose another folder or empty it.")
    out.mkdir(parents=True, exist_ok=True)
    return out


def unfinished(out: Path) -> dict[str, Any]:
    """samples.json of a call that was stopped; {} where none was."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        found = json.loads((out / RECORD).read_text())
        left = found["of"] - found["num"] or not (out / "grid.png").exists()
        if is_count(found["num"]) and is_count(found["of"]) and left:
            return dict(found)
    return {}


def load_generator(args: Namespace) -> Loaded:
    """The module of --checkpoint on its device, generating as the options say."""
    check_editing(args)
    device, solver = usable_device(args.device), solver_spec(args.solver) if args.solver else None
    loaded = load_with_record(args.checkpoint, args.weights, trust=args.trust)
    if not hasattr(loaded.module, "generate"):
        raise ValueError(f"{type(loaded.module).__name__} in {loaded.path} cannot generate images.")
    if args.init and not hasattr(loaded.module, "edit"):
        raise ValueError(f"{type(loaded.module).__name__} in {loaded.path} takes no --init.")
    loaded.module.to(device)
    _change_sampling(loaded, args, solver)
    args.class_names = class_names_in(loaded.checkpoint)
    if args.labels is not None:
        num_classes = getattr(loaded.module, "num_classes", None)
        args.labels = read_labels(args.labels, num_classes, args.class_names)
    args.rows = _rows(loaded.module, args)
    return loaded


def _rows(module: Any, args: Namespace) -> Condition:
    """The condition that the images take the rows of in turn; None leaves it to the seeds."""
    if not args.prompt:
        return torch.tensor(args.labels) if args.labels else None
    if args.labels is not None:
        raise ValueError("give --labels or --prompt, not both.")
    encode = getattr(getattr(module, "conditioning", None), "encode", None)
    if encode is None:
        raise ValueError(
            f"--prompt needs a model of texts, whose conditioning has `encode`, and that of "
            f"{type(module).__name__} has none; --labels names classes."
        )
    return by_part(lambda *rows: torch.stack(rows), *map(encode, args.prompt))


def usable_device(name: str | None) -> torch.device:
    """The device of --device, which this machine must have; without, this process's GPU if any."""
    own = f"cuda:{os.environ.get('LOCAL_RANK') or 0}"
    name = name or (own if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built with CUDA
        raise ValueError(f"--device {name} cannot be used here: {first_line(error)}.") from error


def _change_sampling(loaded: Loaded, args: Namespace, solver: dict[str, Any] | None) -> None:
    module: Any = loaded.module
    compares = getattr(args, "compare", None)  # which changes and checks solvers of its own
    changes = args.solver_options or (args.solver, args.steps) != (None, None)
    changes_solver = changes and not compares
    if not changes_solver and not guidance_options(args):
        return
    own = own_solver(loaded)
    if changes_solver:
        module.solver = changed_solver(module, own, solver, args)
    change_guidance(module, args)
    if compares:
        return
    check_sampling(module.process, module.loss, editing_solver(module, args), module.guidance)
    check_clipping(module.codec, module.solver, module.guidance)


def own_solver(loaded: Loaded) -> dict[str, Any]:
    """Class path and arguments of the solver that the module was built with."""
    own: dict[str, Any] | None = loaded.checkpoint["hyper_parameters"].get("solver")
    if own is None:
        raise ValueError(f"{type(loaded.module).__name__} takes no other solver or guidance.")
    return own


def changed_solver(
    module: Any, own: dict[str, Any], given: dict[str, Any] | None, args: Namespace
) -> Solver:
    """What --solver, --solver.NAME and --steps make of the module's own solver, as for `fit`.

    Another class takes over steps, clip, and a grid if one is named, and no more; DDPM gets the
    variance that the loss trains.
    """
    options = list(args.solver_options)
    if args.steps is not None:
        options.append(f"--solver.steps={args.steps}")
    other = given is not None and given["class_path"] != own["class_path"]
    parser = ArgumentParser(exit_on_error=False)
    with trusting(args.trust):
        # with `own` as the default, another class would get the defaults of its arguments too
        parser.add_argument("--solver", type=Solver, default=None if other else own)
        try:
            if given is not None:
                if other:
                    given = _taking_over(parser, module, own, given, options)
                options.insert(0, f"--solver={json.dumps(given)}")
            changed: Solver = parser.instantiate(parser.parse_args(options)).solver
        except (ArgumentError, ValueError) as error:
            message = innermost(error)
            dashes = "--" if message.startswith("solver") else ""
            raise ValueError(dashes + message) from error
    return changed


def _taking_over(
    parser: ArgumentParser,
    module: Any,
    own: dict[str, Any],
    given: dict[str, Any],
    options: Sequence[str],
) -> dict[str, Any]:
    """A solver of another class, with what it takes over unless that is given."""
    said = given.get("init_args", {})
    if given["class_path"] == short_names()["DDPM"]:
        variance = "LearnedRange" if module.loss.output_factor == 2 else "FixedSmall"
        said = {"variance": variance, **said}
    spec = json.dumps(given | {"init_args": said})
    takes = parser.parse_args([f"--solver={spec}", *options]).solver
    known, taken = own.get("init_args", {}), takes.get("init_args", {})
    kept = {k: known[k] for k in ("steps", "times", "clip") if k in known and k in taken}
    return given | {"init_args": kept | said}


def shipped_solvers() -> dict[str, str]:
    """Class path by name, of our solvers."""
    return {k: path for k, path in short_names().items() if path == f"lit_diffusion.solvers.{k}"}


def solver_spec(given: str) -> dict[str, Any]:
    """Class path and arguments, of YAML, a class path, or a name among our solvers."""
    spec = {"class_path": given}
    if given.lstrip().startswith("{"):
        with suppress(yaml.YAMLError):
            spec = yaml.safe_load(given)
    name = str(spec.get("class_path"))
    own = shipped_solvers()
    paths = {k.lower(): path for k, path in own.items()} | {"dpmpp": own["DPMSolverPP"]}
    if "." not in name and name.lower() not in paths:
        raise ValueError(
            f"--solver must be one of {', '.join(own)}, or a class path with arguments as in YAML, "
            f"got {given}."
        )
    return spec if "." in name else spec | {"class_path": paths[name.lower()]}


def read_labels(given: str, num_classes: int | None, names: Sequence[str]) -> list[int]:
    """The labels that --labels lists, by number or name; only by name where names are numbers.

    Example:
        >>> read_labels("dog,-1,0", 2, ["cat", "dog"]), read_labels("5", 2, ["3", "5"])
        ([1, -1, 0], [1])
    """
    if num_classes is None:
        raise ValueError("--labels needs a model with classes, and this one has none.")
    named = {name: label for label, name in enumerate(names[:num_classes])}
    misleads = any(name.isdecimal() and name != str(label) for name, label in named.items())
    numbered = {} if misleads else {str(label): label for label in range(num_classes)}
    known = numbered | named | {"-1": -1}
    parts = [part.strip() for part in given.split(",")]
    if unknown := [part for part in parts if part not in known]:
        told = [f"in 0..{num_classes - 1}"] * bool(numbered)
        told += [f"one of {', '.join(names[:20])}{', ...' * (len(names) > 20)}"] * bool(names)
        raise ValueError(f"--labels must be {' or '.join([*told, '-1'])}, got {unknown[0]!r}.")
    return [known[part] for part in parts]


def write_samples(loaded: Loaded, args: Namespace, num: int, out: Path) -> dict[str, Any]:
    """Generate `num` images into a folder, or those that are left; what samples.json holds.

    It counts the images after each batch, so that a call that is stopped can be repeated.
    """
    if num < 1:
        raise ValueError(f"--num must be at least 1, got {num}.")
    before = unfinished(out)
    there = before.get("num", 0)
    record = record_of(loaded, args, there, num)
    begun = there or any(out.glob("*.png"))
    if before and begun and before != json.loads(json.dumps(record)):
        raise ValueError(
            f"--out {out} holds {there} of {before['of']} images of another call, which was "
            f"stopped: see {RECORD}. Repeat that call, choose another folder or empty it."
        )
    make = _maker(loaded.module, args)
    atomic_write_text(out / RECORD, as_text(record))  # tells whose images come
    if getattr(args, "trajectory", False):
        few = range(min(num, SEEDS))
        names = [f"seed {args.seed + i}" for i in few]
        write_trajectory(loaded.module, lambda: make(few), names, out)
    for first, images in _generate(make, args, there, num):
        with defer_signals():
            for i, image in enumerate(images, first):
                to_pil_image(image).save(out / f"{i:06d}.png")
            record = record_of(loaded, args, first + len(images), num)
            atomic_write_text(out / RECORD, as_text(record))
    shown = first_images(out, min(num, 256))
    grid = to_pil_image(image_grid(shown, _captions(loaded, args, len(shown))))
    with defer_signals(), atomic_write(out / "grid.png") as file:
        grid.save(file, "PNG")
    return record


def as_text(record: dict[str, Any]) -> str:
    """As its file has it."""
    return json.dumps(record, indent=1) + "\n"


def first_images(folder: Path, num: int) -> Tensor:
    """uint8 (num, C, H, W) of those that were written."""
    files = (folder / f"{i:06d}.png" for i in range(num))
    return torch.stack([pil_to_tensor(Image.open(file)) for file in files])


def _captions(loaded: Loaded, args: Namespace, num: int) -> list[str] | None:
    num_classes = getattr(loaded.module, "num_classes", None)
    if not args.class_names or not num_classes:
        return None
    labels = args.labels or classes_of(range(args.seed, args.seed + num), num_classes)
    return class_captions(labels, args.class_names, num)


def record_of(loaded: Loaded, args: Namespace, made: int, num: int) -> dict[str, Any]:
    """What samples.json holds of `num` images, of which so many are made."""
    module: Any = loaded.module
    return {
        "checkpoint": str(loaded.path),
        "step": loaded.step,
        "weights": loaded.weights,
        "num": made,
        "of": num,
        "seeds": [args.seed, args.seed + made],
        "labels": args.labels,
        **({"prompts": args.prompt} if args.prompt else {}),
        "class_names": args.class_names,
        "sampling": {**_sampling(module), **editing_record(module, args)},
        **{name: value for name in ("init", "strength", "mask") if (value := getattr(args, name))},
        **({"guided_by": args.guided_by} if getattr(args, "guided_by", None) else {}),
    }


def _sampling(module: Any) -> Mapping[str, Any]:
    return module.sampling_record() if hasattr(module, "sampling_record") else {}


def _maker(module: Any, args: Namespace) -> Callable[[range], Tensor]:
    """Numbers of samples -> images uint8 (N, C, H, W) on the CPU."""
    make = generator(module, args)

    def images(numbers: range) -> Tensor:
        chosen = [i % len(args.prompt or args.labels or "-") for i in numbers]
        labels = by_part(itemgetter(chosen), args.rows)
        return make(numbers, [args.seed + i for i in numbers], labels).cpu()

    return images


def _generate(
    make: Callable[[range], Tensor], args: Namespace, there: int, num: int
) -> Iterator[tuple[int, Tensor]]:
    """(number of the first, images uint8 (B, C, H, W) on the CPU), with a sign of life."""
    began = last_sign = time.monotonic()
    for first in range(there, num, args.batch_size):
        numbers = range(first, min(first + args.batch_size, num))
        yield first, make(numbers)
        if time.monotonic() - last_sign > 10 and numbers.stop < num:
            last_sign = time.monotonic()
            end, seconds = numbers.stop, last_sign - began
            parts = [f"{end} of {num} images", *pace("image", end - there, num - end, seconds)]
            print_error("  ".join(parts))
