"""Random numbers of training as a function of (seed, rank, step, batch), for any module."""

import hashlib
import os
import random
from typing import Any

import numpy as np
import torch

try:
    import lightning.pytorch as pl
except ImportError:
    import pytorch_lightning as pl  # type: ignore[no-redef]


class StepSeed(pl.Callback):
    """Seeds random numbers before every training batch with (seed, rank, step, batch index).

    Seeded are torch, numpy and `random`; the step counts optimizer steps.

    Lightning gives all ranks the same seed, so noise and noise levels drawn in `training_step`
    would be alike on all of them; and a resumed run would draw the numbers of the first epoch
    again. With this callback ranks differ, runs repeat and a resumed run draws what the undisturbed
    one would have drawn. A `DiffusionModule` seeds itself, by the same key; this is for others.

    Args:
        seed: of the run; None takes the one given to `seed_everything`.

    Raises:
        ValueError: at fit start, without a seed.

    Example:
        >>> trainer = pl.Trainer(callbacks=[StepSeed(seed=0)], accelerator="cpu", logger=False)
    """

    def __init__(self, seed: int | None = None) -> None:
        self.seed = seed

    def _run_seed(self) -> int | None:
        stored = os.environ.get("PL_GLOBAL_SEED")  # set by seed_everything
        return int(stored) if self.seed is None and stored is not None else self.seed

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuse a run without a seed."""
        if self._run_seed() is None:
            raise ValueError(
                "StepSeed(seed=None) takes the seed of seed_everything(), which was not called; "
                "call lightning.pytorch.seed_everything(0) or pass StepSeed(seed=0)."
            )

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Seed this batch."""
        key = ("step", self._run_seed(), trainer.global_rank, trainer.global_step, batch_idx)
        digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
        seed = int.from_bytes(digest, "little") >> 1  # 63 bits
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed >> 31)  # noqa: NPY002 - its low bits would draw what torch draws
