"""Compiled networks on the lowest torch that setup.cfg admits."""

import os
import re
import subprocess
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOWEST = re.search(r"\n    torch>=([\d.]+)", (ROOT / "setup.cfg").read_text())[1]


def run(*command: object, **options) -> str:
    """What a command printed."""
    words = [str(word) for word in command]
    return subprocess.run(words, stdout=subprocess.PIPE, text=True, **options).stdout


@pytest.mark.slow  # installs torch: minutes, and gigabytes
def test_compiled_networks(tmp_path):
    """In an environment with that torch: $LOWEST_TORCH_PYTHON, or built by pip."""
    source, site = tmp_path / "source", tmp_path / "site"
    run("git", "-C", ROOT, "checkout-index", "--all", f"--prefix={source}/", check=True)
    python = os.environ.get("LOWEST_TORCH_PYTHON")
    if not python:
        venv.create(tmp_path / "env", with_pip=True)
        python = tmp_path / "env" / "bin" / "python"
        pip = python, "-m", "pip", "install", "-q"
        run(*pip, f"torch=={LOWEST}.*", f"{source}[test]", check=True)
    run(python, "-m", "pip", "install", "-q", "--no-deps", "--target", site, source, check=True)
    alone = {"cwd": tmp_path, "env": os.environ | {"PYTHONPATH": str(site)}}
    version = run(python, "-P", "-c", "import torch; print(torch.__version__)", **alone)
    assert version.startswith(f"{LOWEST}.")
    files = [f"{ROOT}/tests/modules/test_compiled.py", f"{ROOT}/tests/networks/test_networks.py"]
    options = ["-q", "-n", "0", "-m", "not gpu", "-k", "test_compiled or compile or captured"]
    output = run(python, "-P", "-m", "pytest", *options, *files, **alone)
    assert re.search(r"^\d+ passed", output, re.MULTILINE), output
