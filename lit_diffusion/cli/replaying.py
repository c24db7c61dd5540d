"""A step whose loss or gradient was not finite, computed again from what FiniteUpdates kept."""

import logging
import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lit_diffusion.checkpoints.loading import build
from lit_diffusion.checkpoints.reading import read_checkpoint
from lit_diffusion.cli.one_step import OneBatch, OneStep, trainer_of
from lit_diffusion.cli.options import usable_device
from lit_diffusion.lab.analysis.first_nonfinite import FirstNonFinite
from lit_diffusion.seeding import RUN_SEED


@dataclass(frozen=True)
class Replayed:
    """A step, computed again."""

    kept: dict[str, Any]  # what the file says of it; kept["outputs"] are the run's
    device: str  # type of the device that it was computed on
    outputs: dict[str, Tensor]  # what training_step returned, by name, on the CPU
    parameters: list[str]  # names of those whose gradients are not finite
    first_output: str | None  # the first part of the module whose output was not finite, if any
    first_gradient: str | None  # likewise for the gradient

    @property
    def failed(self) -> bool:
        """Whether the loss or a gradient is not finite."""
        loss = self.outputs.get("loss")
        return bool(self.parameters) or (loss is not None and not loss.isfinite().all())

    @property
    def is_exact(self) -> bool:
        """Whether the outputs are the run's to the last bit."""
        theirs = self.kept["outputs"]
        return self.outputs.keys() == theirs.keys() and all(
            _same_bits(self.outputs[name], theirs[name]) for name in theirs
        )

    def text(self) -> str:
        """What a person wants to know."""
        kept = self.kept
        lines = [f"The run said: {kept['what']}.", *self._table()]
        if "loss" in self.outputs:
            lines.append(f"loss {float(self.outputs['loss'].mean()):g}")
        lines.append(f"first output that is not finite: {self.first_output or 'none'}")
        lines.append(f"first gradient that is not finite: {self.first_gradient or 'none'}")
        lines.append(f"parameters with a gradient that is not finite: {_few(self.parameters)}")
        if kept["parameters"] != self.parameters:
            names = _few(kept["parameters"])
            lines.append(f"in the run, of all ranks and accumulated batches: {names}")
        lines.append(self._agreement())
        return "\n".join(lines)

    def _table(self) -> list[str]:
        """A line per sample; none for a module that does not tell of them."""
        losses = self.outputs.get("per_sample_loss")
        if losses is None or losses.ndim != 1:
            return []
        batch = self.kept["batch"]
        index = batch[2] if isinstance(batch, tuple | list) and len(batch) == 3 else None
        columns: dict[str, Any] = {"data index": index, **self.outputs, "loss": losses}
        told = {name: columns[name] for name in ("data index", "u", "t", "loss") if name in columns}
        shown = {name: c for name, c in told.items() if getattr(c, "shape", 0) == losses.shape}
        rows = ["  ".join(["sample", *(f"{name:>10}" for name in shown)])]
        for i, loss in enumerate(losses):
            values = "  ".join(f"{float(column[i]):>10g}" for column in shown.values())
            rows.append(f"{i:>6}  {values}" + ("" if loss.isfinite() else "  <- not finite"))
        return rows

    def _agreement(self) -> str:
        then, other = self.kept["device"], "These are not the run's numbers"
        if self.is_exact:
            return "These are the run's numbers to the last bit."
        if self.device != then:
            return f"{other}, which are of {then}: on {self.device} other random numbers are drawn."
        return (
            f"{other} (torch {self.kept['torch']} then, {torch.__version__} now): the step depends "
            "on something besides its weights, batch and seeds, such as compiled code, a random "
            "generator of its own or a state outside of its buffers."
        )


def replay(
    path: str | Path,
    *,
    module: LightningModule | None = None,
    trust: Iterable[str] = (),
    device: str | None = None,
) -> Replayed:
    """Compute the step of a file again, with Lightning's own loop.

    Args:
        path: a file that FiniteUpdates wrote.
        module: as it was trained, for one that was not made from YAML; its weights are replaced.
        trust: packages besides `lit_diffusion.config.trust.TRUSTED` that class paths may name.
        device: "cpu", "cuda", ...; None is what the step ran on, or the CPU.

    Raises:
        ValueError: for a file that is damaged or no such one, or of a step that can't be computed
            again.

    Example:
        >>> replay("runs/digits/non-finite-rank0.ckpt").first_output  # doctest: +SKIP
        'network.middle (ResBlock)'
    """
    path = Path(path)
    checkpoint = read_checkpoint(path)
    kept = checkpoint.get("replay")
    if not isinstance(kept, dict):
        raise ValueError(
            f"{path} is a checkpoint and no step that was not finite; name a "
            "non-finite-rank<r>.ckpt of a run folder."
        )
    if kept["updates"]:
        raise ValueError(
            f"{path} is of a training_step that had made {kept['updates']} updates before the one "
            "that was not finite, and cannot be computed again: the weights before those are lost."
        )
    if module is None:
        module = build(checkpoint, path, trust)
    is_here = torch.get_device_module(kept["device"]).is_available()
    where = usable_device(device or (kept["device"] if is_here else "cpu"))
    step = OneStep(checkpoint, path)
    with FirstNonFinite(module) as first, _as_then(kept):
        trainer = trainer_of(kept, where, step)
        trainer.fit(module, OneBatch(trainer, kept))
    return Replayed(kept, where.type, step.outputs, step.parameters, first.output, first.gradient)


def _few(names: Sequence[str]) -> str:
    more = [f"{len(names) - 8} more"] if len(names) > 8 else []
    return ", ".join([*names[:8], *more]) or "none"


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(*(x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b)))


@contextmanager
def _as_then(kept: dict[str, Any]) -> Iterator[None]:
    """Context with the run's seed, and its threads, on which the order of sums depends."""
    seed, threads = os.environ.pop(RUN_SEED, None), torch.get_num_threads()
    os.environ |= {} if kept["seed"] is None else {RUN_SEED: str(kept["seed"])}
    torch.set_num_threads(kept["threads"])
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        torch.set_num_threads(threads)
        os.environ.pop(RUN_SEED, None)
        os.environ |= {} if seed is None else {RUN_SEED: seed}


@contextmanager
def quiet() -> Iterator[None]:
    """Context in which Lightning says nothing of a training."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="lightning")
            yield
    finally:
        logging.disable(logging.NOTSET)
