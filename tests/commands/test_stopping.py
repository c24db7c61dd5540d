"""A fit in a process of its own that is stopped by a signal: exit code, and what is told."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from support.commands import SCRIPT, call, checkpoint
from support.small_digits import small_digits
from support.tiny_run import write_config

LAST = Path("runs/digits/checkpoints/last.ckpt")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_config(small_digits(100_000), Path("digits.yaml"))


def stopped(number: signal.Signals, sign: Path, *options: str) -> tuple[int, str]:
    """Exit code and stderr of a fit that gets a signal once a file is there."""
    command = [SCRIPT, "fit", "--config=digits.yaml", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    while not sign.exists():
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.01)
    os.killpg(process.pid, number)  # as terminals and batch systems do
    said = process.communicate(timeout=300)[1]
    return process.returncode, said


@pytest.mark.system
@pytest.mark.usefixtures("terminal_signals")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)]
)
def test_a_fit_that_a_signal_stops_ends_with_its_code_and_says_how_to_go_on(number, code, workers):
    ended, said = stopped(number, LAST, f"--data.num_workers={workers}")
    assert ended == code, said
    assert "Traceback" not in said
    assert f"Stopped by {number.name} at step " in said
    told = f"The same command with --ckpt_path=last goes on from {LAST}."
    assert told in said.strip().split("\n")[-1]
    step = checkpoint("runs/digits")["global_step"] + 1
    assert call(f"fit --config digits.yaml --ckpt_path=last --trainer.max_steps={step}") == 0
    assert checkpoint("runs/digits")["global_step"] == step


@pytest.mark.system
@pytest.mark.usefixtures("terminal_signals")
def test_a_fit_that_is_stopped_without_a_checkpoint_says_so():
    options = "--trainer.enable_checkpointing=false"
    ended, said = stopped(signal.SIGTERM, Path("runs/digits/metrics.csv"), options)
    assert ended == 143, said
    assert said.strip().endswith(f"There is no {LAST} to go on from.")
