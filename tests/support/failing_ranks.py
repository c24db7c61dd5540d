"""A small run on several ranks in which one of them fails, in a way and at a place of choice."""

import os
import signal
import sys
import time
from datetime import timedelta

from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, TensorDataset

from lit_diffusion.callbacks.fid import FIDEvaluation
from lit_diffusion.callbacks.rank_watch import RankWatch
from support.forked_ranks import place
from support.pixels import PixelProtocol
from support.plain_module import make_trainer
from support.tiny_diffusion import images, tiny_diffusion

STEP = 3
WAYS = {
    "raise": lambda: _raise(ValueError("no such label")),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "sleep": lambda: time.sleep(1000),
    "work": lambda: time.sleep(6),
    "leave": lambda: sys.exit(75),
    "interrupt": lambda: _raise(KeyboardInterrupt()),
}


def _raise(error):
    raise error


class Data(LightningDataModule):
    def __init__(self, fail, workers=0):
        super().__init__()
        self.fail, self.workers = fail, workers

    def setup(self, stage):
        self.fail("data")

    def train_dataloader(self):
        self.fail("loader")
        data = Stuck(images(60, 4).dataset, self.fail)
        return DataLoader(data, batch_size=4, num_workers=self.workers)

    def val_dataloader(self):
        return images(12, 4)


class Stuck(TensorDataset):
    """Reads from a file system that may not answer, in a loading process."""

    def __init__(self, data, fail):
        super().__init__(*data.tensors)
        self.fail = fail

    def __getitem__(self, index):
        if index > 20:
            self.fail("worker")
        return super().__getitem__(index)


class Failing(Callback):
    """Fails where the run of a rank has come to the place."""

    def __init__(self, fail):
        self.fail = fail

    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step == STEP:
            self.fail("training")

    def on_validation_batch_start(self, trainer, *_):
        self.fail("validation")


class Saving(Callback):
    """Saves on all ranks; what writes the file is rank 0's part."""

    def __init__(self, fail):
        self.fail = fail

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == STEP:
            trainer.save_checkpoint(os.path.join(trainer.default_root_dir, "some.ckpt"))

    def on_save_checkpoint(self, trainer, *_):
        if trainer.is_global_zero:
            self.fail("save")


def main(folder, way, where, ranks, timeout=5.0, workers=0, gloo_timeout=None):
    """Train; the named ranks (all of them: None) fail in a way, at a place."""
    rank, size = place()

    def fail(here):
        if here == where and (ranks is None or rank in ranks):
            WAYS[way]()

    module = tiny_diffusion()
    generate = module.generate

    def watched(seeds, labels=None):
        fail("fid")
        return generate(seeds, labels)

    module.generate = watched
    protocol = PixelProtocol([])
    options = {} if gloo_timeout is None else {"timeout": timedelta(seconds=gloo_timeout)}
    trainer = make_trainer(
        folder,
        RankWatch(timeout),
        Failing(fail),
        Saving(fail),
        FIDEvaluation(9, protocol, weights="raw", save_best=False, cache_dir=str(folder / "cache")),
        devices=size,
        strategy=DDPStrategy(**options),
        max_epochs=1,
        num_sanity_val_steps=0,
    )
    trainer.fit(module, datamodule=Data(fail, workers))


class FailAt(Callback):
    """For configs: a rank fails after so many steps.

    Args:
        way: key of WAYS.
        rank: that fails.
        step: after how many steps.
    """

    def __init__(self, way: str, rank: int, step: int = STEP) -> None:
        self.way, self.rank, self.step = way, rank, step

    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step == self.step and trainer.global_rank == self.rank:
            WAYS[self.way]()
