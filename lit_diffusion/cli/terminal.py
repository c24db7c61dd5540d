"""Colors for terminals. Files and pipes get plain text."""

import os
import re
from typing import TextIO

BOLD, RED, GREEN, YELLOW, CYAN = "1", "1;31", "32", "33", "36"


def is_terminal(stream: TextIO) -> bool:
    """Return whether a stream is a terminal that can move its cursor, which progress bars need."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def has_color(stream: TextIO) -> bool:
    """Whether to color text: True in a terminal, unless NO_COLOR is set (see no-color.org)."""
    return is_terminal(stream) and not os.environ.get("NO_COLOR")


def paint(text: str, style: str, stream: TextIO) -> str:
    """The text in a style such as `RED`, or unchanged if the stream has no color."""
    return f"\033[{style}m{text}\033[0m" if has_color(stream) else text


def paint_help(text: str, stream: TextIO) -> str:
    """Return a help page with bold headings and colored names of options and commands."""
    if not has_color(stream):
        return text
    text = re.sub(r"^[a-z][a-z ]*:(?= |$)", r"\033[1m\g<0>\033[0m", text, flags=re.MULTILINE)
    return re.sub(r"^ {2}(-[^\s,]+(?:,\s-\S+)?)", r"  \033[36m\1\033[0m", text, flags=re.MULTILINE)
