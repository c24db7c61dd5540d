"""Helpers that all analyses use: loading, the output folder, and resumable work.

The work of an analysis is split into pieces. The arrays of a piece are saved as soon as they are
computed. If an analysis is stopped, the next call computes only the missing pieces. Processes of
torchrun or srun each compute a share of the pieces.
"""

import hashlib
import json
import math
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import nn

from lit_diffusion.callbacks.progress import format_speed
from lit_diffusion.checkpoints.loading import LoadedModule, load_module
from lit_diffusion.cli.encoding import launcher_rank_and_world_size
from lit_diffusion.cli.options import usable_device
from lit_diffusion.cli.run_data import data_of_run
from lit_diffusion.files import atomic_write, atomic_write_text, checked_read
from lit_diffusion.lab.analysis.fixed_losses import (
    Losses,
    copy_weights,
    fixed_losses,
    use_exact_spectral_norm_,
)
from lit_diffusion.signals import print_error

Arrays = Mapping[str, np.ndarray[Any, Any]]


class UnfinishedAnalysis(Exception):
    """Raised if other processes have not computed all of their pieces yet."""


def load_analyzed_module(path: str, options: Namespace, moves: bool = True) -> LoadedModule:
    """Load the module of a checkpoint or run folder, with its --weights, on --device.

    `moves` says whether the analysis changes the weights. If it does, spectral norms are computed
    exactly, because the singular vectors that torch stores would be wrong for changed weights.
    """
    loaded = load_module(path, options.weights, trust=options.trust)
    loaded.module.to(usable_device(options.device))
    if moves:
        use_exact_spectral_norm_(loaded.module)
    return loaded


def load_training_data(loaded: LoadedModule, options: Namespace) -> Any:
    """Build the data module of --data or, by default, of the checkpoint's run.

    Raises:
        ValueError: if there is no data module, or if it has no splits.
    """
    data = data_of_run(loaded.path, options.data, options.trust)
    if data is None:
        source = ", ".join(options.data or [str(loaded.path)])
        raise ValueError(f"{source} names no data with splits to take images from.")
    return data


def load_losses(loaded: LoadedModule, options: Namespace) -> Losses:
    """Build the losses of a module on --images training images, at the noise levels --levels."""
    dataset = load_training_data(loaded, options).dataset("train")
    return fixed_losses(loaded.module, dataset, options.images, options.levels)


def print_cost(what: str, seconds: float) -> None:
    """Print the estimated duration of an analysis."""
    print_error(f"{what}: about {seconds / 60:.1f} minutes by one process.")


@torch.no_grad()
def print_cost_of_losses(losses: Losses, times: int) -> None:
    """Time one evaluation of all losses, and print the estimated duration of `times` evaluations.

    Raises:
        ValueError: if a loss is not finite.
    """
    start = time.monotonic()
    values = {name: loss().item() for name, loss in losses.items()}
    print_cost(f"{times} times {len(losses)} losses", (time.monotonic() - start) * times)
    if bad := [f"{value} of {name}" for name, value in values.items() if not math.isfinite(value)]:
        raise ValueError(f"losses must be finite at the initial weights, got {', '.join(bad)}.")


def plan_analysis(kind: str, options: Namespace, *loaded: LoadedModule) -> Path:
    """Write plan.json to a new output folder, or check that an existing folder has the same plan.

    Raises:
        ValueError: if the folder contains files but no plan.json, or if its plan.json differs from
            the plan of this analysis. The message names a setting that differs.
    """
    folder, path = Path(options.out), Path(options.out, "plan.json")
    checkpoints = [
        f"{each.path} at step {each.step}, {each.weights}, {fingerprint(each.module)}"
        for each in loaded
    ]
    without_effect = ("out", "device", "trust", "batch_size")
    settings = {name: each for name, each in vars(options).items() if name not in without_effect}
    plan = {"analysis": kind, "of": checkpoints, **settings}
    text = json.dumps(plan, indent=1, default=str) + "\n"
    # Checked before plan.json, which another process may be writing (first as a hidden file).
    holds_something = folder.is_file() or (folder.is_dir() and any(folder.glob("[!.]*")))
    if not path.is_file():
        if holds_something:
            raise ValueError(f"--out {folder} holds something else; choose another folder.")
        folder.mkdir(parents=True, exist_ok=True)
        atomic_write_text(path, text, shared=True)
        return folder
    with checked_read(path, "plan of an analysis", "delete the folder") as file:
        old_plan = dict(json.loads(file.read_text()))
    for name, value in json.loads(text).items():
        if old_plan.get(name) != value:
            raise ValueError(
                f"--out {folder} holds an analysis whose {name} is {old_plan.get(name)}, but in "
                f"this call it is {value}; choose another folder."
            )
    return folder


def fingerprint(module: nn.Module) -> str:
    """Hash all weights, independent of their memory layout; 12 hex digits."""
    digest = hashlib.sha256()
    for name, value in copy_weights(module).items():
        digest.update(name.encode() + value.float().cpu().numpy().tobytes())
    return digest.hexdigest()[:12]


def compute_pieces(
    folder: Path, names: Sequence[str], compute: Callable[[str], Arrays], unit: str
) -> list[Arrays]:
    """Compute the pieces that have no file yet, and return the arrays of all pieces.

    Each process of torchrun or srun computes its share. The function `compute` computes the arrays
    of a piece from its name, and the arrays are saved in `folder`/pieces/NAME.npz. `unit` is the
    name of a piece in the progress messages, such as "row".

    Raises:
        UnfinishedAnalysis: if other processes have not computed their share yet.
    """
    rank, world_size = launcher_rank_and_world_size()
    (folder / "pieces").mkdir(exist_ok=True)
    files = {name: folder / "pieces" / f"{name}.npz" for name in names}
    pending = [name for name in names[rank::world_size] if not files[name].is_file()]
    start = last_print = time.monotonic()
    try:
        for done, name in enumerate(pending, start=1):
            save_arrays(files[name], compute(name))
            if done == 1 < len(pending) or time.monotonic() - last_print > 10:
                last_print = time.monotonic()
                rate = format_speed(unit, done, len(pending) - done, last_print - start)
                print_error("  ".join([f"{done} of {len(pending)} {unit}s", *rate]))
    except KeyboardInterrupt:
        num = sum(file.is_file() for file in files.values())
        print_error(
            f"Stopped with {num} of {len(names)} {unit}s in {folder}; run it again to continue."
        )
        raise
    if not all(file.is_file() for file in files.values()):
        raise UnfinishedAnalysis(
            f"Other processes are still computing for {folder}. When they have finished, run the "
            "same command again."
        )
    arrays: list[Arrays] = []
    for file in files.values():
        with checked_read(file, "piece", "delete it") as path, np.load(path) as content:
            arrays.append(dict(content))
    return arrays


def save_result(path: Path, result: Mapping[str, Any], note: str = "") -> None:
    """Write the arrays of a result to `path`.npz, and everything else to `path`.json.

    `note` says how the result was measured. Unless `note` is empty, the JSON file contains it.
    """
    arrays = {name: value for name, value in result.items() if isinstance(value, np.ndarray)}
    others = {name: value for name, value in result.items() if name not in arrays}
    if note:
        others["note"] = note
    save_arrays(Path(f"{path}.npz"), arrays)
    atomic_write_text(Path(f"{path}.json"), json.dumps(others, indent=1) + "\n", shared=True)


def save_arrays(path: Path, arrays: Arrays) -> None:
    """Atomically write an .npz file. Several processes may write the same file at once."""
    with atomic_write(path, shared=True) as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)


def save_figure(figure: Figure, path: Path, note: str = "") -> None:
    """Atomically write a PNG file, with `note` as its title.

    Several processes may write the same file at once.
    """
    if note:  # 14 characters of this size are an inch wide
        figure.suptitle(fill(note, int(14 * figure.get_figwidth())), fontsize="small")
    with atomic_write(path, shared=True) as file:
        figure.savefig(file, format="png", dpi=120)
