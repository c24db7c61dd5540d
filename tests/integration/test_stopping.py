"""Commands that are stopped by a signal: exit code, what is told, and what is left behind."""

import os
import pty
import select
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.commands import SCRIPT, call, checkpoint
from support.small_digits import small_digits
from support.tiny_run import HERE, tiny_config, write_config

from lit_diffusion.cli.loggers import read_rows

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
    stderr = process.communicate(timeout=300)[1]
    return process.returncode, stderr


@pytest.mark.system
@pytest.mark.usefixtures("terminal_signals")
@pytest.mark.parametrize(
    ("number", "code", "workers"),
    [(signal.SIGTERM, 75, 2), (signal.SIGINT, 130, 0), (signal.SIGHUP, 129, 0)],
)
def test_a_fit_that_a_signal_stops_ends_with_its_code_and_says_how_to_go_on(number, code, workers):
    ended, stderr = stopped(number, LAST, f"--data.num_workers={workers}")
    assert ended == code, stderr
    assert "Traceback" not in stderr
    step = checkpoint("runs/digits")["global_step"]
    assert f"Saved {LAST} at step {step}, on {number.name}." in stderr
    assert f"Stopped by {number.name} at step {step}. Repeat" in stderr
    assert stderr.strip().endswith(f" with --ckpt_path=last to resume from {LAST}.")
    step += 1
    assert call(f"fit --config digits.yaml --ckpt_path=last --trainer.max_steps={step}") == 0
    assert checkpoint("runs/digits")["global_step"] == step


@pytest.mark.system
@pytest.mark.usefixtures("terminal_signals")
def test_a_terminal_that_is_closed_costs_nothing():
    """Its bar and its messages have nowhere to go then."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(SCRIPT, [SCRIPT, "fit", "--config=digits.yaml"])
    while not LAST.exists():
        if select.select([terminal], [], [], 0.1)[0]:
            os.read(terminal, 4096)
    reached = int(read_rows("runs/digits/metrics.csv")[-1]["step"])
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 129
    assert checkpoint("runs/digits")["global_step"] > reached


@pytest.mark.system
@pytest.mark.usefixtures("terminal_signals")
def test_a_fit_that_is_stopped_without_a_checkpoint_says_so():
    options = "--trainer.enable_checkpointing=false"
    ended, stderr = stopped(signal.SIGTERM, Path("runs/digits/metrics.csv"), options)
    assert ended == 143, stderr
    assert f"There is no {LAST} to resume from: " in stderr
    assert stderr.strip().endswith(" steps are lost.")


KEEPS_NOTHING = [
    "validate --ckpt_path=runs/tiny/checkpoints/last.ckpt",
    "test --ckpt_path=runs/tiny/checkpoints/last.ckpt",
    "predict --ckpt_path=runs/tiny/checkpoints/last.ckpt",
    "fit --config=tiny.yaml --trainer.enable_checkpointing=false --trainer.default_root_dir=none",
]
IN_A_JOB = {"JOB_ID": "7", "JOB_NAME": "train", "NTASKS": "1", "NTASKS_PER_NODE": "1"}
IN_A_JOB |= dict.fromkeys(("NODEID", "PROCID", "LOCALID"), "0")


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Those of a finished run, in a SLURM job whose scontrol would leave a file."""
    write_config(tiny_config(enable_progress_bar=False))
    assert call("fit --config tiny.yaml --trust support") == 0
    for name, value in IN_A_JOB.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(f'#!/bin/bash\necho "$@" >> {tmp_path}/requeued\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{scontrol.parent}:{os.environ['PATH']}")
    return sorted(Path().rglob("*"))


def signalled(command: str, name: str) -> str:
    """The command, whose process gets a signal in its second batch."""
    callback = f"--trainer.callbacks+={HERE}.SignalsItself --trainer.callbacks.name={name}"
    return f"{command} --trust=support {callback}"


def left_behind(files: list[Path]) -> list[Path]:
    """Checkpoints that were not there before, and the sign of a requeue."""
    present = [*Path().rglob("*.ckpt"), *Path().glob("requeued")]
    return [file for file in present if file not in files]


@pytest.mark.quick("validate --ckpt_path=runs/tiny/checkpoints/last.ckpt")
@pytest.mark.parametrize("command", KEEPS_NOTHING)
def test_what_keeps_nothing_ends_on_a_sigterm_before_its_next_batch(files, command):
    assert call(signalled(command, "SIGTERM")) == 143
    assert left_behind(files) == []


@pytest.mark.slow
def test_a_fit_without_checkpoints_dies_of_sigusr1_in_a_slurm_job_that_it_does_not_requeue(files):
    """Lightning would save a checkpoint into the run folder, requeue the job, and go on."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [SCRIPT, *shlex.split(signalled(KEEPS_NOTHING[-1], "SIGUSR1"))]
    assert subprocess.run(command, env=environment, check=False).returncode == -signal.SIGUSR1
    assert left_behind(files) == []


SLOW = """
import time
from pathlib import Path
from support.tiny_run import TinyModule


class Slow(TinyModule):
    def training_step(self, batch, batch_idx):
        if self.global_step == 25:
            Path("asleep").touch()
            time.sleep(120)
        return super().training_step(batch, batch_idx)
"""


@pytest.mark.system
@pytest.mark.usefixtures("terminal_signals")
def test_a_second_ctrl_c_ends_a_slow_step_at_once_and_says_what_is_lost():
    Path("slow.py").write_text(SLOW)
    config = tiny_config(max_steps=100)
    config["model"]["class_path"] = "slow.Slow"
    write_config(config, Path("slow.yaml"))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([".", *sys.path])}
    command = [SCRIPT, "fit", "--config=slow.yaml", "--trust=slow", "--trust=support"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    while not Path("asleep").exists():
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    time.sleep(1)
    assert process.poll() is None  # it waits for the step
    process.send_signal(signal.SIGINT)
    stderr = process.communicate(timeout=60)[1]
    assert process.returncode == 130, stderr
    assert "Stopped by SIGINT at step 25. The 4 steps since step 21 are lost. Repeat" in stderr
