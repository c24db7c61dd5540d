"""Averages by power functions of time, kept now and then, so that any width can be had later."""

from math import prod
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from lit_diffusion.callbacks.ema import EMA
from lit_diffusion.checkpoints.snapshots import FOLDER, write_snapshot
from lit_diffusion.ema_profiles import exponent, power_decay


class PowerEMA(EMA):
    """EMA whose decay rises with the step, so that the average covers the same share of any run.

    After step n: shadow = d shadow + (1 - d) weight with d = (1 - 1 / n)^(gamma + 1). The relative
    width is the standard deviation of what is averaged over, as a share of the run so far: 0.05
    and 0.10 are usual. Snapshots of two widths give any other afterwards, at any of their steps:
    `load(run, weights="power_0.07")`, `lit-diffusion evaluate --ema 0.03,0.07,0.15`.

    All else is as of `EMA`; the weights are called "ema" (the first width) and "power_<width>".

    Args:
        widths: one or more, above 0 and below 0.289.
        snapshot_every_n_steps: optimizer steps between snapshots, which are written to
            `<trainer.default_root_dir>/ema-snapshots`; a divisor of the run's length, or the last
            steps have none. None keeps none.
        prefix: as of `EMA`.
        on_cpu: as of `EMA`.

    Raises:
        ValueError: for a width that no profile has, and what `EMA` refuses.

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

    def _span(self, decay: float, first: int, last: int) -> float:
        return prod(power_decay(self._gammas[decay], n + 1) for n in range(first, last))

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *rest: Any) -> None:
        """As EMA; and keep a snapshot where one is due."""
        super().on_train_batch_end(trainer, pl_module, *rest)
        step, every = trainer.global_step, self.snapshot_every_n_steps
        if every is None or step % every or step == self._kept:
            return
        self._kept = step
        state = self.state_dict()
        if trainer.is_global_zero and state:
            shadows = zip(state["decays"], state["shadows"], strict=True)
            folder = Path(trainer.default_root_dir) / FOLDER
            write_snapshot(folder, step, dict(shadows))
