"""Ends a process by a signal at a chosen place of a fit, whatever it is doing there."""

import os
import signal
from collections import Counter
from functools import partial, wraps

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.trainer import call, trainer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from lit_diffusion.checkpoints.saving import AtomicCheckpointIO
from lit_diffusion.cli.loggers import AppendingCSVLogger
from lit_diffusion.modules.diffusion import DiffusionModule


class Places:
    """Counts how often a process comes to each place, and signals it at one of them.

    Args:
        place: where, by name; None lets it live.
        count: at which time, from 1 on.
        number: of the signal.
    """

    def __init__(self, place=None, count=0, number=signal.SIGKILL):
        self.death, self.number = (place, count), number
        self.counts = Counter()

    def come(self, place, *_):
        self.counts[place] += 1
        if (place, self.counts[place]) == self.death:
            os.kill(os.getpid(), self.number)

    def watch(self):
        """Come to the places of this process, from now on."""
        for owner, name, place in (
            (DiffusionModule, "training_step", "batch"),
            (DiffusionModule, "validation_step", "validation"),
            (DiffusionModule, "generate", "sampling"),
            (torch, "save", "save"),
            (os, "replace", "replacement"),
            (os, "link", "replacement"),
            (AtomicCheckpointIO, "save_checkpoint", "saved"),
            (TorchCheckpointIO, "remove_checkpoint", "saved"),
            (AppendingCSVLogger, "log_metrics", "row"),
            (call, "_call_callback_hooks", "hook"),
            (call, "_call_lightning_module_hook", "hook"),
        ):
            setattr(owner, name, self._around(getattr(owner, name), place))
        for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook):
            register(partial(self.come, "optimizer step"))
        assert trainer.call is call

    def _around(self, function, place):
        @wraps(function)
        def around(*args, **kwargs):
            if place != "saved":
                self.come(place)
            result = function(*args, **kwargs)
            self.come(place)
            return result

        return around
