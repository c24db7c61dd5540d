"""No update from a loss or a gradient that is not finite."""

import math
import os
from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lit_diffusion.callbacks.micro_batch import MicroBatch
from lit_diffusion.sharding import is_made_up

_MOST_FILES = 8


class FiniteUpdates(Callback):
    """Leaves out updates from losses or gradients that are not finite, and stops the run.

    A message names optimizer step, rank, sample (within the batch, and its index in the data set
    where batches are (images, labels, index)), noise level, or for a gradient the parameters. The
    batch goes to `default_root_dir`/non-finite-rank<r>.ckpt, with the weights before the update and
    all else that `lit-diffusion replay` needs to compute the step again; the file of an earlier
    incident is replaced.

    - Left out is the whole update: weights, buffers, optimizer state and EMA stay as they are, and
      of accumulated batches none counts. `global_step` and lr schedules move on, as where a
      GradScaler skips a step. After more than `max_nonfinite_steps` the run stops, with the
      checkpoints as they are.
    - The ranks of a run decide together: what is not finite on one is left out on all.
    - Steps that a GradScaler skips are its search for a scale and do not count, unless the loss
      itself is not finite, or the scale is down to 1 and can't be the reason.
    - A module's training_step may return `u` (B,) in [0, 1], `t` (B,) and `per_sample_loss` (B,)
      beside the loss, which names samples and noise levels; any other module has its steps named.
    - It is known before each update whether it is finite, for which a GPU is waited for once an
      update. Buffers are copied before each batch.
    - List it after callbacks that seed or draw random numbers, such as StepSeed.

    Logs `train/nonfinite_steps`, once there are some; the curve of train/loss of a run that it
    stops ends in NaN.

    Args:
        max_nonfinite_steps: updates that may be left out in a run, resumes included.

    Raises:
        ValueError: a negative number; at the start of a fit, an optimizer that computes gradients
            within its step (LBFGS), or a strategy that shards weights or updates them itself where
            updates may be left out.
        FloatingPointError: at one update too many.
        RuntimeError: for optimizers stepped past Lightning, whose updates can't be left out.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(callbacks=[FiniteUpdates()], accelerator="cpu", logger=False)
    """

    def __init__(self, max_nonfinite_steps: int = 0) -> None:
        if max_nonfinite_steps < 0:
            raise ValueError(f"max_nonfinite_steps must be at least 0, got {max_nonfinite_steps}.")
        self.max_nonfinite_steps = max_nonfinite_steps
        self._skipped = 0
        self._forget()

    def _forget(self) -> None:
        self._now: MicroBatch | None = None
        self._window: list[MicroBatch] = []  # accumulated for the update to come
        self._judged = False  # whether an update was made, or left out, in this batch
        self._failed: list[MicroBatch] = []  # behind an update that was left out
        self._stepped: list[Optimizer] = []  # in this batch, as far as Lightning knows
        self._hooks: list[RemovableHandle] = []

    @property
    def skipped_updates(self) -> int:
        """Updates left out in this run so far, also before it was resumed."""
        return self._skipped

    # Following a step

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse what cannot work before anything is loaded."""
        if stage == "fit":
            self._skipped = 0
            self._forget()
        if _is_sharded(trainer) and self.max_nonfinite_steps:
            raise ValueError(
                f"max_nonfinite_steps must be 0 under {type(trainer.strategy).__name__}, which "
                f"updates weights in its own way, got {self.max_nonfinite_steps}; use "
                "strategy='ddp'."
            )

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """See every step of every optimizer."""
        for optimizer in trainer.optimizers:
            if isinstance(optimizer, torch.optim.LBFGS):
                raise ValueError(
                    "FiniteUpdates cannot leave out an update of LBFGS, which moves weights "
                    "between the losses of one step; use another optimizer."
                )
            self._hooks.append(optimizer.register_step_post_hook(self._refuse_unseen))

    def _refuse_unseen(self, optimizer: Optimizer, _args: Any, kwargs: Any) -> None:
        if is_made_up(optimizer, kwargs):
            return
        if all(known is not optimizer for known in self._stepped):
            raise RuntimeError(
                f"{type(optimizer).__name__} made a step that Lightning does not know of, so that "
                "FiniteUpdates could not have left it out; step what self.optimizers() returns, "
                "without use_pl_optimizer=False."
            )

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Note what the step starts from."""
        self._stepped = []
        self._now = MicroBatch.begin(trainer, pl_module, batch, batch_idx)

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
        self._stepped.append(optimizer)
        if self._now is None:
            return
        self._judged = True
        if not self._failed:  # in manual optimization, an earlier update of this batch
            if not pl_module.automatic_optimization:
                self._now.see_gradients([optimizer])
            window = [*self._window, self._now]
            flags = torch.stack([batch.flags() for batch in window]).amax(0)
            if _is_failure(_on_any_rank(flags, trainer), trainer):
                self._failed = window
                window[0].put_buffers_back(pl_module)
            self._now.updates += 1 - bool(self._failed)
        if self._failed:
            _leave_out(optimizer, _scaler(trainer))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Tell of an update that was left out."""
        now, self._now = self._now, None
        if now is None:
            return
        now.see_outputs(outputs)
        if self._judged:
            self._window, self._judged = [], False
        elif pl_module.automatic_optimization:
            self._window.append(now)
        if self._failed:
            self._tell(trainer, pl_module)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Let go of the batches and optimizers."""
        self.teardown(trainer, pl_module, "fit")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Let go of the batches and optimizers."""
        for hook in self._hooks:
            hook.remove()
        self._forget()

    # Telling

    def _tell(self, trainer: Trainer, module: LightningModule) -> None:
        """Count, dump and say it; stop the run where it is one too many."""
        window, self._failed = self._failed, []
        self._skipped += 1
        what = _on_all_ranks(_badness(window), trainer)
        suspects = [rank for rank, bad in enumerate(what) if bad == max(what)]
        text = ""
        if trainer.global_rank in suspects[:_MOST_FILES]:
            text = _told_and_dumped(_worst(window), trainer, module)
        text = _on_all_ranks(text, trainer)[suspects[0]]
        if others := ", ".join(map(str, suspects[1:])):
            text += f" Likewise on rank {others}"
            # Gradients are looked at when the ranks have summed them.
            text += "." if max(what) == 2 else "; which of them it came from, their replays tell."
        stops = self._skipped > self.max_nonfinite_steps
        numbers = {"train/nonfinite_steps": float(self._skipped)}
        numbers |= {"train/loss": math.nan} if stops else {}
        for logger in trainer.loggers:
            logger.log_metrics(numbers, trainer.fit_loop.epoch_loop._batches_that_stepped)
        allowed = f"{self._skipped} of at most {self.max_nonfinite_steps}"
        if not stops:
            rank_zero_info(f"Left out an update ({allowed}): {text}")
            return
        raise FloatingPointError(
            f"{text} Its update was left out ({allowed}: max_nonfinite_steps); lower the lr, clip "
            "gradients (trainer.gradient_clip_val=1), or resume from an earlier checkpoint."
        )

    # State

    def state_dict(self) -> dict[str, Any]:
        """How many updates were left out; nothing while there are none."""
        return {"skipped_updates": self._skipped} if self._skipped else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on counting."""
        self._skipped = int(state_dict["skipped_updates"])


def _scaler(trainer: Trainer) -> Any:
    return getattr(trainer.precision_plugin, "scaler", None)


def _is_sharded(trainer: Trainer) -> bool:
    sharded: bool = trainer.strategy.restore_checkpoint_after_setup
    return sharded


def _is_failure(flags: Tensor, trainer: Trainer) -> bool:
    """Whether there is more behind it than a GradScaler's search for a scale."""
    loss, gradient = flags.tolist()
    scaler = _scaler(trainer)
    return bool(loss) or bool(gradient and (scaler is None or scaler.get_scale() <= 1))


def _leave_out(optimizer: Optimizer, scaler: Any) -> None:
    """Take the gradients away, without which no optimizer changes anything.

    One that unscales them itself must find one, and skips where it is not finite.
    """
    unscales = scaler is not None and getattr(optimizer, "_step_supports_amp_scaling", False)
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None and unscales:
                param.grad.fill_(math.nan)
            else:
                param.grad = None


def _has_ranks(trainer: Trainer) -> bool:
    return trainer.world_size > 1 and torch.distributed.is_initialized()


def _on_any_rank(flags: Tensor, trainer: Trainer) -> Tensor:
    """The largest of all ranks; no GPU is waited for."""
    if _has_ranks(trainer):
        torch.distributed.all_reduce(flags, torch.distributed.ReduceOp.MAX)
    return flags


def _on_all_ranks(value: Any, trainer: Trainer) -> list[Any]:
    """What each rank has, by rank."""
    values = [value] * trainer.world_size
    if _has_ranks(trainer):
        torch.distributed.all_gather_object(values, value)
    return values


def _badness(window: Sequence[MicroBatch]) -> int:
    """2 where this rank had a loss that is not finite, 1 for a gradient, 0 for neither."""
    flags = torch.stack([batch.flags() for batch in window]).amax(0).tolist()
    return 2 if flags[0] else int(flags[1])


def _worst(window: Sequence[MicroBatch]) -> MicroBatch:
    """The first batch with a loss that is not finite, else the first with a gradient."""
    for which in (0, 1):
        for batch in window:
            if batch.flags()[which]:
                return batch
    return window[-1]


def _told_and_dumped(batch: MicroBatch, trainer: Trainer, module: LightningModule) -> str:
    """What is not finite, and how to compute it again."""
    text, scaler = f"{batch.describe(module)}.", _scaler(trainer)
    if scaler is not None:
        text += f" The loss scale is now {scaler.get_scale():g}."
    if trainer.fast_dev_run or _is_sharded(trainer):  # type: ignore[attr-defined]
        return text
    path = os.path.join(trainer.default_root_dir, f"non-finite-rank{batch.rank}.ckpt")
    try:
        content = batch.content(trainer, module)
        trainer.strategy.checkpoint_io.save_checkpoint(content, path)
    except (OSError, TypeError) as error:  # which must not hide what it is about
        return f"{text} The batch could not be kept for a replay: {str(error).rstrip('.')}."
    return f"{text} `lit-diffusion replay {path}` computes it again."
