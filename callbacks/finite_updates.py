"""Skips updates from losses or gradients that are not finite, and keeps the batch for a look."""

import math
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .trainer_state import all_gather_objects, first_nonfinite, is_nonfinite, logger_step

try:
    import lightning.pytorch as pl
except ImportError:
    import pytorch_lightning as pl  # type: ignore[no-redef]

_MAX_FILES = 8


@dataclass
class _MicroBatch:
    """One batch on this rank, and what is not finite in it."""

    step: int  # optimizer steps completed before it
    batch: Any
    batch_idx: int
    rng: dict[str, Tensor]  # states of torch's generators before it, "cpu" and "cuda"
    bad_loss: Tensor  # () bool, on the device
    gradients: tuple[Tensor, list[nn.Parameter]] | None = None  # which are bad (N,) bool, and whose
    outputs: dict[str, Tensor] = field(default_factory=dict)  # what `training_step` returned

    def flags(self) -> Tensor:
        """(2,) float on the device: 1 if the loss, 1 if a gradient is not finite."""
        no_gradient = torch.zeros_like(self.bad_loss)
        bad_gradient = no_gradient if self.gradients is None else self.gradients[0].any()
        return torch.stack([self.bad_loss, bad_gradient]).float()

    def severity(self) -> int:
        """2 for a loss that is not finite, 1 for a gradient, 0 for neither."""
        loss, gradient = self.flags().tolist()
        return 2 if loss else int(gradient)

    def bad_parameters(self, module: nn.Module) -> list[str]:
        """Names of the parameters whose gradients are not finite, in the module's order."""
        flags, params = self.gradients or (torch.zeros(0), [])
        bad = set(map(id, compress(params, flags.tolist())))
        return [name for name, param in module.named_parameters() if id(param) in bad]


class FiniteUpdates(pl.Callback):
    """Skips updates from losses or gradients that are not finite, and stops the run.

    A message names optimizer step, rank, sample (and its data index where batches are (images,
    labels, index)), noise level, or for a gradient the parameters. The batch goes to
    `default_root_dir`/non-finite-rank<r>.ckpt, a file of tensors and plain builtins that
    `torch.load(weights_only=True)` reads: the weights before the update under "state_dict", and
    under "non_finite" the batch, the states of the random generators before it, and what
    training_step returned.

    - The whole update is skipped: weights, buffers, optimizer state and EMA stay as they are, and
      all batches that were accumulated for it are dropped. `global_step` and lr schedules advance,
      as they do when a GradScaler skips a step. After more than `max_nonfinite_steps` the run
      stops, with the checkpoints as they are.
    - The ranks of a run decide together: what is not finite on one is skipped on all.
    - Steps that a GradScaler skips are its search for a scale and do not count, unless the loss
      itself is not finite, or the scale is down to 1 and cannot be the reason.
    - A module's training_step may return `u` (B,) in [0, 1], `t` (B,) and `per_sample_loss` (B,)
      beside the loss; then the message names samples and noise levels.
    - Checkpoints of weights that are not finite are refused, also the one that ends a run.
    - Costs a copy of the module's buffers, and one GPU synchronization, for each update.
    - Optimizers stepped past Lightning (`use_pl_optimizer=False`) are not checked.
    - List it after callbacks that seed or draw random numbers, such as StepSeed.

    Logs `train/nonfinite_steps`, once there are some; the curve of train/loss of a run that it
    stops ends in NaN.

    Args:
        max_nonfinite_steps: updates that may be skipped in a run, resumes included.

    Attributes:
        skipped_updates: updates skipped in this run so far, resumes included.

    Raises:
        ValueError: a negative number; at the start of a fit, an optimizer that computes losses
            inside its step, or a strategy that splits weights or updates them itself where updates
            may be skipped.
        FloatingPointError: at one update too many, and at a save of weights that are not finite.

    Example:
        >>> trainer = pl.Trainer(callbacks=[FiniteUpdates()], accelerator="cpu", logger=False)
    """

    def __init__(self, max_nonfinite_steps: int = 0) -> None:
        if max_nonfinite_steps < 0:
            raise ValueError(f"max_nonfinite_steps must be at least 0, got {max_nonfinite_steps}.")
        self.max_nonfinite_steps = max_nonfinite_steps
        self.skipped_updates = 0
        self._forget()

    def _forget(self) -> None:
        self._now: _MicroBatch | None = None
        self._window: list[_MicroBatch] = []  # accumulated for the next update
        self._failed: list[_MicroBatch] = []  # the batches of an update that is skipped
        self._buffers: dict[str, Tensor] = {}  # copies from before the window
        self._has_stepped = False  # whether this batch has made or skipped an update

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse an unsupported strategy before anything is loaded."""
        if stage == "fit":
            self.skipped_updates = 0
            self._forget()
        if trainer.strategy.restore_checkpoint_after_setup and self.max_nonfinite_steps:
            raise ValueError(
                f"max_nonfinite_steps must be 0 under {type(trainer.strategy).__name__}, which "
                f"updates weights in its own way, got {self.max_nonfinite_steps}; use "
                "strategy='ddp'."
            )

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuse optimizers that move weights between the losses of one step."""
        if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in trainer.optimizers):
            raise ValueError(
                "FiniteUpdates cannot skip an update of LBFGS, which moves weights between the "
                "losses of one step; use another optimizer."
            )

    # Following a step

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Remember the state before the batch."""
        if not self._window:
            self._buffers = {name: b.detach().clone() for name, b in pl_module.named_buffers()}
        rng = {"cpu": torch.get_rng_state()}
        if pl_module.device.type == "cuda":
            rng["cuda"] = torch.cuda.get_rng_state(pl_module.device)
        is_bad = torch.zeros((), dtype=torch.bool, device=pl_module.device)
        self._now = _MicroBatch(trainer.global_step, batch, batch_idx, rng, is_bad)

    def on_before_backward(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor
    ) -> None:
        """Check the loss."""
        if self._now is not None:
            # A GradScaler's factor may make a half-precision loss infinite, but not NaN.
            may_overflow = loss.dtype == torch.float16 and _grad_scaler(trainer) is not None
            is_bad = loss.detach().isnan() if may_overflow else ~loss.detach().isfinite()
            self._now.bad_loss = self._now.bad_loss | is_bad.any()

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Check the gradients, after each accumulated batch."""
        if self._now is not None and pl_module.automatic_optimization:
            self._now.gradients = _check_gradients(trainer.optimizers)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Skip the update if anything behind it is not finite, on any rank.

        In manual optimization, later updates of the same batch are skipped as well.
        """
        if self._now is None:
            return
        self._has_stepped = True
        if not self._failed:
            if not pl_module.automatic_optimization:
                self._now.gradients = _check_gradients([optimizer])
            window = [*self._window, self._now]
            flags = torch.stack([batch.flags() for batch in window]).amax(0)
            if trainer.world_size > 1:
                torch.distributed.all_reduce(flags, torch.distributed.ReduceOp.MAX)
            loss, gradient = flags.tolist()
            scaler = _grad_scaler(trainer)
            if loss or (gradient and (scaler is None or scaler.get_scale() <= 1)):
                self._failed = window
                self._restore_buffers(pl_module)
        if self._failed:
            _drop_gradients(optimizer, _grad_scaler(trainer))

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Report an update that was skipped."""
        now, self._now = self._now, None
        if now is None:
            return
        if isinstance(outputs, dict):
            tensors = {name: v for name, v in outputs.items() if isinstance(v, Tensor)}
            now.outputs = {str(name): value.detach() for name, value in tensors.items()}
        if self._has_stepped:
            self._window, self._has_stepped = [], False
        elif pl_module.automatic_optimization:
            self._window.append(now)
        if self._failed:
            self._restore_buffers(pl_module)  # what came after the skipped update changed them too
            self._report(trainer, pl_module)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: object) -> None:
        """Release the batches."""
        self._forget()

    on_exception = teardown  # type: ignore[assignment]

    @torch.no_grad()
    def _restore_buffers(self, module: nn.Module) -> None:
        for name, buffer in module.named_buffers():
            if name in self._buffers:
                buffer.copy_(self._buffers[name])

    # Reporting

    def _report(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        worst = max(self._failed, key=_MicroBatch.severity)
        self._failed = []
        self.skipped_updates += 1
        severities = all_gather_objects(worst.severity(), trainer.world_size)
        ranks = [rank for rank, severity in enumerate(severities) if severity == max(severities)]
        text = ""
        if trainer.global_rank in ranks[:_MAX_FILES]:
            text = _write_file(worst, trainer, module)
        text = all_gather_objects(text, trainer.world_size)[ranks[0]]
        if others := ", ".join(map(str, ranks[1:])):  # of a gradient all, which is summed
            text += f" Likewise on rank {others}."
        stops = self.skipped_updates > self.max_nonfinite_steps
        metrics = {"train/nonfinite_steps": float(self.skipped_updates)}
        _log(trainer, metrics | ({"train/loss": math.nan} if stops else {}))
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
        """Refuse weights that are not finite, which the last update may have produced."""
        params = dict(pl_module.named_parameters())
        if (bad := first_nonfinite([*params.values()])) is not None:
            _log(trainer, {"train/loss": math.nan})
            raise FloatingPointError(
                f"The weights of step {trainer.global_step} are not finite, {[*params][bad]} "
                "first, and are not saved. Lower the lr, clip gradients "
                "(trainer.gradient_clip_val=1), or resume from an earlier checkpoint."
            )

    def state_dict(self) -> dict[str, Any]:
        """The number of skipped updates; empty while there are none."""
        return {"skipped_updates": self.skipped_updates} if self.skipped_updates else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue counting."""
        self.skipped_updates = int(state_dict["skipped_updates"])


def _grad_scaler(trainer: pl.Trainer) -> Any:
    return getattr(trainer.precision_plugin, "scaler", None)


def _check_gradients(optimizers: Sequence[Optimizer]) -> tuple[Tensor, list[nn.Parameter]] | None:
    """Which gradients are not finite (N,) bool, and their parameters; None without gradients."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    params = [param for group in groups for param in group["params"] if param.grad is not None]
    return (is_nonfinite([param.grad for param in params]), params) if params else None


def _drop_gradients(optimizer: Optimizer, scaler: Any) -> None:
    # No optimizer changes anything without gradients. One that unscales them itself must see NaN.
    unscales = scaler is not None and getattr(optimizer, "_step_supports_amp_scaling", False)
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None and unscales:
                param.grad.fill_(math.nan)
            else:
                param.grad = None


def _log(trainer: pl.Trainer, metrics: dict[str, float]) -> None:
    for logger in trainer.loggers:
        logger.log_metrics(metrics, logger_step(trainer))


def _write_file(bad: _MicroBatch, trainer: pl.Trainer, module: pl.LightningModule) -> str:
    """Write the batch to its file, and return what is not finite, and where the file is."""
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
        with suppress(TypeError):  # a module built in Python may have objects
            hparams[str(name)] = _plain_copy(value)
    path = os.path.join(trainer.default_root_dir, f"non-finite-rank{trainer.global_rank}.ckpt")
    try:
        content = {
            "state_dict": _plain_copy(dict(module.state_dict())),
            "global_step": bad.step,
            "epoch": trainer.current_epoch,
            "hyper_parameters": hparams,
            "non_finite": _plain_copy(failure),
        }
        trainer.strategy.checkpoint_io.save_checkpoint(content, path)
    except (OSError, TypeError) as error:  # which must not hide what is not finite
        return f"{message} The batch could not be written to a file: {str(error).rstrip('.')}."
    return f"{message} {path} holds the batch and the weights before the update."


def _plain_copy(value: Any) -> Any:
    """A copy on the CPU, of tensors and plain builtins; TypeError for anything else in it."""
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
    """What is not finite, and where: step, noise level, sample, parameters."""
    where = f"at optimizer step {bad.step} (batch {bad.batch_idx}, rank {rank})"
    params = dict(module.named_parameters())
    broken = list(compress(params, is_nonfinite([*params.values()]).tolist()))
    if broken:  # loaded so, or left so by an optimizer that steps past this callback
        return f"the weights were not finite before the update {where}: {_join(broken)}"
    if not bad.bad_loss:
        return f"the gradient is not finite {where}: of {_join(bad.bad_parameters(module))}"
    losses = bad.outputs.get("per_sample_loss")
    if losses is None or losses.ndim != 1 or losses.isfinite().all():
        return f"the loss is not finite {where}"
    samples = (~losses.isfinite()).nonzero().flatten().tolist()
    return f"the loss is not finite {where}: {_join([_name_sample(i, bad) for i in samples])}"


def _name_sample(i: int, bad: _MicroBatch) -> str:
    shape, batch = bad.outputs["per_sample_loss"].shape, bad.batch
    text = f"sample {i}"
    if isinstance(batch, tuple | list) and len(batch) == 3 and isinstance(batch[2], Tensor):
        index = batch[2]  # of (images, labels, index)
        if index.shape == shape and not index.is_floating_point():
            text += f" (data index {int(index[i])})"
    u, t = (bad.outputs.get(name) for name in ("u", "t"))
    if u is not None and u.shape == shape:
        text += f" at u = {float(u[i]):.3f} (train/loss_q{min(int(float(u[i]) * 4), 3)})"
        text += f", t = {float(t[i]):g}" if t is not None and t.shape == shape else ""
    return text


def _join(names: Sequence[str]) -> str:
    return "; ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
