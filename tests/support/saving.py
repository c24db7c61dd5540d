"""Fits of a tiny module that save."""

from pathlib import Path

import torch

from lit_diffusion.cli.last_checkpoint import LastCheckpoint
from support.plain_module import make_trainer
from support.tiny_run import TinyData, TinyModule, TinyNet


class Saves(LastCheckpoint):
    """Remembers the steps at which it saved."""

    def _save(self, trainer):
        super()._save(trainer)
        self.steps = [*getattr(self, "steps", []), trainer.global_step]


def fit(callback, tmp_path: Path, ckpt_path=None, callbacks=(), module=None, **options):
    torch.manual_seed(0)
    module = module or TinyModule(TinyNet(3), torch.optim.Adam)
    options = {"max_steps": 12, "max_epochs": None, "num_sanity_val_steps": 0} | options
    options = {"enable_checkpointing": True} | options
    trainer = make_trainer(tmp_path, *callbacks, callback, **options)
    trainer.fit(module, TinyData(), ckpt_path=ckpt_path)  # 4 batches an epoch
    return trainer


def saved(tmp_path: Path) -> dict:
    return torch.load(tmp_path / "last.ckpt", weights_only=True)
