"""Arms and seeds as fits: real processes, interrupted and taken up again."""

import os
import shlex
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from support.commands import SCRIPT, call, checkpoint
from support.small_digits import small_digits
from support.sweeping import TRUST, write_configs
from support.tiny_run import write_config

from lit_diffusion.lab.compare import sweep_command as sweep
from lit_diffusion.lab.compare.sweep_plan import LAST
from lit_diffusion.lab.compare.sweeping import LOG

MIN_SNR = "lit_diffusion.losses.MinSNR"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_configs()


# The end


def test_a_damaged_checkpoint_is_named_and_the_other_runs_go_on(one_run, capsys):
    Path("out/baseline/seed-0/checkpoints/last.ckpt").write_bytes(b"PK")
    assert call(f"sweep tiny.yaml --arms slow.yaml --seeds 0 --out out {TRUST}") == 1
    said = capsys.readouterr().err
    assert "baseline/seed-0 CANNOT GO ON: out/baseline/seed-0/checkpoints/last.ckpt " in said
    assert "slow/seed-0 was finished before" in said
    assert "1 of 2 runs finished; not baseline/seed-0" in said


def test_runs_that_cannot_be_compared_are_no_report_and_no_success(one_run, capsys):
    assert call(f"sweep tiny.yaml --arms slow.yaml --seeds 0 --out out {TRUST}") == 1
    assert "no report: none of these runs has an FID" in capsys.readouterr().err


@pytest.mark.parametrize(("arms", "out"), [("", "~/out"), ("--arms same.yaml", "out")])
def test_a_baseline_alone_needs_no_comparison(one_run, capsys, monkeypatch, arms, out):
    monkeypatch.setenv("HOME", str(Path.cwd()))
    write_config({"trainer": {"max_steps": 8}}, Path("same.yaml"))
    assert call(f"sweep tiny.yaml {arms} --seeds 0 --out {out} {TRUST}") == 0
    assert "no report" not in capsys.readouterr().err


# The processes


def start(options: str) -> subprocess.Popen:
    return subprocess.Popen(
        [SCRIPT, "sweep", *shlex.split(options)],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=os.setsid,
    )


def told(process: subprocess.Popen, code: int) -> str:
    err = process.communicate(timeout=600)[1]
    assert process.returncode == code, err
    return err


def digits(steps: int) -> dict:
    """A config with an FID that takes a moment."""
    fid = {"num_samples": 20, "extractor": "digits-cnn", "every_n_steps": 50}
    callback = {"class_path": "lit_diffusion.callbacks.FIDEvaluation", "init_args": fid}
    config = small_digits(steps, log_every_n_steps=10)
    config["trainer"]["callbacks"].append(callback)
    return config


@pytest.mark.system
@pytest.mark.usefixtures("terminal_signals")
def test_a_sweep_that_is_interrupted_goes_on_where_it_was():
    """Ctrl-C in the middle; one run then has a checkpoint, the other died before its first."""
    write_config(digits(150), Path("digits.yaml"))
    weighted = {"model": {"init_args": {"loss": {"init_args": {"weighting": MIN_SNR}}}}}
    write_config(weighted, Path("min-snr.yaml"))
    broken = {"model": {"init_args": {"image_shape": [1, 9, 9]}}}  # the data tell only in fit
    write_config(broken, Path("broken.yaml"))
    options = "digits.yaml --arms min-snr.yaml --seeds 0 --jobs 2 --out out"
    runs = [Path("out", arm, "seed-0") for arm in ("baseline", "min-snr")]

    first = start(options)
    while not all((run / LAST).exists() for run in runs):
        assert first.poll() is None, first.communicate()[1]
        time.sleep(0.05)
    os.kill(first.pid, signal.SIGINT)
    said = told(first, 130)
    assert "stopped with 0 of 2 runs finished. The same command goes on:" in said
    assert f"lit-diffusion sweep {options}" in said
    assert "on SIGTERM." in (runs[0] / LOG).read_text()

    reached = checkpoint(runs[0])["global_step"]
    shutil.rmtree(runs[1] / "checkpoints")
    said = told(start(f"{options.replace('--seeds', 'broken.yaml --seeds')}"), 1)
    assert f"baseline/seed-0 resumes at step {reached}\n" in said
    assert "min-snr/seed-0 starts\n" in said
    assert "broken/seed-0 FAILED with exit code 2" in said
    assert "image_shape" in said
    assert "2 of 3 runs finished; not broken/seed-0\n" in said
    assert all(checkpoint(run)["global_step"] == 150 for run in runs)
    assert all((run / "config.yaml").is_file() for run in runs)

    before = {p: p.read_bytes() for run in runs for p in run.rglob("*") if p.is_file()}
    said = told(start(options), 0)
    assert said.count("was finished before") == 2
    assert {p: p.read_bytes() for run in runs for p in run.rglob("*") if p.is_file()} == before
    assert Path("out/report/report.html").is_file()


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.usefixtures("terminal_signals")
def test_a_sweep_that_was_killed_waits_for_the_run_that_it_left_behind():
    write_config(digits(50), Path("digits.yaml"))
    options, run = "digits.yaml --seeds 0 --out out", Path("out/baseline/seed-0")
    first = start(options)
    while not (run / "metrics.csv").exists():
        assert first.poll() is None, first.communicate()[1]
        time.sleep(0.05)
    children = Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text().split()
    signal_all(children, signal.SIGSTOP)  # so that it is still there when the second one looks
    first.kill()
    second = start(options)
    assert "baseline/seed-0 is being run by another process" in second.stderr.readline()
    signal_all(children, signal.SIGCONT)
    assert "baseline/seed-0 was finished before" in told(second, 0)
    assert not list(run.glob("config.resume-*"))


def signal_all(processes: list[str], number: signal.Signals) -> None:
    for process in processes:
        os.kill(int(process), number)


def until_saved(process: subprocess.Popen, run: Path) -> None:
    while not (run / LAST).exists():
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.05)


@pytest.mark.system
@pytest.mark.parametrize("whom", ["the sweep", "its fit"])
def test_a_sweep_whose_time_is_up_leaves_nothing_running_and_is_to_be_started_again(whom):
    """As SLURM announces it, to all processes or to one."""
    write_config(small_digits(100_000), Path("digits.yaml"))
    runs = [Path("out", "baseline", f"seed-{seed}") for seed in (0, 1)]
    process = start("digits.yaml --seeds 0,1 --out out")
    until_saved(process, runs[0])
    (fit,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(process.pid if whom == "the sweep" else int(fit), signal.SIGUSR1)
    said = told(process, 75)
    assert f"baseline/seed-0 saved at step {checkpoint(runs[0])['global_step']} of 100000" in said
    assert "stopped with 0 of 2 runs finished. The same command goes on:" in said
    assert "FAILED" not in said
    assert "on SIGUSR1." in (runs[0] / LOG).read_text()
    assert not Path(f"/proc/{fit}").exists()
    assert not runs[1].exists()


def test_a_signal_while_a_sweep_is_planned_starts_nothing(monkeypatch):
    def planned(*arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        return plan(*arguments)

    plan = sweep.plan
    monkeypatch.setattr(sweep, "plan", planned)
    assert call(f"sweep tiny.yaml --out out {TRUST}") == 143
    assert not Path("out").exists()
