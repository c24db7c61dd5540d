"""Random numbers of training as a function of (seed, rank, step, batch), for any module."""

import random
from typing import Any

import numpy as np
from lightning.pytorch import Callback, LightningModule, Trainer

from lit_diffusion.seeding import run_seed, seed_step


class StepSeed(Callback):
    """Seeds random numbers before every training batch with (seed, rank, step, batch index).

    Those of torch, numpy and `random`; the step counts optimizer steps.

    Lightning gives all ranks the same seed, so noise and noise levels drawn in `training_step`
    would be alike on all of them; and a resumed run would draw the numbers of the first epoch
    again. With this callback ranks differ, runs repeat and a resumed run draws what the undisturbed
    one would have drawn. Modules of this library seed themselves; this is for others.

    Args:
        seed: of the run; None takes the one given to `seed_everything`.

    Raises:
        ValueError: at fit start, without a seed.

    Example:
        >>> trainer = Trainer(callbacks=[StepSeed(seed=0)], accelerator="cpu", logger=False)
    """

    def __init__(self, seed: int | None = None) -> None:
        self.seed = seed

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the seed."""
        if self.seed is None and run_seed() is None:
            raise ValueError(
                "StepSeed(seed=None) takes the seed of seed_everything(), which was not called; "
                "call lightning.pytorch.seed_everything(0) or pass StepSeed(seed=0)."
            )

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Seed this batch."""
        seed = run_seed() if self.seed is None else self.seed
        assert seed is not None
        key = seed_step(seed, trainer.global_rank, trainer.global_step, batch_idx)
        random.seed(key)
        np.random.seed(key >> 31)  # noqa: NPY002 - of the low bits it would draw what torch does
