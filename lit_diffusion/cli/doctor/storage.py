"""Whether what a run writes fits on the disk."""

import copy
import math
import shutil
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from torch import Tensor, nn
from torch.optim import Optimizer

from lit_diffusion.callbacks.ema import EMA
from lit_diffusion.callbacks.power_ema import PowerEMA
from lit_diffusion.cli.doctor.machine import existing
from lit_diffusion.cli.doctor.plan import Plan
from lit_diffusion.cli.doctor.report import Finding, note, ok, problem, size, warning
from lit_diffusion.cli.lightning_internals import save_intervals


@dataclass(frozen=True)
class Storage:
    """What a run writes, and where to; sizes in bytes."""

    folder: str
    free: int
    sizes: Mapping[str, int]  # "weights", "optimizer" (missing where not known) and "EMA"
    checkpoints: float = 1  # full ones that are kept; infinite where none is ever deleted
    weight_files: float = 0  # checkpoints of the weights alone
    snapshots: int = 0  # of averages, all of which are kept
    replaced: int = 0  # of files there already that the run's own will take the place of

    @property
    def checkpoint(self) -> int:
        """Bytes of a full checkpoint."""
        return sum(self.sizes.values())

    @property
    def needed(self) -> float:
        """Free bytes for the worst moment: a file is replaced only when the new one is whole."""
        kept = (self.checkpoints + 1) * self.checkpoint if self.checkpoints else 0
        kept += self.weight_files * self.sizes["weights"] + self.snapshots
        return max(kept - self.replaced, 0)


def check_storage(storage: Storage) -> Finding:
    """Whether the disk is large enough."""
    there = f"{size(storage.free)} are free in {storage.folder}"
    if math.isinf(storage.needed):
        text = f"no checkpoint is ever deleted, {size(storage.checkpoint)} each, and {there}; set "
        return warning("disk", f"{text}save_top_k of ModelCheckpoint.")
    told = _told(storage)
    if storage.needed > storage.free:
        fix = "free some, or choose another disk with --trainer.default_root_dir."
        return problem("disk", f"{told}, but {there}; {fix}")
    if storage.needed > 0.5 * storage.free:
        return warning("disk", f"{told}, and {there}: more than half; others write there too.")
    if "optimizer" not in storage.sizes:
        return note("disk", f"{told}, the optimizer's state not known; {there}")
    return ok("disk", f"{told}; {there}")


def _told(storage: Storage) -> str:
    parts = [f"{name} {size(num_bytes)}" for name, num_bytes in storage.sizes.items() if num_bytes]
    told = f"{size(storage.needed)} needed: checkpoints of {size(storage.checkpoint)} "
    told += f"({', '.join(parts)}), {storage.checkpoints:,.0f} kept and one being written"
    if storage.weight_files:
        told += f", {storage.weight_files:,.0f} of weights alone"
    if storage.snapshots:
        told += f", {size(storage.snapshots)} of snapshots"
    return told + (f", {size(storage.replaced)} there already" if storage.replaced else "")


def storage_of(trainer: Trainer, root: Path, plan: Plan) -> Storage:
    """What the run of a Trainer, its optimizers made, writes into its folder."""
    there, module = existing(root), trainer.lightning_module
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    full, light = _files(callbacks, plan)
    sizes = {"weights": state_bytes(module)}
    with suppress(Exception):  # an optimizer that cannot step on the meta device
        sizes["optimizer"] = sum(map(optimizer_bytes, trainer.optimizers))
    sizes["EMA"] = sum(averages_bytes(module, each) for each in callbacks if isinstance(each, EMA))
    snapshots = sum(
        (plan.length or 0) // each.snapshot_every_n_steps * averages_bytes(module, each)
        for each in callbacks
        if isinstance(each, PowerEMA) and each.snapshot_every_n_steps
    )
    replaced = replaced_bytes(root / "checkpoints", full + light, sum(sizes.values()))
    free = shutil.disk_usage(there).free
    return Storage(str(there), free, sizes, full, light, snapshots, replaced)


def _files(callbacks: Iterable[object], plan: Plan) -> tuple[float, float]:
    full, light, paths = 0.0, 0.0, set()
    for callback in callbacks:
        if isinstance(callback, ModelCheckpoint):
            kept = kept_files(callback, plan)
            full += 0 if callback.save_weights_only else kept
            light += kept if callback.save_weights_only else 0
        elif isinstance(callback, Checkpoint):
            paths.add(getattr(callback, "path", callback))  # several keep one file: last.ckpt
        full += bool(getattr(callback, "save_best", False))
    return full + len(paths), light


def kept_files(saver: ModelCheckpoint, plan: Plan) -> float:
    """Files that are kept at once: infinite where all are, and how many is not known."""
    steps, epochs, by_time = save_intervals(saver)
    kept: float = saver.save_top_k
    if kept < 0:
        kept = math.inf
        if not by_time and plan.length is not None and (steps or plan.epochs is not None):
            kept = plan.length // steps if steps else math.ceil((plan.epochs or 0) / epochs)
    return kept + bool(saver.save_last)


def state_bytes(module: nn.Module) -> int:
    """Bytes of a module's `state_dict`; what modules share is counted once, as torch saves it."""
    tensors = [value for value in module.state_dict().values() if isinstance(value, Tensor)]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


def optimizer_bytes(optimizer: Optimizer) -> int:
    """Bytes that the state of an optimizer has once it has stepped, found on the meta device."""
    shadow = copy.copy(optimizer)
    shadow.state = defaultdict(dict)
    shadow.param_groups = [
        {**group, "fused": None, "params": [_on_meta(p) for p in group["params"]]}
        for group in optimizer.param_groups
    ]
    shadow.step()
    state = [value for entry in shadow.state.values() for value in entry.values()]
    return sum(each.numel() * each.element_size() for each in state if isinstance(each, Tensor))


def _on_meta(parameter: Tensor) -> nn.Parameter:
    made = nn.Parameter(torch.empty_like(parameter, device="meta"))
    made.grad = torch.empty_like(made)
    return made


def averages_bytes(module: nn.Module, ema: EMA) -> int:
    """Bytes of the averages: float32, or float64 of float64, for each decay."""
    dot = f"{ema.prefix}." if ema.prefix else ""
    averaged = [p for n, p in module.named_parameters() if p.requires_grad and n.startswith(dot)]
    return len(ema.decays) * sum(p.numel() * max(4, p.element_size()) for p in averaged)


def replaced_bytes(folder: Path, kept: float, each: int) -> int:
    """Bytes of checkpoints in a folder, of as many as a run will keep, each at most `each`."""
    sizes = sorted((min(file.stat().st_size, each) for file in folder.glob("*.ckpt")), reverse=True)
    return sum(sizes[: len(sizes) if math.isinf(kept) else int(kept)])
