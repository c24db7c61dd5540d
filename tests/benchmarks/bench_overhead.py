"""Trainer + DiffusionModule + all callbacks against a bare PyTorch loop: bench_overhead.py [--steps
N]

The network and data of configs/digits.yaml. The bare loop draws, noises, backpropagates, clips and
steps, no more: no logging, no EMA. Both are interleaved step by step in one process: after each of
the Trainer's steps a callback runs and times one step of the bare loop, so that whatever else the
machine does meets both alike. Evaluations are left out: they are wanted work, not overhead.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.pytorch import Callback, LightningModule, Trainer

from lit_diffusion.callbacks import EMA, FIDEvaluation, NoiseLevelLoss, SampleGrid, StepSeed
from lit_diffusion.callbacks.progress import PlainProgress
from lit_diffusion.checkpoints.loading import instantiate
from lit_diffusion.cli.loggers import AppendingCSVLogger
from lit_diffusion.data.digits import Digits

WARM_UP = 10


def digits_module() -> Any:
    torch.manual_seed(0)
    config = Path(__file__).parents[2] / "configs/digits.yaml"
    spec = yaml.safe_load(config.read_text())["model"]
    return instantiate([spec], LightningModule, (), config)


def bare_loop(net: torch.nn.Module, device: torch.device) -> Iterator[None]:
    """The same training in plain PyTorch, a step at a time."""
    net = net.to(device)
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    angle = (torch.arange(1, 1001) / 1000 + 0.008) / 1.008 * torch.pi / 2
    alphas, sigmas = angle.cos().to(device), angle.sin().to(device)
    while True:
        for images, labels, _ in Digits(batch_size=64).train_dataloader():
            x0 = images.to(device).float() / 127.5 - 1
            u = (torch.randperm(len(x0)) + torch.rand(len(x0))) / len(x0)
            t = (u * 1000).long().to(device)
            alpha, sigma = alphas[t].view(-1, 1, 1, 1), sigmas[t].view(-1, 1, 1, 1)
            noise = torch.randn_like(x0)
            dropped = labels.masked_fill(torch.rand(len(x0)) < 0.1, -1).to(device)
            x_t = (alpha * x0 + sigma * noise).contiguous(memory_format=torch.channels_last)
            target = alpha * noise - sigma * x0
            error = (net(x_t, t, dropped) - target).square().flatten(1).mean(1)
            snr = (alphas[t] / sigmas[t]) ** 2
            loss = (snr.clamp(max=5) / (snr + 1) * error).mean()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            yield


class Interleave(Callback):
    """Runs a step of the bare loop after each of the Trainer's and keeps both times."""

    def __init__(self) -> None:
        self.bare: list[float] = []
        self.ours: list[float] = []

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self._loop = bare_loop(digits_module().network, pl_module.device)
        self._resumed = _now()

    def on_train_batch_end(self, *_: Any) -> None:
        start = _now()
        self.ours.append(start - self._resumed)
        next(self._loop)
        self._resumed = _now()
        self.bare.append(self._resumed - start)


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=150)
    steps = parser.parse_args().steps + WARM_UP
    interleave = Interleave()
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            max_steps=steps,
            default_root_dir=folder,
            gradient_clip_val=1.0,
            num_sanity_val_steps=0,
            enable_model_summary=False,
            enable_checkpointing=False,
            log_every_n_steps=50,
            check_val_every_n_epoch=steps,
            logger=AppendingCSVLogger(folder),
            callbacks=[
                StepSeed(0),
                EMA((0.99,)),
                FIDEvaluation(360, "digits-cnn", every_n_steps=10 * steps, save_best=False),
                SampleGrid(16, every_n_steps=10 * steps),
                NoiseLevelLoss(),
                PlainProgress(),
                interleave,
            ],
        )
        trainer.fit(digits_module(), Digits(batch_size=64))
    ours, bare = (statistics.median(t[WARM_UP:]) for t in (interleave.ours, interleave.bare))
    ratios = [a / b for a, b in zip(interleave.ours, interleave.bare, strict=True)][WARM_UP:]
    quartiles = statistics.quantiles(ratios, n=4)
    print(
        f"{steps - WARM_UP} steps each: ours {1000 * ours:.1f} ms, bare {1000 * bare:.1f} ms "
        f"(medians); "
        f"ratio of the medians {ours / bare:.3f}, ratio step by step {quartiles[1]:.3f} "
        f"(quartiles {quartiles[0]:.3f} to {quartiles[2]:.3f})"
    )
