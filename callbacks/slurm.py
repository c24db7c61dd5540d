"""The SLURM job of this process, and how to requeue it."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lit_diffusion.files import atomic_write_text, checked_read

_JOB_FILE = "slurm-job"


def job_id() -> str | None:
    """Return the id of this process's SLURM job; None outside SLURM.

    Task 2 of the job array 7 has the id 7_2. SLURM's commands accept this id. The variable
    `SLURM_JOB_ID` alone is ambiguous, because in one task of each job array it equals the id of the
    whole array.
    """
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    if array is not None:
        return f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    return os.environ.get("SLURM_JOB_ID")


def requeue_job(job: str, number: signal.Signals) -> str:
    """After a signal, ask SLURM to requeue a running job. Return a sentence about the outcome.

    After SIGTERM, the job is requeued only if SLURM preempts it. Otherwise, a user has sent the
    SIGTERM to stop this process. The job is then not requeued, because a requeue would interrupt
    other work of the user in the same job. After any signal, the job is not requeued if it was
    cancelled or has reached its time limit.
    """
    status = _run(["scontrol", "show", "job", "--oneliner", job])
    states = set(re.findall(r"\bJobState=(\S+)", status.stdout))
    if not states:
        return f"SLURM job {job} is not requeued, because its state is unknown: {_error(status)}"
    if states != {"RUNNING"}:
        listed = ", ".join(sorted(states))
        return f"SLURM job {job} is not requeued, because it is not running: {listed}"
    preempted = set(re.findall(r"\bPreemptTime=(\S+)", status.stdout)) - {"None"}
    if number == signal.SIGTERM and not preempted:
        return f"SLURM job {job} is not requeued, because SLURM did not send the SIGTERM"
    result = _run(["scontrol", "requeue", job])
    if result.returncode:
        return f"SLURM job {job} could not be requeued: {_error(result)}"
    return f"SLURM job {job} is requeued"


def mark_checkpoints(folder: Path) -> None:
    """Write the id and restart count of a SLURM job to a file that `is_requeue_of` reads later."""
    if job := job_id():
        folder.mkdir(parents=True, exist_ok=True)
        atomic_write_text(folder / _JOB_FILE, f"{_cluster()} {job} {_restarts()}\n")


def is_requeue_of(folder: Path) -> bool:
    """Return whether this process is a restart of the job that called `mark_checkpoints`."""
    file = folder / _JOB_FILE
    if not file.is_file():
        return False
    with checked_read(file, "mark of a SLURM job", "delete it"):
        *job, restarts = file.read_text().split()
        return job == [_cluster(), job_id()] and _restarts() > int(restarts)


def _cluster() -> str:
    return os.environ.get("SLURM_CLUSTER_NAME", "-")


def _restarts() -> int:
    return int(os.environ.get("SLURM_RESTART_COUNT") or 0)


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a SLURM command, up to three times if it fails."""
    # In a session of its own, signals to this process do not reach the command.
    options: dict[str, Any] = {"capture_output": True, "text": True, "start_new_session": True}
    for wait in (2.0, 8.0, 0.0):
        try:
            result = subprocess.run(command, timeout=60, check=False, **options)  # noqa: S603
        except OSError as error:
            return subprocess.CompletedProcess(command, 1, "", str(error))
        except subprocess.TimeoutExpired as error:
            result = subprocess.CompletedProcess(command, 1, "", str(error))
        if result.returncode == 0:
            break
        time.sleep(wait)
    return result


def _error(result: subprocess.CompletedProcess[str]) -> str:
    return " ".join(result.stderr.split()) or f"exit code {result.returncode}"
