"""Collect the callbacks of a run from the config, the command line and the defaults."""

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from jsonargparse import get_loader
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, ProgressBar
from lightning.pytorch.utilities.exceptions import SIGTERMException
from yaml import YAMLError

from lit_diffusion.callbacks.finite_updates import FiniteUpdates
from lit_diffusion.callbacks.progress import PlainProgress, StepBar
from lit_diffusion.callbacks.rank_watch import RankWatch
from lit_diffusion.callbacks.save_on_signal import SaveOnSignal
from lit_diffusion.cli.last_checkpoint import LastCheckpoint
from lit_diffusion.cli.terminal import has_color, is_terminal


def contains(callbacks: Sequence[Callback], kind: Any) -> bool:
    """Whether one of the callbacks is an instance of a class or protocol."""
    return any(isinstance(callback, kind) for callback in callbacks)


def with_defaults(config: Any, *, fits: bool, shows_progress: bool) -> list[Callback]:
    """Add missing default callbacks to the callbacks of a config (None, one, or a list)."""
    callbacks: list[Callback] = [*config] if isinstance(config, list) else [config] * bool(config)
    if not contains(callbacks, RankWatch):
        callbacks.insert(0, RankWatch())
    if shows_progress and not contains(callbacks, ProgressBar):
        callbacks.append(ColoredStepBar() if is_terminal(sys.stdout) else PlainProgress())
    if not fits:
        callbacks.append(EndPredictions())
    elif not contains(callbacks, FiniteUpdates):
        callbacks.append(FiniteUpdates())
    return callbacks


def with_last_checkpoint(callbacks: Sequence[Callback], folder: Path) -> list[Callback]:
    """Add LastCheckpoint and SaveOnSignal if they are missing, and move them to the end.

    LastCheckpoint and SaveOnSignal come last because they save the state of all other callbacks in
    last.ckpt.
    """
    for callback in callbacks:
        saves_last = isinstance(callback, ModelCheckpoint) and callback.save_last
        dirpath = getattr(callback, "dirpath", None) or folder
        if saves_last and Path(dirpath).absolute() == folder.absolute():
            raise ValueError(
                "trainer.callbacks: ModelCheckpoint(save_last=True) would overwrite last.ckpt, "
                "which fit saves where a run resumes bit-exactly; leave save_last out."
            )
        if isinstance(callback, SaveOnSignal) and callback.folder not in (None, folder):
            raise ValueError(
                f"trainer.callbacks: SaveOnSignal must save to the folder {folder}, from which fit "
                f"resumes, got {callback.folder}; leave folder out."
            )
    savers = (LastCheckpoint, SaveOnSignal)
    missing = [saver(folder) for saver in savers if not contains(callbacks, saver)]
    return sorted([*callbacks, *missing], key=lambda callback: isinstance(callback, savers))


def dropped_callbacks(configs: Mapping[str, Any]) -> list[str]:
    """Return a message for each config that drops callbacks of earlier configs.

    The key `callbacks` of a config replaces earlier callbacks. The key `callbacks+` adds to them.

    Args:
        configs: contents of the config files by path, in the order of the command line.
    """
    messages, names = [], list[str]()
    for path, settings in configs.items():
        trainer = settings.get("trainer") or {}
        if "callbacks" in trainer:
            listed = _class_names(trainer["callbacks"])
            if lost := ", ".join(name for name in names if name not in listed):
                messages.append(
                    f"{path} replaces the list trainer.callbacks of earlier configs and drops "
                    f"{lost}; to keep {lost}, put {path} before the config that adds it."
                )
            names = listed
        names = [*names, *_class_names(trainer.get("callbacks+"))]
    return messages


def _class_names(callbacks: Any) -> list[str]:
    """Names of the classes in `trainer.callbacks` of a config (None, one, or a list)."""
    listed = callbacks if isinstance(callbacks, list) else [callbacks] * bool(callbacks)
    paths = [each.get("class_path") if isinstance(each, dict) else each for each in listed]
    return [str(path).rpartition(".")[2] for path in paths]


_STEP_HOOKS = (
    *("on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward"),
    *("on_before_optimizer_step", "on_train_batch_end"),
)


def skip_empty_hooks(callbacks: Iterable[Callback]) -> None:
    """Set each hook of a training step to None if the callback does not override it.

    Lightning skips a hook that is None, which saves ten function calls per step.
    """
    for callback in callbacks:
        for name in _STEP_HOOKS:
            if getattr(getattr(callback, name), "__func__", None) is getattr(Callback, name):
                vars(callback)[name] = None  # also of a frozen dataclass


class ColoredStepBar(StepBar):
    """A `StepBar` in color, unless NO_COLOR is set."""

    def init_train_tqdm(self) -> Any:
        """Create the bar."""
        bar = super().init_train_tqdm()
        bar.colour = "cyan" if has_color(sys.stdout) else None
        return bar


class EndPredictions(Callback):
    """After SIGTERM, ends `predict` before the next batch, as Lightning ends its other loops."""

    def on_predict_batch_start(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """Raise SIGTERMException after the signal."""
        if trainer.received_sigterm:
            raise SIGTERMException


# Options by class name: --trainer.callbacks.EMA.decays=[0.9]

_BY_NAME = re.compile(r"(--trainer\.callbacks\.([A-Z]\w*)(?:\.([\w.]+))?)(?:=(.*))?", re.DOTALL)

CallbackOption = tuple[str, str | None, str]
"""(class name, argument or None, value). The value null, without argument, removes the callback."""


def split_callback_options(options: Iterable[str]) -> tuple[list[str], list[CallbackOption]]:
    """Split options into options for jsonargparse and options that name a callback class.

    Example:
        >>> split_callback_options(["--data=Digits", "--trainer.callbacks.EMA.decays=[0.9]"])[1]
        [('EMA', 'decays', '[0.9]')]
    """
    others: list[str] = []
    by_name: list[CallbackOption] = []
    remaining, last_added = iter(options), ""
    for option in remaining:
        if option.startswith("--trainer.callbacks+="):
            last_added = option.rpartition("=")[2].rpartition(".")[2]
        if not (match := _BY_NAME.fullmatch(option)):
            others.append(option)
            continue
        option, name, argument, value = match.groups()
        value = next(remaining, "--") if value is None else value
        if value.startswith("--"):
            raise ValueError(f"{option} needs a value: {option}=VALUE.")
        if name == last_added and argument:  # set at once, because it may be required
            others.append(f"--trainer.callbacks.{argument}={value}")
        else:
            by_name.append((name, argument, value))
    return others, by_name


def apply_callback_options(
    callbacks: Sequence[dict[str, Any]], options: Iterable[CallbackOption]
) -> list[dict[str, Any]]:
    """Apply options to the callbacks of a config, which are dicts of class_path and init_args.

    Options that set an argument change the dicts in place. If an option removes a callback, the
    returned list does not contain it.
    """
    callbacks = list(callbacks)
    for name, argument, text in options:
        option = ".".join(filter(None, ("--trainer.callbacks", name, argument)))
        names = [callback["class_path"].rpartition(".")[2] for callback in callbacks]
        if names.count(name) != 1:
            fix = f"--trainer.callbacks+={name} adds one."
            if name in names:
                fix = "change them in a file."
            elif close := get_close_matches(name, names, 1):
                fix = f"did you mean {close[0]}?"
            raise ValueError(f"{option}: the config has {', '.join(names) or 'none'}; {fix}")
        index = names.index(name)
        path = [part for part in (argument or "").split(".") if part not in ("", "init_args")]
        if path:
            _set_argument(callbacks[index], path, text, option)
        elif argument is None and text == "null":
            del callbacks[index]
        else:
            raise ValueError(
                f"{option}: set an argument by --trainer.callbacks.{name}.ARGUMENT=VALUE, or "
                f"remove the callback by --trainer.callbacks.{name}=null."
            )
    return callbacks


def _set_argument(callback: dict[str, Any], path: Sequence[str], text: str, option: str) -> None:
    """Set an argument of a callback, or of an object nested in it, to a value in YAML."""
    try:
        value = get_loader("yaml")(text)
    except (YAMLError, ValueError) as error:  # also an integer of thousands of digits
        raise ValueError(f"{option}: the value must be YAML, got {text}; quote it.") from error
    if value is None and text not in ("null", "None", "~"):  # unset shell variable
        raise ValueError(f"{option} needs a value: {option}=VALUE.")
    arguments = callback.setdefault("init_args", {})
    for parent in path[:-1]:
        arguments = arguments.setdefault(parent, {})
        if not isinstance(arguments, dict):
            raise ValueError(
                f"{option}: {parent} must have arguments, got {arguments!r}; set {parent} first."
            )
        if "class_path" in arguments:
            arguments = arguments.setdefault("init_args", {})
    arguments[path[-1]] = value
