from pathlib import Path

import pytest
import yaml

from lit_diffusion.cli.run_folder import (
    latest_config,
    next_config,
    occupied,
    read_command_line,
    refuse_mixing,
)

pytestmark = pytest.mark.usefixtures("folder")


def write(path: str, content: str = "") -> Path:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(content)
    return Path(path)


def request(command: str):
    return read_command_line(command.split())


LAST = "runs/other/checkpoints/last.ckpt"


@pytest.mark.parametrize(
    ("command", "root"),
    [
        ("fit --config configs/digits.yaml", "runs/digits"),
        ("fit --config=configs/digits.yaml --config callbacks/clts.yaml", "runs/digits"),
        ("fit -c digits.yaml --trainer.default_root_dir elsewhere", "elsewhere"),
        ("fit --trainer.default_root_dir=here/x", "here/x"),
        ("fit --trainer.default_root_dir=~/x", Path.home() / "x"),
        ("fit --trainer.default_root_dir=~nobody-of-this-name/x", "~nobody-of-this-name/x"),
        ("fit --config rooted.yaml", "from/config"),
        ("fit --config rooted.yaml --trainer.default_root_dir=cli", "cli"),
        ("fit --config digits.yaml --config rooted.yaml", "from/config"),
        (f"test --ckpt_path {LAST}", "runs/other"),
        (f"test --config digits.yaml --ckpt_path={LAST}", "runs/other"),
        (f"fit --config rooted.yaml --ckpt_path={LAST}", "from/config"),
        ("fit --config digits.yaml --ckpt_path=loose.ckpt", "runs/digits"),
        ("fit --config digits.yaml --ckpt_path=last", "runs/digits"),
        ("fit", "runs/unnamed"),
    ],
)
def test_the_run_folder_is_the_one_stated_else_the_checkpoints_else_named_after_the_config(
    command, root
):
    write("rooted.yaml", yaml.safe_dump({"trainer": {"default_root_dir": "from/config"}}))
    write(LAST), write("loose.ckpt"), write("runs/digits/checkpoints/last.ckpt")
    assert request(command).root == Path(root)


def test_last_is_the_last_checkpoint_of_the_run_folder():
    last = Path("runs/digits/checkpoints/last.ckpt")
    with pytest.raises(FileNotFoundError, match=f"there is no file {last}; name another, or last-"):
        request("fit --config digits.yaml --ckpt_path=last")
    started = request("fit --config digits.yaml --ckpt_path=last-or-none")
    assert (started.checkpoint, started.options[-1]) == (None, "--ckpt_path=null")
    write(str(last))
    for name in ("last", "last-or-none"):
        asked = request(f"fit --config digits.yaml --ckpt_path={name}")
        assert asked.checkpoint == last
        assert asked.holds_checkpoint


def test_the_checkpoint_may_be_named_in_a_config():
    write("resuming.yaml", "ckpt_path: last")
    write("runs/resuming/checkpoints/last.ckpt")
    assert request("fit --config resuming.yaml").checkpoint == Path(
        "runs/resuming/checkpoints/last.ckpt"
    )
    assert request("fit --config resuming.yaml --ckpt_path=null").checkpoint is None


def test_a_checkpoint_that_is_not_there_is_named():
    with pytest.raises(FileNotFoundError, match=r"--ckpt_path: there is no file x/no\.ckpt"):
        request("fit --config digits.yaml --ckpt_path x/no.ckpt")


def test_trust_is_taken_out_of_the_options_and_all_else_stays_in_order():
    asked = request("fit --trust a --config x.yaml --model.lr=1 --trust=b --config y.yaml")
    assert asked.trust == ("a", "b")
    assert asked.options == ("--config", "x.yaml", "--model.lr=1", "--config", "y.yaml")


def test_a_config_that_is_not_yaml_is_named():
    write("broken.yaml", "a: [")
    with pytest.raises(ValueError, match=r"broken\.yaml is not YAML: .* line 1"):
        request("fit --config broken.yaml")


def test_a_missing_config_is_left_to_the_real_parser_to_report():
    assert request("fit --config nowhere.yaml").root == Path("runs/nowhere")


@pytest.mark.parametrize("trace", ["metrics.csv", "evaluations.jsonl", "checkpoints/best-fid.ckpt"])
def test_a_fresh_fit_into_the_folder_of_a_run_is_refused_with_both_ways_out(trace):
    write(f"runs/digits/{trace}", "step\n0\n")
    with pytest.raises(ValueError, match=r"runs/digits already holds a run.*delete it") as error:
        refuse_mixing(request("fit --config digits.yaml"))
    assert trace in str(error.value)
    assert "--trainer.default_root_dir=runs/digits-2" in str(error.value)
    write("runs/digits/checkpoints/last.ckpt")
    with pytest.raises(ValueError, match="Continue it with --ckpt_path=last"):
        refuse_mixing(request("fit --config digits.yaml"))


def test_a_checkpoint_from_elsewhere_does_not_open_the_folder_of_a_run():
    write("runs/digits/metrics.csv", "step\n0\n"), write("loose.ckpt")
    with pytest.raises(ValueError, match="already holds a run"):
        refuse_mixing(request("fit --config digits.yaml --ckpt_path loose.ckpt"))


@pytest.mark.parametrize("path", ["last", "runs/digits/checkpoints/last.ckpt"])
def test_a_resume_in_its_own_folder_is_let_through(path):
    write("runs/digits/metrics.csv"), write("runs/digits/checkpoints/last.ckpt")
    refuse_mixing(request(f"fit --config digits.yaml --ckpt_path={path}"))


def test_a_folder_without_a_row_or_a_checkpoint_holds_no_run():
    write("runs/digits/config.yaml"), write("runs/digits/metrics.csv", "step\n")
    write("runs/digits/evaluations.jsonl"), write("runs/digits/tensorboard/events.1")
    refuse_mixing(request("fit --config digits.yaml"))
    assert next_config(Path("runs/digits")) == Path("runs/digits/config.yaml")


def test_a_first_step_that_was_not_finite_is_no_run():
    row = "step,train/loss,train/nonfinite_steps\n0,nan,1.0\n"
    write("runs/digits/metrics.csv", row)
    refuse_mixing(request("fit --config digits.yaml"))
    write("runs/digits/checkpoints/best-fid.ckpt")
    with pytest.raises(ValueError, match="already holds a run"):
        refuse_mixing(request("fit --config digits.yaml"))


def test_every_resume_gets_a_config_of_its_own_and_the_latest_is_found():
    root = Path("runs/digits")
    assert latest_config(root) is None
    assert next_config(root) == root / "config.yaml"
    write("runs/digits/config.yaml"), write("runs/digits/metrics.csv", "step\n0\n")
    for n in range(1, 12):
        assert next_config(root) == root / f"config.resume-{n}.yaml"
        write(f"runs/digits/config.resume-{n}.yaml")
        assert latest_config(root) == root / f"config.resume-{n}.yaml"


def test_a_config_that_a_run_wrote_stands_for_the_folder_that_it_is_in():
    """Whatever that was called when it was written, and whoever looks from wherever."""
    saver = {"class_path": "Saver", "init_args": {"dirpath": "runs/old/best"}}
    trainer = {"default_root_dir": "runs/old", "callbacks": [saver]}
    write("new/config.resume-1.yaml", yaml.safe_dump({"trainer": trainer}))
    assert request("fit --config new/config.resume-1.yaml").root == Path("runs/old")
    write("new/checkpoints/last.ckpt")
    for form in ("--config new/config.resume-1.yaml", "--config=new/config.resume-1.yaml"):
        asked = request(f"fit {form} --ckpt_path=last")
        assert (asked.root, asked.checkpoint) == (Path("new"), Path("new/checkpoints/last.ckpt"))
        (given,) = [option for option in asked.options if "trainer" in option]
        assert "dirpath: new/best" in given
        assert "old" not in given


def test_a_folder_is_for_one_process_at_a_time_and_free_again_after_any_end():
    Path("run").mkdir()
    with occupied(Path("run")):
        with pytest.raises(ValueError, match=r"run is in use.*default_root_dir=run-2"):
            occupied(Path("run")).__enter__()
        with occupied(Path(".")):
            pass
    with pytest.raises(KeyError), occupied(Path("run")):
        raise KeyError
    with occupied(Path("run")):
        assert [file.name for file in Path("run").iterdir()] == [".lock"]


@pytest.fixture
def requeued(folder, monkeypatch):
    """This process is the second start of SLURM job 7, which trained into runs/digits."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    monkeypatch.delenv("SLURM_CLUSTER_NAME", raising=False)
    write("runs/digits/metrics.csv", "step\n0\n")
    write("runs/digits/checkpoints/slurm-job", "- 7 0\n")
    write("configs/digits.yaml", "trainer: {}")


@pytest.mark.usefixtures("requeued")
@pytest.mark.parametrize("option", ["", " --ckpt_path=last", " --ckpt_path=pretrained.ckpt"])
def test_a_requeued_job_goes_on_from_where_it_was(option):
    """The command is that of its first start, which may have named what to begin with."""
    write("pretrained.ckpt")
    last = write("runs/digits/checkpoints/last.ckpt")
    found = request(f"fit --config configs/digits.yaml{option}")
    assert (found.checkpoint, found.requeued) == (last, True)
    refuse_mixing(found)


@pytest.mark.usefixtures("requeued")
def test_a_requeued_job_that_had_saved_nothing_begins_anew():
    found = request("fit --config configs/digits.yaml")
    assert (found.checkpoint, found.requeued) == (None, True)
    refuse_mixing(found)


def test_a_command_that_is_repeated_begins_anew_where_nothing_was_saved():
    write("runs/digits/metrics.csv", "step\n0\n"), write("runs/digits/evaluations.jsonl", "{}\n")
    found = request("fit --config digits.yaml --ckpt_path=last-or-none")
    assert (found.checkpoint, found.repeated) == (None, True)
    refuse_mixing(found)
    write("runs/digits/checkpoints/best-fid.ckpt")  # of a run that has lost its last
    with pytest.raises(ValueError, match="already holds a run"):
        refuse_mixing(found)


@pytest.mark.usefixtures("requeued")
@pytest.mark.parametrize("changed", [{"SLURM_JOB_ID": "8"}, {"SLURM_RESTART_COUNT": ""}])
def test_another_job_in_its_folder_is_refused(monkeypatch, changed):
    write("runs/digits/checkpoints/last.ckpt")
    for name, value in changed.items():
        monkeypatch.setenv(name, value)
    found = request("fit --config configs/digits.yaml")
    assert (found.checkpoint, found.requeued) == (None, False)
    with pytest.raises(ValueError, match="already holds a run"):
        refuse_mixing(found)


@pytest.mark.usefixtures("requeued")
def test_other_commands_of_a_requeued_job_read_what_they_are_told_to():
    write("runs/digits/checkpoints/last.ckpt")
    best = write("runs/digits/checkpoints/best-fid.ckpt")
    assert request(f"validate --ckpt_path {best}").checkpoint == best
