"""What `lit-diffusion fit` adds to a step: its Trainer and default callbacks over a bare loop.

Both train the same module in one process, by turns: blocks of the Trainer's steps, and between them
blocks of a bare loop over the same network, loss, optimizer, clipping and average. Each block is
synchronised at its ends alone. Evaluations are left out: they are wanted work.
"""

import tempfile
import time
import traceback
import warnings
from collections import Counter
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


@dataclass
class Run:
    """Settings of the fit of this process, for the callback that the command line builds."""

    channel: Channel
    mixed: bool  # bf16-mixed, else 32-true
    block: int = 10
    blocks: int = 7  # of each kind, of which the first is not counted


run: Run


def fits(tiny: bool) -> dict[str, Body]:
    digits = ["--config", str(CONFIGS / "digits.yaml"), "--trainer.callbacks.SampleGrid=null"]
    digits += ["--trainer.callbacks.FIDEvaluation=null"]
    cifar10 = ["--config", str(CONFIGS / "cifar10-improved.yaml")]
    cifar10 += ["--config", str(CONFIGS / "fragments/gpu.yaml")]
    cifar10 += ["--data=fit_overhead.NoiseImages", "--data.init_args.batch_size=128"]
    cifar10 += ["--trainer.callbacks.FIDEvaluation=null"]
    if tiny:
        _, sizes = TINY["cifar10-improved"]
        cifar10 += [f"--model.init_args.network.init_args.{k}={v}" for k, v in sizes.items()]
        cifar10 += ["--data.init_args.batch_size=4"]
    return {
        f"{name}, {how}": fit(options, mixed, mode, tiny)
        for how, mode in (("eager", None), ("compiled", "default"), ("CUDA graphs", GRAPHS))
        for name, options, mixed in (
            ("CIFAR-10, bf16-mixed", cifar10, True),
            ("digits, 32-true", digits, False),
        )
    }


def fit(options: list[str], mixed: bool, mode: str | None, tiny: bool) -> Body:
    """The body of a process that fits with the default callbacks and those of a config."""

    def body(channel: Channel) -> None:
        global run
        run = Run(channel, mixed)
        if tiny:
            run.block, run.blocks = 2, 3
        common = [f"--trainer.accelerator={'gpu' if torch.cuda.is_available() else 'cpu'}"]
        common += [f"--trainer.default_root_dir={tempfile.mkdtemp()}", "--trainer.max_steps=10000"]
        common += ["--trainer.val_check_interval=10000", "--trust", "fit_overhead"]
        common += [f"--model.init_args.compile={mode or 'null'}"]
        code = main(["fit", *options, "--trainer.callbacks+=fit_overhead.Alternate", *common])
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


class Alternate(Callback):
    """Runs blocks of a bare loop between blocks of the Trainer's steps, and times both."""

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.step = self.bare_loop(trainer, pl_module)
        self.trainer_ms: list[float] = []
        self.bare_ms: list[float] = []
        self.count = -WARM_UP

    def bare_loop(self, trainer: Trainer, module: Any) -> Any:
        parameters = [p for p in module.parameters() if p.requires_grad]
        optimizer = torch.optim.Adam(parameters, lr=1e-4, fused=torch.cuda.is_available())
        average = [p.detach().clone() for p in parameters]
        images = trainer.datamodule.load("train").images
        images = images.pin_memory() if torch.cuda.is_available() else images
        batch = trainer.datamodule.batch_size

        def step() -> None:
            batch_images = images[torch.randint(0, len(images), (batch,))]
            x = batch_images.to(module.device, non_blocking=True)
            labels = None
            if module.num_classes:
                labels = torch.randint(0, module.num_classes, (batch,), device=module.device)
            with torch.autocast(device().type, torch.bfloat16, enabled=run.mixed):
                loss = loss_of(module, x, labels)
            optimizer.zero_grad()
            loss.backward()
            if trainer.gradient_clip_val:
                torch.nn.utils.clip_grad_norm_(parameters, trainer.gradient_clip_val)
            optimizer.step()
            with torch.no_grad():
                torch._foreach_lerp_(average, parameters, 1e-4)

        return step

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        self.count += 1
        if self.count == 0:
            self.step()
            synchronize()
            free_memory()
            run.channel.reply()
            run.channel.request()  # until it is the turn of this process
            self.resumed = time.perf_counter()
        elif self.count > 0 and self.count % run.block == 0:
            synchronize()
            self.trainer_ms.append(1000 * (time.perf_counter() - self.resumed) / run.block)
            if len(self.trainer_ms) > run.blocks:
                self.waits.__exit__(None, None, None)
                run.channel.reply(self.row(trainer))
                run.channel.request()  # for ever
            start = time.perf_counter()
            for _ in range(run.block):
                self.step()
            synchronize()
            self.bare_ms.append(1000 * (time.perf_counter() - start) / run.block)
            if len(self.bare_ms) == run.blocks:  # one more block, in which waits are counted
                self.waits = Waits() if torch.cuda.is_available() else nullcontext()
                self.waits.__enter__()
            self.resumed = time.perf_counter()

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
