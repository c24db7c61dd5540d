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
            cell.outputs = merge_streams(cell.outputs)


def merge_streams(outputs: list[Any]) -> list[Any]:
    """Outputs without paths of the machine, with the parts of a stream joined."""
    merged: list[Any] = []
    for output in outputs:
        if output.output_type == "stream":
            output.text = PATHS.sub("", output.text)
            if merged and merged[-1].get("name") == output.name:
                merged[-1].text += output.text
                continue
        merged.append(output)
    return merged


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
