"""Checkpoint files: written so that no crash leaves half of one, read without running any code.

A checkpoint holds tensors and plain builtins, nothing else: `torch.load(path, weights_only=True)`
reads it. `state_dict` are the raw weights, averages are in the state of the EMA callback,
`hyper_parameters` the class paths and arguments of the module.
"""

import os
import pickle
import re
import shutil
import zipfile
from argparse import ArgumentError
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from jsonargparse import ArgumentParser, register_unresolvable_import_paths
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.serialization import (
    get_crc32_options,
    get_unsafe_globals_in_checkpoint,
    set_crc32_options,
)

from lit_diffusion.averages_state import check_averages
from lit_diffusion.checkpoint_checks import (
    MOST_VALUES,
    check_archive,
    check_content,
    is_plain,
    no_larger_than,
)
from lit_diffusion.errors import innermost
from lit_diffusion.files import discard, new_file, sync_folder
from lit_diffusion.pickle_extent import check_pickles
from lit_diffusion.sharding import first_split, gathered
from lit_diffusion.trust import trusting
from lit_diffusion.yaml_extent import check_text

PathLike = str | Path
Checkpoint = dict[str, Any]


class AtomicCheckpointIO(TorchCheckpointIO):
    """Checkpoint files that are whole or not there, and that are read without running code.

    A save writes a temporary file in the same folder, syncs it to the disk and renames it: on a
    full disk or a crash the previous checkpoint stays. Loading is always with `weights_only=True`,
    also from URLs. Remote paths are written as Lightning does.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(plugins=[AtomicCheckpointIO()], logger=False, accelerator="cpu")
    """

    def save_checkpoint(
        self, checkpoint: Checkpoint, path: PathLike, storage_options: Any | None = None
    ) -> None:
        """Write `checkpoint`, or leave what was at `path`.

        Raises:
            OSError: where the file cannot be written; the previous one is intact.
            TypeError: for content that could not be read back with `weights_only=True`, and for
                tensors that are split over ranks: strategies call this on one rank alone, which
                cannot gather them.
        """
        kept = plain(checkpoint)
        if _is_remote(path):
            super().save_checkpoint(kept, path, storage_options)
        else:
            _write(kept, path)

    def load_checkpoint(
        self, path: PathLike, map_location: Any = None, weights_only: bool | None = None
    ) -> Checkpoint:
        """The checkpoint at `path`, whatever `weights_only` says read as True.

        Raises:
            ValueError: where it holds pickled code.
        """
        if not _is_remote(path):
            return read_checkpoint(path)
        try:
            return super().load_checkpoint(path, map_location, weights_only=True)
        except pickle.UnpicklingError as error:
            raise ValueError(f"{path} {_why_unreadable(error)}") from None


def write_checkpoint(checkpoint: Mapping[str, Any], path: PathLike) -> None:
    """Write a checkpoint to a local path, atomically: see `AtomicCheckpointIO`.

    One with tensors that `fully_shard` has split is written by all ranks together: each calls this,
    the first writes whole tensors, and the others do not wait for the file. It fits any number of
    ranks, as one of unsplit tensors does: `set_model_state_dict` of
    `torch.distributed.checkpoint.state_dict`, with `full_state_dict=True`, takes the weights.
    """
    whole = gathered(checkpoint)
    if whole or not checkpoint:
        _write(plain(whole), path)


def _write(checkpoint: Checkpoint, path: PathLike) -> None:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with new_file(temporary) as file, _checksums():
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        _check_plain(temporary)
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:
        kept = "; the checkpoint saved there before is intact" if path.exists() else ""
        free = shutil.disk_usage(path.parent).free / 2**20
        raise OSError(
            f"{path} could not be written, with {free:.0f} MiB free there: "
            f"{_first_line(error)}{kept}."
        ) from error
    finally:
        discard(temporary)
    sync_folder(path.parent)


@contextmanager
def _checksums() -> Iterator[None]:
    """Context in which `torch.save` writes what tells a damaged file; without it, zeros."""
    before = get_crc32_options()
    set_crc32_options(True)
    try:
        yield
    finally:
        set_crc32_options(before)


def read_checkpoint(path: PathLike, *, mmap: bool = False) -> Checkpoint:
    """A checkpoint file, on the CPU and without running any code in it.

    Args:
        path: local file.
        mmap: whether tensors stay on the disk until they are used, where the format allows it.

    Raises:
        FileNotFoundError: where there is none.
        ValueError: where the file is truncated, no checkpoint, one rank's part of one, or holds
            pickled code, or where it is a folder of all parts; names file and reason.
    """
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{path} {_why_no_file(path)}")
    if not path.is_file():
        raise FileNotFoundError(f"There is no checkpoint at {path}.")
    try:
        check_archive(path)
        check_pickles(path, MOST_VALUES)
        mmap = mmap and zipfile.is_zipfile(path)
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except PermissionError:
        raise
    except Exception as error:  # what torch says of a broken file is of many types
        # From None: torch advises to run the code in the file, which a traceback would tell.
        raise ValueError(f"{path} {_why_unreadable(error)}") from None
    try:
        check_content(checkpoint)
    except ValueError as error:
        raise ValueError(f"{path} is not a training checkpoint: {error}.") from None
    if split := first_split(checkpoint):
        raise ValueError(f"{path} {_part_of(split)}")
    return dict(checkpoint)


class Loaded(NamedTuple):
    """A module made from a checkpoint, and what it was made of.

    Attributes:
        module: in eval mode, on the CPU.
        path: of the file.
        step: optimizer steps that it was trained for.
        weights: "raw" or "ema_<decay>": those that the module holds.
        checkpoint: the file's content.
    """

    module: LightningModule
    path: Path
    step: int
    weights: str
    checkpoint: Checkpoint


def load(
    path: PathLike,
    weights: str = "ema",
    *,
    module: LightningModule | None = None,
    trust: Iterable[str] = (),
) -> Any:
    """A module with the weights of a checkpoint, in eval mode on the CPU, ready for `generate`.

    Args:
        path: file, or run folder: then its checkpoints/last.ckpt.
        weights: "ema" for the average (of several, the first), "ema_<decay>" for a certain one,
            "raw" for the weights as trained.
        module: filled in place of one built from the class paths in the file; for modules that were
            not made from YAML.
        trust: packages besides `lit_diffusion.trust.TRUSTED` that those class paths may name.

    Raises:
        FileNotFoundError: where there is no file.
        ValueError: where the file is damaged, of another architecture, holds code, or not those
            weights.

    Example:
        >>> images = load("runs/digits", weights="ema").generate(range(64))  # doctest: +SKIP
    """
    return load_with_record(path, weights, module=module, trust=trust).module


def load_with_record(
    path: PathLike,
    weights: str = "ema",
    *,
    module: LightningModule | None = None,
    trust: Iterable[str] = (),
) -> Loaded:
    """As `load`, with what was loaded."""
    path = checkpoint_file(path)
    checkpoint = read_checkpoint(path)
    if module is None:
        with no_larger_than(checkpoint["state_dict"]):
            module = build(checkpoint, path, trust)
    name, averages = chosen_weights(checkpoint, weights, path)
    load_state(module, {**uncompiled(checkpoint["state_dict"]), **averages}, path)
    step = int(checkpoint.get("global_step", 0))
    rank_zero_info(f"Loaded {name} weights of step {step} from {path}.")
    return Loaded(module.eval(), path, step, name, checkpoint)


def checkpoint_file(path: PathLike) -> Path:
    """`path` itself, or checkpoints/last.ckpt of a run folder."""
    path = Path(path)
    run_folder = path.is_dir() and not _holds_parts(path)
    return path / "checkpoints" / "last.ckpt" if run_folder else path


def build(checkpoint: Checkpoint, path: PathLike, trust: Iterable[str] = ()) -> LightningModule:
    """The module that a checkpoint's class paths describe, freshly initialised."""
    spec = model_spec(checkpoint)
    if spec is None:
        raise ValueError(
            f"{path} does not say how its module was built, as it was made in Python; "
            "build it and call load(path, module=...)."
        )
    built: LightningModule = instantiate(spec, LightningModule, trust, path)
    return built


def instantiate(spec: dict[str, Any], base: type, trust: Iterable[str], path: PathLike) -> Any:
    """The object of type `base` that the class path and arguments in the file `path` describe."""
    register_unresolvable_import_paths(torch)
    parser = ArgumentParser(exit_on_error=False)
    with trusting(trust):
        parser.add_subclass_arguments(base, "object", fail_untyped=False, required=True)
        try:
            check_text(yaml.safe_dump(spec))  # in whose texts jsonargparse reads YAML
            return parser.instantiate(parser.parse_object({"object": spec})).object
        except (ArgumentError, ValueError) as error:
            raise ValueError(f"{path}: {innermost(error)}") from error
        except Exception as error:  # what a constructor says of arguments that it cannot take
            cause = f"{type(error).__name__}: {_first_line(error)}"
            raise ValueError(f"{path}: {spec['class_path']} cannot be built: {cause}.") from error


def model_spec(checkpoint: Checkpoint, key: str = "hyper_parameters") -> dict[str, Any] | None:
    """Class path and arguments of the module (by another key, of the data), or None."""
    saved = dict(checkpoint.get(key) or {})
    class_path = saved.pop("_class_path", None)
    saved.pop("_instantiator", None)
    return None if class_path is None else {"class_path": class_path, "init_args": saved}


def ema_states(checkpoint: Checkpoint, path: PathLike) -> list[dict[str, Any]]:
    """What the EMA callbacks of a run saved: decays, steps and shadows (callbacks/ema.py)."""
    states = checkpoint.get("callbacks", {})
    saved = [(key, state) for key, state in states.items() if key.startswith("EMA{")]
    weights = uncompiled(checkpoint.get("state_dict", {}))
    for key, state in saved:
        try:
            check_averages(state)
            _check_alike(state, weights)
        except ValueError as error:
            raise ValueError(
                f"{path} is damaged: the state of {key} in it holds no averages, as {error}."
            ) from None
    return [state for _, state in saved if state]


def chosen_weights(
    checkpoint: Checkpoint, weights: str, path: PathLike
) -> tuple[str, dict[str, Tensor]]:
    """The unambiguous name of the weights that are asked for, and the averages among them.

    Args:
        checkpoint: as read.
        weights: "raw", "ema" or "ema_<decay>".
        path: of the file, for messages.
    """
    if weights == "raw":
        return "raw", {}
    averages, chosen, known = {}, [], ["raw"]
    for state in ema_states(checkpoint, path):
        names = [f"ema_{decay:g}" for decay in state["decays"]]
        known += names
        name = names[0] if weights == "ema" else weights
        if name in names:
            averages.update(state["shadows"][names.index(name)])
            chosen.append(name)
    if not chosen:
        raise ValueError(f"{path} has no weights {weights!r}; it has {', '.join(known)}.")
    return "+".join(dict.fromkeys(chosen)), averages


def _check_alike(averages: Mapping[str, Any], weights: Mapping[str, Any]) -> None:
    """Refuse averages of another shape than the weights, or of other numbers: torch casts them."""
    for shadow in averages.get("shadows", ()):
        for name in shadow.keys() & weights.keys():
            raw, average = weights[name], shadow[name]
            if isinstance(raw, Tensor) and not (
                raw.shape == average.shape and _kind(raw) == _kind(average)
            ):
                raise ValueError(
                    f"its average of {name} is {average.dtype} {tuple(average.shape)}, and the "
                    f"weight {raw.dtype} {tuple(raw.shape)}"
                )


def load_state(module: LightningModule, state: Mapping[str, Tensor], path: PathLike) -> None:
    """Copy the weights `state` of the file `path` into `module`.

    Raises:
        ValueError: where names or shapes differ; names the first ones.
    """
    if differences := misfits(module, state):
        more = f" and {len(differences) - 3} more" if len(differences) > 3 else ""
        raise ValueError(
            f"{path} is of another architecture: {'; '.join(differences[:3])}{more}. "
            "Use the config that it was trained with."
        )
    module.load_state_dict(state)


def uncompiled(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`state` by the names that its module has without torch.compile."""
    return {name.replace("_orig_mod.", ""): value for name, value in state.items()}


def misfits(module: LightningModule, state: Mapping[str, Tensor]) -> list[str]:
    """How `state` differs from what `module` expects, one phrase a tensor."""
    own = module.state_dict()
    missing = [f"the file lacks {name}" for name in own if name not in state]
    shapes = [
        f"{name} is {tuple(state[name].shape)} in the file, {tuple(own[name].shape)} in the module"
        for name in own
        if name in state
        and getattr(own[name], "shape", None) != getattr(state[name], "shape", None)
    ]
    unknown = [f"the module lacks {name}" for name in state if name not in own]
    return shapes + missing + unknown + wrong_types(module, state)


def wrong_types(module: LightningModule, state: Mapping[str, Any]) -> list[str]:
    """Weights in `state` that torch would cast, and lose, into those of `module`."""
    own = module.state_dict()
    both = [(name, state[name], own[name]) for name in own if name in state]
    return [
        f"{name} is {saved.dtype} in the file, {expected.dtype} in the module"
        for name, saved, expected in both
        if isinstance(saved, Tensor) and isinstance(expected, Tensor)
        if _kind(saved) != _kind(expected)
    ]


def _kind(tensor: Tensor) -> tuple[bool, bool, bool]:
    return tensor.is_floating_point(), tensor.is_complex(), tensor.dtype is torch.bool


def plain(checkpoint: Mapping[str, Any]) -> Checkpoint:
    """`checkpoint` without hyper-parameters that are objects, which would be pickled by class.

    Raises:
        TypeError: where a tensor is split over ranks; a file would hold one rank's part of it.
    """
    if split := first_split(checkpoint):
        raise TypeError(
            f"a checkpoint must hold whole tensors, and {split!r} is one rank's part of one; "
            "gather it on all ranks (write_checkpoint does), or let the strategy: "
            "ModelParallelStrategy(save_distributed_checkpoint=False)."
        )
    kept = dict(checkpoint)
    for key in kept:
        if key.endswith("hyper_parameters"):
            kept[key] = {name: value for name, value in kept[key].items() if is_plain(value)}
    return kept


def _check_plain(file: Path) -> None:
    """Find at the first save, not at the resume, what cannot be read back."""
    if classes := get_unsafe_globals_in_checkpoint(file):
        raise TypeError(
            f"a checkpoint must hold tensors and plain builtins, got {', '.join(classes)}; "
            "convert it in the state_dict() of the callback or module that it belongs to."
        )


def _is_remote(path: PathLike) -> bool:
    return "://" in str(path)


def _holds_parts(folder: Path) -> bool:
    """Whether a folder is a checkpoint of `torch.distributed.checkpoint`."""
    return (folder / ".metadata").is_file()


def _why_no_file(folder: Path) -> str:
    if not _holds_parts(folder):
        return "is a folder; name the checkpoint file in it."
    return (
        "is a folder with the parts that ranks have saved of a checkpoint; make a file of it with "
        f"python -m lightning.fabric.utilities.consolidate_checkpoint {folder}, or train with "
        "ModelParallelStrategy(save_distributed_checkpoint=False)."
    )


def _part_of(name: str) -> str:
    return (
        f"holds one rank's part of a tensor ({name}) and not the whole, so nothing can be read "
        "from it; save on all ranks with write_checkpoint, or with "
        "ModelParallelStrategy(save_distributed_checkpoint=False)."
    )


def _why_unreadable(error: Exception) -> str:
    """The reason, in our words: those of torch advise to run the code in the file."""
    said = str(error)
    if found := re.search(r"GLOBAL ([\w.]+)", said):
        return (
            f"holds pickled code ({found[1]}), which is never run; only tensors and plain builtins "
            "are read."
        )
    if isinstance(error, pickle.UnpicklingError) or "weights_only" in said:
        return (
            "may hold pickled code, which is never run, or is damaged or no checkpoint; only "
            "tensors and plain builtins are read, in the format that torch.save writes by default."
        )
    return f"is truncated, damaged or no checkpoint: {_first_line(error)}"


def _first_line(error: BaseException) -> str:
    return str(error).split("\n")[0].rstrip(".") or type(error).__name__
