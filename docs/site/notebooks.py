"""A notebook, with the outputs that it was saved with, as a Markdown page and its images."""

import base64
import json
import re
from typing import Any

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def text_of(source: str | list[str]) -> str:
    """Text of a cell or output, which the format writes as a string or as lines."""
    return source if isinstance(source, str) else "".join(source)


def fence(text: str, language: str) -> str:
    """Fenced code whose fence is longer than any in the text."""
    ticks = "`" * max([3, *(len(run) + 1 for run in re.findall("`{3,}", text))])
    return f"{ticks}{language}\n{text.rstrip()}\n{ticks}"


def last_line_states(text: str) -> str:
    """What a terminal shows: a carriage return starts its line again."""
    lines = ESCAPES.sub("", text).replace("\r\n", "\n").split("\n")
    return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in lines)


def convert(uri: str, content: str) -> dict[str, str | bytes]:
    """Files of the site by their paths: the page `<name>.md` and the images that it shows."""
    stem = uri.removesuffix(".ipynb")
    name = stem.rpartition("/")[2]
    images: dict[str, str | bytes] = {}

    def show(output: dict[str, Any]) -> str:
        data = output.get("data", {})
        for kind, suffix in (("image/png", "png"), ("image/jpeg", "jpg"), ("image/svg+xml", "svg")):
            if kind in data:
                text = text_of(data[kind])
                file = f"{name}-{len(images)}.{suffix}"
                image = text if suffix == "svg" else base64.b64decode(text)
                images[f"{stem.removesuffix(name)}{file}"] = image
                return f"![Output of the cell above]({file})"
        text = text_of(output.get("text", data.get("text/plain", "")))
        text = "\n".join(output["traceback"]) if "traceback" in output else text
        text = last_line_states(text).strip("\n")
        return fence(text, "text { .output }") if text.strip() else ""

    parts = []
    for cell in json.loads(content)["cells"]:
        source = text_of(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
        elif cell["cell_type"] == "code" and source.strip():
            parts += [fence(source, "python"), *map(show, cell["outputs"])]
    note = f"This page is the notebook [{name}.ipynb](REPOSITORY:docs/{uri}) with its outputs."
    heading, _, rest = parts[0].partition("\n") if parts else ("", "", "")
    parts[:1] = [heading, note, rest]
    return {f"{stem}.md": "\n\n".join(part for part in parts if part) + "\n", **images}
