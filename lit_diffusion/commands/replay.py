"""`lit-diffusion replay`: compute a step again whose loss or gradient was not finite."""

import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_diffusion.commands.options import Parser

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule
    from torch import Tensor

_NUMBERS = ("step", "epoch", "batch_idx", "rank", "updates")
_EXPECTED: dict[str, type] = {
    **dict.fromkeys((*_NUMBERS, "accumulate_grad_batches", "threads"), int),
    **dict.fromkeys(("rng", "buffers", "timesteps", "outputs", "precision_state"), dict),
    **dict.fromkeys(("what", "precision", "device", "torch"), str),
    **dict.fromkeys(("parameters", "evaluating"), list),
}


def parser() -> Parser:
    """Options of the command."""
    made = Parser(
        "replay",
        """Compute a training step again whose loss or gradient was not finite.

    lit-diffusion replay runs/digits/non-finite-rank0.ckpt

A fit that meets such a step leaves FILE in its run folder: the batch, the weights before the
update, and what the step's randomness is a function of. Printed are the losses of the samples with
their noise levels and data indices, which of them are not finite, the part of the network whose
output, and the one whose gradient, first was not, and whether all numbers are those of the run to
the last bit, as they are on the CPU. Nothing is written.

Exit codes: 0, it happened again; 1, it did not; 2, FILE cannot be used.""",
    )
    made.add_argument("file", metavar="FILE", help="non-finite-rank<r>.ckpt of a run folder")
    made.add_argument(
        "--device", help="cpu, cuda, ... (default: what the step ran on, if there is one here)"
    )
    made.add_argument(
        "--trust",
        action="append",
        default=[],
        metavar="PACKAGE",
        help="package that class paths in FILE may name; may be repeated",
    )
    return made


def run(argv: Sequence[str]) -> None:
    """Run the command.

    Args:
        argv: "replay", then options.

    Raises:
        SystemExit: with 1, where all was finite this time.
    """
    args = parser().parse_args(argv[1:])
    with _quiet():
        found = replay(args.file, trust=args.trust, device=args.device)
    print(found.text())
    if not found.failed:
        raise SystemExit(1)


@dataclass(frozen=True)
class Replayed:
    """A step, computed again.

    Attributes:
        kept: what the file says of it; kept["outputs"] are the run's.
        device: type of the device that it was computed on.
        outputs: what training_step returned, by name, on the CPU.
        parameters: names of those whose gradients are not finite.
        first_output: the first part of the module whose output was not finite, if any.
        first_gradient: likewise for the gradient.
    """

    kept: dict[str, Any]
    device: str
    outputs: "dict[str, Tensor]"
    parameters: list[str]
    first_output: str | None
    first_gradient: str | None

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
        lines = [f"The run said: {kept['what']}.", *self._samples()]
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

    def _samples(self) -> list[str]:
        """A table of the samples; empty for a module that does not tell of them."""
        import torch

        losses = self.outputs.get("per_sample_loss")
        if losses is None or losses.ndim != 1:
            return []
        columns = {"loss": losses}
        for name in ("t", "u"):
            if self.outputs.get(name, losses[:0]).shape == losses.shape:
                columns = {name: self.outputs[name], **columns}
        batch = self.kept["batch"]
        if isinstance(batch, tuple | list) and len(batch) == 3:
            index = batch[2]
            if isinstance(index, torch.Tensor) and index.shape == losses.shape:
                columns = {"data index": index, **columns}
        rows = ["  ".join(["sample", *(f"{name:>10}" for name in columns)])]
        for i, loss in enumerate(losses):
            values = "  ".join(f"{float(column[i]):>10g}" for column in columns.values())
            rows.append(f"{i:>6}  {values}" + ("" if loss.isfinite() else "  <- not finite"))
        return rows

    def _agreement(self) -> str:
        import torch

        if self.is_exact:
            return "These are the run's numbers to the last bit."
        kept = self.kept
        if self.device != kept["device"]:
            return (
                f"These are not the run's numbers, which are of {kept['device']}: on "
                f"{self.device} other random numbers are drawn."
            )
        return (
            f"These are not the run's numbers (torch {kept['torch']} then, {torch.__version__} "
            "now): the step depends on something besides its weights, batch and seeds, such as "
            "compiled code, a random generator of its own or a state outside of its buffers."
        )


def replay(
    path: str | Path,
    *,
    module: "LightningModule | None" = None,
    trust: Iterable[str] = (),
    device: str | None = None,
) -> Replayed:
    """Compute the step of a file again, with Lightning's own loop.

    Args:
        path: a file that FiniteUpdates wrote.
        module: as it was trained, for one that was not made from YAML; its weights are replaced.
        trust: packages besides `lit_diffusion.trust.TRUSTED` that class paths may name.
        device: "cpu", "cuda", ...; None is what the step ran on, or the CPU.

    Raises:
        ValueError: for a file that is damaged or no such one, or of a step that can't be computed
            again.

    Example:
        >>> replay("runs/digits/non-finite-rank0.ckpt").first_output  # doctest: +SKIP
        'network.middle (ResBlock)'
    """
    from lit_diffusion.analysis.first_nonfinite import FirstNonFinite
    from lit_diffusion.checkpoints import build, read_checkpoint

    path = Path(path)
    checkpoint = read_checkpoint(path)
    kept = _checked(checkpoint.get("replay"), path)
    if module is None:
        module = build(checkpoint, path, trust)
    where = _device(device, kept["device"])
    with FirstNonFinite(module) as first, _seeded(kept["seed"]), _threads(kept["threads"]):
        outputs, parameters = _computed(module, checkpoint, path, where)
    return Replayed(kept, where.type, outputs, parameters, first.output, first.gradient)


def _computed(
    module: "LightningModule", checkpoint: dict[str, Any], path: Path, device: Any
) -> "tuple[dict[str, Tensor], list[str]]":
    """What training_step returned, and the parameters whose gradients are not finite."""
    from lit_diffusion.commands.one_step import OneBatch, OneStep, trainer_of

    step = OneStep(checkpoint, path)
    trainer = trainer_of(checkpoint["replay"], device, step)
    trainer.fit(module, OneBatch(trainer, checkpoint["replay"]))
    return step.outputs, step.parameters


def _checked(kept: Any, path: Path) -> dict[str, Any]:
    """What a file says of a step, as far as it could be wrong."""
    import torch

    if not isinstance(kept, dict):
        raise ValueError(
            f"{path} is a checkpoint and no step that was not finite; name a "
            "non-finite-rank<r>.ckpt of a run folder."
        )
    for name, kind in {**_EXPECTED, "batch": object}.items():
        if not isinstance(kept.get(name), kind):
            raise ValueError(f"{path} is damaged: its {name!r} must be {kind.__name__}.")
    rng, seed = kept["rng"].get("cpu"), kept.get("seed")
    times = kept["timesteps"]
    known = times.keys() <= {"timestep_density", "timestep_weight"} and all(
        value is None or isinstance(value, torch.Tensor) for value in times.values()
    )
    is_state = known and isinstance(rng, torch.Tensor) and rng.shape == torch.get_rng_state().shape
    fine = is_state and rng.dtype == torch.uint8 and (seed is None or isinstance(seed, int))
    counts = [kept[name] for name in _NUMBERS]
    at_least_one = [kept["accumulate_grad_batches"], kept["threads"]]
    if not fine or min(counts) < 0 or min(at_least_one) < 1 or max(kept["threads"], 1) > 4096:
        raise ValueError(f"{path} is damaged: a count, seed or random state is out of range.")
    if kept["updates"]:
        raise ValueError(
            f"{path} is of a training_step that had made {kept['updates']} updates before the one "
            "that was not finite, and the weights before those are not in the file; it can't be "
            "computed again."
        )
    return kept


def _device(wanted: str | None, trained_on: str) -> Any:
    from lit_diffusion.commands.sample import usable_device

    if wanted is not None:
        return usable_device(wanted)
    try:
        return usable_device(trained_on)
    except ValueError:
        return usable_device("cpu")


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(names[:8]) + more if names else "none"


def _same_bits(a: "Tensor", b: "Tensor") -> bool:
    import torch

    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(*(x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b)))


@contextmanager
def _seeded(seed: int | None) -> Iterator[None]:
    """The seed of a run where `seed_everything` leaves it, and torch's generator put back."""
    import torch

    before, state = os.environ.pop("PL_GLOBAL_SEED", None), torch.get_rng_state()
    if seed is not None:
        os.environ["PL_GLOBAL_SEED"] = str(seed)
    try:
        yield
    finally:
        torch.set_rng_state(state)
        os.environ.pop("PL_GLOBAL_SEED", None)
        if before is not None:
            os.environ["PL_GLOBAL_SEED"] = before


@contextmanager
def _threads(number: int) -> Iterator[None]:
    """As many threads as the run had, on which the order of sums depends."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _quiet() -> Iterator[None]:
    """Leave out what Lightning tells of a training."""
    import logging

    names = ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero")
    loggers = [logging.getLogger(name) for name in names]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="lightning")
            yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
