"""What is said to SLURM and read from it; a real one is in integration/test_slurm_cluster.py."""

import pytest

from lit_diffusion.slurm import is_requeue_of, job_id, leave_note, requeue_job


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Puts programs of given names and texts first on the path."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")

    def install(**texts):
        (tmp_path / "bin").mkdir()
        for name, text in texts.items():
            (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
            (tmp_path / "bin" / name).chmod(0o755)

    return install


def test_a_running_job_is_requeued(programs, tmp_path):
    programs(squeue="echo RUNNING", scontrol=f'echo "$@" > {tmp_path}/asked')
    assert requeue_job("12") == "SLURM job 12 is requeued"
    assert (tmp_path / "asked").read_text() == "requeue 12\n"


@pytest.mark.parametrize("state", ["CANCELLED", "TIMEOUT", "COMPLETING"])
def test_a_job_that_somebody_ended_stays_ended(programs, tmp_path, state):
    programs(squeue=f"echo {state}", scontrol=f"touch {tmp_path}/asked")
    told = f"SLURM job 12 is not requeued, as it is not running: {state}"
    assert requeue_job("12") == told
    assert not (tmp_path / "asked").exists()


def test_a_refusal_of_slurm_is_told(programs):
    programs(squeue="echo RUNNING", scontrol="echo slurm_requeue error: Disabled >&2; exit 1")
    told = "SLURM job 12 could not be requeued: slurm_requeue error: Disabled"
    assert requeue_job("12") == told


def test_programs_that_are_not_there_are_told(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "No such file" in requeue_job("12")


@pytest.mark.parametrize(
    ("job", "restarts", "same"),
    [("7", "1", True), ("7", "3", True), ("7", None, False), ("7", "0", False), ("8", "1", False)],
)
def test_a_requeue_is_a_later_start_of_the_job_that_left_its_note(
    tmp_path, monkeypatch, job, restarts, same
):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    leave_note(tmp_path / "checkpoints")
    monkeypatch.setenv("SLURM_JOB_ID", job)
    if restarts is not None:
        monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
    assert is_requeue_of(tmp_path / "checkpoints") == same
    assert not is_requeue_of(tmp_path)


def test_a_task_of_an_array_is_not_taken_for_the_array(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert job_id() == "7"
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "7")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "2")
    assert job_id() == "7_2"


def test_outside_of_slurm_there_is_neither_job_nor_note(tmp_path, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    leave_note(tmp_path / "checkpoints")
    assert job_id() is None
    assert not (tmp_path / "checkpoints").exists()
    assert not is_requeue_of(tmp_path / "checkpoints")
