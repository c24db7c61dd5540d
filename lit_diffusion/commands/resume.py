"""What wins at a resume: command line, then config, then checkpoint; and what is said about it.

Lightning restores optimizer and schedule as they were saved, so that a new lr would be printed and
never used. Here, exactly what was changed is changed in the saved state, and nothing else.
"""

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

Changes = Mapping[str, tuple[Any, Any]]
"""Dotted name of a setting -> (value in the checkpoint, value that is used)."""

_STATES = {"amsgrad": "max_exp_avg_sq", "centered": "grad_avg", "momentum": "momentum_buffer"}
"""Settings of optimizers that need a state -> its name. SGD without momentum has no state at all,
and makes that of momentum when it first needs it."""


def differences(saved: Any, used: Any, name: str = "model") -> dict[str, tuple[Any, Any]]:
    """Settings whose value differs, by dotted name; a class that changed stands for its arguments.

    Args:
        saved: what the checkpoint was trained with.
        used: what this run uses.
        name: of both.

    Example:
        >>> old = {"class_path": "A", "init_args": {"lr": 0.1, "steps": 5}}
        >>> differences(old, {"class_path": "A", "init_args": {"lr": 0.001, "steps": 5}})
        {'model.lr': (0.1, 0.001)}
    """
    if saved == used or (_same_list(saved, used)):
        return {}
    if _are_specs(saved, used):
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


def tell(changes: Changes) -> None:
    """Say which settings of the checkpoint are not used."""
    for name, (old, new) in changes.items():
        rank_zero_info(f"The checkpoint had {name} {old}, using {new}.")


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
        self._checkpoint: dict[str, Any] = {}

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Remember what will be restored after `on_fit_start`."""
        self._checkpoint = checkpoint

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Change the saved state while the fresh optimizers show what the config says."""
        saved, self._checkpoint = self._checkpoint, {}
        if not saved or not self._changes:
            return
        _refuse_other_optimizer(self._changes)
        if self._reschedule:
            _replay_schedules(trainer, saved)
        for optimizer, state in zip(trainer.optimizers, saved["optimizer_states"], strict=True):
            _refuse_missing_state(self._changes, optimizer, state["state"])
            _change_groups(optimizer, state["param_groups"], self._keys, self._reschedule)


def _same_list(saved: Any, used: Any) -> bool:
    """A tuple and the list that YAML makes of it."""
    kinds = (list, tuple)
    return isinstance(saved, kinds) and isinstance(used, kinds) and list(saved) == list(used)


def _are_specs(saved: Any, used: Any) -> bool:
    """Two lists of as many objects, such as callbacks."""
    lists = isinstance(saved, list) and isinstance(used, list) and len(saved) == len(used)
    return lists and all(isinstance(item, dict) for item in [*saved, *used])


def _refuse_other_optimizer(changes: Changes) -> None:
    for name, (old, new) in changes.items():
        if str(old).startswith("torch.optim.") and "lr_scheduler" not in str(old):
            raise ValueError(_not_held(name, old, new))


def _refuse_missing_state(
    changes: Changes, optimizer: Optimizer, state: Mapping[Any, Mapping[str, Any]]
) -> None:
    """Refuse settings that need a state which an optimizer has from its first step on."""
    for name, (old, new) in changes.items():
        key = name.rpartition(".")[2]
        wanted = any(group.get(key) for group in optimizer.param_groups)
        needed = _STATES.get(key)
        if wanted and needed and any(needed not in held for held in state.values()):
            raise ValueError(_not_held(name, old, new))


def _not_held(name: str, old: Any, new: Any) -> str:
    return (
        f"{name} was {old} and is now {new}, whose state the checkpoint does not hold; "
        "resume with the same optimizer, or start a new run."
    )


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
    counted = batches if config.interval == "step" else saved["epoch"]
    return int(counted) // config.frequency


def _change_groups(
    optimizer: Optimizer, saved: list[dict[str, Any]], keys: Iterable[str], reschedule: bool
) -> None:
    changed = {*keys, *(("lr", "initial_lr") if reschedule else ())} - {"params"}
    for fresh, group in zip(optimizer.param_groups, saved, strict=True):
        group.update({key: fresh[key] for key in changed & fresh.keys()})
