"""Compiled networks on the lowest torch that setup.cfg admits."""

import os
import re
import subprocess
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOWEST = re.search(r"\n    torch>=([\d.]+)", (ROOT / "setup.cfg").read_text())[1]


@pytest.fixture
def source(tmp_path) -> str:
    """The tracked files, in which pip may build."""
    prefix = f"--prefix={tmp_path / 'source'}/"
    subprocess.run(["git", "-C", str(ROOT), "checkout-index", "--all", prefix], check=True)
    return str(tmp_path / "source")


@pytest.fixture
def python(tmp_path, source) -> str:
    """Python of an environment with that torch: $LOWEST_TORCH_PYTHON, or built by pip."""
    if ready := os.environ.get("LOWEST_TORCH_PYTHON"):
        return ready
    venv.create(tmp_path / "env", with_pip=True)
    built = str(tmp_path / "env" / "bin" / "python")
    pip = [built, "-m", "pip", "install", "-q"]
    subprocess.run([*pip, f"torch=={LOWEST}.*", f"{source}[test]"], check=True)
    return built


@pytest.mark.rare  # installs torch: minutes, and gigabytes
def test_compiled_networks(python, source, tmp_path):
    site = str(tmp_path / "site")
    pip = [python, "-m", "pip", "install", "-q", "--no-deps", "--target", site, source]
    subprocess.run(pip, check=True)

    def output_of(*arguments):
        return subprocess.run(
            [python, "-P", *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": site},
            capture_output=True,
            text=True,
        ).stdout

    assert output_of("-c", "import torch; print(torch.__version__)").startswith(f"{LOWEST}.")
    files = [f"{ROOT}/tests/modules/test_compiled.py", f"{ROOT}/tests/networks/test_networks.py"]
    options = ["-q", "-n", "0", "-m", "not gpu", "-k", "test_compiled or compile or captured"]
    output = output_of("-m", "pytest", *options, *files)
    assert re.search(r"^\d+ passed", output, re.MULTILINE), output
