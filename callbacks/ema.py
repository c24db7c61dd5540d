"""Exponential moving averages of weights: which weights a number comes from is never in doubt."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lit_diffusion.callbacks.parts.averages import Group, RawWeights, overwrite_, span_decay
from lit_diffusion.callbacks.trainer_state import (
    gather_state,
    is_state_init_step,
    isinstance_lightning,
    refuse_split_weights,
    refuse_strategy,
    refuse_unhooked,
    reshard,
    should_log,
)
from lit_diffusion.checkpoints.averages import (
    Averaged,
    changed_decays,
    check_averages,
    pack,
    unpack,
)

RAW = "raw"


class EMA(Callback):
    """Averages the trainable weights, and validates, tests and predicts with the averages.

    After each step of the optimizer that holds it: shadow = decay * shadow + (1 - decay) * weight.

    - Averaged is every parameter under `prefix` that requires a gradient and that an optimizer
      holds: shared ones once, those unfrozen or added later from then on, in float32 or wider. Each
      optimizer counts its own steps, so the networks of a GAN are averaged at their own pace.
      Accumulated batches and steps that a GradScaler skips do not count.
    - Weights that ModelParallelStrategy splits are averaged part by part. Saves gather the averages
      on rank 0; for this and for `weights()` all ranks are needed.
    - Validation, test and predict use the first decay, swapped in place and back; inside
      `weights(name)`, what that has put in place. Before the first update they use the weights.
    - `LightningModule.state_dict()` is raw, also while averages are in place, and with it every
      checkpoint; read averages from parameters or submodules. Checkpoints hold them under
      `checkpoint["callbacks"][ema.state_key]` as `checkpoints.averages.pack` arranges them.
    - On resume these arguments win over the checkpoint's; a change of decays is printed.
    - The averages go with the module object. Where its weights are replaced by hand, take another
      EMA, or give the Trainer a `ckpt_path`.
    - An average that is not finite is refused, by name, where it would be used, saved or logged.

    Args:
        decays: one or more, per optimizer step, in [0, 1). 0.9999 halves the past in 6,931 steps.
        warmup: limit the decay of step n to (1 + n) / (10 + n).
        every_n_steps: optimizer steps from one update to the next, which has their decays' product.
        prefix: submodule that is averaged, such as "network"; "" for all. Two EMA callbacks need
            prefixes of which neither contains the other.
        start: optimizer steps in which the averages are still the weights; `warmup` counts from
            there.
        buffers: whether buffers of floating point numbers under `prefix` are averaged too, such as
            the running statistics of BatchNorm, with each step of the first optimizer that has
            something to average. The vectors of spectral norm stay those of the weights.
        on_cpu: whether averages are kept in the CPU's memory, to which weights are copied at each
            update: slower, and no memory of the GPU.

    Raises:
        ValueError: bad arguments; at the start of a run, a prefix without parameters, overlapping
            EMAs, a strategy that is not supported, or a checkpoint whose averages do not fit.

    Source: Polyak & Juditsky 1992, "Acceleration of stochastic approximation by averaging".

    Example:
        >>> EMA(decays=(0.999, 0.9999)).names()
        ['raw', 'ema', 'ema_0.999', 'ema_0.9999']
    """

    _kind = "ema"

    def __init__(
        self,
        decays: tuple[float, ...] | float = (0.9999,),
        warmup: bool = True,
        every_n_steps: int = 1,
        prefix: str = "",
        start: int = 0,
        buffers: bool = False,
        on_cpu: bool = False,
    ) -> None:
        self.decays = (decays,) if isinstance(decays, float) else tuple(decays)
        self.warmup = warmup
        self.every_n_steps = every_n_steps
        self.prefix = prefix.rstrip(".")
        self.start = start
        self.buffers = buffers
        self.on_cpu = on_cpu
        self._names = [RAW, "ema", *(f"{self._kind}_{decay:g}" for decay in self.decays)]
        if not self.decays or not all(0 <= decay < 1 for decay in self.decays):
            raise ValueError(f"decays must be one or more numbers in [0, 1), got {self.decays}.")
        if len(set(self._names)) < len(self._names):
            raise ValueError(f"decays must differ in their first 6 digits, got {self.decays}.")
        if self.every_n_steps < 1:
            raise ValueError(f"every_n_steps must be at least 1, got {self.every_n_steps}.")
        if self.start < 0:
            raise ValueError(f"start must be at least 0, got {self.start}.")
        self._module: LightningModule | None = None
        self._groups: list[Group] = []
        self._loaded: dict[str, Any] = {}  # read from a checkpoint, not yet taken up
        self._waiting: dict[str, Averaged] = {}  # of parameters that are not trained yet
        self._seen: dict[int, Tensor] = {}  # parameters, averaged or outside the prefix, by id
        self._step_hooks: list[RemovableHandle] = []
        self._active = self._outside = RAW  # weights in place: now, outside of the evaluation
        self._raw = RawWeights()

    @property
    def steps(self) -> int:
        """Optimizer steps since the averages began; of several optimizers, the most."""
        steps = [group.steps for group in self._groups]
        return max([*steps, *(average.steps for average in self._waiting.values())], default=0)

    # Weights by name

    def names(self) -> list[str]:
        """Names of weights: raw, ema (the first decay) and ema_<decay> for each."""
        return list(self._names)

    @contextmanager
    def weights(self, name: str) -> Iterator[None]:
        """Context in which the module's parameters hold the named weights. Contexts may be nested.

        Args:
            name: one of `names()`. Before the first update each of them gives the raw weights.
        """
        if name not in self._names:
            raise ValueError(f"EMA knows the weights {self._names}, got {name!r}.")
        if name != RAW and not self._groups:
            raise RuntimeError(
                f"EMA holds no averages, so there is no {name!r}: fit first, or give the Trainer a "
                "checkpoint that was written with EMA."
            )
        previous = self._active
        try:
            self._activate(name)
            yield
        finally:
            self._activate(previous)

    def _activate(self, name: str) -> None:
        if name == self._active:
            return
        if name == RAW:
            self._raw.put_back()
            self._active = RAW  # last: interrupted at any instant, `_activate(RAW)` repairs
        else:
            self._put_average(name)

    def _put_average(self, name: str) -> None:
        self._renew_buffers()
        updated = [group for group in self._groups if group.steps >= self.every_n_steps]
        for group in updated:
            group.refuse_nonfinite()
        previous, self._active = self._active, name
        if previous == RAW:
            assert self._module is not None
            self._raw.keep(self._module, [p for group in updated for p in group.params])
        which = max(self._names.index(name) - 2, 0)
        for group in updated:
            overwrite_(group.params, group.shadows[which])

    def _refuse_others_in_place(self) -> None:
        if self._active != RAW:
            raise RuntimeError(
                f"The weights {self._active!r} are in place, and what is loaded or trained now "
                "would be lost; leave EMA.weights() first."
            )

    # Following the optimizers

    def _follow(self, trainer: Trainer, module: LightningModule) -> None:
        self._forget_if_replaced(trainer)
        from_checkpoint = bool(self._loaded)
        self._waiting = self._take_up(module)
        known = set(self._waiting)
        self._unfollow()
        self._groups = [self._group() for _ in trainer.optimizers]
        self._seen = {}
        for optimizer, group in zip(trainer.optimizers, self._groups, strict=True):
            refuse_unhooked(optimizer)
            self._adopt(optimizer, group)
            pairs = zip(group.names, group.params, strict=True)
            missing = [n for n, p in pairs if n not in known and isinstance(p, Parameter)]
            if from_checkpoint and missing:
                raise ValueError(
                    f"The checkpoint's EMA holds no average of the parameter {missing[0]!r}, which "
                    "is trained now. Resume with the module that wrote it, or freeze the parameter "
                    "until training has started."
                )
            self._step_hooks += [
                optimizer.register_step_pre_hook(partial(self._before_step, group)),
                optimizer.register_step_post_hook(partial(self._after_step, group)),
            ]
        if not any(group.params for group in self._groups):
            rank_zero_warn(
                f"No optimizer holds a trainable parameter under EMA(prefix={self.prefix!r}) yet: "
                "there is nothing to average until one does."
            )

    def _group(self, steps: int = 0) -> Group:
        return Group(self.decays, steps, self.on_cpu, self._span)

    def _span(self, decay: float, first: int, last: int) -> float:
        return span_decay(decay, first, last, self.warmup)

    def _unfollow(self) -> None:
        for hook in self._step_hooks:
            hook.remove()
        self._step_hooks = []

    def _take_up(self, module: LightningModule) -> dict[str, Averaged]:
        """Known averages: of the checkpoint, else of an earlier run on the same module."""
        self._refuse_others_in_place()
        state = self._loaded or (self._packed() if module is self._module else {})
        self._module = module
        params = self._parameters()
        self._loaded = {}
        if not state:
            return {}
        for change in changed_decays(state, self.decays):
            rank_zero_info(change)
        known = unpack(state, self.decays, self._named_buffers() | params)
        if left := known.keys() - params.keys():
            rank_zero_info(f"EMA averages no such buffers: {len(left)} averages are dropped.")
        if new := [n for n, p in params.items() if not isinstance(p, Parameter) and n not in known]:
            rank_zero_info(f"EMA(buffers=True): averages of {len(new)} buffers start from these.")
        return {name: average for name, average in known.items() if name in params}

    def _adopt(self, optimizer: Optimizer, group: Group) -> None:
        new = {
            id(param): param
            for entry in optimizer.param_groups
            for param in entry["params"]
            if id(param) not in self._seen and param.requires_grad
        }
        if not new:
            return
        self._seen |= new
        for name, param in self._parameters().items():
            if id(param) in new:
                known = self._waiting.pop(name, None)
                if known:
                    group.steps = max(group.steps, known.steps)
                group.add(name, param, known)
        averaged = {name for each in self._groups for name in each.names}
        for name, buffer in self._buffers().items() if self.buffers and group.params else ():
            if name not in averaged:
                group.add(name, buffer, self._waiting.pop(name, None))

    def _buffers(self) -> dict[str, Tensor]:
        """Buffers to average: floating point numbers that a checkpoint holds, no masks of -inf.

        The singular vectors of spectral norm are not averaged: sums of unit vectors are shorter.
        """
        assert self._module is not None
        saved = {_plain(name) for name in self._module.state_dict()}
        return {
            name: buffer
            for name, buffer in self._named_buffers().items()
            if name in saved and _is_under(name, self.prefix)
            if buffer.is_floating_point() and buffer.isfinite().all()
            if not _is_singular_vector(name, saved)
        }

    def _named_buffers(self) -> dict[str, Tensor]:
        assert self._module is not None
        return {_plain(name): buffer for name, buffer in self._module.named_buffers()}

    def _renew_buffers(self) -> None:
        """Find buffers again that modules have replaced, as `.to(device)` does, by their names."""
        if self.buffers:
            now = self._named_buffers()
            for group in self._groups:
                pairs = zip(group.names, group.params, strict=True)
                group.params = [now.get(name, param) for name, param in pairs]

    def _parameters(self) -> dict[str, Tensor]:
        """What is averaged, by a name that torch.compile does not change."""
        assert self._module is not None
        reshard(self._module)
        named: dict[str, Tensor] = {
            _plain(name): param for name, param in self._module.named_parameters()
        }
        found = {name: param for name, param in named.items() if _is_under(name, self.prefix)}
        if not found:
            children = sorted({name.split(".")[0] for name in named})
            raise ValueError(
                f"EMA(prefix={self.prefix!r}) fits no parameter; the module's are under {children}."
            )
        return found | (self._buffers() if self.buffers else {})

    def _before_step(self, group: Group, optimizer: Optimizer, _args: Any, kwargs: Any) -> None:
        if is_state_init_step(optimizer, kwargs):
            return
        self._refuse_others_in_place()
        self._adopt(optimizer, group)
        if group.steps == 0:
            group.restart()  # weights may have been loaded after fit start

    def _after_step(self, group: Group, optimizer: Optimizer, _args: Any, kwargs: Any) -> None:
        # A GradScaler has fused optimizers skip a step inside, and does not call step() of others.
        params = (param for entry in optimizer.param_groups for param in entry["params"])
        skipped = getattr(optimizer, "found_inf", None) or all(p.grad is None for p in params)
        if not skipped and not is_state_init_step(optimizer, kwargs):
            self._renew_buffers()
            group.advance(self.every_n_steps, self.start)

    # State

    @property
    def state_key(self) -> str:
        """Key in `checkpoint["callbacks"]`; without the decays, which may change on resume."""
        return f"{type(self).__qualname__}{ {'prefix': self.prefix} }"

    def state_dict(self) -> dict[str, Any]:
        """The averages as `checkpoints.averages.pack` arranges them; empty where there are none.

        Of split weights, whole ones on rank 0 and nothing on the others; all of them must ask.
        """
        return gather_state(self._packed())

    def _packed(self) -> dict[str, Any]:
        if self._loaded or not self._groups:
            return self._loaded  # kept as read, should a save come before the run begins
        averages = dict(self._waiting)
        for group in self._groups:
            group.refuse_nonfinite()
            averages |= group.averages()
        return pack(averages, self.decays)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the averages for the run that starts; in one that runs, go back to them."""
        try:
            check_averages(state_dict)
        except ValueError as error:
            raise ValueError(f"The checkpoint's state of EMA is damaged: {error}.") from None
        self._loaded = state_dict
        if self._step_hooks:  # restored in mid-fit, as a search for an lr does when it is done
            assert self._module is not None
            self._follow(self._module.trainer, self._module)

    # Lightning hooks

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse what cannot work before anything is loaded."""
        self._loaded = {}
        refuse_strategy(trainer, "EMA")
        for other in trainer.callbacks:  # type: ignore[attr-defined]
            if not isinstance(other, EMA) or other is self:
                continue
            if _is_under(self.prefix, other.prefix) or _is_under(other.prefix, self.prefix):
                raise ValueError(
                    f"EMA(prefix={self.prefix!r}) and EMA(prefix={other.prefix!r}) average the "
                    "same parameters; give one EMA several decays instead."
                )

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make the shadows on the module's device, or take those of the checkpoint."""
        for callback in trainer.checkpoint_callbacks:
            if isinstance_lightning(callback, ModelCheckpoint) and callback.save_weights_only:
                rank_zero_warn(
                    "ModelCheckpoint(save_weights_only=True) writes the raw weights only; the "
                    "averages of EMA will not be in its files."
                )
        refuse_split_weights(trainer, pl_module, "EMA")
        self._unfollow()
        if not trainer.strategy.restore_checkpoint_after_setup:
            self._follow(trainer, pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin under a strategy that has read the checkpoint only now."""
        if trainer.strategy.restore_checkpoint_after_setup and not self._step_hooks:
            self._follow(trainer, pl_module)

    on_sanity_check_start = on_train_start

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Log the decay, and look at the averages, as often as Lightning logs."""
        if self.steps and should_log(trainer):
            for group in self._groups:
                group.refuse_nonfinite()
            name = f"ema/decay_{self.prefix}" if self.prefix else "ema/decay"
            n = self.steps - self.start
            decay = self._span(self.decays[0], n - 1, n) if n > 0 else 0.0
            pl_module.log(name, decay)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say so where no step was seen."""
        if trainer.global_step and not any(group.steps for group in self._groups):
            rank_zero_warn(
                f"EMA saw none of {trainer.global_step} optimizer steps, so there are no averages. "
                "An optimizer that steps another one inside it, or clears gradients as it steps, "
                "hides its steps."
            )

    def _forget_if_replaced(self, trainer: Trainer) -> None:
        """Averages in memory are not those of weights from a checkpoint that came without any."""
        if trainer.ckpt_path is not None and not self._loaded:
            self._module, self._groups, self._waiting = None, [], {}

    def _take_up_to_evaluate(self, module: LightningModule) -> None:
        known = self._take_up(module)
        params = self._parameters()
        groups: dict[int, Group] = {}
        for name, average in known.items():
            group = groups.setdefault(average.steps, self._group(average.steps))
            group.add(name, params[name], average)
        self._groups = list(groups.values())
        self._waiting = {}

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Validate, test and predict with the averages."""
        if trainer.state.fn != TrainerFn.FITTING:
            self._forget_if_replaced(trainer)
            if self._loaded or pl_module is not self._module:
                self._take_up_to_evaluate(pl_module)
        self._outside = self._active
        if not self._groups:
            rank_zero_warn(
                "EMA holds no averages (none in the checkpoint, or neither a checkpoint nor a fit "
                "before): the weights are used as they are."
            )
        elif self._active == RAW:
            self._activate("ema")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the weights back."""
        self._activate(self._outside)

    on_test_start = on_predict_start = on_validation_start
    on_test_end = on_predict_end = on_validation_end

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Put the raw weights back and let go of the optimizers."""
        self._activate(RAW)
        self._unfollow()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Let go of the optimizers."""
        self._unfollow()


def _plain(name: str) -> str:
    """As it is without torch.compile."""
    return name.replace("_orig_mod.", "")


def _is_under(name: str, prefix: str) -> bool:
    return prefix in ("", name) or name.startswith(prefix + ".")


def _is_singular_vector(name: str, saved: Collection[str]) -> bool:
    """Whether a buffer is of torch's spectral norm, as a parametrization or as a hook."""
    if name[-2:] not in ("_u", "_v"):
        return False
    return ".parametrizations." in f".{name}" or f"{name[:-2]}_orig" in saved
