"""Without SLURM; a real one is in integration/test_cluster.py."""

import signal

import pytest

from lit_diffusion.callbacks.slurm import is_requeue_of, job_id, mark_checkpoints, requeue_job


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Puts an `scontrol` of a given text first on the path."""
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")

    def install(text):
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "scontrol").write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "bin" / "scontrol").chmod(0o755)

    return install


def scontrol(state: str, requeue: str = "true") -> str:
    return f'[ "$1" = show ] && echo "JobId=12 {state}" && exit; {requeue}'


RUNNING = "JobState=RUNNING PreemptTime=None"
PREEMPTED = "JobState=RUNNING PreemptTime=2026-11-22T00:36:36"


@pytest.mark.parametrize(
    ("number", "state"),
    [("SIGUSR1", RUNNING), ("SIGTERM", PREEMPTED), ("SIGUSR1", f"{RUNNING}\nJobState=RUNNING")],
)
def test_a_running_job_is_requeued(program, tmp_path, number, state):
    """The last is a heterogeneous job."""
    program(scontrol(state, f'echo "$@" > {tmp_path}/asked'))
    assert requeue_job("12", signal.Signals[number]) == "SLURM job 12 is requeued"
    assert (tmp_path / "asked").read_text() == "requeue 12\n"


@pytest.mark.parametrize(
    ("number", "state", "why"),
    [
        ("SIGTERM", "JobState=CANCELLED", "not running: CANCELLED"),
        ("SIGUSR1", "JobState=TIMEOUT", "not running: TIMEOUT"),
        ("SIGTERM", RUNNING, "did not send the SIGTERM"),
    ],
)
def test_what_somebody_ended_stays_ended(program, tmp_path, number, state, why):
    program(scontrol(state, f"touch {tmp_path}/asked"))
    assert requeue_job("12", signal.Signals[number]).endswith(why)
    assert not (tmp_path / "asked").exists()


def test_a_refusal_of_slurm_is_reported(program):
    program(scontrol(RUNNING, "echo slurm_requeue error: Disabled >&2; exit 1"))
    assert requeue_job("12", signal.SIGUSR1).endswith(
        "not be requeued: slurm_requeue error: Disabled"
    )


@pytest.mark.parametrize(
    ("job", "restarts", "same"),
    [("7", "2", True), ("7", "3", True), ("7", None, False), ("7", "1", False), ("8", "2", False)],
)
def test_a_requeue_is_a_later_start_of_the_job_that_marked_the_folder(
    tmp_path, monkeypatch, job, restarts, same
):
    """The mark is of the second start; a second run of that start is not a requeue."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    mark_checkpoints(tmp_path / "checkpoints")
    monkeypatch.setenv("SLURM_JOB_ID", job)
    monkeypatch.setenv("SLURM_RESTART_COUNT", restarts or "")
    assert is_requeue_of(tmp_path / "checkpoints") == same
    assert not is_requeue_of(tmp_path)


def test_a_task_of_an_array_is_not_taken_for_the_array(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert job_id() == "7"
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "7")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "2")
    assert job_id() == "7_2"


def test_outside_of_slurm_there_is_neither_job_nor_mark(tmp_path, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    mark_checkpoints(tmp_path / "checkpoints")
    assert job_id() is None
    assert not (tmp_path / "checkpoints").exists()
