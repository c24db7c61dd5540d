"""Milliseconds that each callback adds to a training step of a network with one parameter.

    python tests/benchmarks/bench_callbacks.py [--steps 500] [--rounds 5]

Runs with and without each callback take turns; the median of the rounds is printed, and the share
of a step of 100 ms that it would be. Set-up and evaluations are left out.
"""

import argparse
import logging
import statistics
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lit_diffusion.callbacks import (
    EMA,
    CurriculumWeight,
    FIDEvaluation,
    FiniteUpdates,
    ImportanceWeightedCurriculum,
    LossSecondMomentResampler,
    LRCompensation,
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


class Stopwatch(Callback):
    def __init__(self):
        self.ends = []

    def on_train_batch_end(self, *_):
        self.ends.append(time.perf_counter())


def milliseconds_per_step(callbacks, steps):
    """From the end of the first step to the end of the last."""
    stopwatch = Stopwatch()
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
    return 1000 * (stopwatch.ends[-1] - stopwatch.ends[0]) / (steps - 1)


def fid(every_n_steps):
    """Compares with random images in a file; never due."""
    path = Path(tempfile.gettempdir()) / "bench_callbacks.npz"
    images = np.random.default_rng(0).integers(0, 256, (64, 8, 8, 1), dtype=np.uint8)
    np.savez(path, images)
    return FIDEvaluation(16, "digits-cnn", str(path), every_n_steps, weights="raw")


ARMS = {
    "none": lambda n: [],
    "a callback without hooks": lambda n: [Callback()],
    "EMA": lambda n: [EMA()],
    "EMA, 3 decays": lambda n: [EMA((0.999, 0.9999, 0.99999))],
    "FiniteUpdates": lambda n: [FiniteUpdates()],
    "StepSeed": lambda n: [StepSeed(0)],
    "MomentumDecay": lambda n: [MomentumDecay()],
    "LRCompensation": lambda n: [LRCompensation()],
    "TimestepCurriculum": lambda n: [TimestepCurriculum(n)],
    "CurriculumWeight": lambda n: [CurriculumWeight(n)],
    "ImportanceWeightedCurriculum": lambda n: [ImportanceWeightedCurriculum(n)],
    "resampler, 1000 bins": lambda n: [LossSecondMomentResampler(1000)],
    "resampler, 4000 bins": lambda n: [LossSecondMomentResampler(4000)],
    "SampleGrid, not drawing": lambda n: [SampleGrid(16, every_n_steps=10 * n)],
    "NoiseLevelLoss, not due": lambda n: [NoiseLevelLoss(every_n_steps=10 * n)],
    "FIDEvaluation, not due": lambda n: [fid(10 * n)],
}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    milliseconds_per_step([], 50)  # warm-up
    times = {name: [] for name in ARMS}
    for _ in range(options.rounds):
        for name, make in ARMS.items():
            times[name].append(milliseconds_per_step(make(options.steps), options.steps))
    base = statistics.median(times["none"])
    for name, milliseconds in times.items():
        median = statistics.median(milliseconds)
        more = median - base
        print(f"{name:28} {median:7.3f} ms/step  {more:+7.3f} ms  {more:+6.2f}% of 100 ms")
