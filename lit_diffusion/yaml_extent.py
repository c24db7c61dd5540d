"""How much a YAML text stands for, told before objects are made of it."""

from typing import Any

import yaml
from jsonargparse import get_loader, set_loader

from lit_diffusion.extent import DEEPEST

MOST_VALUES = 10**5
"""Of a config. Ten lines of aliases to aliases can stand for more than a machine has."""

MOST_DIGITS = 1000
"""Of a number, which take quadratic time to read."""

_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_load = get_loader("yaml")


def check_text(text: str) -> None:
    """Refuse YAML that would take all time or memory to make objects of.

    Aliases and merge keys count with all that they stand for. Texts in it are looked at too, as
    jsonargparse reads YAML again in a text where an object is wanted.

    Raises:
        ValueError: where it stands for more than `MOST_VALUES`, is nested too deep, or has an
            endless number.
        yaml.YAMLError: where it is no YAML.

    Example:
        >>> check_text("steps: [1, 2]")
    """
    count, waiting = 0, [(_composed(text), 0)]
    while waiting:
        node, depth = waiting.pop()
        count += 1
        if count > MOST_VALUES or depth > DEEPEST:
            raise ValueError("its lists and dicts hold too many values, or are nested too deep")
        waiting += [(inside, depth + 1) for inside in _inside(node)]


def guard_options() -> None:
    """Have jsonargparse check the YAML files that it opens by itself."""
    set_loader("yaml", _guarded, (yaml.YAMLError,))


def _guarded(text: str) -> Any:
    try:
        check_text(text)
    except ValueError as error:
        raise yaml.YAMLError(f"{text[:50]!r} cannot be read as YAML: {error}.") from error
    return _load(text)


def _composed(text: str) -> yaml.Node | None:
    try:
        node: yaml.Node | None = yaml.compose(text, yaml.SafeLoader)
        return node
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def _inside(node: yaml.Node | None) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [each for pair in node.value for each in pair]
    if isinstance(node, yaml.SequenceNode):
        return list(node.value)
    return [] if node is None else _inside_scalar(node)


def _inside_scalar(node: yaml.ScalarNode) -> list[yaml.Node]:
    """What a text holds, where it is YAML that may be large."""
    if len(node.value) > MOST_DIGITS and node.tag in _NUMBERS:
        raise ValueError(f"it holds a number of {len(node.value):,} characters")
    if len(node.value) <= MOST_DIGITS and "*" not in node.value:  # by which aliases are told
        return []
    try:
        inside = _composed(node.value)
    except yaml.YAMLError:
        return []
    same = isinstance(inside, yaml.ScalarNode) and inside.tag == node.tag
    return [] if same or inside is None else [inside]
