"""What the analyses share: checkpoints, losses on training images, plans, costs, files."""

import hashlib
import json
import math
import time
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from lit_diffusion.checkpoints.loading import LoadedModule, load_module
from lit_diffusion.cli.options import usable_device
from lit_diffusion.cli.run_data import data_of_run
from lit_diffusion.files import atomic_write, atomic_write_text
from lit_diffusion.lab.analysis.command import AnalysisOptions, LossOptions
from lit_diffusion.lab.analysis.fixed_losses import (
    Losses,
    copy_weights,
    fixed_losses,
    use_exact_spectral_norm_,
)
from lit_diffusion.lab.analysis.work_queue import prepare_folder
from lit_diffusion.signals import print_error

Result = TypeVar("Result")
"""A dataclass whose fields are arrays, or what JSON can hold."""


def load_checkpointed_module(path: str, options: AnalysisOptions) -> LoadedModule:
    """Load the module of a checkpoint to its device."""
    loaded = load_module(path, options.weights, trust=options.trust)
    loaded.module.to(usable_device(options.device))
    return loaded


def load_with_exact_spectral_norm(path: str, options: AnalysisOptions) -> LoadedModule:
    """Load the module of a checkpoint, with spectral norms that follow weights that move."""
    loaded = load_checkpointed_module(path, options)
    use_exact_spectral_norm_(loaded.module)
    return loaded


def load_training_data(loaded: LoadedModule, options: AnalysisOptions) -> Any:
    """Build the data module of --data, or of the run of a checkpoint.

    Raises:
        ValueError: if neither names data with splits.
    """
    data = data_of_run(loaded.path, options.data, options.trust)
    if data is None:
        named = options.data or loaded.path
        raise ValueError(f"{named} names no data with splits to take images from.")
    return data


def load_losses(loaded: LoadedModule, options: LossOptions) -> Losses:
    """Build the losses of a module on its training images that the options name."""
    dataset = load_training_data(loaded, options).dataset("train")
    return fixed_losses(loaded.module, dataset, options.images, options.levels)


def print_cost(what: str, seconds: float) -> None:
    """Print how long an analysis will take."""
    print_error(f"{what}: about {seconds / 60:.1f} minutes by one process.")


@torch.no_grad()
def print_cost_of_losses(losses: Losses, times: int) -> None:
    """Print how long evaluating all losses so many times will take, from the time of one.

    Raises:
        ValueError: if a loss is not finite.
    """
    start = time.monotonic()
    values = {name: loss().item() for name, loss in losses.items()}
    print_cost(f"{times} times {len(losses)} losses", (time.monotonic() - start) * times)
    if bad := [f"{value} of {name}" for name, value in values.items() if not math.isfinite(value)]:
        raise ValueError(f"losses must be finite where the analysis begins, got {', '.join(bad)}.")


def plan_analysis(kind: str, options: AnalysisOptions, *loaded: LoadedModule) -> Path:
    """Make the folder of the results, or check that it holds a part of the same analysis.

    Raises:
        ValueError: if it holds something else.
    """
    checkpoints = [
        f"{each.path} at step {each.step}, {each.weights}, {fingerprint(each.module)}"
        for each in loaded
    ]
    settings = asdict(options)
    for name in ("out", "device", "trust", "batch_size"):  # without effect on the results
        settings.pop(name, None)
    prepare_folder(Path(options.out), {"analysis": kind, "of": checkpoints, **settings})
    return Path(options.out)


def fingerprint(module: nn.Module) -> str:
    """Hash all weights, whatever their layout in memory."""
    digest = hashlib.sha256()
    for name, value in copy_weights(module).items():
        digest.update(name.encode() + value.float().cpu().numpy().tobytes())
    return digest.hexdigest()[:12]


def text_of_unfinished(out: Path) -> str:
    """What to print if other processes have not computed all of their pieces."""
    return f"Other processes are at work for {out}; the same command, after them, ends it."


def save_result(result: Any, path: str | Path) -> None:
    """Write arrays to `path`.npz and all else to `path`.json; others may write the same."""
    values = {field.name: getattr(result, field.name) for field in fields(result)}
    arrays = {name: value for name, value in values.items() if isinstance(value, np.ndarray)}
    others = {name: value for name, value in values.items() if name not in arrays}
    with atomic_write(Path(f"{path}.npz"), shared=True) as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)
    atomic_write_text(Path(f"{path}.json"), json.dumps(others, indent=1) + "\n", shared=True)


def load_result(kind: type[Result], path: str | Path) -> Result:
    """Read the result of class `kind` that `save_result` has written.

    Raises:
        FileNotFoundError: if one of the two files is missing.
    """
    others = json.loads(Path(f"{path}.json").read_text())
    with np.load(f"{path}.npz") as arrays:
        return kind(**others, **{name: arrays[name] for name in arrays.files})


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure of matplotlib as PNG; other processes may write the same."""
    with atomic_write(path, shared=True) as file:
        figure.savefig(file, format="png", dpi=120)
