"""Build modules from checkpoints, and load weights into modules."""

import os
import re
import shlex
from argparse import ArgumentError
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from jsonargparse import ArgumentParser, Namespace
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lit_diffusion.callbacks.trainer_state import strip_compile_prefix
from lit_diffusion.checkpoints.averages import select_weights
from lit_diffusion.checkpoints.reading import (
    Checkpoint,
    check_content,
    first_line,
    limit_parameters,
    number_kind,
    read_checkpoint,
)
from lit_diffusion.config.messages import explain_parse_error
from lit_diffusion.config.trust import allow_class_paths
from lit_diffusion.config.yaml_file import read_yaml, refuse_files
from lit_diffusion.files import is_checkpoint_folder, path_after_replace
from lit_diffusion.interchange.exported import is_exported, read_as_checkpoint
from lit_diffusion.pretrained import find_model


class LoadedModule(NamedTuple):
    """A module in eval mode, and the checkpoint from which it was loaded.

    Attributes:
        module: the module.
        path: path of the checkpoint.
        step: number of optimizer steps after which the checkpoint was written.
        weights: name of the loaded weights: "raw", "ema_<decay>" or "power_<width>".
        checkpoint: content of the checkpoint.
    """

    module: LightningModule
    path: Path
    step: int
    weights: str
    checkpoint: Checkpoint


def load(
    path: str | Path,
    weights: str = "ema",
    *,
    module: LightningModule | None = None,
    trust: Iterable[str] = (),
) -> Any:
    """Load a module with the weights of a checkpoint, in eval mode on the CPU.

    Args:
        path: a checkpoint, a run folder (which means its checkpoints/last.ckpt), or a folder
            written by `lit-diffusion convert export`. "digits" and "mnist" are the models in this
            package, unless a file or folder with this name exists.
        weights: "raw" for the trained weights, "ema" for the first average, "ema_<decay>" for a
            specific average, or "power_<width>" for an average of `PowerEMA`, which may be
            reconstructed from snapshots. An exported folder has only one set of weights,
            which this argument must name.
        module: module into which to load the weights. If the weights do not fit, the module is
            unchanged. If None, the module is built from the class paths in the checkpoint. If
            the checkpoint is from a module that was built in Python, it has no class paths, so this
            argument is required.
        trust: names of packages from which classes may be built, in addition to
            `config.trust.TRUSTED`. An entry with a "/" is a folder that the module's codec may
            read. Such an entry is necessary if the checkpoint names the folder, but no config in
            the run folder names it.

    Returns:
        The module. A DiffusionModule is ready for `generate`.

    Raises:
        FileNotFoundError: if there is no checkpoint at `path`.
        ValueError: if the checkpoint is damaged, contains code, or does not have the requested
            weights, or if its weights do not fit the module.

    Example:
        >>> images = load("digits").generate(range(4))  # seed s gives class s % 10
        >>> images.shape, images.dtype
        (torch.Size([4, 1, 8, 8]), torch.uint8)
        >>> images = load("runs/digits", weights="ema").generate(range(64))  # doctest: +SKIP
    """
    return load_module(path, weights, module=module, trust=trust).module


def load_module(
    path: str | Path,
    weights: str = "ema",
    *,
    module: LightningModule | None = None,
    trust: Iterable[str] = (),
) -> LoadedModule:
    """Load a module as `load` does, and return it with the content of its checkpoint."""
    name, trust = str(path), tuple(trust)
    path = checkpoint_file(path)
    exported = is_exported(path)
    if exported:
        checkpoint, name = _read_export(path, weights)
        averages: dict[str, Tensor] = {}
    else:
        try:
            checkpoint = read_checkpoint(path)
        except (FileNotFoundError, ValueError) as error:
            if not find_model(name):
                raise
            kind = "folder" if os.path.isdir(name) else "file"
            raise type(error)(
                f"{error} The {kind} {name} here hides the packaged model of the same name; rename "
                f"the {kind}, or work in another folder."
            ) from None
    if module is None:
        with limit_parameters(checkpoint["state_dict"], trust):
            module = build_module(checkpoint, path, trust)
    module.on_load_checkpoint(checkpoint)  # as in Lightning; may raise
    step = int(checkpoint.get("global_step", 0))
    if not exported:
        name, averages = select_weights(checkpoint, weights, path)
    # A shared parameter has several names in a state_dict, but only one average, under the first.
    parameters = module.state_dict(keep_vars=True)
    by_identity = {id(parameters[n]): value for n, value in averages.items() if n in parameters}
    shared = {n: by_identity[id(p)] for n, p in parameters.items() if id(p) in by_identity}
    state = strip_compile_prefix(checkpoint["state_dict"])
    if exported:  # an export lacks the weights of losses, which only training needs
        of_losses = [n for n in parameters if n.startswith(("loss.", "auxiliary_loss."))]
        state = {n: parameters[n].detach() for n in of_losses} | state
    load_state(module, {**state, **averages, **shared}, path)
    rank_zero_info(f"Loaded {name} weights of step {step} from {path}.")
    return LoadedModule(module.eval(), path, step, name, checkpoint)


def _read_export(folder: Path, weights: str) -> tuple[Checkpoint, str]:
    """Read an exported folder as a checkpoint, and return it with the name of its weights."""
    checkpoint, name = read_as_checkpoint(folder)
    try:
        check_content(checkpoint)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{folder} is not an exported network: {error}.") from None
    if weights not in (name, name.partition("_")[0]):
        raise ValueError(f"{folder} has no weights {weights!r}; it has {name}.")
    return checkpoint, name


def split_weights_suffix(source: str) -> tuple[str, str | None]:
    """Split "PATH:WEIGHTS" into the path and the name of the weights (None if there is none).

    WEIGHTS is "raw", "ema", "ema_<decay>" or "power_<width>".

    Example:
        >>> split_weights_suffix("runs/digits:ema_0.99"), split_weights_suffix("runs/digits")
        (('runs/digits', 'ema_0.99'), ('runs/digits', None))
    """
    match = re.fullmatch(r"(.+):(raw|(?:ema|power)(?:_[\w.+-]+)?)", source)
    return (match[1], match[2]) if match else (source, None)


def checkpoint_file(path: str | Path) -> Path:
    """Find the file or folder from which to load.

    For a run folder, the result is its checkpoints/last.ckpt. For the name of a model in this
    package, the result is the folder of the model, unless a file or folder with this name exists.
    Any other path is returned unchanged.
    """
    folder = find_model(path)
    path = Path(path)
    if folder is not None and not os.path.lexists(path):
        return folder
    is_export = is_exported(path) and not (path / "checkpoints").is_dir()
    is_run_folder = path.is_dir() and not (is_checkpoint_folder(path) or is_export)
    return path_after_replace(path / "checkpoints" / "last.ckpt" if is_run_folder else path)


def build_module(
    checkpoint: Checkpoint, path: str | Path, trust: Iterable[str] = ()
) -> LightningModule:
    """Build the module that the class paths in a checkpoint describe, with initial weights.

    Raises:
        ValueError: if the checkpoint has no class paths, if a class cannot be built, or if an
            argument is the path of a file from which further arguments would be read.
    """
    spec = model_spec(checkpoint)
    if spec is None:
        raise ValueError(
            f"{path} does not describe its module, because the module was built in Python; build "
            "the module and call load(path, module=...)."
        )
    refuse_files(spec, Path(path))
    check = partial(check_codec_folder, checkpoint=Path(path), trust=trust)
    return instantiate([spec], LightningModule, trust, path, check=check)


def instantiate(
    specs: Sequence[Any],
    base: type,
    trust: Iterable[str],
    path: str | Path,
    options: Sequence[str] = (),
    *,
    key: str = "object",
    check: Callable[[Any], None] = lambda config: None,
) -> Any:
    """Build an object from class paths and arguments that come from files.

    Args:
        specs: descriptions of the object. Each is either a dictionary with "class_path" and
            "init_args" or the name of a class. A later description overrides parts of earlier
            ones.
        base: class or protocol of which the object must be an instance.
        trust: packages from which classes may be built, in addition to `config.trust.TRUSTED`.
        path: path of the file, for error messages.
        options: command-line options that override the descriptions, such as
            `--data.init_args.NAME=VALUE`.
        key: name of the object in options and error messages, such as "data" in
            `--data.init_args.NAME`.
        check: function that is called with the parsed description before anything is built.

    Raises:
        ValueError: if the descriptions are invalid, or if `check` or a constructor raises an error.
    """
    parser = ArgumentParser(exit_on_error=False)
    with allow_class_paths(trust):
        parser.add_subclass_arguments(base, key, fail_untyped=False, required=True)
        try:
            if len(specs) == 1 and not options:
                config = parser.parse_object({key: specs[0]})
            else:
                texts = [spec if isinstance(spec, str) else yaml.safe_dump(spec) for spec in specs]
                config = parser.parse_args([*(f"--{key}={text}" for text in texts), *options])
            check(config[key])
            return parser.instantiate(config)[key]
        except (ArgumentError, ValueError) as error:
            raise ValueError(f"{path}: {explain_parse_error(error)}") from error
        except Exception as error:  # a constructor may raise any exception
            cause = f"{type(error).__name__}: {first_line(error)}"
            paths = [spec.get("class_path") for spec in specs if isinstance(spec, Mapping)]
            name = [key, *filter(None, paths)][-1]
            raise ValueError(f"{path}: {name} cannot be built: {cause}.") from error


def check_codec_folder(
    model: Any, checkpoint: Path, trust: Iterable[str] = (), settings: Sequence[Any] = ()
) -> None:
    """Raise ValueError if a model's codec would read a folder that the user has not approved.

    A checkpoint from somebody else could make a codec read any folder. Therefore, the codec may
    read only folders inside the run folder, folders that a config in the run folder names, and
    folders in `trust` and `settings`.

    Args:
        model: parsed class paths and arguments of the model. Its parts may have codecs, too.
        checkpoint: path of the checkpoint.
        trust: folders that codecs may read. Entries without a "/" are packages and are ignored.
        settings: the user's own settings of the model. Codecs may read the folders in them.
    """
    trusted = [{"folder": name} for name in trust if "/" in name]
    unnamed = _folders(model) - _folders([*settings, *trusted])
    if unnamed and checkpoint.absolute().parent.name == "checkpoints":
        run = checkpoint.absolute().parent.parent
        configs = [read_yaml(config) for config in run.glob("config*.yaml")]
        unnamed -= _folders([each.get("model") for each in configs if isinstance(each, dict)])
        unnamed = {name for name in unnamed if not Path(name).is_relative_to(run.resolve())}
    if unnamed:
        folder = shlex.quote(min(unnamed))
        raise ValueError(
            f"the checkpoint names the folder {folder} of its codec, but no config in its run "
            f"folder does; if you trust the checkpoint, add --trust {folder}."
        )


def _folders(settings: Any) -> set[str]:
    """Return the absolute paths of all arguments named `folder` in nested settings."""
    if isinstance(settings, Namespace):
        settings = vars(settings)
    elif isinstance(settings, list | tuple):
        settings = dict(enumerate(settings))
    if not isinstance(settings, Mapping):
        return set()
    folders = set[str]().union(*map(_folders, settings.values()))
    if isinstance(folder := settings.get("folder"), str | Path):
        folders.add(os.path.realpath(os.path.expanduser(folder)))
    return folders


def model_spec(checkpoint: Checkpoint, key: str = "hyper_parameters") -> dict[str, Any] | None:
    """Get "class_path" and "init_args" of the module in a checkpoint; None if there are none.

    The key of the data module is "datamodule_hyper_parameters".
    """
    init_args = dict(checkpoint.get(key) or {})
    class_path = init_args.pop("_class_path", None)
    init_args.pop("_instantiator", None)
    return None if class_path is None else {"class_path": class_path, "init_args": init_args}


def read_class_names(checkpoint: Checkpoint) -> list[str]:
    """Read the class names of a model's training data, in the order of labels; [] if unknown."""
    spec = model_spec(checkpoint, "datamodule_hyper_parameters") or {"class_path": ""}
    state = checkpoint.get(spec["class_path"].rpartition(".")[2], checkpoint)
    names = state.get("class_names") if isinstance(state, dict) else None
    return [str(name) for name in names] if isinstance(names, list) else []


def load_state(module: LightningModule, state: Mapping[str, Tensor], path: str | Path) -> None:
    """Load a state_dict that was read from `path` into a module.

    If the weights do not fit, a ValueError lists the first three differences, and the module is
    unchanged.
    """
    refuse_other_dtypes(module, state, path)
    try:
        with _WithoutCopying():  # torch raises only after it has copied the weights that fit
            module.load_state_dict(state)
        module.load_state_dict(state)
    except RuntimeError as error:
        raise ValueError(
            f"{path} has a different architecture: {list_mismatches(error)} "
            "Use the config with which it was trained."
        ) from error


class _WithoutCopying(TorchFunctionMode):
    """Context in which `load_state_dict` runs all its checks and hooks, but copies no weights."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is Tensor.copy_ else func(*args, **(kwargs or {}))


def list_mismatches(error: RuntimeError) -> str:
    """Return the first three mismatches in an error of `load_state_dict` as one line."""
    return " ".join(line.strip()[:200] for line in str(error).split("\n")[1:4])


def refuse_other_dtypes(
    module: LightningModule, state: Mapping[str, Any], path: str | Path | None
) -> None:
    """Raise ValueError if torch would silently cast weights to a different kind of dtype.

    The kinds are floating-point, complex, bool and integer.
    """
    for name, expected in module.state_dict().items():
        value = state.get(name)
        if not (isinstance(value, Tensor) and isinstance(expected, Tensor)):
            continue
        if number_kind(value) != number_kind(expected):
            raise ValueError(
                f"{path} has a different architecture: {name} is {value.dtype} in the file, "
                f"{expected.dtype} in the module. Use the config with which it was trained."
            )
