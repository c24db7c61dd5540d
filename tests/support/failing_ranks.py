"""Ways in which a rank fails, for the tests of ranks that fail and of what starts them."""

import os
import signal
import sys
import time

from lightning.pytorch import Callback

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
