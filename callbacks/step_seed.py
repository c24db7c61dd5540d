"""Seed the random numbers of each training batch by (seed, rank, step, batch), in any module."""

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
    """Seeds torch, numpy and `random` before every training batch.

    The seed is a hash of the run's seed, the rank, the optimizer step and the batch index.

    Without this callback, `seed_everything` seeds all ranks equally, so all ranks draw the same
    noise and the same noise levels in `training_step`. Moreover, a resumed run starts from this
    seed again and repeats the random numbers of the first epoch.

    With this callback, each rank draws different random numbers, and a run with the same seed draws
    the same numbers again. A resumed run draws the same numbers as an uninterrupted run. The class
    `DiffusionModule` of lit-diffusion does not need this callback, because it seeds each step
    itself in the same way.

    Args:
        seed: seed of the run; None uses the seed that was passed to `seed_everything`.

    Raises:
        ValueError: at fit start, if `seed` is None and `seed_everything` was not called.

    Example:
        >>> trainer = pl.Trainer(callbacks=[StepSeed(seed=0)], accelerator="cpu", logger=False)
    """

    def __init__(self, seed: int | None = None) -> None:
        self.seed = seed

    def _run_seed(self) -> int | None:
        stored = os.environ.get("PL_GLOBAL_SEED")  # set by seed_everything
        return int(stored) if self.seed is None and stored is not None else self.seed

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Raise an error for a run without a seed."""
        if self._run_seed() is None:
            raise ValueError(
                "StepSeed(seed=None) needs the seed of seed_everything(), which was not called; "
                "call lightning.pytorch.seed_everything(0) or use StepSeed(seed=0)."
            )

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Seed the random number generators for this batch."""
        key = ("step", self._run_seed(), trainer.global_rank, trainer.global_step, batch_idx)
        digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
        seed = int.from_bytes(digest, "little") >> 1  # 63 bits
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed >> 31)  # noqa: NPY002 - with its low bits, numpy would repeat torch's numbers
