"""Lightning's ModelCheckpoints in a run that goes on: their files are those of one that did not."""

import os
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lit_diffusion.checkpoints.reading import saved_step
from lit_diffusion.system.trainer_state import files_of, put_unsaved_state, unsaved_state


def unsaved_states(trainer: Trainer) -> dict[str, dict[str, Any]]:
    """Of each, with which step it saved last, and whether it waits for a validation to save."""
    return {each.state_key: unsaved_state(each) for each in _all(trainer)}


def restore(trainer: Trainer, states: dict[str, dict[str, Any]]) -> None:
    """Put `unsaved_states` in place, when Lightning has restored the rest; find files to replace.

    Files that the run saved before it was interrupted, after the checkpoint from which it goes on,
    pass for others' files there: the same step would be saved beside its old file, as -v1. Here
    that one is replaced.
    """
    found = _all(trainer)
    for each in found:
        put_unsaved_state(each, states.get(each.state_key, {}))
    known = {os.path.abspath(file) for each in found for file in files_of(each)}
    folders = {os.path.abspath(each.dirpath) for each in found if each.dirpath}
    files = {str(file) for folder in folders for file in Path(folder).glob("*.ckpt")} - known
    undone = {file for file in files if saved_step(file) >= trainer.global_step}
    for each in found:
        vars(each)["file_exists"] = partial(_exists, undone, each.file_exists)


def _all(trainer: Trainer) -> list[ModelCheckpoint]:
    return [each for each in trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint)]


def _exists(undone: set[str], exists: Any, filepath: str, trainer: Trainer) -> bool:
    """`exists`, but for files that are about to be replaced."""
    path = os.path.abspath(filepath)
    is_undone = trainer.strategy.broadcast(path in undone)
    undone.discard(path)
    return bool(exists(filepath, trainer)) and not is_undone
