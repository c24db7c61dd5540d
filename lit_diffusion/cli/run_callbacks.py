"""The callbacks of a run: those of its config, as options change them, and those of every run."""

import re
import sys
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from jsonargparse import get_loader
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, ProgressBar
from lightning.pytorch.utilities.exceptions import SIGTERMException
from yaml import YAMLError

from lit_diffusion.callbacks.finite_updates import FiniteUpdates
from lit_diffusion.callbacks.progress import PlainProgress, StepBar
from lit_diffusion.callbacks.rank_watch import RankWatch
from lit_diffusion.callbacks.save_on_signal import SaveOnSignal
from lit_diffusion.cli.changed_settings import ApplyChangedHyperparameters, ChangedSettings
from lit_diffusion.cli.exact_resume import ExactResume
from lit_diffusion.cli.last_checkpoint import LastCheckpoint
from lit_diffusion.cli.run_outputs import ImagesSeen, RewindLogs


def contains(callbacks: Sequence[Callback], kind: Any) -> bool:
    """Whether one of the callbacks is of a class or protocol."""
    return any(isinstance(callback, kind) for callback in callbacks)


def with_defaults(config: Any, *, fits: bool, shows_progress: bool) -> list[Callback]:
    """The callbacks of a config (a list, one or None), and the defaults that it does not name."""
    callbacks: list[Callback] = (
        list(config) if isinstance(config, list) else [config] * bool(config)
    )
    if not contains(callbacks, RankWatch):
        callbacks.insert(0, RankWatch())
    if shows_progress and not contains(callbacks, ProgressBar):
        callbacks.append(StepBar() if sys.stdout.isatty() else PlainProgress())
    if not fits:
        callbacks.append(EndPredictions())
    elif not contains(callbacks, FiniteUpdates):
        callbacks.append(FiniteUpdates())
    return callbacks


def logging_and_resume_callbacks(changed: ChangedSettings) -> list[Callback]:
    """Callbacks of a fit by which a resumed run ends as one that was never interrupted."""
    return [RewindLogs(), ImagesSeen(), ApplyChangedHyperparameters(changed), ExactResume()]


def with_last_checkpoint(callbacks: Sequence[Callback], folder: Path) -> list[Callback]:
    """The callbacks, and at the end those that save last.ckpt: with the state of all others.

    Raises:
        ValueError: for a callback that would write another last.ckpt, from which a run cannot
            resume exactly, or one elsewhere.
    """
    for callback in callbacks:
        saves_last = isinstance(callback, ModelCheckpoint) and callback.save_last
        dirpath = getattr(callback, "dirpath", None) or folder
        if saves_last and Path(dirpath).absolute() == folder.absolute():
            raise ValueError(
                "trainer.callbacks: ModelCheckpoint(save_last=True) would write last.ckpt, which "
                "fit does by itself where a run resumes bit-exactly; leave save_last out."
            )
        if isinstance(callback, SaveOnSignal) and callback.folder not in (None, folder):
            raise ValueError(
                f"trainer.callbacks: SaveOnSignal must save where fit looks, which is {folder}, "
                f"and has the folder {callback.folder}; leave that out."
            )
    savers = (LastCheckpoint, SaveOnSignal)
    missing = [saver(folder) for saver in savers if not contains(callbacks, saver)]
    return sorted([*callbacks, *missing], key=lambda callback: isinstance(callback, savers))


class EndPredictions(Callback):
    """Ends `predict` before the next batch after a SIGTERM, as Lightning ends its other loops."""

    def on_predict_batch_start(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """Raise SIGTERMException after the signal."""
        if trainer.received_sigterm:
            raise SIGTERMException


# Callbacks by the names of their classes: --trainer.callbacks.EMA.decays=[0.9]

_BY_NAME = re.compile(r"--trainer\.callbacks\.([A-Z]\w*)(?:\.([\w.]+))?(?:=(.*))?", re.DOTALL)


class CallbackOption(NamedTuple):
    """--trainer.callbacks.NAME.ARGUMENT=VALUE; without an argument, the value null removes it."""

    name: str
    argument: str | None
    value: str

    def __str__(self) -> str:
        argument = f".{self.argument}" if self.argument else ""
        return f"--trainer.callbacks.{self.name}{argument}={self.value}"


def split_callback_options(options: Iterable[str]) -> tuple[list[str], list[CallbackOption]]:
    """Divide a command line into the options that jsonargparse knows and those by class name.

    Raises:
        ValueError: for an option without a value.

    Example:
        >>> split_callback_options(["--data=Digits", "--trainer.callbacks.EMA.decays=[0.9]"])[1]
        [CallbackOption(name='EMA', argument='decays', value='[0.9]')]
    """
    others, by_name, remaining, last_added = [], [], iter(options), ""
    for option in remaining:
        if option.startswith("--trainer.callbacks+="):
            last_added = option.rpartition("=")[2].rpartition(".")[2]
        if not (match := _BY_NAME.fullmatch(option)):
            others.append(option)
            continue
        name, argument, value = match.groups()
        value = next(remaining, "--") if value is None else value
        if value.startswith("--"):
            raise ValueError(f"{option} needs a value: {option}=VALUE.")
        if name == last_added and argument:  # set at once: it may be required
            others.append(f"--trainer.callbacks.{argument}={value}")
        else:
            by_name.append(CallbackOption(name, argument, value))
    return others, by_name


def apply_callback_options(
    callbacks: Sequence[dict[str, Any]], options: Iterable[CallbackOption]
) -> list[dict[str, Any]]:
    """Change the callbacks of a config (class_path and init_args) in place; those that remain.

    Raises:
        ValueError: where the class is not there exactly once, or the value cannot be set.
    """
    callbacks = list(callbacks)
    for option in options:
        names = [callback["class_path"].rpartition(".")[2] for callback in callbacks]
        if names.count(option.name) > 1:
            raise ValueError(
                f"{option}: the config has several {option.name}; change them in a file."
            )
        if option.name not in names:
            close = get_close_matches(option.name, names, 1)
            fix = f"--trainer.callbacks+={option.name} adds one."
            fix = f"did you mean {close[0]}?" if close else fix
            raise ValueError(f"{option}: the config has {', '.join(names) or 'none'}; {fix}")
        index = names.index(option.name)
        if option.argument is not None:
            _set_argument(callbacks[index], option)
        elif option.value == "null":
            del callbacks[index]
        else:
            raise ValueError(
                f"{option}: =null leaves {option.name} out; its arguments are set as "
                f"--trainer.callbacks.{option.name}.ARGUMENT=VALUE."
            )
    return callbacks


def _set_argument(callback: dict[str, Any], option: CallbackOption) -> None:
    """Set the argument of a callback, or of an object among its arguments."""
    names = [name for name in str(option.argument).split(".") if name != "init_args"]
    try:
        value = get_loader("yaml")(option.value)
    except YAMLError as error:
        raise ValueError(f"{option}: the value is no YAML.") from error
    if not names or (value is None and option.value not in ("null", "None", "~")):
        raise ValueError(f"{option}: name an argument and its value.")
    target = callback
    for depth, name in enumerate(names):
        if not isinstance(target, dict):
            raise ValueError(f"{option}: {names[depth - 1]} is {target!r}, which has no {name}.")
        arguments = target.setdefault("init_args", {}) if "class_path" in target else target
        if depth == len(names) - 1:
            arguments[name] = value
        else:
            target = arguments.setdefault(name, {})
