"""The callbacks of a run that its config does not name."""

import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, ProgressBar, TQDMProgressBar
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lit_diffusion.commands.catching_up import CatchUp
from lit_diffusion.commands.keeping import CurvesInStep, ExactResume, ImagesSeen, LastCheckpoint
from lit_diffusion.commands.resume import Changes, PreferConfig
from lit_diffusion.protocols import UpdateGuard


def with_defaults(given: Any, *, fits: bool, shows_progress: bool) -> list[Callback]:
    """The callbacks of a config, and what every run has besides.

    Args:
        given: as in a config: a list, one, or None.
        fits: whether weights are trained.
        shows_progress: whether the Trainer may.
    """
    callbacks: list[Callback] = list(given) if isinstance(given, list) else [given] * bool(given)
    if not has(callbacks, rank_watch()):
        callbacks.insert(0, rank_watch()())
    if shows_progress and not has(callbacks, ProgressBar):
        callbacks.append(_progress())
    if fits and not has(callbacks, UpdateGuard):
        callbacks.append(_callback("finite_updates", "FiniteUpdates")())
    if not fits:
        callbacks.append(EndPredictions())
    return callbacks


class EndPredictions(Callback):
    """Ends `predict` on SIGTERM before the next batch; of Lightning's loops this one goes on."""

    def on_predict_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Look whether there was one."""
        if trainer.received_sigterm:
            raise SIGTERMException


def keepers(root: Path, changed: Changes) -> list[Callback]:
    """What has a run folder and a resume agree.

    Args:
        root: the run folder.
        changed: settings that differ from those of the checkpoint.
    """
    return [ExactResume(), CurvesInStep(root), ImagesSeen(), PreferConfig(changed), CatchUp()]


def savers(given: Sequence[Callback], folder: Path) -> list[Callback]:
    """What keeps last.ckpt, as far as the config has not its own.

    Args:
        given: the other callbacks.
        folder: of the checkpoints.

    Raises:
        ValueError: for what would keep another, from which a run does not go on by itself.
    """
    for saver in given:
        if not (isinstance(saver, ModelCheckpoint) and saver.save_last):
            continue
        if Path(saver.dirpath or folder).absolute() == folder.absolute():
            raise ValueError(
                "trainer.callbacks: ModelCheckpoint(save_last=True) would write last.ckpt, which "
                "fit does by itself where runs go on to the last bit; leave save_last out."
            )
    save_on_signal = _callback("save_on_signal", "SaveOnSignal")
    made: list[Callback] = []
    if not has(given, LastCheckpoint):
        made.append(LastCheckpoint(folder))
    for saver in given:
        if isinstance(saver, save_on_signal) and saver.folder not in (None, folder):
            raise ValueError(
                f"trainer.callbacks: SaveOnSignal must save where fit looks, which is {folder}, "
                f"and has the folder {saver.folder}; leave that out."
            )
    if not has(given, save_on_signal):
        made.append(save_on_signal(folder))
    return made


def rank_watch() -> Any:
    """What ends all ranks when one fails; on a single rank it does nothing."""
    return _callback("rank_watch", "RankWatch")


def _progress() -> Callback:
    """A bar in a terminal, lines elsewhere."""
    if sys.stderr.isatty():
        return TQDMProgressBar()
    progress: Callback = _callback("progress", "PlainProgress")()
    return progress


def _callback(file: str, name: str) -> Any:
    """A class of ours, found by its path as in a config: callbacks know nothing of commands."""
    return getattr(import_module(f"lit_diffusion.callbacks.{file}"), name)


def has(callbacks: Sequence[Callback], kind: Any) -> bool:
    """Whether one of the callbacks is of a class or protocol."""
    return any(isinstance(callback, kind) for callback in callbacks)
