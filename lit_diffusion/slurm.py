"""What a process knows of the SLURM job that it is part of, and how it has that job start again."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

_NOTE = "slurm-job"


def job_id() -> str | None:
    """The job by the name that SLURM's commands take, as 7 or array_task; None outside of SLURM.

    SLURM_JOB_ID alone would not do: one task of an array has the number of the whole array.
    """
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    if array is not None:
        return f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    return os.environ.get("SLURM_JOB_ID")


def requeue_job(job: str) -> str:
    """Ask SLURM to start a job again, unless somebody has cancelled it or its time is up.

    Args:
        job: its name, as of `job_id`.

    Returns:
        What became of it, in words.
    """
    state = _run(["squeue", "--noheader", "--format=%T", f"--jobs={job}"])
    if state.stdout.strip() != "RUNNING":
        found = state.stdout.strip() or _error(state)
        return f"SLURM job {job} is not requeued, as it is not running: {found}"
    asked = _run(["scontrol", "requeue", job])
    if asked.returncode:
        return f"SLURM job {job} could not be requeued: {_error(asked)}"
    return f"SLURM job {job} is requeued"


def leave_note(folder: Path) -> None:
    """Note in a folder of checkpoints which job writes them; nothing outside of SLURM."""
    if job := job_id():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _NOTE).write_text(f"{job}\n")


def is_requeue_of(folder: Path) -> bool:
    """Whether this process is a later start of the very job that left its note in a folder."""
    note = folder / _NOTE
    restarts = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
    return restarts > 0 and note.is_file() and note.read_text().strip() == job_id()


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(  # noqa: S603  the command is ours
            command, capture_output=True, text=True, check=False, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 1, "", str(error))


def _error(done: subprocess.CompletedProcess[str]) -> str:
    return " ".join(done.stderr.split()) or f"exit code {done.returncode}"
