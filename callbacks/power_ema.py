"""Averages by power functions of time, kept now and then, so that any width can be had later."""

from math import prod
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info

from lit_diffusion.callbacks.ema import EMA
from lit_diffusion.checkpoints.snapshots import (
    SNAPSHOT_FOLDER,
    delete_snapshots_after,
    write_snapshot,
)
from lit_diffusion.ema_profiles import exponent, power_decay


class PowerEMA(EMA):
    """EMA whose decay rises with the step, so that the average covers the same share of any run.

    After step n: shadow = d shadow + (1 - d) weight with d = (1 - 1 / n)^(gamma + 1). The relative
    width is the standard deviation of what is averaged over, as a share of the run so far: 0.05
    and 0.10 are usual. A checkpoint of two widths and snapshots from before it give others:
    `load(run, weights="power_0.07")`, `lit-diffusion evaluate --ema 0.03,0.07,0.15`. 30 snapshots
    give 0.02 to 0.25; a width whose profile they miss by more than a tenth is refused.

    All else is as of `EMA`; the weights are called "ema" (the first width) and "power_<width>".
    Steps are counted from where the averages began. A resume drops later snapshots, and cannot
    have a new width. A checkpoint knows its snapshots by SHA-256, and others are refused. Averages
    are in float32, whose rounding grows with the steps: after 400,000 it is 0.3% of what sets the
    widths 0.05 and 0.10 apart where weights move by 10% in a run, and more where they move less.

    Args:
        widths: one or more, above 0 and below 0.289.
        snapshot_every_n_steps: optimizer steps between snapshots, which are written to
            `<trainer.default_root_dir>/ema-snapshots`. None keeps none.
        prefix: as of `EMA`.
        on_cpu: as of `EMA`.

    Raises:
        ValueError: for a width that no profile has, two PowerEMA with snapshots, a checkpoint
            without a width, and what `EMA` refuses.

    Source: Karras et al. 2024 (EDM2, arXiv 2312.02696), section 3.

    Example:
        >>> PowerEMA(widths=(0.05, 0.1)).names()
        ['raw', 'ema', 'power_0.05', 'power_0.1']
    """

    _kind = "power"

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
                f"snapshot_every_n_steps must be at least 1, got {snapshot_every_n_steps}; None "
                "keeps no snapshots."
            )
        self._kept = 0
        self._taken: dict[int, str] = {}  # snapshots: SHA-256 by number of updates

    def _span(self, decay: float, first: int, last: int) -> float:
        return prod(power_decay(self._gammas[decay], n + 1) for n in range(first, last))

    def state_dict(self) -> dict[str, Any]:
        """As EMA's; with what is known of the snapshots."""
        state = super().state_dict()
        return state | {"snapshots": dict(self._taken)} if state and self._taken else state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As EMA; refuse widths that would begin in the middle of the run."""
        super().load_state_dict(state_dict)
        self._taken = dict(state_dict.get("snapshots", {}))
        known = state_dict.get("decays", self.decays)
        if new := sorted(set(self.decays) - set(known)):
            raise ValueError(
                f"PowerEMA(widths={self.decays}): the checkpoint has averages of {tuple(known)}, "
                f"and one of {new[0]:g} would lack the steps before; keep the widths of the run."
            )

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """As EMA; refuse a second one that writes the same files."""
        super().setup(trainer, pl_module, stage)
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        writers = [each for each in callbacks if getattr(each, "snapshot_every_n_steps", None)]
        if len(writers) > 1:
            raise ValueError(
                "two PowerEMA would write snapshots of equal names; give one of them "
                "snapshot_every_n_steps=None, or one a prefix that holds both."
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """As EMA; drop the snapshots of steps that are to come."""
        super().on_train_start(trainer, pl_module)
        self._kept = self.steps
        self._taken = {step: sha for step, sha in self._taken.items() if step <= self._kept}
        tries = trainer.fast_dev_run  # type: ignore[attr-defined]
        if self.snapshot_every_n_steps and trainer.is_global_zero and not tries:
            folder = Path(trainer.default_root_dir) / SNAPSHOT_FOLDER
            if count := delete_snapshots_after(folder, self._kept):
                rank_zero_info(f"Took {count} snapshots after step {self._kept} out of {folder}.")

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *rest: Any) -> None:
        """As EMA; and keep a snapshot where one is due."""
        super().on_train_batch_end(trainer, pl_module, *rest)
        step, every = self.steps, self.snapshot_every_n_steps
        if every is None or step % every or step == self._kept:
            return
        self._kept = step
        state = self.state_dict()
        if trainer.is_global_zero and state:
            shadows = zip(state["decays"], state["shadows"], strict=True)
            folder = Path(trainer.default_root_dir) / SNAPSHOT_FOLDER
            self._taken[step] = write_snapshot(folder, step, dict(shadows))
