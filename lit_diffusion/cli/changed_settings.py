"""Settings that differ from those of the checkpoint: command line and config win over it.

Lightning restores optimizers and schedulers as they were saved, so that a new lr would be printed
and never used. Here, what was changed is changed in the saved state, and nothing else.
"""

import warnings
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lit_diffusion.callbacks.trainer_state import loaded_checkpoint

ChangedSettings = Mapping[str, tuple[Any, Any]]
"""Dotted name of a setting -> (value in the checkpoint, value that is used)."""


def differences(saved: Any, used: Any, name: str = "model") -> dict[str, tuple[Any, Any]]:
    """Settings whose values differ, by dotted name: (saved, used).

    Of objects of different classes, the class paths are the difference. Settings that only one side
    has are left out, as after an update that added an argument.
    """
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


class ApplyChangedHyperparameters(Callback):
    """Puts changed settings of optimizers and schedulers into the state that a resume restores.

    The lr is what it would be had the changed lr or schedule been there from the first step: the
    schedule is built anew and run to the step of the checkpoint. Momenta and all else stay.

    Args:
        changed: settings of the module. The last part of a name is an argument of the optimizer
            (lr, betas), and a name with "scheduler" in it is of the schedule.
    """

    def __init__(self, changed: ChangedSettings) -> None:
        self._changed = changed
        self._arguments = {name.rpartition(".")[2] for name in changed}
        self._reschedule = "lr" in self._arguments or any("scheduler" in name for name in changed)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Change the loaded checkpoint, to what the newly built optimizers have."""
        checkpoint = loaded_checkpoint(trainer)
        if not checkpoint or not self._changed:
            return
        for name, (old, new) in self._changed.items():
            if str(old).startswith("torch.optim.") and "lr_scheduler" not in str(old):
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


def _replay_schedules(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """Run the newly built schedulers to the step of the checkpoint, and replace its states."""
    states = checkpoint["lr_schedulers"]
    for i, config in enumerate(trainer.lr_scheduler_configs):
        if isinstance(config.scheduler, ReduceLROnPlateau):
            if i == len(states):
                states.append(config.scheduler.state_dict())
            continue  # a function of past metrics cannot be replayed, only continued
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
