"""The callbacks of a run that its config does not name."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, ProgressBar
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lit_diffusion.callbacks.finite_updates import FiniteUpdates
from lit_diffusion.callbacks.progress import PlainProgress, StepBar
from lit_diffusion.callbacks.rank_watch import RankWatch
from lit_diffusion.callbacks.save_on_signal import SaveOnSignal
from lit_diffusion.cli.changed_settings import Changes, PreferConfig
from lit_diffusion.cli.exact_resume import ExactResume
from lit_diffusion.cli.last_checkpoint import LastCheckpoint
from lit_diffusion.cli.run_outputs import CurvesInStep, ImagesSeen


def with_defaults(given: Any, *, fits: bool, shows_progress: bool) -> list[Callback]:
    """The callbacks of a config, a list, one or None, and what every run has besides."""
    callbacks: list[Callback] = list(given) if isinstance(given, list) else [given] * bool(given)
    if not contains(callbacks, RankWatch):
        callbacks.insert(0, RankWatch())
    if shows_progress and not contains(callbacks, ProgressBar):
        callbacks.append(StepBar() if sys.stdout.isatty() else PlainProgress())
    if fits and not contains(callbacks, FiniteUpdates):
        callbacks.append(FiniteUpdates())
    if not fits:
        callbacks.append(EndPredictions())
    return callbacks


class EndPredictions(Callback):
    """Ends `predict` on SIGTERM before the next batch; of Lightning's loops this one goes on."""

    def on_predict_batch_start(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """Look whether there was one."""
        if trainer.received_sigterm:
            raise SIGTERMException


def run_callbacks(changed: Changes) -> list[Callback]:
    """What has a run folder and a resume agree, where settings differ from the checkpoint's."""
    return [CurvesInStep(), ImagesSeen(), PreferConfig(changed), ExactResume()]


def with_last_checkpoint(given: Sequence[Callback], folder: Path) -> list[Callback]:
    """The callbacks, and what keeps last.ckpt: at the end, so that it has what others do before.

    Raises:
        ValueError: for what would keep another, from which a run does not go on by itself.
    """
    for callback in given:
        _refuse_other_last(callback, folder)
    savers = (LastCheckpoint, SaveOnSignal)
    missing = [saver(folder) for saver in savers if not contains(given, saver)]
    return sorted([*given, *missing], key=lambda callback: isinstance(callback, savers))


def _refuse_other_last(callback: Callback, folder: Path) -> None:
    if isinstance(callback, ModelCheckpoint) and callback.save_last:
        saves_to = Path(callback.dirpath or folder)
        if saves_to.absolute() == folder.absolute():
            raise ValueError(
                "trainer.callbacks: ModelCheckpoint(save_last=True) would write last.ckpt, which "
                "fit does by itself where runs go on to the last bit; leave save_last out."
            )
    if isinstance(callback, SaveOnSignal) and callback.folder not in (None, folder):
        raise ValueError(
            f"trainer.callbacks: SaveOnSignal must save where fit looks, which is {folder}, and "
            f"has the folder {callback.folder}; leave that out."
        )


def contains(callbacks: Sequence[Callback], kind: Any) -> bool:
    """Whether one of the callbacks is of a class or protocol."""
    return any(isinstance(callback, kind) for callback in callbacks)
