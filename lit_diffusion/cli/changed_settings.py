"""Find the settings of a resumed run that differ from the settings in its checkpoint.

Lightning restores optimizers and schedulers as they were saved, so a new lr in the config would
have no effect. The callback in this file writes the changed settings, and nothing else, into the
restored state.
"""

import warnings
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lit_diffusion.callbacks.trainer_state import is_count, loaded_checkpoint

ChangedSettings = Mapping[str, tuple[Any, Any]]
"""Dotted name of a setting -> (value in the checkpoint, present value)."""


LEARNING_RATES = ("lr", "adamw_lr")
"""Arguments of optimizers that are the lr of a param group."""
OPTIMIZERS = ("torch.optim.", "lit_diffusion.optimizers.")
"""Modules of optimizers."""


def differences(saved: Any, used: Any, name: str = "model") -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ, as {dotted name: (saved value, used value)}.

    If the object in the checkpoint and the object in use have different classes, the result has
    their class paths, but none of their arguments. A setting is ignored if only one of the objects
    has it, because a newer version of the library may have added an argument.
    """
    are_lists = isinstance(saved, list | tuple) and isinstance(used, list | tuple)
    if saved == used or (are_lists and list(saved) == list(used)):  # YAML has no tuples
        return {}
    if saved != saved and used != used:  # two nan
        return {}
    if are_lists and len(saved) == len(used) and all(isinstance(x, dict) for x in [*saved, *used]):
        saved, used = dict(enumerate(saved)), dict(enumerate(used))
    if not (isinstance(saved, dict) and isinstance(used, dict)):
        return {name: (saved, used)}
    if saved.get("class_path") != used.get("class_path"):
        return {name: (saved.get("class_path"), used.get("class_path"))}
    changes: dict[str, tuple[Any, Any]] = {}
    for key in saved.keys() & used.keys():
        child = name if key == "init_args" else f"{name}.{key}"
        changes |= differences(saved[key], used[key], child)
    return dict(sorted(changes.items()))


class ApplyChangedHyperparameters(Callback):
    """Writes changed settings of optimizers and schedulers into the state that a resume restores.

    If the lr or the schedule has changed, a new scheduler is advanced to the step of the
    checkpoint, as if the run had used it from the start. Momentum buffers and all other state stay
    as they were saved.

    Args:
        changed: changed settings of the module, by dotted name. If a name contains "scheduler", the
            setting belongs to the lr scheduler. Otherwise, the last part of the name is an argument
            of the optimizer, such as lr or betas.
    """

    def __init__(self, changed: ChangedSettings) -> None:
        self._changed = changed
        self._arguments = {name.rpartition(".")[2] for name in changed}
        has_lr = not self._arguments.isdisjoint(LEARNING_RATES)
        self._reschedule = has_lr or any("scheduler" in name for name in changed)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Apply the changes to the checkpoint, if Lightning has already loaded it."""
        if checkpoint := loaded_checkpoint(trainer):
            self._apply(trainer, checkpoint)
        self._new_groups = [_copy_groups(optimizer) for optimizer in trainer.optimizers]

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Apply the changes if the strategy loads optimizers after its setup, as FSDP does."""
        if not trainer.strategy.restore_checkpoint_after_setup:
            return
        loaded = [_copy_groups(optimizer) for optimizer in trainer.optimizers]
        _update_groups(trainer, self._new_groups)
        checkpoint["optimizer_states"] = [{"param_groups": groups} for groups in loaded]
        self._apply(trainer, checkpoint)
        _update_groups(trainer, loaded)

    def _apply(self, trainer: Trainer, checkpoint: dict[str, Any]) -> None:
        """Copy the changed options of the new optimizers into the checkpoint."""
        schedulers: list[Any] = [config.scheduler for config in trainer.lr_scheduler_configs]
        for scheduler, state in zip(schedulers, checkpoint["lr_schedulers"], strict=False):
            is_known = type(scheduler).__module__.startswith(("torch.", "lit_diffusion."))
            if is_known and (damaged := _find_damage(state, scheduler.state_dict())):
                raise ValueError(
                    f"{trainer.ckpt_path} has {damaged} in the state of its lr scheduler, but a "
                    f"{type(scheduler).__name__} never saves this; resume from another checkpoint."
                )
        if not self._changed:
            return
        for name, (old, new) in self._changed.items():
            if str(old).startswith(OPTIMIZERS) and "lr_scheduler" not in str(old):
                raise ValueError(
                    f"{name} was {old} and is now {new}, whose state the checkpoint does not hold; "
                    "resume with the same optimizer, or start a new run."
                )
        if self._reschedule:
            _replay_schedules(trainer, checkpoint)
        keys = {*self._arguments, *(("lr", "initial_lr") if self._reschedule else ())} - {"params"}
        for optimizer, state in zip(
            trainer.optimizers, checkpoint["optimizer_states"], strict=True
        ):
            for new, group in zip(optimizer.param_groups, state["param_groups"], strict=True):
                group.update({key: new[key] for key in keys & new.keys()})


def _copy_groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The options of each parameter group."""
    return [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def _update_groups(trainer: Trainer, groups: list[list[dict[str, Any]]]) -> None:
    for optimizer, options in zip(trainer.optimizers, groups, strict=True):
        for group, values in zip(optimizer.param_groups, options, strict=True):
            group.update(values)


def _find_damage(saved: Any, new: Any, name: str = "state") -> str | None:
    """Return "name=value" for the first value whose type differs from a new scheduler's."""
    if name == "lr_lambdas":  # None for a function
        return None
    if isinstance(saved, list | tuple) and isinstance(new, list | tuple):
        saved, new = dict(enumerate(saved)), dict(enumerate(new))
    if isinstance(saved, dict) and isinstance(new, dict):
        parts = (_find_damage(saved[key], new[key], f"{key}") for key in saved.keys() & new.keys())
        return next(filter(None, parts), None)
    types: list[Any] = [int | float, dict, list | tuple]
    is_damaged = any(isinstance(new, each) and not isinstance(saved, each) for each in types)
    # SequentialLR saves -1 for a schedule that has not begun.
    is_damaged |= name in ("last_epoch", "_step_count") and not is_count(saved) and saved != -1
    return f"{name}={saved!r:.50}" if is_damaged else None


def _replay_schedules(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """Run the new schedulers to the step of the checkpoint, and replace its scheduler states."""
    states = checkpoint["lr_schedulers"]
    for i, config in enumerate(trainer.lr_scheduler_configs):
        if isinstance(config.scheduler, ReduceLROnPlateau):
            if i == len(states):
                states.append(config.scheduler.state_dict())
            continue  # depends on past metrics, so it cannot be replayed
        if i < len(states):
            steps = states[i]["last_epoch"]
        else:  # the saved run had no scheduler
            batches = checkpoint["global_step"] // len(checkpoint["optimizer_states"])
            steps = batches if config.interval == "step" else checkpoint["epoch"]
            steps //= config.frequency
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "step() before optimizer.step()"
            for _ in range(steps):
                config.scheduler.step()
        states[i : i + 1] = [config.scheduler.state_dict()]
