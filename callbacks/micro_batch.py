"""One batch of training with all that computing it again needs, and where it was not finite."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from lit_diffusion.callbacks.finite import nonfinite
from lit_diffusion.protocols import HasTimesteps

QUARTILES = 4
"""Of noise levels, by which losses are logged as train/loss_q0, ..."""

_SHOWN = 3


@dataclass
class MicroBatch:
    """A batch on one rank. Tensors are references, but for the buffers, which a step may change.

    Attributes:
        step: optimizer steps completed before it.
        epoch: number of the epoch.
        batch_idx: its number in the epoch.
        rank: of this process.
        batch: as `training_step` got it.
        rng: states of torch's generators, of the CPU and of the device, before it.
        buffers: of the module before it.
        timesteps: what callbacks had set for it on a `protocols.HasTimesteps`.
        outputs: tensors that `training_step` returned, by name; "loss" where it returned one.
        loss_is_bad: () bool on the device; None before any loss.
        gradients: (N,) bool on the device, whether each parameter's gradient is not finite, and the
            parameters; None before it is known.
        updates: optimizer steps made since it began.
        device: of the module.
    """

    step: int
    epoch: int
    batch_idx: int
    rank: int
    batch: Any
    rng: dict[str, Tensor]
    buffers: dict[str, Tensor]
    timesteps: dict[str, Tensor | None] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    loss_is_bad: Tensor | None = None
    gradients: tuple[Tensor, list[Tensor]] | None = None
    updates: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @classmethod
    def begin(
        cls, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int
    ) -> "MicroBatch":
        """What there is before the step."""
        rng = {"cpu": torch.get_rng_state()}
        if module.device.type == "cuda":
            rng["cuda"] = torch.cuda.get_rng_state(module.device)
        buffers = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
        rank = trainer.global_rank
        begun = cls(
            trainer.global_step, trainer.current_epoch, batch_idx, rank, batch, rng, buffers
        )
        begun.device = module.device
        return begun

    def see_loss(self, loss: Tensor, module: LightningModule, scaled: bool) -> None:
        """Note a loss, and how noise levels were chosen for it; no device is waited for.

        Args:
            loss: of any shape.
            module: that it is of.
            scaled: whether a GradScaler has multiplied it, which may have made a half infinite.
        """
        loss = loss.detach()
        half = scaled and loss.dtype == torch.float16
        bad = (loss.isnan() if half else ~loss.isfinite()).any()
        self.loss_is_bad = bad if self.loss_is_bad is None else self.loss_is_bad | bad
        if isinstance(module, HasTimesteps):
            names = ("timestep_density", "timestep_weight")
            self.timesteps = {name: getattr(module, name) for name in names}

    def see_gradients(self, optimizers: Sequence[Optimizer]) -> None:
        """Note which gradients are not finite; no device is waited for."""
        params = [
            p
            for optimizer in optimizers
            for group in optimizer.param_groups
            for p in group["params"]
        ]
        params = [param for param in params if param.grad is not None]
        if params:
            self.gradients = nonfinite([param.grad for param in params]), params

    @torch.no_grad()
    def put_buffers_back(self, module: LightningModule) -> None:
        """Give the module's buffers, such as BatchNorm's, the values from before the step."""
        for name, buffer in module.named_buffers():
            if name in self.buffers:
                buffer.copy_(self.buffers[name])

    def see_outputs(self, outputs: Any) -> None:
        """Note what `training_step` returned, as callbacks get it."""
        if isinstance(outputs, dict):
            found = {name: value for name, value in outputs.items() if isinstance(value, Tensor)}
            self.outputs = {str(name): value.detach() for name, value in found.items()}

    def flags(self) -> Tensor:
        """(2,) float on the device: 1 where the loss, 1 where a gradient is not finite."""
        bad_gradient = None if self.gradients is None else self.gradients[0].any()
        zero = torch.zeros((), device=self.device)
        return torch.stack(
            [zero if f is None else f.float() for f in (self.loss_is_bad, bad_gradient)]
        )

    def bad_parameters(self, module: LightningModule) -> list[str]:
        """Names of the parameters whose gradients are not finite, in the module's order."""
        if self.gradients is None:
            return []
        flags, params = self.gradients
        pairs = zip(params, flags.tolist(), strict=True)
        bad = {id(param) for param, is_bad in pairs if is_bad}
        return [name for name, param in module.named_parameters() if id(param) in bad]

    def describe(self, module: LightningModule) -> str:
        """What is not finite, and where: step, noise level, sample, parameters."""
        where = f"at optimizer step {self.step} (batch {self.batch_idx}, rank {self.rank})"
        if self.loss_is_bad is not None and self.loss_is_bad:
            samples = self._samples()
            return f"the loss is not finite {where}" + (f": {samples}" if samples else "")
        names = self.bad_parameters(module)
        return f"the gradient is not finite {where}: of {_first(names)}"

    def _samples(self) -> str:
        """The samples whose losses are not finite; empty for a module that does not tell."""
        losses = self.outputs.get("per_sample_loss")
        if losses is None or losses.ndim != 1:
            return ""
        bad = (~losses.isfinite()).nonzero().flatten().tolist()
        return _first([self._sample(i, len(losses)) for i in bad[: _SHOWN + 1]], len(bad))

    def _sample(self, i: int, size: int) -> str:
        text, index = f"sample {i}", index_of(self.batch, size)
        if index is not None:
            text += f" (data index {int(index[i])})"
        u, t = (self.outputs.get(name) for name in ("u", "t"))
        if u is not None and u.shape == (size,):
            level = float(u[i])
            text += f" at u = {level:.3f} (train/loss_q{min(int(level * QUARTILES), 3)})"
            text += f", t = {float(t[i]):g}" if t is not None and t.shape == (size,) else ""
        return text

    def content(self, trainer: Trainer, module: LightningModule) -> dict[str, Any]:
        """A checkpoint with the weights as they are, and under "replay" what the step needs.

        Raises:
            TypeError: for a batch that is not made of tensors and plain builtins.
        """
        seed = os.environ.get("PL_GLOBAL_SEED")
        own = ("step", "epoch", "batch_idx", "rank", "updates", "batch", "rng", "buffers")
        replay = {
            "what": self.describe(module),
            **{name: getattr(self, name) for name in (*own, "timesteps", "outputs")},
            "parameters": self.bad_parameters(module),
            "seed": None if seed is None else int(seed),
            "precision": trainer.precision,
            "precision_state": trainer.precision_plugin.state_dict(),
            "accumulate_grad_batches": trainer.accumulate_grad_batches,
            "device": module.device.type,
            "threads": torch.get_num_threads(),
            "evaluating": [name for name, part in module.named_modules() if not part.training],
            "torch": str(torch.__version__),
        }
        content: dict[str, Any] = storable(
            {
                "state_dict": dict(module.state_dict()),
                "global_step": self.step,
                "epoch": self.epoch,
                "hyper_parameters": _storable_items(module.hparams),
                "replay": replay,
            }
        )
        return content


def index_of(batch: Any, size: int) -> Tensor | None:
    """The data set's index of each sample, of batches (images, labels, index); else None.

    Example:
        >>> index_of((torch.zeros(2, 1), torch.zeros(2), torch.tensor([7, 9])), 2)
        tensor([7, 9])
    """
    if not (isinstance(batch, tuple | list) and len(batch) == 3 and isinstance(batch[2], Tensor)):
        return None
    index = batch[2]
    return index if index.shape == (size,) and not index.is_floating_point() else None


def storable(value: Any) -> Any:
    """A copy on the CPU, of tensors and plain builtins.

    Raises:
        TypeError: for anything else in it.

    Example:
        >>> storable({"x": (torch.ones(1), 2, None)})
        {'x': (tensor([1.]), 2, None)}
    """
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {storable(name): storable(item) for name, item in value.items()}
    if isinstance(value, tuple | list):
        return (tuple if isinstance(value, tuple) else list)(storable(item) for item in value)
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise TypeError(
        f"only tensors and plain builtins can be stored, got {type(value).__module__}."
        f"{type(value).__qualname__}"
    )


def _storable_items(items: Any) -> dict[str, Any]:
    """Those that can be stored: a module made in Python may have been given objects."""
    kept = {}
    for name, value in items.items():
        try:
            kept[str(name)] = storable(value)
        except TypeError:
            continue
    return kept


def _first(names: Sequence[str], total: int | None = None) -> str:
    total = len(names) if total is None else total
    more = f" and {total - _SHOWN} more" if total > _SHOWN else ""
    return "; ".join(names[:_SHOWN]) + more
