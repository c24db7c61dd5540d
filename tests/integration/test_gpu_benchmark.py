"""The scripts of tests/benchmarks/gpu run on a CPU, with small networks, and keep their rows."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("diffusers", reason="pip install -e '.[diffusers]'")
SCRIPTS = Path(__file__).parents[1] / "benchmarks/gpu"


@pytest.mark.slow
def test_small_networks_are_timed_on_a_cpu(tmp_path):
    sections = ["cifar10", "sampling", "fit"]
    command = [sys.executable, SCRIPTS / "run.py", *sections, "--tiny", "--rounds=1"]
    options = ["--only=(cifar10|sampling|digits).*eager", f"--out={tmp_path}", "--budget=240"]
    subprocess.run([*command, *options], check=True)
    lines = (tmp_path / "results.jsonl").read_text().splitlines()
    rows = {(row["section"], row["variant"]): row for row in map(json.loads, lines)}
    errors = [row for row in rows.values() if "error" in row]
    assert errors == []
    ours = rows["cifar10", "ours, channels_last, eager"]
    theirs = rows["cifar10", "diffusers, eager"]
    assert ours["flops"] == theirs["flops"]  # networks of equal size
    assert ours["wall_ms"] > 0
    assert rows["sampling", "ours, eager"]["images_per_s"] > 0
    assert rows["fit", "digits, 32-true, eager"]["bare_ms"] > 0
    tables = subprocess.run(
        [sys.executable, SCRIPTS / "table.py", tmp_path / "results.jsonl"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert "| ours, channels_last, eager |" in tables
