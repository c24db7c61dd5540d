"""Milliseconds that each callback adds to a training step of a network with one parameter.

Runs with and without each callback take turns, in three rounds of 300 steps; the median of the
rounds is printed, and the share of a step of 100 ms that it would be. Set-up and evaluations are
left out.
"""

import logging
import statistics
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import LambdaCallback
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lit_diffusion.callbacks import (
    EMA,
    FIDEvaluation,
    FiniteUpdates,
    LossSecondMomentResampler,
    MomentumDecay,
    NoiseLevelLoss,
    SampleGrid,
    StepSeed,
    TimestepCurriculum,
)
from lit_diffusion.codecs import PixelCodec
from lit_diffusion.processes import CosineBetas, DiscreteVP


class OneParameter(LightningModule):
    process, codec, num_classes = DiscreteVP(CosineBetas(100)), PixelCodec(), None

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.timestep_density = self.timestep_weight = None
        self.u = torch.rand(128)

    def training_step(self, batch, batch_idx):
        loss = (self.weight - batch[0]).pow(2).mean()
        return {"loss": loss, "u": self.u, "per_sample_loss": self.u}

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)

    def generate(self, seeds, labels=None):
        return torch.zeros(len(seeds), 1, 8, 8, dtype=torch.uint8)

    def per_sample_loss(self, x0, labels, t, noise, step=None):
        return x0.flatten(1).mean(1) * self.weight


def milliseconds_per_step(callbacks, steps):
    """From the end of the first step to the end of the last."""
    ends = []
    stopwatch = LambdaCallback(on_train_batch_end=lambda *_: ends.append(time.perf_counter()))
    with tempfile.TemporaryDirectory() as folder:
        off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
        trainer = Trainer(
            default_root_dir=folder,
            max_steps=steps,
            callbacks=[*callbacks, stopwatch],
            accelerator="cpu",
            **dict.fromkeys(off, False),
        )
        data = DataLoader(TensorDataset(torch.zeros(steps, 1)), batch_size=1)
        trainer.fit(OneParameter(), data)
    return 1000 * (ends[-1] - ends[0]) / (steps - 1)


def fid(every_n_steps):
    """Compares with random images in a file; never due."""
    path = Path(tempfile.gettempdir()) / "bench_callbacks.npz"
    images = np.random.default_rng(0).integers(0, 256, (64, 8, 8, 1), dtype=np.uint8)
    np.savez(path, images)
    return FIDEvaluation(16, "digits-cnn", str(path), every_n_steps, weights="raw")


STEPS, ROUNDS = 300, 3
NEVER = 10 * STEPS
ARMS = {
    "none": lambda: [],
    "EMA": lambda: [EMA()],
    "EMA, 3 decays": lambda: [EMA((0.999, 0.9999, 0.99999))],
    "FiniteUpdates": lambda: [FiniteUpdates()],
    "StepSeed": lambda: [StepSeed(0)],
    "MomentumDecay": lambda: [MomentumDecay()],
    "TimestepCurriculum": lambda: [TimestepCurriculum(STEPS)],
    "resampler, 1000 bins": lambda: [LossSecondMomentResampler(1000)],
    "SampleGrid, not drawing": lambda: [SampleGrid(16, every_n_steps=NEVER)],
    "NoiseLevelLoss, not due": lambda: [NoiseLevelLoss(every_n_steps=NEVER)],
    "FIDEvaluation, not due": lambda: [fid(NEVER)],
}


if __name__ == "__main__":
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    milliseconds_per_step([], 50)  # warm-up
    rounds = [
        {name: milliseconds_per_step(callbacks(), STEPS) for name, callbacks in ARMS.items()}
        for _ in range(ROUNDS)
    ]
    medians = {name: statistics.median(each[name] for each in rounds) for name in ARMS}
    for name, median in medians.items():
        more = median - medians["none"]
        print(f"{name:28} {median:7.3f} ms/step  {more:+7.3f} ms  {more:+6.2f}% of 100 ms")
