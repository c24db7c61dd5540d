"""What wins at a resume: command line, then config, then checkpoint; and what is said about it.

Lightning restores optimizer and schedule as they were saved, so that a new lr would be printed and
never used. Here, exactly what was changed is changed in the saved state, and nothing else.
"""

import warnings
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lit_diffusion.callbacks.trainer_state import loaded_checkpoint

Changes = Mapping[str, tuple[Any, Any]]
"""Dotted name of a setting -> (value in the checkpoint, value that is used)."""


def differences(saved: Any, used: Any, name: str = "model") -> dict[str, tuple[Any, Any]]:
    """Settings whose values differ, by dotted name; a changed class stands for its arguments."""
    are_lists = isinstance(saved, list | tuple) and isinstance(used, list | tuple)
    if saved == used or (are_lists and list(saved) == list(used)):  # YAML has no tuples
        return {}
    if are_lists and len(saved) == len(used) and all(isinstance(x, dict) for x in [*saved, *used]):
        saved, used = dict(enumerate(saved)), dict(enumerate(used))
    if not (isinstance(saved, dict) and isinstance(used, dict)):
        return {name: (saved, used)}
    if saved.get("class_path") != used.get("class_path"):
        return {name: (saved.get("class_path"), used.get("class_path"))}
    changes: dict[str, tuple[Any, Any]] = {}
    for key in saved.keys() & used.keys():
        below = name if key == "init_args" else f"{name}.{key}"
        changes |= differences(saved[key], used[key], below)
    return dict(sorted(changes.items()))


class PreferConfig(Callback):
    """Puts changed settings of optimizers and schedules into the state that a resume restores.

    A changed lr or schedule is what it would be had it been there from the first step: the schedule
    is built anew and run to the step of the checkpoint. Momenta and all else stay.

    Args:
        changes: of the module's settings, by dotted name; the last part of a name is the
            optimizer's own (lr, betas), and a part with "scheduler" in it marks the schedule.
    """

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        self._keys = {name.rpartition(".")[2] for name in changes}
        self._reschedule = "lr" in self._keys or any("scheduler" in name for name in changes)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Change the saved state while the fresh optimizers show what the config says."""
        saved = loaded_checkpoint(trainer)
        if not saved or not self._changes:
            return
        for name, (old, new) in self._changes.items():
            if str(old).startswith("torch.optim.") and "lr_scheduler" not in str(old):
                raise ValueError(
                    f"{name} was {old} and is now {new}, whose state the checkpoint does not hold; "
                    "resume with the same optimizer, or start a new run."
                )
        if self._reschedule:
            _replay_schedules(trainer, saved)
        changed = {*self._keys, *(("lr", "initial_lr") if self._reschedule else ())} - {"params"}
        for optimizer, state in zip(trainer.optimizers, saved["optimizer_states"], strict=True):
            for fresh, group in zip(optimizer.param_groups, state["param_groups"], strict=True):
                group.update({key: fresh[key] for key in changed & fresh.keys()})


def _replay_schedules(trainer: Trainer, saved: dict[str, Any]) -> None:
    """Run the fresh schedules to the step of the saved ones, and save them in their place."""
    states = saved["lr_schedulers"]
    for i, config in enumerate(trainer.lr_scheduler_configs):
        if isinstance(config.scheduler, ReduceLROnPlateau):
            if i == len(states):
                states.append(config.scheduler.state_dict())
            continue  # a function of past metrics cannot be replayed, only continued
        done = states[i]["last_epoch"] if i < len(states) else _steps_without(config, saved)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "step() before optimizer.step()"
            for _ in range(done):
                config.scheduler.step()
        states[i : i + 1] = [config.scheduler.state_dict()]


def _steps_without(config: LRSchedulerConfig, saved: dict[str, Any]) -> int:
    """Steps that a schedule would have done, had the saved run had it."""
    batches = saved["global_step"] // len(saved["optimizer_states"])
    counted: int = batches if config.interval == "step" else saved["epoch"]
    return counted // config.frequency
