"""Execute the notebooks of docs/notebooks.

    python tests/support/notebooks.py docs/notebooks/*.ipynb

writes their outputs into them, which is needed after a change of a cell.
"""

import os
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
PATHS = re.compile(rf"(?:{re.escape(str(ROOT))}|\S*/site-packages)/")
"""Folders of this machine, which no output names."""
NOISE = re.compile(
    r".*(?:IProgress not found|notebook_tqdm|Tip: For seamless|treespec\.is_leaf|GPU available"
    r"|TPU available|is deprecated).*\n"
)
"""Lines of Lightning and tqdm that say nothing of the run."""
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
LANGUAGE = {"name": "python", "version": "3.11"}
KERNEL = {"name": "python3", "display_name": "Python 3", "language": "python"}


def execute(notebook: Any, folder: Path, timeout: float = 900) -> None:
    """Execute all cells in `folder`, by this Python. Raises CellExecutionError if one fails."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    resources = {"metadata": {"path": str(folder)}}
    client = NotebookClient(notebook, timeout=timeout, kernel_name="python3", resources=resources)
    client.execute(env=environment)


def tidy(notebook: Any) -> None:
    """Remove what differs between two executions, and paths of the machine."""
    notebook.metadata = {"kernelspec": KERNEL, "language_info": LANGUAGE}
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.execution_count = None
            cell.outputs = merge_streams(cell.outputs)


def merge_streams(outputs: list[Any]) -> list[Any]:
    """Outputs without paths of the machine, with the parts of a stream joined."""
    merged: list[Any] = []
    for output in outputs:
        if merged and "name" in output and merged[-1].get("name") == output.name:
            merged[-1].text += output.text
            continue
        for kind in ("image/jpeg", "text/plain"):  # the same image again, and its type
            if "image/png" in output.get("data", {}):
                output.data.pop(kind, None)
        output.pop("execution_count", None)
        merged.append(output)
    for output in merged:
        if output.output_type == "stream":
            output.text = NOISE.sub("", PATHS.sub("", last_states(output.text)))
    return [output for output in merged if output.get("text", "x").strip()]


def last_states(text: str) -> str:
    """What a terminal shows at the end, without colours: a carriage return starts a line again."""
    lines = ESCAPES.sub("", text).replace("\r\n", "\n").split("\n")
    return "\n".join(line.rstrip("\r").rpartition("\r")[2].rstrip() for line in lines)


def main(files: list[str]) -> None:
    for file in files:
        notebook = nbformat.read(file, as_version=4)
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            execute(notebook, Path(folder))
        tidy(notebook)
        nbformat.write(notebook, file)
        print(f"{file}: {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
