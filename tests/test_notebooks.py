"""The notebooks in docs/notebooks run without an error, and are saved with their outputs."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

FOLDER = Path(__file__).parents[1] / "docs" / "notebooks"
SCRIPT = Path(__file__).parent / "support" / "notebooks.py"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
NEEDS = {"diffusers": "diffusers"}
"""Packages of extras that a notebook imports, by its name."""


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_there_are_three():
    assert {file.stem for file in NOTEBOOKS} == {"quickstart", "own-module", "diffusers"}


@pytest.mark.slow
@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_runs(file, tmp_path, monkeypatch):
    """Failing cells raise. Where a saved cell shows images, the same cell shows as many."""
    if file.stem in NEEDS:
        pytest.importorskip(NEEDS[file.stem])
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    copy = shutil.copy(file, tmp_path)
    subprocess.run([sys.executable, SCRIPT, copy], check=True)  # as it sets signal handlers
    saved, notebook = (nbformat.read(path, as_version=4) for path in (file, copy))
    for before, after in zip(code_cells(saved), code_cells(notebook), strict=True):
        kinds = [
            ["image/png" in output.get("data", {}) for output in cell.outputs].count(True)
            for cell in (before, after)
        ]
        assert kinds[0] == kinds[1], before.source


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_is_saved_with_its_outputs(file):
    notebook = nbformat.read(file, as_version=4)
    nbformat.validate(notebook)
    assert file.stat().st_size < 400_000
    install, *others = code_cells(notebook)
    assert "%pip install" in install.source
    assert "not tried on Colab" in install.source
    outputs = [output for cell in others for output in cell.outputs]
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 2
    assert "error" not in [output.output_type for output in outputs]
    text = "".join(output.get("text", "") for output in outputs)
    assert re.findall(r"(?<![\w.])/(?:work|root|home|usr|tmp)/", text) == []


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_its_links_lead_somewhere(file):
    for cell in nbformat.read(file, as_version=4).cells:
        for link in re.findall(r"\]\((?!https?:)([^)#]+)", cell.source):
            assert cell.cell_type != "markdown" or (FOLDER / link).exists(), link
