"""Skip updates whose loss or gradient is not finite, and save the batch for inspection."""

import math
import os
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from .trainer_state import (
    all_gather_objects,
    find_dtensor,
    first_nonfinite,
    is_nonfinite,
    logger_step,
    output_folder,
    should_log,
)

try:
    import lightning.pytorch as pl
except ImportError:
    import pytorch_lightning as pl  # type: ignore[no-redef]

_MAX_FILES = 8
_MAX_UNREAD = 4
"""Maximum number of updates whose flags the host has not read yet."""
_DEFERRING_DEVICES = ("cuda",)
_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
"""Optimizers whose `fused=True` kernels change nothing if `found_inf` is 1. The host does not read
`found_inf`."""


@dataclass
class _MicroBatch:
    """A batch on this rank, with flags for a non-finite loss and non-finite gradients."""

    step: int  # optimizer steps completed before the batch
    batch: Any
    batch_idx: int
    rng: dict[str, Tensor]  # states of torch's generators "cpu" and "cuda" before the batch
    device: torch.device
    bad_loss: Tensor | None = None  # () bool, on the device
    # (N,) bool flags, True for non-finite gradients, and the N parameters
    gradients: tuple[Tensor, list[nn.Parameter]] | None = None
    outputs: dict[str, Tensor] = field(default_factory=dict)  # tensors returned by training_step

    def flags(self) -> Tensor:
        """Return two flags (non-finite loss, non-finite gradient) as (2,) float on the device."""
        bad_gradient = None if self.gradients is None else self.gradients[0].any()
        flags = [
            torch.zeros((), dtype=torch.bool, device=self.device) if flag is None else flag
            for flag in (self.bad_loss, bad_gradient)
        ]
        return torch.stack(flags).float()

    def severity(self) -> int:
        """Return 2 for a non-finite loss, 1 for a finite loss with non-finite gradients, else 0."""
        loss, gradient = self.flags().tolist()
        return 2 if loss else int(gradient)

    def bad_parameters(self, module: nn.Module) -> list[str]:
        """List the names of parameters with non-finite gradients, in the module's order."""
        flags, params = self.gradients or (torch.zeros(0), [])
        bad = set(map(id, compress(params, flags.tolist())))
        return [name for name, param in module.named_parameters() if id(param) in bad]


@dataclass
class _Unread:
    """An update that the device skips if it is not finite. The host has not read the flag yet."""

    batches: list[_MicroBatch]
    logger_step: int
    flag: Tensor  # () float on the CPU, 1 if this update or an earlier one was skipped
    copied: "torch.cuda.Event | None"  # end of the copy to `flag`; None without a GPU

    def is_skipped(self) -> bool:
        """Read the flag, after waiting until the device has finished this update."""
        if self.copied is not None:
            self.copied.synchronize()
        return bool(self.flag)


class FiniteUpdates(pl.Callback):
    """Skips updates whose loss or gradient is not finite, and stops the run after too many skips.

    - The whole update is skipped: weights, buffers, optimizer state and EMA do not change, and the
      gradients of all batches accumulated for the update are dropped. If the loss or gradient is
      not finite on one rank, all ranks skip the update. `global_step` and lr schedules advance, as
      they do when a GradScaler skips a step.
    - If more than `max_nonfinite_steps` updates have been skipped, the run stops with an error.
      Existing checkpoints are not changed.
    - For each skipped update, a message names the optimizer step and the rank. If the loss is not
      finite, the message can also name the samples and their noise levels. To enable this,
      training_step must return a dictionary with the tensors "u", "t" and "per_sample_loss" besides
      the loss. Each tensor has one entry per sample, and u is in [0, 1]. If batches are tuples
      (images, labels, index), the message includes the data index of each of these samples. If the
      loss is finite but gradients are not, the message names the parameters with non-finite
      gradients.
    - The batch is saved to the file non-finite-rank<r>.ckpt in the first logger's version
      directory, or in `default_root_dir` if there is no logger. If an earlier fit has left such a
      file, the new name ends in -v1, -v2, and so on. Read the file with
      `torch.load(path, weights_only=True)`. The entry "state_dict" has the weights before the
      update. The entry "non_finite" has the batch, the states of the random generators before the
      batch, and the outputs of training_step.
    - Updates that a GradScaler skips are not counted, because their usual cause is a large loss
      scale. As an exception, such an update is counted if the loss itself is not finite, or if the
      loss scale is at most 1.
    - Saving a checkpoint with non-finite weights raises an error, also at the end of a run.
    - At each skipped update, the callback logs the number of skipped updates so far as
      `train/nonfinite_steps`. When the callback stops a run, it logs NaN as the last train/loss.
    - If a module steps an optimizer without Lightning (`self.optimizers(use_pl_optimizer=False)`),
      the updates of this optimizer are not checked.
    - List this callback after callbacks that seed or consume random numbers, such as StepSeed.
      Otherwise, the saved states of the random generators are not the states with which
      training_step starts.

    Cost: each update copies the module's buffers. Usually, the host also waits for the GPU once in
    each update. There is no wait on CUDA if all of the following hold: max_nonfinite_steps is 0,
    optimization is automatic, no weights are split over ranks, and each optimizer is torch's Adam,
    AdamW, SGD or Adagrad with `fused=True`. Without the wait, the behavior differs in these points:

    - The GPU skips the bad update and all later updates. The host notices this at most 4 updates
      later, and then stops the run. It notices this earlier if a logging step, a validation, the
      save of a full checkpoint, or a call of `trainer_state.confirm_updates(trainer)` comes first.
    - The batches of the last 4 updates stay in GPU memory.
    - Until the host notices the skipped updates, other callbacks continue to run. In
      `on_train_batch_end`, they see the weights from before the bad update, but the step number of
      a later update. Files of `ModelCheckpoint(save_weights_only=True)` have the same mismatch.
    - `global_step` and lr schedules also advance in the updates that were skipped after the bad
      update. The callbacks of loss_resampler.py also record the losses of these updates.

    Args:
        max_nonfinite_steps: maximum number of skipped updates in a run. Updates that were skipped
            before a resume are counted too.

    Attributes:
        skipped_updates: number of updates skipped so far. Updates that were skipped before a resume
            are counted too.

    Raises:
        ValueError: if `max_nonfinite_steps` is negative. At the start of a fit, the error is also
            raised if an optimizer computes several losses in one step (LBFGS). It is also raised if
            `max_nonfinite_steps` is above 0 and the strategy splits weights over ranks or updates
            weights in its own way.
        FloatingPointError: if too many updates are skipped, or if a checkpoint with non-finite
            weights would be saved.

    Example:
        >>> trainer = pl.Trainer(callbacks=[FiniteUpdates()], accelerator="cpu", logger=False)
    """

    def __init__(self, max_nonfinite_steps: int = 0) -> None:
        if max_nonfinite_steps < 0:
            raise ValueError(f"max_nonfinite_steps must be at least 0, got {max_nonfinite_steps}.")
        self.max_nonfinite_steps = max_nonfinite_steps
        self.skipped_updates = 0
        self._hooks: list[RemovableHandle] = []
        self._reset()

    def _reset(self) -> None:
        self._current: _MicroBatch | None = None
        self._accumulated: list[_MicroBatch] = []  # batches accumulated for the next update
        self._skipped_batches: list[_MicroBatch] = []  # batches of the update that is being skipped
        self._buffers: list[tuple[nn.Module, str, Tensor]] = []  # copies from before the update
        self._with_buffers: list[nn.Module] | None = None  # modules with buffers; None if unknown
        self._has_stepped = False  # whether this batch has made or skipped an update
        self._unread: deque[_Unread] = deque()
        self._unread_at_exception: deque[_Unread] = deque()  # without their batches
        # () float on the device that decides which updates are skipped; None if the host decides
        self._found_inf: Tensor | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Raise an error for an unsupported strategy, before Lightning loads a checkpoint."""
        if stage == "fit":
            self.skipped_updates = 0
            self._reset()
            stem = os.path.join(output_folder(trainer), f"non-finite-rank{trainer.global_rank}")
            self._file, version = f"{stem}.ckpt", 0
            is_new = trainer.ckpt_path is None and not hasattr(trainer, "run_folder")
            while is_new and os.path.lexists(self._file):  # file of an earlier fit
                self._file, version = f"{stem}-v{version + 1}.ckpt", version + 1
        if trainer.strategy.restore_checkpoint_after_setup and self.max_nonfinite_steps:
            raise ValueError(
                f"max_nonfinite_steps must be 0 under {type(trainer.strategy).__name__}, which "
                f"updates weights in its own way, got {self.max_nonfinite_steps}; use "
                "strategy='ddp'."
            )

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Raise an error for optimizers that compute several losses inside one step."""
        if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in trainer.optimizers):
            raise ValueError(
                "FiniteUpdates cannot skip an update of LBFGS, because LBFGS changes the weights "
                "between the losses of one step; use another optimizer."
            )

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Let the device itself skip updates, if optimizers, strategy and arguments allow it.

        Lightning restores the optimizers of a checkpoint before it calls this hook.
        """
        self._hooks = [
            torch_modules.register_module_module_registration_hook(self._forget_modules),
            torch_modules.register_module_buffer_registration_hook(self._forget_modules),
        ]
        groups = [group for each in trainer.optimizers for group in each.param_groups]
        if (
            self.max_nonfinite_steps == 0
            and pl_module.automatic_optimization
            and pl_module.device.type in _DEFERRING_DEVICES
            and all(type(optimizer) in _FUSED for optimizer in trainer.optimizers)
            and all(group.get("fused") for group in groups)
            and find_dtensor(dict(pl_module.named_parameters())) is None
            and not trainer.strategy.restore_checkpoint_after_setup
        ):
            self._found_inf = torch.zeros((), dtype=torch.float32, device=pl_module.device)

    def _forget_modules(self, *_: Any) -> None:
        """Forget which modules have buffers. Torch calls this if a submodule or buffer is added."""
        self._with_buffers = None

    # Checking an update

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Store buffers and random states before the batch."""
        if not self._accumulated:
            if self._with_buffers is None:
                self._with_buffers = [m for m in pl_module.modules() if m._buffers]
            self._buffers = [
                (module, name, buffer.detach().clone())
                for module in self._with_buffers
                for name, buffer in module.named_buffers(recurse=False)
            ]
        rng = {"cpu": torch.get_rng_state()}
        if pl_module.device.type == "cuda":
            rng["cuda"] = torch.cuda.get_rng_state(pl_module.device)
        self._current = _MicroBatch(trainer.global_step, batch, batch_idx, rng, pl_module.device)

    def on_before_backward(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor
    ) -> None:
        """Check the loss."""
        if self._current is not None:
            # A GradScaler's factor may make a half-precision loss infinite, but not NaN.
            may_overflow = loss.dtype == torch.float16 and _grad_scaler(trainer) is not None
            is_bad = loss.detach().isnan() if may_overflow else loss.detach() * 0 != 0
            is_bad = is_bad.any() if is_bad.ndim else is_bad
            before = self._current.bad_loss  # from earlier losses, in manual optimization
            self._current.bad_loss = is_bad if before is None else before | is_bad

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Check the gradients, after each accumulated batch."""
        if self._current is not None and pl_module.automatic_optimization:
            self._current.gradients = _check_gradients(trainer.optimizers)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Skip the update if any of its losses or gradients is not finite on any rank.

        In manual optimization, later updates in the same batch are skipped as well.
        """
        if self._current is None:
            return
        self._has_stepped = True
        if not self._skipped_batches:
            if not pl_module.automatic_optimization:
                self._current.gradients = _check_gradients([optimizer])
            window = [*self._accumulated, self._current]
            flags = window[0].flags()
            for batch in window[1:]:
                flags = torch.maximum(flags, batch.flags())
            if trainer.world_size > 1:
                torch.distributed.all_reduce(flags, torch.distributed.ReduceOp.MAX)
            scaler = _grad_scaler(trainer)
            if self._found_inf is not None:
                self._skip_on_device(trainer, optimizer, window, flags)
                self._restore_buffers()
                return
            loss, gradient = flags.tolist()
            if loss or (gradient and (scaler is None or scaler.get_scale() <= 1)):
                self._skipped_batches = window
                self._restore_buffers()
        if self._skipped_batches:
            _drop_gradients(optimizer, _grad_scaler(trainer))

    def _skip_on_device(
        self, trainer: pl.Trainer, optimizer: Optimizer, batches: list[_MicroBatch], flags: Tensor
    ) -> None:
        """Let the device skip the update if it or an earlier one is not finite.

        The flag is copied to the host without waiting for it.
        """
        assert self._found_inf is not None
        scaler = _grad_scaler(trainer)
        if scaler is not None:
            can_shrink = scaler.scale(torch.ones_like(self._found_inf)) > 1
            flags = flags * torch.stack([torch.ones_like(can_shrink), ~can_shrink])
        self._found_inf = torch.maximum(self._found_inf, flags.amax())
        if scaler is None or not getattr(optimizer, "_step_supports_amp_scaling", False):
            optimizer.found_inf = self._found_inf  # type: ignore[attr-defined]
        else:  # the scaler sets found_inf itself if a gradient is not finite
            grads = (p.grad for group in optimizer.param_groups for p in group["params"])
            if (grad := next((g for g in grads if g is not None), None)) is not None:
                grad.masked_fill_(self._found_inf > 0, math.nan)
        flag = self._found_inf.to("cpu", non_blocking=True)  # into pinned memory
        copied = None
        if self._found_inf.is_cuda:
            copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            copied.record(torch.cuda.current_stream(self._found_inf.device))
        self._unread.append(_Unread(batches, logger_step(trainer), flag, copied))

    def confirm_updates(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, max_unread: int = 0
    ) -> None:
        """Stop the run if the device skipped an update.

        This method waits for, and checks, all updates except the last `max_unread`. Callbacks that
        read weights in `on_train_batch_end` should call it first.
        """
        while len(self._unread) > max_unread:
            if (update := self._unread.popleft()).is_skipped():
                self._unread.clear()
                self._skipped_batches = update.batches
                self._restore_buffers()
                self._report(trainer, pl_module, update.logger_step)

    on_validation_start = on_train_epoch_end = confirm_updates

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *_: Any
    ) -> None:
        """Report a skipped update."""
        current, self._current = self._current, None
        if current is None:
            return
        if isinstance(outputs, dict):
            tensors = {name: v for name, v in outputs.items() if isinstance(v, Tensor)}
            current.outputs = {str(name): value.detach() for name, value in tensors.items()}
        if self._has_stepped:
            self._accumulated, self._has_stepped = [], False
            if self._skipped_batches or self._found_inf is not None:
                self._restore_buffers()  # the rest of the batch may have changed them too
        elif pl_module.automatic_optimization:
            self._accumulated.append(current)
        if self._skipped_batches:
            self._report(trainer, pl_module, logger_step(trainer))
        self.confirm_updates(trainer, pl_module, 0 if should_log(trainer) else _MAX_UNREAD)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: object) -> None:
        """Release the batches, and remove the hooks."""
        while self._hooks:
            self._hooks.pop().remove()
        for optimizer in trainer.optimizers if self._found_inf is not None else ():
            vars(optimizer).pop("found_inf", None)
        self._reset()

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Release the batches, but keep the unread flags, because a save may follow."""
        unread = self._unread
        self.teardown(trainer, pl_module, "fit")
        for update in unread:
            update.batches = []
        self._unread_at_exception = unread

    @torch.no_grad()
    def _restore_buffers(self) -> None:
        """Restore the buffers. If the device decides, restore them only if it skips the update."""
        for owner, name, before in self._buffers:
            buffer = getattr(owner, name, None)  # modules may have replaced or removed it
            if buffer is None:
                continue
            if buffer.shape != before.shape:  # the module has replaced the buffer by another
                if self._found_inf is None:  # else the update may be finite
                    setattr(owner, name, before.clone())
                continue
            if self._found_inf is not None:
                before = torch.where(self._found_inf.to(buffer.device) > 0, before, buffer)
            buffer.copy_(before)

    # Reporting

    def _report(self, trainer: pl.Trainer, module: pl.LightningModule, step: int) -> None:
        """Save the batch, log at the logger step `step`, and stop the run after too many skips."""
        worst = max(self._skipped_batches, key=_MicroBatch.severity)
        self._skipped_batches = []
        self.skipped_updates += 1
        severities = all_gather_objects(worst.severity(), trainer.world_size)
        ranks = [rank for rank, severity in enumerate(severities) if severity == max(severities)]
        text = ""
        if trainer.global_rank in ranks[:_MAX_FILES]:
            text = _save_batch(worst, trainer, module, self._file)
        text = all_gather_objects(text, trainer.world_size)[ranks[0]]
        if others := ", ".join(map(str, ranks[1:])):  # all of them if only gradients are bad
            text += f" The same happened on rank {others}."
        stops = self.skipped_updates > self.max_nonfinite_steps
        metrics = {"train/nonfinite_steps": float(self.skipped_updates)}
        _log(trainer, metrics | ({"train/loss": math.nan} if stops else {}), step)
        count = f"{self.skipped_updates} of at most {self.max_nonfinite_steps}"
        if not stops:
            pl.utilities.rank_zero_info(f"Skipped an update ({count}): {text}")
            return
        raise FloatingPointError(
            f"{text} Its update was skipped ({count}: max_nonfinite_steps); lower the lr, clip "
            "gradients (trainer.gradient_clip_val=1), or resume from an earlier checkpoint."
        )

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        """Raise an error if the device has skipped updates, or if weights are not finite."""
        self.confirm_updates(trainer, pl_module)
        if any(update.is_skipped() for update in self._unread_at_exception):
            raise FloatingPointError(
                "An update that was not finite was skipped shortly before the run ended, so step "
                f"{trainer.global_step} is not saved; lower the lr, or resume from an earlier "
                "checkpoint."
            )
        params = dict(pl_module.named_parameters())
        if (bad := first_nonfinite([*params.values()])) is not None:
            _log(trainer, {"train/loss": math.nan}, logger_step(trainer))
            raise FloatingPointError(
                f"The weights of step {trainer.global_step} are not finite and are not saved; the "
                f"first such parameter is {[*params][bad]}. Lower the lr, clip gradients "
                "(trainer.gradient_clip_val=1), or resume from an earlier checkpoint."
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the number of skipped updates, or {} if there are none."""
        return {"skipped_updates": self.skipped_updates} if self.skipped_updates else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the number of skipped updates."""
        self.skipped_updates = int(state_dict["skipped_updates"])


def _grad_scaler(trainer: pl.Trainer) -> Any:
    return getattr(trainer.precision_plugin, "scaler", None)


def _check_gradients(optimizers: Sequence[Optimizer]) -> tuple[Tensor, list[nn.Parameter]] | None:
    """Return (N,) bool flags of non-finite gradients, and the N parameters; None if N is 0."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    params = [param for group in groups for param in group["params"] if param.grad is not None]
    return (is_nonfinite([param.grad for param in params]), params) if params else None


def _drop_gradients(optimizer: Optimizer, scaler: Any) -> None:
    # Optimizers skip parameters without gradients. Optimizers that unscale gradients themselves
    # need NaN gradients instead, so that their GradScaler skips the step.
    unscales = scaler is not None and getattr(optimizer, "_step_supports_amp_scaling", False)
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None and unscales:
                param.grad.fill_(math.nan)
            else:
                param.grad = None


def _log(trainer: pl.Trainer, metrics: dict[str, float], step: int) -> None:
    for logger in trainer.loggers:
        logger.log_metrics(metrics, step)


def _save_batch(
    bad: _MicroBatch, trainer: pl.Trainer, module: pl.LightningModule, path: str
) -> str:
    """Write the batch to the file `path`, and return a message with the cause and the path."""
    text, scaler = _describe(bad, module, trainer.global_rank), _grad_scaler(trainer)
    message = f"{text}." + ("" if scaler is None else f" The loss scale is {scaler.get_scale():g}.")
    is_split = trainer.strategy.restore_checkpoint_after_setup
    if trainer.fast_dev_run or is_split:  # type: ignore[attr-defined]
        return message
    seed = os.environ.get("PL_GLOBAL_SEED")  # set by Lightning's seed_everything
    failure = {
        "what": text,
        "batch": bad.batch,
        "batch_idx": bad.batch_idx,
        "rank": trainer.global_rank,
        "rng": bad.rng,
        "seed": None if seed is None else int(seed),
        "outputs": bad.outputs,
        "parameters": bad.bad_parameters(module),
    }
    hparams = {}
    for name, value in module.hparams.items():
        with suppress(TypeError):  # hyperparameters of a module built in Python may be objects
            hparams[str(name)] = _plain_copy(value)
    try:
        content = {
            "state_dict": _plain_copy(dict(module.state_dict())),
            "global_step": bad.step,
            "epoch": trainer.current_epoch,
            "hyper_parameters": hparams,
            "non_finite": _plain_copy(failure),
        }
        trainer.strategy.checkpoint_io.save_checkpoint(content, path)
    except (OSError, TypeError) as error:  # this error must not replace the message
        return f"{message} The batch could not be written to a file: {str(error).rstrip('.')}."
    return f"{message} {path} holds the batch and the weights before the update."


def _plain_copy(value: Any) -> Any:
    """Copy nested tensors to the CPU. Raise TypeError if a value is no tensor or plain builtin."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {_plain_copy(name): _plain_copy(item) for name, item in value.items()}
    if isinstance(value, tuple | list):
        return (tuple if isinstance(value, tuple) else list)(map(_plain_copy, value))
    if value is None or type(value) in (bool, int, float, str):
        return value
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    raise TypeError(f"only tensors and plain builtins can be stored, got {name}")


def _describe(bad: _MicroBatch, module: nn.Module, rank: int) -> str:
    """Describe what is not finite: at which step, in which samples or parameters."""
    where = f"at optimizer step {bad.step} (batch {bad.batch_idx}, rank {rank})"
    params = dict(module.named_parameters())
    nonfinite = list(compress(params, is_nonfinite([*params.values()]).tolist()))
    if nonfinite:  # loaded from a file, or updated by an optimizer that is not checked
        return f"the weights were not finite before the update {where}: {_list_names(nonfinite)}"
    if not bad.bad_loss:
        return f"the gradient is not finite {where}: of {_list_names(bad.bad_parameters(module))}"
    losses = bad.outputs.get("per_sample_loss")
    if losses is None or losses.ndim != 1 or losses.isfinite().all():
        return f"the loss is not finite {where}"
    samples = (~losses.isfinite()).nonzero().flatten().tolist()
    return f"the loss is not finite {where}: {_list_names([_name_sample(i, bad) for i in samples])}"


def _name_sample(i: int, bad: _MicroBatch) -> str:
    shape, batch = bad.outputs["per_sample_loss"].shape, bad.batch
    text = f"sample {i}"
    if isinstance(batch, tuple | list) and len(batch) == 3 and isinstance(batch[2], Tensor):
        index = batch[2]  # the batch is (images, labels, index)
        if index.shape == shape and not index.is_floating_point():
            text += f" (data index {int(index[i])})"
    u, t = (bad.outputs.get(name) for name in ("u", "t"))
    if u is not None and u.shape == shape:
        text += f" at u = {float(u[i]):.3f} (train/loss_q{min(int(float(u[i]) * 4), 3)})"
        text += f", t = {float(t[i]):g}" if t is not None and t.shape == shape else ""
    return text


def _list_names(names: Sequence[str]) -> str:
    return "; ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
