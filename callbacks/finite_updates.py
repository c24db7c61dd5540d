"""No update from a loss or a gradient that is not finite, and no checkpoint of such weights."""

import math
import os
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer

from lit_diffusion.callbacks.parts.micro_batch import MicroBatch
from lit_diffusion.callbacks.trainer_state import first_nonfinite, logger_step
from lit_diffusion.distributed import all_gather_objects

_MOST_FILES = 8


class FiniteUpdates(Callback):
    """Leaves out updates from losses or gradients that are not finite, and stops the run.

    A message names optimizer step, rank, sample (and its data index where batches are (images,
    labels, index)), noise level, or for a gradient the parameters. The batch goes to
    `default_root_dir`/non-finite-rank<r>.ckpt, with which `lit-diffusion replay` computes the step
    again.

    - Left out is the whole update: weights, buffers, optimizer state and EMA stay as they are, and
      of accumulated batches none counts. `global_step` and lr schedules move on, as where a
      GradScaler skips a step. After more than `max_nonfinite_steps` the run stops, with the
      checkpoints as they are.
    - The ranks of a run decide together: what is not finite on one is left out on all.
    - Steps that a GradScaler skips are its search for a scale and do not count, unless the loss
      itself is not finite, or the scale is down to 1 and can't be the reason.
    - A module's training_step may return `u` (B,) in [0, 1], `t` (B,) and `per_sample_loss` (B,)
      beside the loss, which names samples and noise levels; any other module has its steps named.
    - Checkpoints of weights that are not finite are refused, also the one that ends a run.
    - A GPU is waited for once an update. Before each batch the buffers are copied of those
      submodules, such as BatchNorm, of which an earlier batch has changed one.
    - Optimizers stepped past Lightning (`use_pl_optimizer=False`) are not seen.
    - List it after callbacks that seed or draw random numbers, such as StepSeed.

    Logs `train/nonfinite_steps`, once there are some; the curve of train/loss of a run that it
    stops ends in NaN.

    Args:
        max_nonfinite_steps: updates that may be left out in a run, resumes included.

    Attributes:
        skipped_updates: left out in this run so far, resumes included.

    Raises:
        ValueError: a negative number; at the start of a fit, a strategy that shards weights or
            updates them itself where updates may be left out.
        FloatingPointError: at one update too many, and at a save of weights that are not finite.

    Example:
        >>> trainer = Trainer(callbacks=[FiniteUpdates()], accelerator="cpu", logger=False)
    """

    def __init__(self, max_nonfinite_steps: int = 0) -> None:
        if max_nonfinite_steps < 0:
            raise ValueError(f"max_nonfinite_steps must be at least 0, got {max_nonfinite_steps}.")
        self.max_nonfinite_steps = max_nonfinite_steps
        self.skipped_updates = 0
        self._forget()

    def _forget(self) -> None:
        self._now: MicroBatch | None = None
        self._window: list[MicroBatch] = []  # accumulated for the update to come
        self._judged = False  # whether an update was made, or left out, in this batch
        self._failed: list[MicroBatch] = []  # behind an update that was left out
        self._changing: set[str] | None = None  # submodules of which batches change buffers

    # Following a step

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse what cannot work before anything is loaded."""
        if stage == "fit":
            self.skipped_updates = 0
            self._forget()
        if trainer.strategy.restore_checkpoint_after_setup and self.max_nonfinite_steps:
            raise ValueError(
                f"max_nonfinite_steps must be 0 under {type(trainer.strategy).__name__}, which "
                f"updates weights in its own way, got {self.max_nonfinite_steps}; use "
                "strategy='ddp'."
            )

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse what moves weights between the losses of one step."""
        if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in trainer.optimizers):
            raise ValueError(
                "FiniteUpdates cannot leave out an update of LBFGS, which moves weights between "
                "the losses of one step; use another optimizer."
            )

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Note what the step starts from."""
        self._now = MicroBatch.begin(trainer, pl_module, batch, batch_idx, self._changing)

    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: Tensor
    ) -> None:
        """Look at the loss."""
        if self._now is not None:
            self._now.see_loss(loss, pl_module, _scaler(trainer) is not None)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look at the gradients, after each accumulated batch."""
        if self._now is not None and pl_module.automatic_optimization:
            self._now.see_gradients(trainer.optimizers)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        """Judge the update, or the one before it, and leave this one out if need be."""
        if self._now is None:
            return
        self._judged = True
        if not self._failed:  # in manual optimization, an earlier update of this batch
            if not pl_module.automatic_optimization:
                self._now.see_gradients([optimizer])
            window = [*self._window, self._now]
            flags = torch.stack([batch.flags() for batch in window]).amax(0)
            if trainer.world_size > 1:
                torch.distributed.all_reduce(flags, torch.distributed.ReduceOp.MAX)
            if _is_failure(flags, trainer):
                self._failed = window
                window[0].put_buffers_back(pl_module)
            self._now.updates += 1 - bool(self._failed)
        if self._failed:
            _leave_out(optimizer, _scaler(trainer))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Report an update that was left out."""
        now, self._now = self._now, None
        if now is None:
            return
        now.see_outputs(outputs)
        if not self._failed:
            changed = now.changed(pl_module, by_value=self._changing is None)
            self._changing = changed | (self._changing or set())
        if self._judged:
            self._window, self._judged = [], False
        elif pl_module.automatic_optimization:
            self._window.append(now)
        if self._failed:
            self._failed[0].put_buffers_back(pl_module)  # of what came after it, too
            self._report(trainer, pl_module)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: object) -> None:
        """Let go of the batches."""
        self._forget()

    on_exception = teardown  # type: ignore[assignment]

    def _report(self, trainer: Trainer, module: LightningModule) -> None:
        worst = max(self._failed, key=MicroBatch.badness)
        self._failed = []
        self.skipped_updates += 1
        what = all_gather_objects(worst.badness())
        suspects = [rank for rank, bad in enumerate(what) if bad == max(what)]
        text = ""
        if trainer.global_rank in suspects[:_MOST_FILES]:
            text = _described_and_kept(worst, trainer, module)
        text = all_gather_objects(text)[suspects[0]]
        if others := ", ".join(map(str, suspects[1:])):
            text += f" Likewise on rank {others}"
            # Gradients are looked at when the ranks have summed them.
            text += "." if max(what) == 2 else "; which of them it came from, their replays tell."
        stops = self.skipped_updates > self.max_nonfinite_steps
        numbers = {"train/nonfinite_steps": float(self.skipped_updates)}
        numbers |= {"train/loss": math.nan} if stops else {}
        _log(trainer, numbers)
        allowed = f"{self.skipped_updates} of at most {self.max_nonfinite_steps}"
        if not stops:
            rank_zero_info(f"Left out an update ({allowed}): {text}")
            return
        raise FloatingPointError(
            f"{text} Its update was left out ({allowed}: max_nonfinite_steps); lower the lr, clip "
            "gradients (trainer.gradient_clip_val=1), or resume from an earlier checkpoint."
        )

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Look at the weights: those of the last update have no loss that would tell."""
        named = dict(pl_module.named_parameters())
        if (bad := first_nonfinite([*named.values()])) is not None:
            _log(trainer, {"train/loss": math.nan})
            raise FloatingPointError(
                f"The weights of step {trainer.global_step} are not finite, {[*named][bad]} first, "
                "and are not saved. Lower the lr, clip gradients (trainer.gradient_clip_val=1), "
                "or resume from an earlier checkpoint."
            )

    # State

    def state_dict(self) -> dict[str, Any]:
        """How many updates were left out; nothing while there are none."""
        return {"skipped_updates": self.skipped_updates} if self.skipped_updates else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on counting."""
        self.skipped_updates = int(state_dict["skipped_updates"])


def _log(trainer: Trainer, numbers: dict[str, float]) -> None:
    for logger in trainer.loggers:
        logger.log_metrics(numbers, logger_step(trainer))


def _scaler(trainer: Trainer) -> Any:
    return getattr(trainer.precision_plugin, "scaler", None)


def _is_failure(flags: Tensor, trainer: Trainer) -> bool:
    # Else it is no more than a GradScaler's search for a scale.
    loss, gradient = flags.tolist()
    scaler = _scaler(trainer)
    return bool(loss) or bool(gradient and (scaler is None or scaler.get_scale() <= 1))


def _leave_out(optimizer: Optimizer, scaler: Any) -> None:
    # Without gradients no optimizer changes anything. One that unscales them itself must find one.
    unscales = scaler is not None and getattr(optimizer, "_step_supports_amp_scaling", False)
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None and unscales:
                param.grad.fill_(math.nan)
            else:
                param.grad = None


def _described_and_kept(batch: MicroBatch, trainer: Trainer, module: LightningModule) -> str:
    text, scaler = f"{batch.describe(module)}.", _scaler(trainer)
    if scaler is not None:
        text += f" The loss scale is now {scaler.get_scale():g}."
    sharded = trainer.strategy.restore_checkpoint_after_setup
    if trainer.fast_dev_run or sharded:  # type: ignore[attr-defined]
        return text
    path = os.path.join(trainer.default_root_dir, f"non-finite-rank{batch.rank}.ckpt")
    try:
        content = batch.content(trainer, module)
        trainer.strategy.checkpoint_io.save_checkpoint(content, path)
    except (OSError, TypeError) as error:  # which must not hide what it is about
        return f"{text} The batch could not be kept for a replay: {str(error).rstrip('.')}."
    if "_class_path" not in module.hparams:  # made in Python, which no command can do again
        return f'{text} {path} holds the batch and the state of the generators ("replay").'
    return f"{text} `lit-diffusion replay {path}` computes it again."
