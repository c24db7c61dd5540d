"""Runs on a real SLURM with two nodes, and under torchrun with two; both on this machine."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from support.commands import SCRIPT
from support.plain_module import assert_same_bits
from support.resuming import curves
from support.small_digits import small_digits
from support.tiny_run import write_config

HERE = Path(__file__).parent / "slurm"
CLUSTER = Path(__file__).parents[2] / "configs" / "cluster"
STEPS = 400
NO_GPU = ("--gpus-per-node=0", "--ntasks-per-node=1", "--cpus-per-task=1", "--mem=1G", "--time=10")
BIN = str(Path(sys.executable).parent)

pytestmark = pytest.mark.system


class Cluster:
    """SLURM's commands, with this environment's programs on the path of the jobs."""

    def __init__(self, folder: Path) -> None:
        settings = {"PATH": f"{BIN}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
        self.environment = os.environ | settings | {"MS_DIR": str(folder), "MS_GRACE": "60"}

    def start(self) -> None:
        done = subprocess.run([HERE / "start-slurm.sh"], env=self.environment, check=False)
        if done.returncode == 3:
            pytest.skip("SLURM's Debian packages cannot be installed")
        assert done.returncode == 0
        self.environment["SLURM_CONF"] = f"{self.environment['MS_DIR']}/etc/slurm.conf"

    def stop(self) -> None:
        environment = self.environment | {"MS_PURGE": "1"}
        subprocess.run([HERE / "stop-slurm.sh"], env=environment, check=False)

    def submit(self, *arguments: object) -> str:
        return re.search(r"batch job (\d+)", self("sbatch", *arguments))[1]

    def __call__(self, *command: object) -> str:
        words = [str(word) for word in command]
        return subprocess.check_output(words, env=self.environment, text=True)

    def describe(self, job: str) -> dict[str, str]:
        return dict(re.findall(r"(\w+)=(\S*)", self("scontrol", "show", "job", job)))

    def wait_for_end(self, job: str) -> dict[str, str]:
        """The description of a job, once it is over."""

        def ended() -> dict[str, str] | None:
            description = self.describe(job)
            return None if description["JobState"] in GOING else description

        return wait_for(ended, f"job {job}")


GOING = ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED", "SUSPENDED")


def wait_for(condition, what, seconds=300):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.2)
    raise AssertionError(f"waited for {what} in vain: {output()}")


def output() -> str:
    return "\n".join(f"{file}:\n{file.read_text()}" for file in Path().glob("*.out"))


def reaches(step: int, root: str = "runs/digits"):
    """Whether a run has logged so many rows."""
    metrics = Path(root) / "metrics.csv"
    return lambda: metrics.exists() and metrics.read_text().count("\n") > step


@pytest.fixture(scope="module")
def slurm():
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        pytest.skip("SLURM is installed and started by root on Debian")
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    folder.chmod(0o755)  # pytest's own are closed to others, which munge refuses
    cluster = Cluster(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(autouse=True)
def _config(folder):
    config()


def config(steps=STEPS):
    contents = small_digits(steps, enable_progress_bar=False, max_epochs=-1)
    schedule = {"total_steps": steps, "warmup_steps": 4}
    contents["model"]["init_args"]["lr_scheduler"]["init_args"] = schedule
    write_config(contents, Path("digits.yaml"))


def torchrun(name: str, *options: str) -> list[subprocess.Popen]:
    """A fit on two nodes of one process each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    fit = [SCRIPT, "fit", "--config=digits.yaml", f"--trainer.default_root_dir={name}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    launch = [f"{BIN}/torchrun", "--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1"]
    nodes = []
    for node in range(2):
        log = Path(f"{name}-{node}.out").open("ab")  # noqa: SIM115  the process has it
        command = [*launch, f"--node-rank={node}", f"--master-port={port}", *fit, *TWO, *options]
        nodes.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))
    return nodes


TWO = ("--trainer.num_nodes=2", "--trainer.devices=1", "--trainer.strategy=ddp")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A run on two nodes from its first step to its last."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        config()
        assert [node.wait(300) for node in torchrun("whole")] == [0, 0], output()
    return folder / "whole"


def assert_same_end(folder, expected):
    for key in ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "epoch"):
        assert_same_bits(end(folder)[key], end(expected)[key])
    assert curves(Path(folder)) == curves(expected)


def end(folder):
    return torch.load(Path(folder) / "checkpoints" / "last.ckpt", weights_only=True)


def test_torchrun_on_two_nodes_of_which_one_is_told_to_stop(undisturbed):
    nodes = torchrun("stopped")
    wait_for(reaches(100, "stopped"), "step 100")
    nodes[1].send_signal(signal.SIGTERM)
    assert all(node.wait(120) for node in nodes), output()
    step = end("stopped")["global_step"]
    assert f"Saved stopped/checkpoints/last.ckpt at step {step}, on SIGTERM." in output()
    assert "exitcode  : 75" in output()
    assert [node.wait(300) for node in torchrun("stopped", "--ckpt_path=last-or-none")] == [0, 0]
    assert_same_end("stopped", undisturbed)


def test_torchrun_in_a_job_is_told_of_the_end_by_the_batch_script(tmp_path, monkeypatch):
    """Without SLURM: scontrol is a script that leaves a file, and the test signals the shell."""
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(
        f'#!/bin/bash\necho "$@" >> {tmp_path}/asked\necho JobState=RUNNING PreemptTime=None\n'
    )
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{scontrol.parent}:{BIN}:{os.environ['PATH']}")
    for name, value in {"JOB_ID": "7", "JOB_NAME": "train", "GPUS_ON_NODE": "2"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    first = batch()
    wait_for(reaches(30), "step 30")
    first.send_signal(signal.SIGUSR1)
    assert first.wait(120) == 1  # torchrun's, of which a process ended with 75
    assert "on SIGUSR1. SLURM job 7 is requeued." in output()
    assert "exitcode  : 75" in output()
    assert Path("asked").read_text().split("\n")[-2:] == ["requeue 7", ""]
    step = end("runs/digits")["global_step"]
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert batch(f"--trainer.max_steps={step + 1}").wait(120) == 0
    assert "SLURM job 7 was requeued, and resumes from" in output()
    assert end("runs/digits")["global_step"] == step + 1


def batch(*options: str) -> subprocess.Popen:
    """A fit on two processors, by the batch script for torchrun."""
    fit = ["--config=digits.yaml", "--trainer.strategy=ddp", *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with Path("batch.out").open("ab") as log:
        return subprocess.Popen(
            ["bash", CLUSTER / "torchrun.sbatch", *fit], stdout=log, stderr=log, env=environment
        )


def test_a_preempted_job_is_requeued_and_ends_as_if_it_never_was(slurm, undisturbed):
    job = slurm.submit(*NO_GPU, CLUSTER / "multi-node.sbatch", "--config=digits.yaml", *TWO[2:])
    wait_for(reaches(100), "step 100")
    urgent = slurm.submit(HERE / "urgent.sbatch")
    assert slurm.wait_for_end(urgent)["JobState"] == "COMPLETED"
    description = slurm.wait_for_end(job)
    assert (description["JobState"], description["Restarts"]) == ("COMPLETED", "1"), output()
    resumed = f"SLURM job {job} was requeued, and resumes from runs/digits/checkpoints/last.ckpt."
    assert resumed in output()
    assert_same_end("runs/digits", undisturbed)


def test_a_signal_that_meets_uneven_ranks_deadlocks_nobody_in_any_project(slurm):
    job = slurm.submit(HERE / "foreign.sbatch", HERE / "foreign_training.py")
    wait_for(Path("reached-step-5").exists, "step 5")
    slurm("scancel", "--signal=USR1", job)
    description = slurm.wait_for_end(job)
    assert (description["JobState"], description["Restarts"]) == ("COMPLETED", "1"), output()
    assert re.search(r"at step \d+, on SIGUSR1. SLURM job \d+ is requeued.", output())
    assert "ended at step 80" in output()


def test_a_cancelled_job_saves_and_stays_cancelled(slurm):
    config(100_000)
    job = slurm.submit(*NO_GPU, CLUSTER / "single-node.sbatch", "--config=digits.yaml")
    wait_for(reaches(30), "step 30")
    slurm("scancel", job)
    description = slurm.wait_for_end(job)
    assert (description["JobState"], description["Restarts"]) == ("CANCELLED", "0"), output()
    wait_for(lambda: "is not requeued" in output(), "the message")
    assert end("runs/digits")["global_step"] >= 30


def test_the_tasks_of_an_array_are_requeued_each_by_itself(slurm):
    config(300)
    sweep = [SCRIPT, "sweep", "digits.yaml", "--seeds=0,1", "--out=runs", "--print"]
    Path("commands").write_bytes(subprocess.check_output(sweep))
    job = slurm.submit("--array=1-2", *NO_GPU, CLUSTER / "array.sbatch", "commands")
    wait_for(reaches(30, "runs/baseline/seed-1"), "step 30")
    slurm("scancel", "--signal=USR1", f"{job}_2")
    wait_for(lambda: slurm("squeue", "--noheader") == "", "the array")
    folders = [Path("runs/baseline", f"seed-{seed}") for seed in (0, 1)]
    assert [end(folder)["global_step"] for folder in folders] == [300, 300], output()
    resumes = [len(list(folder.glob("config.resume-*.yaml"))) for folder in folders]
    assert resumes == [0, 1]
