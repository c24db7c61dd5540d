"""Whether what a run writes fits on the disk."""

import copy
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lit_diffusion.doctor.report import Finding, note, ok, problem, size, warning


@dataclass(frozen=True)
class Storage:
    """What a run writes, and where to.

    Attributes:
        folder: where the run goes.
        free: bytes on its disk.
        weights: bytes of a module's state.
        optimizer: bytes of the optimizers' state; None where not known.
        averages: bytes of the averages.
        checkpoints: full checkpoints that are kept; infinite where none is ever deleted.
        weight_files: checkpoints of the weights alone.
        samples: bytes of the grids of samples, at most; None where not known.
        replaced: bytes of files there already that the run's own will take the place of.
    """

    folder: str
    free: int
    weights: int
    optimizer: int | None = 0
    averages: int = 0
    checkpoints: float = 1
    weight_files: float = 0
    samples: int | None = 0
    replaced: int = 0

    @property
    def checkpoint(self) -> int:
        """Bytes of a full checkpoint."""
        return self.weights + (self.optimizer or 0) + self.averages

    @property
    def needed(self) -> float:
        """Free bytes for the worst moment: a file is replaced only when the new one is whole."""
        kept = (self.checkpoints + 1) * self.checkpoint if self.checkpoints else 0
        light = self.weight_files * self.weights if self.weight_files else 0
        return max(kept + light + (self.samples or 0) - self.replaced, 0)


def check_storage(storage: Storage) -> list[Finding]:
    """Whether the disk is large enough."""
    there = f"{size(storage.free)} are free in {storage.folder}"
    if math.isinf(storage.needed):
        return [
            warning(
                "disk",
                f"no checkpoint is ever deleted, {size(storage.checkpoint)} each, and {there}; set "
                "save_top_k of ModelCheckpoint.",
            )
        ]
    told = _told(storage)
    if storage.needed > storage.free:
        fix = "free some, or choose another disk with --trainer.default_root_dir."
        return [problem("disk", f"{told}, but {there}; {fix}")]
    if storage.needed > 0.5 * storage.free:
        return [warning("disk", f"{told}, and {there}: more than half; others write there too.")]
    found = [ok("disk", f"{told}; {there}")]
    if storage.optimizer is None:
        found.append(note("disk", "the size of the optimizer's state is not known."))
    return found


def _told(storage: Storage) -> str:
    parts = [f"weights {size(storage.weights)}"]
    if storage.optimizer:
        parts.append(f"optimizer {size(storage.optimizer)}")
    if storage.averages:
        parts.append(f"EMA {size(storage.averages)}")
    told = f"{size(storage.needed)} needed: checkpoints of {size(storage.checkpoint)} "
    told += f"({', '.join(parts)}), {storage.checkpoints:,.0f} kept and one being written"
    if storage.weight_files:
        told += f", {storage.weight_files:,.0f} of weights alone"
    if storage.samples:
        told += f", samples {size(storage.samples)}"
    return told + (f", {size(storage.replaced)} there already" if storage.replaced else "")


# Facts


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors, each counted once.

    Example:
        >>> tensor_bytes([torch.zeros(3), torch.zeros(2, dtype=torch.float64)])
        28
    """
    return sum({id(t): t.numel() * t.element_size() for t in tensors}.values())


def state_bytes(module: nn.Module) -> int:
    """Bytes of a module's `state_dict`; what modules share is counted once, as torch saves it."""
    return tensor_bytes(
        {
            value.data_ptr() or id(value): value
            for value in module.state_dict().values()
            if isinstance(value, Tensor)
        }.values()
    )


def optimizer_bytes(optimizer: Optimizer) -> int:
    """Bytes that the state of an optimizer has once it has stepped, found on the meta device.

    Example:
        >>> adam = torch.optim.Adam([nn.Parameter(torch.zeros(1000))])
        >>> optimizer_bytes(adam), len(adam.state)
        (8004, 0)
    """
    shadow = copy.copy(optimizer)
    shadow.state = defaultdict(dict)
    shadow.param_groups = [
        {**group, "fused": None, "params": [_on_meta(p) for p in group["params"]]}
        for group in optimizer.param_groups
    ]
    shadow.step()
    state = [value for entry in shadow.state.values() for value in entry.values()]
    return tensor_bytes(value for value in state if isinstance(value, Tensor))


def _on_meta(parameter: Tensor) -> nn.Parameter:
    made = nn.Parameter(torch.empty_like(parameter, device="meta"))
    made.grad = torch.empty_like(made)
    return made


def averages_bytes(module: nn.Module, num_decays: int, prefix: str = "") -> int:
    """Bytes of an EMA callback's averages: float32, or float64 of float64, for each decay.

    Args:
        module: whose trainable parameters are averaged.
        num_decays: of the callback.
        prefix: of the submodule that is averaged.
    """
    dot = f"{prefix}." if prefix else ""
    averaged = [p for n, p in module.named_parameters() if p.requires_grad and n.startswith(dot)]
    return num_decays * sum(p.numel() * max(4, p.element_size()) for p in averaged)


def grid_bytes(num: int, times: int, shape: tuple[int, int, int]) -> int:
    """Bytes, at most, of the files of a SampleGrid: two pictures each time, and TensorBoard's copy.

    Args:
        num: of samples.
        times: that a grid is drawn.
        shape: (C, H, W) of a sample.
    """
    side = max(512, math.ceil(math.sqrt(num)) * max(shape[1:]))
    return 2 * times * 3 * shape[0] * side**2


def replaced_bytes(folder: Path, kept: float, each: int) -> int:
    """Bytes of checkpoints in a folder, of as many as a run will keep there.

    Args:
        folder: of the run's checkpoints; need not be there.
        kept: files of the run.
        each: bytes that are foretold of one; no file counts for more.
    """
    sizes = [min(file.stat().st_size, each) for file in folder.glob("*.ckpt")]
    sizes.sort(reverse=True)
    return sum(sizes[: len(sizes) if math.isinf(kept) else int(kept)])


def kept_files(save_top_k: int, save_last: bool, saves: int | None) -> float:
    """Files that a ModelCheckpoint keeps.

    Args:
        save_top_k: as its own: -1 keeps all.
        save_last: whether there is a last.ckpt beside.
        saves: of the run; None where not known.

    Example:
        >>> kept_files(3, True, 100), kept_files(-1, False, 40), kept_files(-1, False, None)
        (4, 40, inf)
    """
    if save_top_k >= 0:
        top = save_top_k if saves is None else min(save_top_k, saves)
        return top + bool(save_last)
    return (math.inf if saves is None else saves) + bool(save_last)
