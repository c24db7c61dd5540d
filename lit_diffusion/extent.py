"""How much lists and dicts hold, which somebody else wrote."""

from typing import Any

DEEPEST = 100
"""Levels of lists and dicts in each other."""

LONGEST = 10**6
"""Characters of a text."""


def check_extent(content: Any, most: int) -> None:
    """Refuse lists and dicts that hold each other so that they are many to whoever walks them.

    Args:
        content: a dict or list.
        most: values that it may hold.

    Raises:
        ValueError: where it holds more, is nested too deep, or holds an endless number or text.

    Example:
        >>> check_extent({"steps": [1, 2]}, most=10)
    """
    count, waiting = 0, [(content, 0)]
    while waiting:
        holder, depth = waiting.pop()
        inside = [*holder.keys(), *holder.values()] if isinstance(holder, dict) else holder
        count += len(inside)
        if count > most or depth > DEEPEST:
            raise ValueError("its lists and dicts hold too many values, or are nested too deep")
        for value in inside:
            if isinstance(value, dict | list | tuple | set):
                waiting.append((value, depth + 1))
            elif type(value) is int and value.bit_length() > 1024:
                raise ValueError(f"it holds a number of {value.bit_length():,} bits")
            elif isinstance(value, str) and len(value) > LONGEST:
                raise ValueError(f"it holds a text of {len(value):,} characters")
