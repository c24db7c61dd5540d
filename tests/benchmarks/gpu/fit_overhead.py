"""What `lit-diffusion fit` adds to a step: its Trainer and default callbacks over a bare loop.

Both train the same module in one process, by turns: blocks of the Trainer's steps, and between them
blocks of a bare loop over the same network, loss, optimizer, clipping and average. Each block is
synchronised at its ends alone. On a CPU, times are those of this process, as others may use it too.
Evaluations are left out: they are wanted work.
"""

import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from measure import device, free_memory, synchronize
from ours import CONFIGS, TINY, loss_of
from turns import Body, Channel

from lit_diffusion.cli.main import main
from lit_diffusion.data.cifar10 import CIFAR10
from lit_diffusion.data.datasets import TensorImages

WARM_UP = 10
GRAPHS = "reduce-overhead"  # torch's mode that captures CUDA graphs
clock = time.perf_counter if torch.cuda.is_available() else time.process_time


@dataclass
class Run:
    """Settings of the fit of this process, for the callback that the command line builds."""

    channel: Channel
    block: int = 10 if torch.cuda.is_available() else 2  # steps; few, as the speed of a CPU drifts
    blocks: int = 7 if torch.cuda.is_available() else 31  # of each kind; the first is not counted


run: Run


def fits(tiny: bool) -> dict[str, Body]:
    digits, cifar10 = config_options("digits"), config_options("cifar10", tiny)
    return {
        f"{name}, {how}": fit(options, mode, tiny)
        for how, mode in (("eager", None), ("compiled", "default"), ("CUDA graphs", GRAPHS))
        for name, options in (("CIFAR-10, bf16-mixed", cifar10), ("digits, 32-true", digits))
    }


def config_options(name: str, tiny: bool = False) -> list[str]:
    """Options of a fit without evaluations; a tiny one of CIFAR-10 suits a CPU."""
    if name == "digits":
        options = ["--config", str(CONFIGS / "digits.yaml"), "--trainer.callbacks.SampleGrid=null"]
    else:
        options = ["--config", str(CONFIGS / "cifar10-improved.yaml")]
        options += ["--config", str(CONFIGS / "fragments/gpu.yaml")]
        options += ["--data=fit_overhead.NoiseImages", "--data.init_args.batch_size=128"]
    if name != "digits" and tiny:
        _, sizes = TINY["cifar10-improved"]
        options += [f"--model.init_args.network.init_args.{k}={v}" for k, v in sizes.items()]
        options += ["--data.init_args.batch_size=4"]
    return [*options, "--trainer.callbacks.FIDEvaluation=null"]


def run_fit(options: list[str], callback: str, mode: str | None) -> int:
    """Fit with the default callbacks, those of a config, and one of a file of this folder."""
    options = [*options, f"--trainer.callbacks+={callback}"]
    options += ["--trust", "fit_overhead", "--trust", callback.rpartition(".")[0]]
    options += [f"--trainer.accelerator={'gpu' if torch.cuda.is_available() else 'cpu'}"]
    options += [f"--trainer.default_root_dir={tempfile.mkdtemp()}", "--trainer.max_steps=10000"]
    options += ["--trainer.val_check_interval=10000"]
    options += [f"--model.init_args.compile={mode or 'null'}"]
    return main(["fit", *options])


def fit(options: list[str], mode: str | None, tiny: bool) -> Body:
    """The body of a process that fits, and runs a bare loop by turns."""

    def body(channel: Channel) -> None:
        global run
        run = Run(channel)
        if tiny:
            run.block, run.blocks = 2, 3
        code = run_fit(options, "fit_overhead.Alternate", mode)
        raise RuntimeError(f"fit ended with {code}")

    return body


class NoiseImages(CIFAR10):
    """10,000 images of noise in place of CIFAR-10's files."""

    def check(self) -> None:
        """There are no files."""

    def pending_setup(self) -> None:
        """There are no files."""

    def load(self, split: str) -> TensorImages:
        num = 10_000 if split == "train" else 100
        generator = torch.Generator().manual_seed(0)
        images = torch.randint(0, 256, (num, 3, 32, 32), dtype=torch.uint8, generator=generator)
        labels = torch.randint(0, 10, (num,), generator=generator)
        return TensorImages(images, labels, self.flip)


def bare_loop(trainer: Trainer, module: Any, part: Any = nullcontext) -> Callable[[], None]:
    """A training step on the network of a fit, without its Trainer; `part` times a named part."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(parameters, lr=1e-4, fused=torch.cuda.is_available())
    average = [p.detach().clone() for p in parameters]
    images = trainer.datamodule.load("train").images
    images = images.pin_memory() if torch.cuda.is_available() else images
    batch, mixed = trainer.datamodule.batch_size, trainer.precision == "bf16-mixed"

    def step() -> None:
        with part("data"):
            batch_images = images[torch.randint(0, len(images), (batch,))]
            x = batch_images.to(module.device, non_blocking=True)
            labels = None
            if module.num_classes:
                labels = torch.randint(0, module.num_classes, (batch,), device=module.device)
        with part("loss"), torch.autocast(device().type, torch.bfloat16, enabled=mixed):
            loss = loss_of(module, x, labels)
        with part("backward"):
            optimizer.zero_grad()
            loss.backward()
        with part("clipping"):
            if trainer.gradient_clip_val:
                torch.nn.utils.clip_grad_norm_(parameters, trainer.gradient_clip_val)
        with part("optimizer"):
            optimizer.step()
        with part("average"), torch.no_grad():
            torch._foreach_lerp_(average, parameters, 1e-4)

    return step


class Alternate(Callback):
    """Runs blocks of a bare loop between blocks of the Trainer's steps, and times both."""

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.step = bare_loop(trainer, pl_module)
        self.trainer_ms: list[float] = []
        self.bare_ms: list[float] = []
        self.count = -WARM_UP

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        self.count += 1
        if self.count == 0:
            self.step()
            synchronize()
            free_memory()
            run.channel.reply()
            run.channel.request()  # until it is the turn of this process
            self.resumed = clock()
        elif self.count > 0 and self.count % run.block == 0:
            synchronize()
            self.trainer_ms.append(1000 * (clock() - self.resumed) / run.block)
            if len(self.trainer_ms) > run.blocks:
                self.waits.__exit__(None, None, None)
                run.channel.reply(self.row(trainer))
                run.channel.request()  # for ever
            start = clock()
            for _ in range(run.block):
                self.step()
            synchronize()
            self.bare_ms.append(1000 * (clock() - start) / run.block)
            if len(self.bare_ms) == run.blocks:  # one more block, in which waits are counted
                self.waits = Waits() if torch.cuda.is_available() else nullcontext()
                self.waits.__enter__()
            self.resumed = clock()

    def row(self, trainer: Trainer) -> dict[str, Any]:
        ours, bare = (median(ms[1 : run.blocks]) for ms in (self.trainer_ms, self.bare_ms))
        row = {
            "trainer_ms": round(ours, 3),
            "bare_ms": round(bare, 3),
            "overhead": round(ours / bare - 1, 4),
            "images_per_s": round(1000 * trainer.datamodule.batch_size / ours, 1),
            "trainer_blocks_ms": [round(ms, 3) for ms in self.trainer_ms[: run.blocks]],
            "bare_blocks_ms": [round(ms, 3) for ms in self.bare_ms],
            "callbacks": [type(callback).__name__ for callback in trainer.callbacks],
            "log_every_n_steps": trainer.log_every_n_steps,
        }
        if isinstance(self.waits, Waits):
            row["waits_per_step"] = sum(self.waits.places.values()) / run.block
            row["waits"] = dict(self.waits.places.most_common(8))
        return row


class Waits(AbstractContextManager[None]):
    """Counts where the host waits for the device, by torch's own warnings."""

    def __enter__(self) -> None:
        self.places = Counter[str]()
        self.show, warnings.showwarning = warnings.showwarning, self.record
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")

    def record(self, message: Any, *_: Any, **__: Any) -> None:
        if "synchroniz" in str(message):
            frames = [f for f in traceback.extract_stack() if "/warnings.py" not in f.filename]
            ours = [f for f in frames if "lit_diffusion" in f.filename]
            places = [f"{f.filename[-50:]}:{f.lineno}" for f in (*frames[-3:-1], *ours[-1:])]
            self.places[" > ".join(places)] += 1

    def __exit__(self, *_: Any) -> None:
        warnings.showwarning = self.show  # first, as the next line would count as one
        torch.cuda.set_sync_debug_mode("default")
