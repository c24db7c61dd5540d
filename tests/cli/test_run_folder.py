import os
from pathlib import Path

import pytest
import yaml

from lit_diffusion.checkpoints.saving import write_checkpoint
from lit_diffusion.cli.run_folder import (
    latest_config,
    next_config,
    occupied,
    read_command_line,
    refuse_mixing,
)

pytestmark = pytest.mark.usefixtures("folder")
LAST = "runs/digits/checkpoints/last.ckpt"
OTHER = "runs/other/checkpoints/last.ckpt"
DIGITS = "fit --config configs/digits.yaml"


def write(path: str, content: str = "") -> Path:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(content)
    return Path(path)


def read(command: str):
    return read_command_line(command.split())


def refuses(command: str, message: str = "runs/digits already holds a run"):
    with pytest.raises(ValueError, match=message):
        refuse_mixing(read(command))


@pytest.mark.parametrize(
    ("command", "root"),
    [
        (DIGITS, "runs/digits"),
        ("fit -c digits.yaml --trainer.default_root_dir elsewhere", "elsewhere"),
        ("fit --trainer.default_root_dir=~/x", Path.home() / "x"),
        ("fit --config rooted.yaml", "from/config"),
        ("fit --config digits.yaml --config rooted.yaml", "from/config"),
        (f"test --config digits.yaml --ckpt_path={OTHER}", "runs/other"),
        (f"fit --config rooted.yaml --ckpt_path={OTHER}", "from/config"),
        (f"fit --config digits.yaml --ckpt_path=s3://bucket/{OTHER}", "runs/digits"),
        ("fit", "runs/unnamed"),
    ],
)
def test_the_run_folder_is_the_stated_one_else_the_checkpoints_else_named_after_the_config(
    command, root
):
    write("rooted.yaml", yaml.safe_dump({"trainer": {"default_root_dir": "from/config"}}))
    write(OTHER), write("loose.ckpt"), write(LAST)
    assert read(command).root == Path(root)


def test_last_is_the_last_checkpoint_of_the_run_folder():
    with pytest.raises(FileNotFoundError, match=f"there is no file {LAST}; name another, or last-"):
        read(f"{DIGITS} --ckpt_path=last")
    request = read(f"{DIGITS} --ckpt_path=last-or-none")
    assert (request.checkpoint, request.options[-1]) == (None, "--ckpt_path=null")
    write(LAST)
    for name in ("last", "last-or-none", f"file://{LAST}", "runs/digits"):
        request = read(f"{DIGITS} --ckpt_path={name}")
        assert (request.checkpoint, request.holds_checkpoint) == (Path(LAST), True)


def test_the_run_folder_of_a_checkpoint_is_found_from_within_it(monkeypatch):
    root = write(LAST).absolute().parent.parent
    for folder, file in ((root, "checkpoints/last.ckpt"), (root / "checkpoints", "last.ckpt")):
        monkeypatch.chdir(folder)
        request = read(f"test --ckpt_path {file}")
        assert (request.root.resolve(), request.holds_checkpoint) == (root, True)
    assert read("fit --ckpt_path=null").root == Path("runs/unnamed")


def test_the_checkpoint_may_be_named_in_a_config(monkeypatch):
    write("digits.yaml", "ckpt_path: last")
    write(LAST)
    assert read("fit --config digits.yaml").checkpoint == Path(LAST)
    assert read("fit --config digits.yaml --ckpt_path=null").checkpoint is None
    with pytest.raises(FileNotFoundError, match=r"--ckpt_path: there is no file x/no\.ckpt"):
        read("fit --config digits.yaml --ckpt_path x/no.ckpt")
    monkeypatch.setenv("HOME", os.getcwd())
    write("digits.yaml", f"ckpt_path: ~/{LAST}")
    assert read("fit --config digits.yaml").checkpoint == Path(LAST).absolute()


def test_a_config_that_is_not_yaml_is_named():
    write("broken.yaml", "a: [")
    with pytest.raises(ValueError, match=r"^broken\.yaml, line 1: .*; correct the YAML\.$"):
        read("fit --config broken.yaml")


@pytest.mark.parametrize("option", ["--model=", "--data ", "--trainer.callbacks=", "--config "])
def test_a_pipe_as_the_value_of_an_option_is_refused_and_not_waited_for(option):
    os.mkfifo("pipe")
    with pytest.raises(ValueError, match=r"^pipe is not a regular file, but a pipe"):
        read(f"fit {option}pipe")


@pytest.mark.parametrize("trace", ["metrics.csv", "evaluations.jsonl", "checkpoints/best-fid.ckpt"])
def test_a_fit_into_the_folder_of_another_run_is_refused_with_both_ways_out(trace):
    write(f"runs/digits/{trace}", "step\n0\n")
    refuses(DIGITS, rf"{trace}.*delete the run, or .*--trainer\.default_root_dir=runs/digits-2")
    write(LAST), write("loose.ckpt")
    refuses(DIGITS, "Continue it with --ckpt_path=last")
    refuses(f"{DIGITS} --ckpt_path loose.ckpt")
    for path in ("last", LAST):
        refuse_mixing(read(f"{DIGITS} --ckpt_path={path}"))


def test_every_resume_gets_a_separate_config_and_the_latest_counts():
    root = Path("runs/digits")
    assert latest_config(root) is None
    assert next_config(root) == root / "config.yaml"
    write("runs/digits/config.yaml"), write("runs/digits/metrics.csv", "step\n0\n")
    for n in range(1, 12):
        assert next_config(root) == root / f"config.resume-{n}.yaml"
        write(f"runs/digits/config.resume-{n}.yaml")
        assert latest_config(root) == root / f"config.resume-{n}.yaml"
    Path("runs/digits/config.resume-4.yaml").unlink()
    write("runs/digits/config.resume-11-before-my-changes.yaml")
    assert next_config(root) == root / "config.resume-12.yaml"  # overwrites none
    assert latest_config(root) == root / "config.resume-11.yaml"


@pytest.mark.parametrize("option", ["--config ", "--config=", "-c ", "-c"])
def test_a_config_that_a_run_wrote_stands_for_the_folder_that_it_is_in(option):
    """Whatever that was called when it was written, and whoever looks from wherever."""
    saver = {"class_path": "Saver", "init_args": {"dirpath": "runs/old/best"}}
    trainer = {"default_root_dir": "runs/old", "callbacks": [saver]}
    write("new/config.resume-1.yaml", yaml.safe_dump({"trainer": trainer}))
    command = f"fit {option}new/config.resume-1.yaml"
    assert read(command).root == Path("runs/old")
    write("new/checkpoints/last.ckpt")
    request = read(f"{command} --ckpt_path=last")
    assert (request.root, request.checkpoint) == (Path("new"), Path("new/checkpoints/last.ckpt"))
    (config,) = [option for option in request.options if "trainer" in option]
    assert "dirpath: new/best" in config
    assert "old" not in config


def test_a_folder_is_for_one_process_at_a_time_and_free_again_after_any_end():
    in_use = pytest.raises(ValueError, match=r"run is in use.*default_root_dir=run-2")
    with occupied(Path("run")), in_use:
        occupied(Path("run")).__enter__()
    with pytest.raises(KeyError), occupied(Path("run")):
        raise KeyError
    with occupied(Path("run")):
        assert [file.name for file in Path("run").iterdir()] == [".lock"]


# A job that SLURM starts again, and a command that is repeated


@pytest.fixture
def requeued(folder, monkeypatch):
    """This process is the second start of SLURM job 7, which trained into runs/digits."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    monkeypatch.delenv("SLURM_CLUSTER_NAME", raising=False)
    write("runs/digits/metrics.csv", "step\n0\n")
    write("runs/digits/checkpoints/slurm-job", "- 7 0\n")
    write("configs/digits.yaml", "trainer: {}")


@pytest.mark.parametrize("option", ["", " --ckpt_path=last", " --ckpt_path=pretrained.ckpt"])
def test_a_requeued_job_goes_on_from_where_it_was(requeued, option):
    """The command is that of its first start, which may have named what to begin with."""
    write("pretrained.ckpt")
    if option == "":  # it had saved nothing
        request = read(DIGITS)
        assert (request.checkpoint, request.requeued) == (None, True)
        refuse_mixing(request)
    last = write(LAST)
    request = read(f"{DIGITS}{option}")
    assert (request.checkpoint, request.requeued) == (last, True)
    refuse_mixing(request)
    best = write("runs/digits/checkpoints/best-fid.ckpt")
    assert read(f"validate --ckpt_path {best}").checkpoint == best


@pytest.mark.parametrize("changed", [{"SLURM_JOB_ID": "8"}, {"SLURM_RESTART_COUNT": ""}])
def test_another_job_in_its_folder_is_refused(requeued, monkeypatch, changed):
    write(LAST)
    for name, value in changed.items():
        monkeypatch.setenv(name, value)
    request = read(DIGITS)
    assert (request.checkpoint, request.requeued) == (None, False)
    refuses(DIGITS)


def test_a_command_that_is_repeated_begins_anew_where_nothing_was_saved():
    write("runs/digits/metrics.csv", "step\n0\n"), write("runs/digits/evaluations.jsonl", "{}\n")
    command = f"{DIGITS} --ckpt_path=last-or-none"
    request = read(command)
    assert (request.checkpoint, request.repeated) == (None, True)
    refuse_mixing(request)
    file = write("runs/digits/checkpoints/best-fid.ckpt")
    refuses(command)  # a file that cannot be read may be worth something
    write_checkpoint({"global_step": 15}, file)  # killed before its first last.ckpt
    refuse_mixing(request)
    write_checkpoint({"global_step": 500}, file)  # a run that has lost its last.ckpt
    refuses(command)
