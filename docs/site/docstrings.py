"""Docstrings as they are in the sources, for mkdocstrings: a griffe extension."""

import re
from typing import Any

import griffe

CODE = re.compile(r"(`+[^`]*`+)")


def to_markdown(docstring: str) -> str:
    """Name sections of examples as griffe does; escape < and ][ outside code."""
    lines, in_example = [], False
    for line in docstring.split("\n"):
        if re.fullmatch(r"Examples?:", line):
            in_example = True
            lines.append("Examples:")
            continue
        in_example = in_example and (not line or line.startswith(" "))
        if not in_example:
            parts = CODE.split(line)
            parts[::2] = [part.replace("<", "&lt;").replace("][", "]\\[") for part in parts[::2]]
            line = "".join(parts)
            line = re.sub(r"^(Source):", r"**\1:**", line)
        lines.append(line)
    return "\n".join(lines)


class SourceDocstrings(griffe.Extension):
    """Rewrites each docstring once, when its object is loaded."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite the docstring of `obj`."""
        if obj.docstring:
            obj.docstring.value = to_markdown(obj.docstring.value)
