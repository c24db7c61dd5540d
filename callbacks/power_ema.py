"""Average weights with EDM2's power-function EMA. Snapshots allow other EMA widths after a run."""

import shutil
from math import prod
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info

from lit_diffusion.callbacks.ema import EMA
from lit_diffusion.callbacks.evaluation import refuse_other_run
from lit_diffusion.callbacks.trainer_state import confirm_updates, gather_state, output_folder
from lit_diffusion.checkpoints.averages import (
    SNAPSHOT_FOLDER,
    delete_snapshots_after,
    list_snapshots,
    write_snapshot,
)
from lit_diffusion.ema_profiles import exponent, power_decay
from lit_diffusion.files import atomic_write, check_regular


class PowerEMA(EMA):
    """EMA whose decay grows, so that it averages over a fixed fraction of the steps so far.

    At step n, each average becomes `d * average + (1 - d) * weight`, with
    `d = (1 - 1 / n)**(gamma + 1)`. The first step of the averaging is n = 1. The exponent gamma is
    computed from the relative width of the average. To define this width, the share of each step in
    the average is regarded as the probability of the step. The relative width is the standard
    deviation of the step under these probabilities, divided by the number of steps so far. Usual
    widths are 0.05 and 0.10. `weights(name)` accepts the names "power_<width>", and "ema" for the
    first width.

    If a run averages with two widths and saves snapshots, you can reconstruct averages with other
    widths from a checkpoint and the snapshots of earlier steps. To do so, call
    `load(run, weights="power_0.07")` or run `lit-diffusion evaluate --ema 0.03,0.07,0.15`. For
    widths from 0.02 to 0.25, 20 snapshots suffice. A reconstruction is a linear combination of the
    stored averages. In it, each training step has approximately the same share as in the requested
    average. An error is raised if the relative L2 error of these shares is above 0.1.

    Like `EMA`, this callback averages trainable parameters in float32. Validation, test and predict
    use the average with the first width, while `LightningModule.state_dict()` returns the raw
    weights. A resumed run deletes the snapshots of steps after the checkpoint. A checkpoint stores
    the SHA-256 hashes of the run's snapshots, and reading a snapshot with a different hash raises
    an error.

    The averages are stored in float32, and their rounding errors grow with the number of steps. For
    example, if the weights change by 10% in a run of 400,000 steps, the rounding errors are 0.3% of
    the difference between the averages with widths 0.05 and 0.10. If the weights change less, the
    rounding errors are a larger fraction of this difference.

    Args:
        widths: one or more relative widths, above 0 and below 0.289. One average is stored for
            each width.
        snapshot_every_n_steps: optimizer steps between snapshots of the averages. Snapshots are
            written to `ema-snapshots/` in the run folder, next to `checkpoints/`. None writes no
            snapshots.
        prefix: name of the submodule to average, such as "network"; "" averages all parameters.
        on_cpu: whether to store the averages in CPU memory. This saves GPU memory but is slower,
            because each update copies the weights to the CPU.

    Raises:
        ValueError: if a width is out of range, if two `PowerEMA` callbacks write snapshots, or if
            the checkpoint lacks the average for one of the widths. The error is also raised if no
            parameter is under the prefix, if the prefixes of two callbacks overlap, or if the
            strategy is not supported.

    Source: Karras et al. 2024 (EDM2, arXiv 2312.02696), section 3.

    Example:
        >>> PowerEMA(widths=(0.05, 0.1)).names()
        ['raw', 'ema', 'power_0.05', 'power_0.1']
    """

    _name_prefix = "power"

    def __init__(
        self,
        widths: tuple[float, ...] = (0.05, 0.10),
        snapshot_every_n_steps: int | None = None,
        prefix: str = "",
        on_cpu: bool = False,
    ) -> None:
        self._gammas = {width: exponent(width) for width in widths}
        super().__init__(tuple(widths), warmup=False, prefix=prefix, on_cpu=on_cpu)
        self.snapshot_every_n_steps = snapshot_every_n_steps
        if snapshot_every_n_steps is not None and snapshot_every_n_steps < 1:
            raise ValueError(
                f"snapshot_every_n_steps must be at least 1, got {snapshot_every_n_steps}; pass "
                "None for no snapshots."
            )
        self._last_step = 0  # number of updates at the end of the last batch
        self._hashes: dict[int, str] = {}  # step of each snapshot -> SHA-256

    def _update_decay(self, decay: float, first: int, last: int) -> float:
        return prod(power_decay(self._gammas[decay], n + 1) for n in range(first, last))

    def state_dict(self) -> dict[str, Any]:
        """Return the state of `EMA`, with the hashes of the snapshots added."""
        state = super().state_dict()
        if state and self._hashes:
            state["snapshots"] = dict(self._hashes)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore averages and hashes. Raise ValueError if the checkpoint lacks a width."""
        super().load_state_dict(state_dict)
        self._hashes = dict(state_dict.get("snapshots", {}))
        saved = state_dict.get("decays", self.decays)
        if new := sorted(set(self.decays) - set(saved)):
            raise ValueError(
                f"PowerEMA(widths={self.decays}): the checkpoint has the widths {tuple(saved)}, "
                f"and an average of width {new[0]:g} would lack the steps before; keep the widths "
                "of the run."
            )

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Run the checks of `EMA`. Raise an error if another `PowerEMA` writes snapshots too."""
        super().setup(trainer, pl_module, stage)
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        writers = [each for each in callbacks if getattr(each, "snapshot_every_n_steps", None)]
        if len(writers) > 1:
            raise ValueError(
                "two PowerEMA would write snapshots with the same names; pass "
                "snapshot_every_n_steps=None to one of them, or use one PowerEMA whose prefix "
                "contains both."
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start averaging, and delete snapshots of steps after the current one."""
        super().on_train_start(trainer, pl_module)
        self._last_step = step = self.steps
        self._hashes = {n: sha for n, sha in self._hashes.items() if n <= step}
        if self.snapshot_every_n_steps is None:
            return
        self._folder = Path(output_folder(trainer)) / SNAPSHOT_FOLDER
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        refuse_other_run(trainer, self._folder, self._folder.exists())
        if trainer.is_global_zero:
            self._copy_earlier_snapshots(trainer)
            if count := delete_snapshots_after(self._folder, step):
                rank_zero_info(f"Deleted {count} snapshots after step {step} in {self._folder}.")
        # Another callback may have saved the checkpoint just before the snapshot was written.
        is_due = step > 0 and step % self.snapshot_every_n_steps == 0
        if trainer.strategy.broadcast(is_due and step not in self._hashes):
            self._write_snapshot(trainer)

    def _copy_earlier_snapshots(self, trainer: Trainer) -> None:
        """Copy the snapshots of the run that is resumed, if this run writes to another folder."""
        before = Path(trainer.ckpt_path or "").absolute().parent.parent / SNAPSHOT_FOLDER
        if trainer.ckpt_path is None or before.resolve() == self._folder.resolve():
            return
        for step, file in list_snapshots(before).items():
            copy = self._folder / file.name
            if step in self._hashes and not copy.exists():
                self._folder.mkdir(parents=True, exist_ok=True)
                with check_regular(file).open("rb") as source, atomic_write(copy) as target:
                    shutil.copyfileobj(source, target)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *rest: Any) -> None:
        """Write a snapshot if one is due."""
        super().on_train_batch_end(trainer, pl_module, *rest)
        every, before, self._last_step = self.snapshot_every_n_steps, self._last_step, self.steps
        if every is None or self.steps // every == before // every:
            return
        confirm_updates(trainer)
        if not trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._write_snapshot(trainer)

    def _write_snapshot(self, trainer: Trainer) -> None:
        state = gather_state(self.state_dict())
        if trainer.is_global_zero and state:
            shadows = zip(state["decays"], state["shadows"], strict=True)
            self._hashes[self.steps] = write_snapshot(self._folder, self.steps, dict(shadows))
