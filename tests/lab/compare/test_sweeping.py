"""Runs of a sweep that are finished or broken, or that another process has."""

import io
import shlex
import shutil
from pathlib import Path

import pytest
from support.sweeping import TRUST, write_configs

from lit_diffusion.cli.run_folder import occupied
from lit_diffusion.lab.compare.jobs import Job
from lit_diffusion.lab.compare.sweep_command import parser, planned
from lit_diffusion.lab.compare.sweeping import LOG, Sweep


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_configs()


def small_sweep(options: str) -> Sweep:
    args = parser().parse_args(shlex.split(f"tiny.yaml --out out {options}"))
    return Sweep(planned(args, TRUST.split()), 1)


def test_a_checkpoint_that_a_run_leaves_damaged_stops_no_other_run(one_run, capsys):
    for name in ("baseline", "slow"):
        shutil.rmtree(f"out/{name}")
    over = small_sweep("--seeds 0")
    file = Path("out/baseline/seed-0/checkpoints/last.ckpt")
    file.parent.mkdir(parents=True)
    file.write_bytes(b"PK")
    over._ended(Job("baseline/seed-0", [], io.BytesIO()), 0, 1.0)
    assert over.unfinished == ["baseline/seed-0"]
    assert "ended after 0:00:01 with a damaged checkpoint: out/baseline" in capsys.readouterr().err


def test_the_folder_of_a_fit_that_no_sweep_started_is_left_alone_until_it_ends(one_run, capsys):
    """Before its first checkpoint, it looks like a run that died."""
    run = Path("out/baseline/seed-0")
    shutil.rmtree(run / "checkpoints")
    (run / "metrics.csv").unlink()
    with occupied(run):
        before, claimed = sorted(run.iterdir()), (run / ".lock").stat().st_ino
        jobs = small_sweep("--seeds 0")._jobs()
        assert [next(jobs) for _ in range(3)] == [None] * 3
        assert sorted({*before, run / LOG}) == sorted(run.iterdir())
    assert capsys.readouterr().err.count("baseline/seed-0 is being run by another process") == 1
    (job,) = jobs
    assert job.name == "baseline/seed-0"
    assert sorted(path.name for path in run.iterdir()) == [".lock", LOG]
    assert (run / ".lock").stat().st_ino == claimed  # a new file would be another claim


def test_runs_of_others_come_last_and_count_as_finished_when_those_finish_them(one_run, tmp_path):
    saved = Path("out/baseline/seed-0/checkpoints")
    saved.rename("elsewhere")
    shutil.rmtree("out/slow")
    over = small_sweep("--arms slow.yaml --seeds 0")
    jobs = over._jobs()
    with occupied(saved.parent):
        assert next(jobs).name == "slow/seed-0"
        assert next(jobs) is None
        Path("elsewhere").rename(saved)
    assert list(jobs) == []
    assert over.unfinished == ["slow/seed-0"]
