"""The scripts of tests/benchmarks/gpu run on a CPU, with small networks, and keep their rows."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from lit_diffusion.lab.compare.sweep import PlannedRun

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


def test_the_pilot_does_not_repeat_a_run_that_has_failed(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("pilot", SCRIPTS / "pilot.py")
    pilot = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pilot)
    planned = [("1e-4", PlannedRun("mdlrc", seed, tmp_path / "run", (), 9)) for seed in (0, 1)]
    codes = [1, 2, 2]  # a failure, then a mistake, such as missing images
    monkeypatch.setattr(pilot, "runs", lambda *_: iter(planned))
    monkeypatch.setattr(subprocess, "run", lambda _: SimpleNamespace(returncode=codes.pop(0)))
    monkeypatch.setattr(sys, "argv", ["pilot.py", "--minutes=1", f"--csv={tmp_path}"])
    pilot.main()
    assert codes == [2]
    pilot.main()  # tries only the second run again
    assert codes == []
