"""The script of docs/results/references.md, on the reference that pip installs."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("diffusers", reason="pip install -e '.[diffusers]'")
SCRIPT = Path(__file__).parents[1] / "benchmarks/references.py"


@pytest.mark.slow
def test_random_configurations_equal_diffusers(tmp_path):
    asked = ["--references", str(tmp_path), "--only", "diffusers", "--num", "16", "--seed", "1"]
    ended = subprocess.run([sys.executable, SCRIPT, *asked], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    rows = [line.split(" | ") for line in ended.stdout.splitlines()[2:]]
    assert len(rows) == 7
    assert sum(int(row[3]) for row in rows) == 16
