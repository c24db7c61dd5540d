"""Steps of `fit` with the network of configs/dit-1b.yaml, split over one GPU, beside the plan.

A split over one rank has the kernels, the casts and the memory of a split over more, without their
communication.
"""

import tempfile
import time
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from typing import Any

import torch
from fit_overhead import NoiseImages
from lightning.pytorch import Callback, Trainer
from measure import free_memory, synchronize
from ours import CONFIGS
from turns import Body, Channel

from lit_diffusion.cli.main import main
from lit_diffusion.data.datasets import TensorImages

CONFIG = str(CONFIGS / "dit-1b.yaml")
WARM_UP, STEPS = 3, 10
TINY = {"width": 64, "depth": 2, "num_heads": 4}


class NoiseLatents(NoiseImages):
    """Noise in place of the latents of ImageNet."""

    image_shape, num_classes = (4, 32, 32), 1000

    def load(self, split: str) -> TensorImages:
        images = torch.randint(0, 256, (2000, 4, 32, 32), dtype=torch.uint8)
        return TensorImages(images, torch.randint(0, 1000, (len(images),)), False)


class Clock(Callback):
    """Replies to the driver after some steps, and ends the process at its next request."""

    channel: Channel

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        done = trainer.global_step
        if done == WARM_UP:
            free_memory()
            self.channel.reply()
            self.channel.request()
            self.start = time.perf_counter()
        elif done == WARM_UP + STEPS:
            synchronize()
            seconds = (time.perf_counter() - self.start) / STEPS
            batch = trainer.datamodule.batch_size
            row = {"wall_ms": 1000 * seconds, "images_per_s": batch / seconds}
            if torch.cuda.is_available():
                row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
            self.channel.reply(row | planned())
            self.channel.request()


def planned() -> dict[str, float]:
    """Memory and operations of a step by `lit-diffusion plan`."""
    with redirect_stdout(StringIO()) as output:
        main(["plan", "--config", CONFIG, "--ranks=1"])
    lines = [line.rpartition(" ") for line in output.getvalue().splitlines()]
    figures = {name.strip(): figure for name, _, figure in lines}
    memory, seconds = figures["in all, GiB"], figures["arithmetic, s"]
    return {"planned_gib": float(memory), "planned_tflop": 400 * float(seconds)}


def sharded(tiny: bool) -> dict[str, Body]:
    def body(channel: Channel, checkpointing: bool) -> None:
        Clock.channel = channel
        network = {"gradient_checkpointing": checkpointing, **(TINY if tiny else {})}
        options = [f"--model.init_args.network.init_args.{k}={v}" for k, v in network.items()]
        if not torch.cuda.is_available():
            options += ["--trainer.accelerator=cpu", "--model.init_args.compile=null"]
        data = "--data=sharded.NoiseLatents"
        options += [data, f"--data.init_args.batch_size={2 if tiny else 32}", "--trust=sharded"]
        options += ["--trainer.strategy.init_args.data_parallel_size=1", "--trainer.devices=1"]
        options += ["--model.init_args.codec=null", "--trainer.callbacks+=sharded.Clock"]
        options += [f"--trainer.default_root_dir={tempfile.mkdtemp()}"]
        main(["fit", "--config", CONFIG, *options])

    return {
        "split over one GPU, blocks compiled": partial(body, checkpointing=False),
        "the same, gradient checkpointing": partial(body, checkpointing=True),
    }
