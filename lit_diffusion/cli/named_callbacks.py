"""Callbacks on the command line by the names of their classes, wherever in the list they are."""

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple

from jsonargparse import get_loader
from yaml import YAMLError

_NAMED = re.compile(r"--trainer\.callbacks\.([A-Z]\w*)(?:\.([\w.]+))?(?:=(.*))?", re.DOTALL)


class Change(NamedTuple):
    """--trainer.callbacks.NAME.ARGUMENT=VALUE; NAME=null leaves the callback out."""

    name: str
    argument: str | None
    value: str

    def __str__(self) -> str:
        argument = f".{self.argument}" if self.argument else ""
        return f"--trainer.callbacks.{self.name}{argument}={self.value}"


def split_off(options: Iterable[str]) -> tuple[list[str], list[Change]]:
    """The other options, and those that name a callback's class.

    Raises:
        ValueError: for one without a value.

    Example:
        >>> split_off(["--data=Digits", "--trainer.callbacks.EMA.decays=[0.9]"])[1]
        [Change(name='EMA', argument='decays', value='[0.9]')]
    """
    others, changes, coming, added = [], [], iter(options), ""
    for option in coming:
        if option.startswith("--trainer.callbacks+="):
            added = option.rpartition("=")[2].rpartition(".")[2]
        if match := _NAMED.fullmatch(option):
            name, argument, value = match.groups()
            value = next(coming, "--") if value is None else value
            if value.startswith("--"):
                raise ValueError(f"{option} needs a value: {option}=VALUE.")
            if name == added and argument:  # of the last one yet, which may need it to be parsed
                others.append(f"--trainer.callbacks.{argument}={value}")
            else:
                changes.append(Change(name, argument, value))
        else:
            others.append(option)
    return others, changes


def changed(callbacks: Sequence[dict[str, Any]], changes: Iterable[Change]) -> list[dict[str, Any]]:
    """The callbacks of a config, as plain builtins, with the changes in their order.

    Raises:
        ValueError: for a class that is not there once, or a value that cannot be.
    """
    left = list(callbacks)
    for change in changes:
        callback = _only(left, change)
        if change.argument is not None:
            _set(callback, change)
        elif change.value == "null":
            left.remove(callback)
        else:
            raise ValueError(
                f"{change}: =null leaves {change.name} out; what it is made of is set as "
                f"--trainer.callbacks.{change.name}.ARGUMENT=VALUE."
            )
    return left


def _only(callbacks: Sequence[dict[str, Any]], change: Change) -> dict[str, Any]:
    names = [callback["class_path"].rpartition(".")[2] for callback in callbacks]
    match names.count(change.name):
        case 1:
            return callbacks[names.index(change.name)]
        case 0:
            there = f"the config has {', '.join(names) or 'none'}"
            way = f"--trainer.callbacks+={change.name} adds one"
            if close := get_close_matches(change.name, names, 1):
                way = f"did you mean {close[0]}?"
        case _:
            there = f"the config has several {change.name}"
            way = "change them in a file"
    raise ValueError(f"{change}: {there}; {way}{'' if way.endswith('?') else '.'}")


def _set(place: dict[str, Any], change: Change) -> None:
    *path, last = [key for key in str(change.argument).split(".") if key != "init_args"] or [""]
    for key in path:
        place = _arguments(place).setdefault(key, {})
        if not isinstance(place, dict):
            raise ValueError(f"{change}: {key} is {place!r}, which has no {last}.")
    try:
        value = get_loader("yaml")(change.value)
    except YAMLError as error:
        raise ValueError(f"{change}: the value is no YAML.") from error
    if not last or (value is None and change.value not in ("null", "None", "~")):
        raise ValueError(f"{change}: name an argument and its value.")
    _arguments(place)[last] = value


def _arguments(place: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = place.setdefault("init_args", {}) if "class_path" in place else place
    return found
