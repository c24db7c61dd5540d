"""Which runs a sweep has, and which it refuses, found out on the command line."""

import shlex
import shutil
from pathlib import Path

import pytest
import yaml
from support.commands import call, equal, weights
from support.sweeping import ARMS, TRUST, printed, refusal, write_configs
from support.tiny_run import EMA, tiny_config, write_config

from lit_diffusion.cli.loggers import read_rows
from lit_diffusion.cli.main import main


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_configs()


def test_all_arms_of_the_first_seed_come_first_and_the_config_alone_is_the_baseline(capsys):
    lines = printed(capsys, "--arms slow.yaml ema.yaml --seeds 0,7")
    roots = [line.partition("default_root_dir=")[2].split()[0] for line in lines]
    arms = ["baseline", "slow", "ema"]
    assert roots == [f"runs/tiny-sweep/{arm}/seed-{n}" for n in (0, 7) for arm in arms]
    assert ["--seed_everything=7" in line for line in lines] == [False] * 3 + [True] * 3
    assert sorted(Path().iterdir()) == sorted(Path(f"{n}.yaml") for n in ("tiny", "slow", "ema"))


def test_configs_joined_by_a_plus_are_one_arm(capsys):
    """Fed to a real fit, both are in force."""
    (_, line) = printed(capsys, "--arms slow.yaml+ema.yaml --seeds 3 --out out")
    assert main(shlex.split(line)[1:]) == 0
    saved = yaml.safe_load(Path("out/slow+ema/seed-3/config.yaml").read_text())
    assert saved["seed_everything"] == 3
    assert saved["model"]["init_args"]["optimizer"]["init_args"]["lr"] == 0.01
    assert len(saved["trainer"]["callbacks"]) == 1


def test_a_setting_that_a_joined_config_takes_back_is_told(capsys):
    write_config(
        {"model": {"init_args": {"optimizer": {"init_args": {"lr": 0.1}}}}}, Path("f.yaml")
    )
    assert call(f"sweep tiny.yaml --arms slow.yaml+f.yaml --seeds 0 --print {TRUST}") == 0
    setting = "model.init_args.optimizer.init_args.lr"
    told = f"arm slow+f: f.yaml replaces what slow.yaml sets: {setting}"
    assert told in capsys.readouterr().err


def test_an_arm_that_changes_nothing_is_left_out_and_told(capsys):
    """As beta1-0.9 where the experiment has that: it would be one more test, of no difference."""
    same = {"model": {"init_args": {"optimizer": {"init_args": {"lr": 0.1}}}}}
    write_config(same, Path("same.yaml"))
    write_config(ARMS["slow"], Path("copy.yaml"))
    options = "--arms same.yaml slow.yaml copy.yaml+same.yaml same.yaml+copy.yaml --seeds 0,1"
    assert call(f"sweep tiny.yaml {options} --print {TRUST}") == 0
    out, err = capsys.readouterr()
    roots = [line.partition("default_root_dir=")[2].split()[0] for line in out.splitlines()]
    runs = [f"{arm}/seed-{n}" for n in (0, 1) for arm in ("baseline", "slow")]
    assert roots == [f"runs/tiny-sweep/{run}" for run in runs]
    told = [line.partition("  ")[2] for line in err.splitlines() if "left out" in line]
    assert told == [
        "arm same is left out: its settings are those of baseline",
        "arm copy+same is left out: its settings are those of baseline",
        "arm same+copy is left out: its settings are those of slow",
    ]


def test_a_file_with_a_plus_in_its_name_is_one_config(capsys):
    shutil.copy("slow.yaml", "a+b.yaml")
    assert "--config=a+b.yaml" in printed(capsys, "--arms a+b.yaml --seeds 0")[1]


def test_a_printed_command_resumes_when_it_is_run_again(capsys):
    """As an array task that was requeued; a finished one is left as it is."""
    (_, line) = printed(capsys, "--arms ema.yaml --seeds 0 --out out --trainer.max_steps=4")
    run = Path("out/ema/seed-0")
    assert main(shlex.split(line)[1:]) == 0
    before = weights(run)
    assert main(shlex.split(line)[1:]) == 0
    assert equal(before, weights(run))
    assert main(shlex.split(line.replace("max_steps=4", "max_steps=6"))[1:]) == 0
    steps = [int(row["step"]) for row in read_rows(run / "metrics.csv")]
    assert sorted(set(steps)) == list(range(6))
    saved = yaml.safe_load((run / "config.resume-1.yaml").read_text())  # none for the finished
    assert len(saved["trainer"]["callbacks"]) == 1  # appended once, not once more at each resume


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--jobs 0", "--jobs must be at least 1, got 0."),
        ("--seeds 1,1", "--seeds must be different numbers from 0 to 4294967295, got [1, 1]."),
        ("--seeds -1", "--seeds must be different numbers from 0 to 4294967295, got [-1]."),
        ("--seeds 4294967296", "from 0 to 4294967295, got [4294967296]."),
        ("--arms slow.yaml deep/slow.yaml", "two arms are named slow; rename deep/slow.yaml"),
        ("--arms baseline.yaml", "two arms are named baseline; rename baseline.yaml"),
        ("--arms slow.yaml missing.yaml", "arm missing: "),
        ("--trainer.max_steps=-1", "arm baseline: runs are finished after trainer.max_steps"),
        ("--trainer.enable_checkpointing=false", "runs are resumed from checkpoints"),
        ("--trainer.fast_dev_run=true", "runs are resumed from checkpoints"),
        ("--ckpt_path=last", "there is no file runs/tiny/checkpoints/last.ckpt"),
        ("--trainer.max_stops=4", "max_stops"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_started(capsys, options, said):
    assert said in refusal(capsys, options)


def test_a_mistake_in_the_last_arm_is_found_before_the_first_is_started(capsys):
    write_config({"model": {"init_args": {"shft": 1.0}}}, Path("wrong.yaml"))
    said = refusal(capsys, "--arms slow.yaml wrong.yaml")
    assert "arm wrong: " in said
    assert "shft" in said


def test_a_changed_arm_under_the_same_name_is_refused_by_the_names_of_its_keys(one_run, capsys):
    arm = {"model": {"init_args": {"shift": 2.0, "optimizer": {"init_args": {"lr": 0.02}}}}}
    write_config(arm, Path("slow.yaml"))
    said = refusal(capsys, "--arms slow.yaml --seeds 0 --out out")
    assert "out/slow/seed-0 holds a run with other settings" in said
    assert "model.shift was 0.0, is 2.0" in said
    assert "model.optimizer.lr was 0.01, is 0.02" in said
    assert "data" not in said


def test_a_changed_baseline_length_or_callback_is_refused(one_run, capsys):
    same = "--arms slow.yaml --seeds 0 --out out"
    assert "trainer.max_steps was 8, is 9" in refusal(capsys, f"{same} --trainer.max_steps=9")
    write_config(tiny_config(callbacks=[EMA]))
    assert "trainer.callbacks was None, is [" in refusal(capsys, same)


def test_a_run_folder_may_be_named_in_another_way(one_run, capsys):
    assert len(printed(capsys, f"--arms slow.yaml --seeds 0 --out {Path('out').resolve()}")) == 2


def test_a_run_that_lost_its_last_checkpoint_is_never_started_over(one_run, capsys):
    saved = Path("out/slow/seed-0/checkpoints/last.ckpt")
    saved.rename(saved.with_name("best-fid.ckpt"))
    said = refusal(capsys, "--arms slow.yaml --seeds 0 --out out")
    assert "out/slow/seed-0 has best-fid.ckpt, but no checkpoints/last.ckpt" in said


def test_finished_runs_are_left_alone_also_without_their_checkpoints(one_run, capsys):
    """As where only results were kept."""
    for folder in Path("out").glob("*/seed-0"):
        shutil.rmtree(folder / "checkpoints")
    before = {path: path.read_bytes() for path in Path("out").rglob("metrics.csv")}
    assert len(before) == 2
    assert call(f"sweep tiny.yaml --seeds 0 --out out {TRUST}") == 0
    assert "baseline/seed-0 was finished before" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in Path("out").rglob("metrics.csv")} == before


def test_results_without_a_checkpoint_to_go_on_from_are_never_deleted(one_run, capsys):
    shutil.rmtree("out/slow/seed-0/checkpoints")
    Path("out/slow/seed-0/evaluations.jsonl").write_text('{"step": 7}\n')
    said = refusal(capsys, "--arms slow.yaml --seeds 0 --out out")
    assert "out/slow/seed-0 has evaluations up to step 7, but no checkpoints/last.ckpt" in said


def test_an_empty_config_in_a_run_folder_is_named(one_run, capsys):
    Path("out/slow/seed-0/config.yaml").write_text("")
    said = refusal(capsys, "--arms slow.yaml --seeds 0 --out out")
    assert "out/slow/seed-0/config.yaml must hold settings" in said
