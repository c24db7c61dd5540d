"""What a process knows of the SLURM job that it is part of, and how it has that job start again."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lit_diffusion.files import atomic_write_text

_NOTE = "slurm-job"


def job_id() -> str | None:
    """The job by the name that SLURM's commands take, as 7 or array_task; None outside of SLURM.

    SLURM_JOB_ID alone would not do: one task of an array has the number of the whole array.
    """
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    if array is not None:
        return f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    return os.environ.get("SLURM_JOB_ID")


def requeue_job(job: str, number: signal.Signals) -> str:
    """Ask SLURM to start a job again, where that is what a signal meant.

    SIGTERM means it where SLURM preempts the job; else somebody wants this process to end, who may
    have other work in the job. Other signals mean it as long as the job runs. One that was
    cancelled or has run out of its time stays ended. Returns what became of it, in words.
    """
    shown = _run(["scontrol", "show", "job", "--oneliner", job])
    states = set(re.findall(r"\bJobState=(\S+)", shown.stdout))
    if not states:
        return f"SLURM job {job} could not be asked for: {_error(shown)}"
    if states != {"RUNNING"}:
        found = ", ".join(sorted(states))
        return f"SLURM job {job} is not requeued, as it is not running: {found}"
    preempted = set(re.findall(r"\bPreemptTime=(\S+)", shown.stdout)) - {"None"}
    if number == signal.SIGTERM and not preempted:
        return f"SLURM job {job} is not requeued, as SIGTERM came from elsewhere"
    asked = _run(["scontrol", "requeue", job])
    if asked.returncode:
        return f"SLURM job {job} could not be requeued: {_error(asked)}"
    return f"SLURM job {job} is requeued"


def leave_note(folder: Path) -> None:
    """Note in a folder of checkpoints which start of which job writes them; if it is in SLURM."""
    if job := job_id():
        folder.mkdir(parents=True, exist_ok=True)
        atomic_write_text(folder / _NOTE, f"{_cluster()} {job} {_restarts()}\n")


def is_requeue_of(folder: Path) -> bool:
    """Whether this process is of a later start of the very job that left its note in a folder."""
    note = folder / _NOTE
    if not note.is_file():
        return False
    *named, restarts = note.read_text().split()
    return named == [_cluster(), job_id()] and _restarts() > int(restarts)


def _cluster() -> str:
    return os.environ.get("SLURM_CLUSTER_NAME", "-")


def _restarts() -> int:
    return int(os.environ.get("SLURM_RESTART_COUNT") or 0)


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a command of SLURM's, again where its controller is busy, and out of reach of signals."""
    options: dict[str, Any] = {"capture_output": True, "text": True, "start_new_session": True}
    for wait in (2.0, 8.0, 0.0):
        try:
            done = subprocess.run(command, timeout=60, check=False, **options)  # noqa: S603
        except OSError as error:
            return subprocess.CompletedProcess(command, 1, "", str(error))
        except subprocess.TimeoutExpired as error:
            done = subprocess.CompletedProcess(command, 1, "", str(error))
        if done.returncode == 0:
            break
        time.sleep(wait)
    return done


def _error(done: subprocess.CompletedProcess[str]) -> str:
    return " ".join(done.stderr.split()) or f"exit code {done.returncode}"
