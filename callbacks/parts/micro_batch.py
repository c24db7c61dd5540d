"""One batch of training with all that computing it again needs, and where it was not finite."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from lit_diffusion.callbacks.trainer_state import is_nonfinite
from lit_diffusion.seeding import run_seed


@dataclass
class MicroBatch:
    """A batch on one rank. Tensors are references, but for the buffers, which a step may change."""

    step: int  # optimizer steps completed before it
    epoch: int
    batch_idx: int
    rank: int
    batch: Any
    rng: dict[str, Tensor]  # states of the generators of the CPU and of the device, before it
    buffers: dict[str, Tensor]  # before it, those that batches change
    others: dict[str, tuple[Tensor, int]] = field(default_factory=dict)  # and writes into each
    timesteps: dict[str, Tensor | None] = field(default_factory=dict)  # of a `HasTimesteps`
    outputs: dict[str, Tensor] = field(default_factory=dict)  # of `training_step`, by name
    loss_is_bad: Tensor = field(default_factory=lambda: torch.tensor(False))
    gradients: tuple[Tensor, list[Tensor]] | None = None  # which are bad (N,) bool, parameters
    updates: int = 0  # made since it began

    @classmethod
    def begin(
        cls,
        trainer: Trainer,
        module: LightningModule,
        batch: Any,
        batch_idx: int,
        changing: set[str] | None = None,
    ) -> "MicroBatch":
        """What there is before the step; `changing` as `changed` tells, None where not known."""
        rng = {"cpu": torch.get_rng_state()}
        if module.device.type == "cuda":
            rng["cuda"] = torch.cuda.get_rng_state(module.device)
        named = dict(module.named_buffers())
        copied = [name for name in named if changing is None or _owner(name) in changing]
        buffers = {name: named.pop(name).detach().clone() for name in copied}
        others = {name: (buffer, _writes(buffer)) for name, buffer in named.items()}
        where = trainer.global_step, trainer.current_epoch, batch_idx, trainer.global_rank
        begun = cls(*where, batch, rng, buffers, others)
        begun.loss_is_bad = torch.zeros((), dtype=torch.bool, device=module.device)
        return begun

    def see_loss(self, loss: Tensor, module: LightningModule, scaled: bool) -> None:
        """Note a loss, and how noise levels were chosen for it; no device is waited for."""
        loss = loss.detach()
        half = scaled and loss.dtype == torch.float16  # which a GradScaler may have made infinite
        self.loss_is_bad = self.loss_is_bad | (loss.isnan() if half else ~loss.isfinite()).any()
        names = ("timestep_density", "timestep_weight")
        self.timesteps = {name: getattr(module, name) for name in names if hasattr(module, name)}

    def see_gradients(self, optimizers: Sequence[Optimizer]) -> None:
        """Note which gradients are not finite; no device is waited for."""
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        params = [p for group in groups for p in group["params"] if p.grad is not None]
        if params:
            self.gradients = is_nonfinite([param.grad for param in params]), params

    @torch.no_grad()
    def put_buffers_back(self, module: LightningModule) -> None:
        """Give the module's buffers, such as BatchNorm's, the values from before the step."""
        for name, buffer in module.named_buffers():
            if name in self.buffers:
                buffer.copy_(self.buffers[name])

    def changed(self, module: LightningModule, by_value: bool) -> set[str]:
        """Submodules of which a buffer is no longer what it was before the step.

        `by_value` compares with the copies, and waits for the device: torch does not count the
        writes of BatchNorm into its averages, nor those into `buffer.data`.
        """
        known = self.buffers if by_value else self.others
        named = module.named_buffers() if known else ()
        return {_owner(name) for name, b in named if name in known and self._differs(name, b)}

    def _differs(self, name: str, buffer: Tensor) -> bool:
        if name in self.buffers:
            return not torch.equal(buffer, self.buffers[name])
        before, writes = self.others[name]
        return buffer is not before or _writes(buffer) != writes

    def see_outputs(self, outputs: Any) -> None:
        """Note what `training_step` returned, as callbacks get it."""
        if isinstance(outputs, dict):
            found = {name: value for name, value in outputs.items() if isinstance(value, Tensor)}
            self.outputs = {str(name): value.detach() for name, value in found.items()}

    def flags(self) -> Tensor:
        """(2,) float on the device: 1 where the loss, 1 where a gradient is not finite."""
        none = torch.zeros_like(self.loss_is_bad)
        bad_gradient = none if self.gradients is None else self.gradients[0].any()
        return torch.stack([self.loss_is_bad, bad_gradient]).float()

    def badness(self) -> int:
        """2 with a loss that is not finite, 1 with a gradient, 0 with neither."""
        loss, gradient = self.flags().tolist()
        return 2 if loss else int(gradient)

    def bad_parameters(self, module: LightningModule) -> list[str]:
        """Names of the parameters whose gradients are not finite, in the module's order."""
        if self.gradients is None:
            return []
        flags, params = self.gradients
        bad = set(map(id, compress(params, flags.tolist())))
        return [name for name, param in module.named_parameters() if id(param) in bad]

    def describe(self, module: LightningModule) -> str:
        """What is not finite, and where: step, noise level, sample, parameters."""
        where = f"at optimizer step {self.step} (batch {self.batch_idx}, rank {self.rank})"
        params = dict(module.named_parameters())
        broken = list(compress(params, is_nonfinite([*params.values()]).tolist()))
        if broken:  # loaded so, or left so by something that steps past this callback
            return f"the weights were not finite before the update {where}: {_first(broken)}"
        if self.loss_is_bad:
            samples = self._samples()
            return f"the loss is not finite {where}" + (f": {samples}" if samples else "")
        names = self.bad_parameters(module)
        return f"the gradient is not finite {where}: of {_first(names)}"

    def _samples(self) -> str:
        losses = self.outputs.get("per_sample_loss")
        if losses is None or losses.ndim != 1:
            return ""
        bad = (~losses.isfinite()).nonzero().flatten().tolist()
        return _first([self._sample(i, len(losses)) for i in bad])

    def _sample(self, i: int, size: int) -> str:
        text, index = f"sample {i}", index_of(self.batch, size)
        if index is not None:
            text += f" (data index {int(index[i])})"
        u, t = (self.outputs.get(name) for name in ("u", "t"))
        if u is not None and u.shape == (size,):
            level = float(u[i])
            text += f" at u = {level:.3f} (train/loss_q{min(int(level * 4), 3)})"
            text += f", t = {float(t[i]):g}" if t is not None and t.shape == (size,) else ""
        return text

    def content(self, trainer: Trainer, module: LightningModule) -> dict[str, Any]:
        """A checkpoint with the weights as they are, and under "replay" what the step needs."""
        own = ("step", "epoch", "batch_idx", "rank", "updates", "batch", "rng")
        replay = {
            "what": self.describe(module),
            **{name: getattr(self, name) for name in (*own, "timesteps", "outputs")},
            "buffers": dict(module.named_buffers()) | self.buffers,
            "parameters": self.bad_parameters(module),
            "seed": run_seed(),
            "precision": trainer.precision,
            "precision_state": trainer.precision_plugin.state_dict(),
            "accumulate_grad_batches": trainer.accumulate_grad_batches,
            "device": module.device.type,
            "threads": torch.get_num_threads(),
            "evaluating": [name for name, part in module.named_modules() if not part.training],
            "torch": str(torch.__version__),
        }
        return {
            "state_dict": storable(dict(module.state_dict())),
            "global_step": self.step,
            "epoch": self.epoch,
            "hyper_parameters": _storable_items(module.hparams),
            "replay": storable(replay),
        }


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _writes(buffer: Tensor) -> int:
    return 0 if buffer.is_inference() else buffer._version


def index_of(batch: Any, size: int) -> Tensor | None:
    """The data set's index of each sample, of batches (images, labels, index); else None."""
    if not (isinstance(batch, tuple | list) and len(batch) == 3 and isinstance(batch[2], Tensor)):
        return None
    index = batch[2]
    return index if index.shape == (size,) and not index.is_floating_point() else None


def storable(value: Any) -> Any:
    """A copy on the CPU, of tensors and plain builtins; TypeError for anything else in it."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {storable(name): storable(item) for name, item in value.items()}
    if isinstance(value, tuple | list):
        return (tuple if isinstance(value, tuple) else list)(storable(item) for item in value)
    if value is None or type(value) in (bool, int, float, str):
        return value
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    raise TypeError(f"only tensors and plain builtins can be stored, got {name}")


def _storable_items(items: Any) -> dict[str, Any]:
    kept = {}
    for name, value in items.items():
        with suppress(TypeError):  # a module made in Python may have been given objects
            kept[str(name)] = storable(value)
    return kept


def _first(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return "; ".join(names[:3]) + more
