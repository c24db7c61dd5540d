"""A sweep: which runs it has, which it refuses, and real processes that are interrupted."""

import io
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml
from support.commands import SCRIPT, call, checkpoint, equal, weights
from support.small_digits import small_digits
from support.sweeping import ARMS, TRUST, printed, refusal, write_configs
from support.tiny_run import write_config

from lit_diffusion.cli.loggers import read_rows
from lit_diffusion.cli.main import main
from lit_diffusion.cli.run_folder import occupied
from lit_diffusion.lab.compare.processes import Job
from lit_diffusion.lab.compare.sweep import LAST, LOG, Sweep, plan_sweep

MIN_SNR = "lit_diffusion.losses.MinSNR"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_configs()


def test_all_arms_of_the_first_seed_come_first_and_copies_of_arms_are_left_out(capsys):
    """As beta1-0.9 where the experiment has that: it would be one more test, of no difference."""
    same = {"model": {"init_args": {"optimizer": {"init_args": {"lr": 0.1}}}}}
    write_config(same, Path("same.yaml"))
    write_config(ARMS["slow"], Path("c+py.yaml"))  # one file, though its name has a plus
    options = f"--arms same.yaml slow.yaml c+py.yaml --seeds 0,7 --print {TRUST}"
    before = sorted(Path().iterdir())
    for experiment in ("tiny.yaml -c ema.yaml", "-c tiny.yaml ema.yaml"):  # later configs win
        assert call(f"sweep {experiment} {options}") == 0
        out, err = capsys.readouterr()
        configs = [re.findall(r"--config=(\S+)", line) for line in out.splitlines()]
        assert configs == [["tiny.yaml", "ema.yaml"], ["tiny.yaml", "ema.yaml", "slow.yaml"]] * 2
    runs = re.findall(r"--seed_everything=(\d+) --trainer.default_root_dir=(\S+)", out)
    arms = ["baseline", "slow"]
    assert runs == [(n, f"runs/tiny-sweep/{arm}/seed-{n}") for n in "07" for arm in arms]
    assert re.findall(r"arm (\S+) is left out: its settings equal the settings of (\S+)", err) == [
        *(("same", "baseline"), ("c+py", "slow"))
    ]
    assert sorted(Path().iterdir()) == before


@pytest.mark.slow
def test_configs_joined_by_a_plus_are_one_arm_whose_command_resumes_when_run_again(capsys):
    """As an array task that was requeued; a finished one is left as it is."""
    arms = "--arms slow.yaml+ema.yaml --seeds 3 --out out"
    (_, line) = printed(capsys, f"{arms} --trainer.max_steps=4")
    run = Path("out/slow+ema/seed-3")
    assert main(shlex.split(line)[1:]) == 0
    before, saved = weights(run), yaml.safe_load((run / "config.yaml").read_text())
    assert saved["seed_everything"] == 3
    assert saved["model"]["init_args"]["optimizer"]["init_args"]["lr"] == 0.01
    assert main(shlex.split(line)[1:]) == 0
    assert equal(before, weights(run))
    assert main(shlex.split(line.replace("max_steps=4", "max_steps=6"))[1:]) == 0
    steps = [int(row["step"]) for row in read_rows(run / "metrics.csv")]
    assert sorted(set(steps)) == list(range(6))
    saved = yaml.safe_load((run / "config.resume-1.yaml").read_text())  # none for the finished
    assert len(saved["trainer"]["callbacks"]) == 1  # appended once, not once more at each resume


def test_a_config_that_later_configs_of_its_arm_override_is_reported_or_refused(capsys):
    """An arm named velocity+epsilon would be epsilon alone."""
    init_args = {"shift": 2.0, "optimizer": {"init_args": {"lr": 0.1}}}
    write_config({"model": {"init_args": init_args}}, Path("shifted.yaml"))
    err = refusal(capsys, "--arms slow.yaml+shifted.yaml")
    assert "arm slow+shifted: slow.yaml has no effect, because later configs override" in err
    loggers = [{"class_path": "CSVLogger", "init_args": {"save_dir": "logs"}}]
    write_config({"trainer": {"logger": False, "devices": [0, 1]}}, Path("two.yaml"))
    write_config({"trainer": {"logger": loggers, "accelerator": "cpu"}}, Path("logged.yaml"))
    write_config({"trainer": {"devices": [0]}}, Path("one.yaml"))
    for arms, overridden in {
        "shifted.yaml+slow.yaml": ["model.optimizer.lr of shifted.yaml"],
        "two.yaml+logged.yaml": ["trainer.logger of two.yaml"],
        "two.yaml+one.yaml": ["trainer.devices of two.yaml"],
        "slow.yaml+ema.yaml": [],
        "ema.yaml+slow.yaml": [],
    }.items():
        assert call(f"sweep tiny.yaml --arms {arms} --seeds 0 --print {TRUST}") == 0
        err = capsys.readouterr().err
        assert re.findall(r"later configs override (.*)", err) == overridden


@pytest.mark.parametrize(
    ("options", "err"),
    [
        ("--jobs 0", "--jobs must be at least 1, got 0."),
        ("--seeds 1,1", "--seeds must be different numbers from 0 to 4294967295, got [1, 1]."),
        ("--arms slow.yaml deep/slow.yaml", "two arms are named slow; rename deep/slow.yaml"),
        ("--arms tiny.yaml", "has tiny.yaml twice"),
        ("--arms missing.yaml", "no arm file missing.yaml"),
        ("--trainer.max_steps=-1", "arm baseline: runs end after trainer.max_steps"),
        ("--trainer.enable_checkpointing=false", "runs are resumed from checkpoints"),
        ("--model.help=DiffusionModule", "arm baseline: `fit` prints no settings with these"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_started(capsys, options, err):
    assert err in refusal(capsys, options)


def test_a_changed_arm_under_the_same_name_is_refused_by_the_names_of_its_keys(one_run, capsys):
    same = "--arms slow.yaml --seeds 0 --out"
    assert len(printed(capsys, f"{same} {Path('out').resolve()}")) == 2  # the folder, named anew
    arm = {"model": {"init_args": {"shift": 2.0, "optimizer": {"init_args": {"lr": 0.02}}}}}
    write_config(arm, Path("slow.yaml"))
    err = refusal(capsys, f"{same} out")
    assert "out/slow/seed-0 contains a run with other settings" in err
    assert "model.shift was 0.0, is 2.0" in err
    assert "model.optimizer.lr was 0.01, is 0.02" in err
    assert "data" not in err


BASELINE = Path("out/baseline/seed-0")


def test_settings_that_a_fit_takes_from_the_data_make_no_other_run(capsys):
    BASELINE.mkdir(parents=True)
    write_config({"seed_everything": 0, **small_digits(8)}, BASELINE / "config.yaml")
    config = small_digits(8)
    config["model"]["init_args"] |= {"image_shape": "data", "num_classes": "data"}
    config["model"]["init_args"]["network"]["init_args"]["num_classes"] = None
    write_config(config)
    assert len(printed(capsys, "--seeds 0 --out out")) == 1
    err = refusal(capsys, "--seeds 0 --out out --model.init_args.num_classes=9")
    assert "model.num_classes was 10, is 9" in err
    assert "image_shape" not in err


def lose_the_last_checkpoint():
    saved = BASELINE / LAST
    saved.rename(saved.with_name("best-fid.ckpt"))


def lose_all_checkpoints_after_an_evaluation():
    shutil.rmtree(BASELINE / "checkpoints")
    (BASELINE / "evaluations.jsonl").write_text('{"step": 7}\n')


def link_to_checkpoints():
    (BASELINE / "checkpoints").rename("disk")
    (BASELINE / "checkpoints").symlink_to(Path("disk").absolute())


def lose_the_last_checkpoint_behind_a_link():
    lose_the_last_checkpoint()
    link_to_checkpoints()


@pytest.mark.parametrize(
    ("change", "err"),
    [
        (lose_the_last_checkpoint_behind_a_link, " has best-fid.ckpt, but no checkpoints/last"),
        (lose_the_last_checkpoint, " has best-fid.ckpt, but no checkpoints/last.ckpt"),
        (lose_all_checkpoints_after_an_evaluation, " has results up to step 7, but no check"),
        (lambda: (BASELINE / "config.yaml").write_text(""), "/config.yaml must hold settings"),
    ],
)
def test_a_run_that_cannot_go_on_is_never_started_over(one_run, capsys, change, err):
    change()
    assert f"{BASELINE}{err}" in refusal(capsys, "--seeds 0 --out out")


def test_finished_runs_are_left_alone_also_without_their_checkpoints(one_run, capsys):
    """As where only results were kept."""
    shutil.rmtree(BASELINE / "checkpoints")
    before = (BASELINE / "metrics.csv").read_bytes()
    assert call(f"sweep tiny.yaml --seeds 0 --out out {TRUST}") == 0
    assert "baseline/seed-0 was finished before" in capsys.readouterr().err
    assert (BASELINE / "metrics.csv").read_bytes() == before


def small_sweep(*arms: str) -> Sweep:
    return Sweep(plan_sweep(["tiny.yaml"], arms, [0], Path("out"), TRUST.split()), 1)


def test_a_run_that_fails_or_leaves_a_damaged_checkpoint_stops_no_other_run(one_run, capsys):
    over, job = small_sweep(), Job("baseline/seed-0", [], io.BytesIO())
    (BASELINE / LOG).write_text("image_shape must be another\n")
    over.on_end(job, 2, 1.0)
    (BASELINE / LAST).write_bytes(b"PK")
    over.on_end(job, 0, 1.0)
    assert not over.finished
    err = capsys.readouterr().err
    assert "baseline/seed-0 FAILED with exit code 2 after 0:00:01" in err
    assert "  | image_shape must be another\n" in err
    assert "ended after 0:00:01 with a damaged checkpoint: out/baseline" in err


def test_the_folder_of_a_fit_that_no_sweep_started_is_left_alone_until_it_ends(one_run, capsys):
    """Before its first checkpoint, it looks like a run that died."""
    shutil.rmtree(BASELINE / "checkpoints")
    (BASELINE / "metrics.csv").unlink()
    with occupied(BASELINE):
        before, claimed = sorted(BASELINE.iterdir()), (BASELINE / ".lock").stat().st_ino
        jobs = small_sweep().jobs()
        assert [next(jobs) for _ in range(3)] == [None] * 3
        assert sorted({*before, BASELINE / LOG}) == sorted(BASELINE.iterdir())
    assert capsys.readouterr().err.count("waiting for baseline/seed-0, which is being run") == 1
    (job,) = jobs
    assert job.name == "baseline/seed-0"
    assert sorted(path.name for path in BASELINE.iterdir()) == [".lock", LOG]
    assert (BASELINE / ".lock").stat().st_ino == claimed  # a new file would be another claim


def test_a_link_to_a_folder_of_checkpoints_stays(one_run):
    link_to_checkpoints()
    assert list(small_sweep().jobs()) == []  # finished
    Path("disk/last.ckpt").unlink()
    (BASELINE / "metrics.csv").unlink()
    (job,) = small_sweep().jobs()  # as if it was killed before its first checkpoint
    assert job.name == "baseline/seed-0"
    assert sorted(path.name for path in BASELINE.iterdir()) == [".lock", "checkpoints", LOG]
    assert (BASELINE / "checkpoints").resolve() == Path("disk").absolute()


def start(options: str) -> subprocess.Popen:
    return subprocess.Popen(
        [SCRIPT, "sweep", *shlex.split(options)],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=os.setsid,
    )


def wait_for(process: subprocess.Popen, *files: Path) -> None:
    while not all(file.exists() for file in files):
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.05)


def stderr_of(process: subprocess.Popen, code: int) -> str:
    err = process.communicate(timeout=600)[1]
    assert process.returncode == code, err
    return err


@pytest.mark.system
@pytest.mark.usefixtures("terminal_signals")
def test_a_sweep_that_is_interrupted_goes_on_where_it_was():
    """Ctrl-C in the middle; one run then has a checkpoint, the other died before its first."""
    config = small_digits(150, log_every_n_steps=10)
    fid = {"num_samples": 20, "extractor": "digits-cnn", "every_n_steps": 50}
    callback = {"class_path": "lit_diffusion.callbacks.FIDEvaluation", "init_args": fid}
    config["trainer"]["callbacks"].append(callback)
    write_config(config, Path("digits.yaml"))
    weighted = {"model": {"init_args": {"loss": {"init_args": {"weighting": MIN_SNR}}}}}
    write_config(weighted, Path("min-snr.yaml"))
    options = "digits.yaml --arms min-snr.yaml --seeds 0 --jobs 2 --out out"
    runs = [Path("out", arm, "seed-0") for arm in ("baseline", "min-snr")]

    first = start(options)
    wait_for(first, *(run / LAST for run in runs))
    os.kill(first.pid, signal.SIGINT)
    err = stderr_of(first, 130)
    assert "stopped with 0 of 2 runs finished. To continue, run the same command:" in err
    assert f"lit-diffusion sweep {options}" in err
    assert "on SIGTERM." in (runs[0] / LOG).read_text()

    reached = checkpoint(runs[0])["global_step"]
    shutil.rmtree(runs[1] / "checkpoints")
    err = stderr_of(start(options), 0)
    assert f"baseline/seed-0 resumes at step {reached}\n" in err
    assert "min-snr/seed-0 starts\n" in err
    assert all(checkpoint(run)["global_step"] == 150 for run in runs)
    assert Path("out/report/report.html").is_file()


@pytest.mark.system
def test_a_sweep_whose_time_is_up_leaves_nothing_running_and_is_to_be_started_again():
    """As SLURM announces it."""
    write_config(small_digits(100_000), Path("digits.yaml"))
    runs = [Path("out", "baseline", f"seed-{seed}") for seed in (0, 1)]
    process = start("digits.yaml --seeds 0,1 --out out")
    wait_for(process, runs[0] / LAST)
    (fit,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(process.pid, signal.SIGUSR1)
    err = stderr_of(process, 75)
    assert f"baseline/seed-0 saved at step {checkpoint(runs[0])['global_step']} of 100000" in err
    assert "stopped with 0 of 2 runs finished. To continue, run the same command:" in err
    assert "FAILED" not in err
    assert "on SIGUSR1." in (runs[0] / LOG).read_text()
    assert not Path(f"/proc/{fit}").exists()
    assert not runs[1].exists()
