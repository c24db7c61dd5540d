"""One batch of training in Lightning's own loop, at the place in a run that it had."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor
from torch.optim import Optimizer

from lit_diffusion.checkpoints.content import uncompiled
from lit_diffusion.checkpoints.loading import load_state
from lit_diffusion.checkpoints.reading import Checkpoint


class OneStep(Callback):
    """Puts a module, and the loop, in the state of a step; makes no update.

    Args:
        checkpoint: with "state_dict" and "replay", as `callbacks/parts/micro_batch.py` makes it.
        path: of the file, for messages.
    """

    def __init__(self, checkpoint: Checkpoint, path: Path) -> None:
        self._state = checkpoint["state_dict"]
        self._kept: dict[str, Any] = checkpoint["replay"]
        self._path = path
        self.outputs: dict[str, Tensor] = {}  # of training_step, by name, on the CPU
        self.parameters: list[str] = []  # names of those whose gradients are not finite

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Load the weights, when the module has its precision."""
        load_state(pl_module, uncompiled(self._state), self._path)
        trainer.precision_plugin.load_state_dict(self._kept["precision_state"])
        for hook in ("on_before_batch_transfer", "on_after_batch_transfer"):
            # the batch has been through them
            setattr(pl_module, hook, lambda batch, dataloader_idx: batch)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Go to the step."""
        loop, step = trainer.fit_loop.epoch_loop, self._kept["step"]
        loop.automatic_optimization.optim_progress.optimizer.step.total.completed = step
        loop.manual_optimization.optim_step_progress.total.completed = step
        epochs = trainer.fit_loop.epoch_progress.current
        epochs.processed = epochs.completed = self._kept["epoch"]  # type: ignore[attr-defined]
        trainer.strategy.global_rank = self._kept["rank"]  # type: ignore[attr-defined]

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Restore what the step reads besides weights and batch."""
        evaluating = {name.replace("._orig_mod", "") for name in self._kept["evaluating"]}
        for name, part in pl_module.named_modules():
            part.training = name not in evaluating
        for name, value in self._kept["timesteps"].items():
            setattr(pl_module, name, None if value is None else value.to(pl_module.device))
        buffers = uncompiled(self._kept["buffers"])
        with torch.no_grad():
            for name, buffer in pl_module.named_buffers():
                buffer.copy_(buffers[name])
        torch.set_rng_state(self._kept["rng"]["cpu"])
        if "cuda" in self._kept["rng"] and pl_module.device.type == "cuda":
            torch.cuda.set_rng_state(self._kept["rng"]["cuda"], pl_module.device)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look at the gradients."""
        for name, param in pl_module.named_parameters():
            bad = param.grad is not None and not param.grad.isfinite().all()
            if bad and name not in self.parameters:  # by an earlier of several backward passes
                self.parameters.append(name)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        """Let nothing be updated."""
        optimizer.zero_grad(set_to_none=True)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keep what training_step returned."""
        if isinstance(outputs, dict):
            found = {name: value for name, value in outputs.items() if isinstance(value, Tensor)}
            self.outputs = {str(name): value.detach().cpu() for name, value in found.items()}


class OneBatch:
    """A loader of the batch of a step, which gets in the loop of `trainer` the number it had."""

    def __init__(self, trainer: Trainer, kept: dict[str, Any]) -> None:
        self._count = trainer.fit_loop.epoch_loop.batch_progress.current
        self._kept = kept

    def __iter__(self) -> Iterator[Any]:
        yield self._kept["batch"]
        # Asked for another one ahead, when counts are reset and the first is not yet numbered.
        self._count.ready = self._kept["batch_idx"]


def trainer_of(kept: dict[str, Any], device: torch.device, callback: Callback) -> Trainer:
    """A Trainer as the run's, in one process and without traces."""
    # One process also where a batch system offers more.
    plugins: list[Any] = [LightningEnvironment()]
    precision = kept["precision"]
    if precision == "16-mixed":  # which Lightning has on GPUs alone
        scaler = torch.amp.GradScaler(device.type) if kept["precision_state"] else None
        plugins.append(MixedPrecision(precision, device.type, scaler))
        precision = None
    return Trainer(
        accelerator="cpu" if device.type == "cpu" else "gpu",
        devices=1 if device.index is None else [device.index],
        precision=precision,
        accumulate_grad_batches=kept["accumulate_grad_batches"],
        max_steps=kept["step"] + 1,
        max_epochs=kept["epoch"] + 1,
        callbacks=[callback],
        plugins=plugins,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
    )
