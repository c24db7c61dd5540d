"""fit, validate, test and predict as called by a user, on a tiny module: exit codes and files."""

import sys
from pathlib import Path

import pytest
import torch
import yaml
from support.commands import call, checkpoint, equal, weights
from support.small_digits import small_digits
from support.tiny_run import EMA, HERE, TinyModule, tiny_config, write_config
from torch.optim import Adam

from lit_diffusion.cli.loggers import read_rows
from lit_diffusion.cli.run_folder import occupied
from lit_diffusion.cli.trainer_cli import wrong_trainer_settings

TRUST = "--trust support"
FIT = f"fit --config tiny.yaml {TRUST}"
LAST = "runs/tiny/checkpoints/last.ckpt"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_config(tiny_config())


@pytest.fixture
def adam(monkeypatch):
    """lr, betas and first moments at the beginning of each step of Adam."""
    steps, step = [], Adam.step

    def record(optimizer, closure=None):
        moments = [state["exp_avg"].clone() for state in optimizer.state.values()]
        group = optimizer.param_groups[0]
        steps.append({"lr": group["lr"], "betas": group["betas"], "moments": moments})
        return step(optimizer, closure)

    monkeypatch.setattr(Adam, "step", record)
    return steps


def files() -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in Path("runs").rglob("*") if path.is_file()}


def with_schedule(name: str, **init_args) -> dict:
    config, path = tiny_config(), f"lit_diffusion.lr_schedules.{name}"
    schedule = {"class_path": path, "init_args": init_args}
    config["model"]["init_args"]["lr_scheduler"] = schedule
    return config


# The run folder


def test_a_fit_leaves_a_run_folder_named_after_its_config(capsys):
    assert call(FIT) == 0
    names = {str(path.relative_to("runs/tiny")) for path in files()}
    assert {"config.yaml", "metrics.csv", "checkpoints/last.ckpt"} <= names
    assert not any("version_" in name or "lightning_logs" in name for name in names)
    assert next(Path("runs/tiny/tensorboard").glob("events.*"))
    err = capsys.readouterr().err
    assert "8 steps, 32 images seen" in err
    assert "lit-diffusion sample --checkpoint runs/tiny" in err


def test_images_of_each_batch_size_are_counted(capsys):
    call(f"{FIT} --trainer.max_steps=3")
    call(f"{FIT} --ckpt_path=last --trainer.max_steps=7 --data.init_args.batch_size=2")
    assert "7 steps, 20 images seen" in capsys.readouterr().err
    call(f"{FIT} --ckpt_path=last --trainer.max_steps=8 --data.init_args.batch_size=8")
    assert "8 steps, 28 images seen" in capsys.readouterr().err


@pytest.mark.quick
@pytest.mark.parametrize("callbacks", [[], [EMA]])
def test_the_sample_command_that_a_fit_ends_with_works(callbacks, capsys):
    """Without averages, with a module from elsewhere, in a folder with a space."""
    write_config(small_digits(1, callbacks=callbacks, limit_val_batches=0))
    assert call(f"{FIT} --trainer.default_root_dir='my runs/tiny'") == 0
    line = capsys.readouterr().err.strip().split("\n")[-1]
    assert line.startswith("sample ")
    assert "--trust=support" in line
    assert call(line.partition("lit-diffusion ")[2].replace("--num 64", "--num 1")) == 0
    assert Path("my runs/tiny/out/000000.png").is_file()


@pytest.mark.parametrize("option", ["max_steps=0", "enable_checkpointing=false"])
def test_a_run_without_a_checkpoint_has_none_and_no_command_that_samples(option, capsys):
    assert call(f"{FIT} --trainer.{option}") == 0
    err = capsys.readouterr().err
    assert "run folder  runs/tiny" in err
    assert "lit-diffusion sample" not in err
    assert not Path(LAST).exists()


def test_a_folder_that_holds_a_run_is_not_changed_by_another(capsys):
    call(FIT)
    before = files()
    capsys.readouterr()
    assert call(FIT) == 2
    assert "runs/tiny already holds a run" in capsys.readouterr().err
    with occupied(Path("runs/tiny")):
        assert call(f"{FIT} --ckpt_path=last --trainer.max_steps=12") == 2
    assert "runs/tiny is in use: another process trains into it." in capsys.readouterr().err
    assert call(f"{FIT} --trainer.fast_dev_run=true") == 0
    assert files() == before
    assert call(f"{FIT} --ckpt_path=last --trainer.max_steps=12") == 0


def test_the_loggers_and_callbacks_of_a_config_stand_beside_those_of_every_run(monkeypatch):
    saver = "lightning.pytorch.callbacks.ModelCheckpoint"
    saver = {"class_path": saver, "init_args": {"dirpath": "kept", "save_last": True}}
    logger = "lightning.pytorch.loggers.CSVLogger"
    logger = {"class_path": logger, "init_args": {"save_dir": "l"}}
    write_config(tiny_config(logger=logger, callbacks=[saver]))
    first = []
    monkeypatch.setattr(TinyModule, "on_train_start", lambda self: first.append(self.logger))
    assert call(FIT) == 0
    assert [type(logger).__name__ for logger in first] == ["CSVLogger"]
    assert Path("kept/last.ckpt").exists()
    assert Path("l").exists()
    assert Path(LAST).exists()  # from which it would resume
    assert not Path("runs/tiny/tensorboard").exists()
    assert read_rows("runs/tiny/metrics.csv")  # which a resume and compare want


@pytest.mark.parametrize("value", ["false", "[]"])
def test_no_logger_is_no_logger(value):
    assert call(f"{FIT} --trainer.logger={value}") == 0
    assert not Path("runs/tiny/metrics.csv").exists()


# Composition


def test_a_fragment_is_appended_and_the_command_line_wins_over_both():
    write_config({"trainer": {"callbacks+": [EMA]}}, Path("ema.yaml"))
    write_config(tiny_config(callbacks=[{"class_path": f"{HERE}.Nothing"}]))
    assert call(f"{FIT} --config ema.yaml --trainer.max_steps=3 --tuned_on=digits-cnn") == 0
    saved = yaml.safe_load(Path("runs/tiny/config.yaml").read_text())
    names = [each["class_path"].rpartition(".")[2] for each in saved["trainer"]["callbacks"]]
    assert names == ["Nothing", "EMA"]
    assert (saved["trainer"]["max_steps"], saved["tuned_on"]) == (3, "digits-cnn")


def test_the_saved_config_gives_the_same_run_again():
    call(FIT)
    again = "--trainer.default_root_dir=runs/again"
    assert call(f"fit --config runs/tiny/config.yaml {TRUST} {again}") == 0
    assert equal(weights("runs/tiny"), weights("runs/again"))


# Resuming


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """The folder of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole")
    config = write_config(tiny_config(callbacks=[EMA], max_steps=10), folder / "tiny.yaml")
    root = folder / "run"
    assert call(f"fit --config {config} {TRUST} --trainer.default_root_dir={root}") == 0
    return root


@pytest.mark.quick
@pytest.mark.parametrize("died_at", [3, 4, 5, 8])
def test_a_resumed_run_ends_as_an_uninterrupted_one(whole, died_at):
    """In an epoch and at the end of one: weights, averages, counters and curves."""
    write_config(tiny_config(callbacks=[EMA], max_steps=10))
    assert call(f"{FIT} --trainer.max_steps={died_at}") == 0
    assert call(f"{FIT} --ckpt_path=last") == 0
    assert equal(weights(whole), weights("runs/tiny"))
    rows = [Path(root, "metrics.csv").read_text() for root in (whole, "runs/tiny")]
    assert rows[0] == rows[1]
    whole, resumed = checkpoint(whole), checkpoint("runs/tiny")
    key = next(key for key in whole["callbacks"] if key.startswith("EMA"))
    averages = [c["callbacks"][key]["shadows"][0] for c in (whole, resumed)]
    assert equal(*averages)
    assert [c["epoch"] for c in (whole, resumed)] == [2, 2]


def test_weights_in_double_precision_are_restored_bit_exactly():
    """Lightning restores them before it has cast the module, which rounds them to float32."""
    write_config(tiny_config(precision="64-true"))
    assert call(f"{FIT} --trainer.default_root_dir=whole") == 0
    assert call(f"{FIT} --trainer.max_steps=3") == 0
    assert call(f"{FIT} --ckpt_path=last") == 0
    assert equal(weights("whole"), weights("runs/tiny"))
    assert {value.dtype for value in weights("whole").values()} == {torch.float64}


def test_a_resume_keeps_the_first_config_and_writes_its_own():
    call(f"{FIT} --trainer.max_steps=3")
    first = Path("runs/tiny/config.yaml").read_text()
    for n in (1, 2):
        assert call(f"{FIT} --ckpt_path=last --trainer.max_steps={3 + n}") == 0
        saved = yaml.safe_load(Path(f"runs/tiny/config.resume-{n}.yaml").read_text())
        assert saved["trainer"]["max_steps"] == 3 + n
    assert Path("runs/tiny/config.yaml").read_text() == first


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_run_is_resumed_from_its_checkpoint_alone(scheme):
    call(f"{FIT} --trainer.max_steps=3")
    last = f"{scheme}{Path(LAST).absolute()}"
    assert call(f"fit --ckpt_path={last} --trainer.max_steps=5 {TRUST}") == 0
    assert checkpoint("runs/tiny")["global_step"] == 5
    assert [row["step"] for row in read_rows("runs/tiny/metrics.csv")] == list("012334")


def test_last_without_a_checkpoint_is_a_mistake_unless_the_run_may_start(capsys):
    assert call(f"{FIT} --ckpt_path=last") == 2
    assert f"no file {LAST}" in capsys.readouterr().err
    assert not Path("runs").exists()
    assert call(f"{FIT} --ckpt_path=last-or-none") == 0
    assert checkpoint("runs/tiny")["global_step"] == 8
    Path(LAST).rename(Path(LAST).with_name("best-fid.ckpt"))  # a run that lost its last
    before = files()
    capsys.readouterr()
    for name, message in (("last", f"no file {LAST}"), ("last-or-none", "best-fid.ckpt")):
        assert call(f"{FIT} --ckpt_path={name}") == 2
        assert message in capsys.readouterr().err
    assert files() == before


def test_a_run_that_is_moved_resumes_in_its_new_place_from_anywhere(whole, monkeypatch):
    """Bit-exactly, by its checkpoint alone, and by the config that it wrote."""
    options = {"dirpath": "runs/tiny/kept", "every_n_train_steps": 1}
    saver = {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": options}
    write_config(tiny_config(callbacks=[EMA, saver], max_steps=10))
    assert call(f"{FIT} --trainer.max_steps=3") == 0
    moved = Path("elsewhere/renamed").absolute()
    moved.parent.mkdir()
    Path("runs/tiny").rename(moved)
    Path("far/away").mkdir(parents=True)
    monkeypatch.chdir("far/away")
    last = f"--ckpt_path={moved}/checkpoints/last.ckpt"
    assert call(f"fit {last} --trainer.max_steps=5 {TRUST}") == 0
    config = f"--config {moved}/config.yaml --ckpt_path=last --trainer.max_steps=10"
    assert call(f"fit {config} {TRUST}") == 0
    assert list(Path().iterdir()) == []
    assert (moved / "kept" / "epoch=2-step=10.ckpt").is_file()
    assert equal(weights(whole), weights(moved))
    assert (whole / "metrics.csv").read_text() == (moved / "metrics.csv").read_text()


def test_after_a_mistake_at_the_first_step_the_corrected_command_starts():
    assert call(f"{FIT} --trainer.callbacks+=support.tiny_run.Fails") == 1
    assert Path("runs/tiny/metrics.csv").exists()
    assert call(FIT) == 0


@pytest.mark.parametrize(
    ("limit", "more"),
    [
        ("max_steps=3", "max_steps=4"),
        ("max_steps=4", "max_steps=5"),
        ("max_epochs=2", "max_epochs=3"),
        ("max_epochs=2 --trainer.val_check_interval=2", "max_epochs=3"),
    ],
)
def test_a_finished_run_is_not_trained_again(limit, more, capsys):
    base = f"{FIT} --trainer.max_steps=-1 --trainer"
    assert call(f"{base}.{limit}") == 0
    before = files()
    capsys.readouterr()
    assert call(f"{base}.{limit} --ckpt_path=last") == 2
    name, _, value = limit.split()[0].partition("=")
    unit = name.removeprefix("max_")
    rule = f"last.ckpt has {value} {unit}, and trainer.{name} is {value}; raise that to train on"
    assert rule in capsys.readouterr().err
    assert call(f"{base}.{limit} --ckpt_path=last-or-none") == 0
    assert "the run is finished" in capsys.readouterr().err
    assert files() == before
    assert call(f"{base}.{more} --ckpt_path=last") == 0


def test_rows_after_the_checkpoint_of_a_resume_are_deleted(caplog):
    assert call(f"{FIT} --trainer.max_steps=3") == 0
    early = Path(LAST).read_bytes()
    assert call(f"{FIT} --trainer.max_steps=7 --ckpt_path=last") == 0
    assert not any("rows of steps" in message for message in caplog.messages)
    Path(LAST).write_bytes(early)  # died before the next save
    assert call(f"{FIT} --trainer.max_steps=7 --ckpt_path=last") == 0
    assert "Took 5 rows of steps after 3 out of runs/tiny/metrics.csv." in caplog.messages


def test_rows_are_deleted_by_the_steps_they_are_logged_at_not_by_those_of_all_optimizers():
    config = tiny_config()
    config["model"]["class_path"] = f"{HERE}.TwoOptimizers"
    write_config(config)
    assert call(f"{FIT} --trainer.max_steps=12") == 0
    early = Path(LAST).read_bytes()
    assert call(f"{FIT} --trainer.max_steps=16 --ckpt_path=last") == 0
    Path(LAST).write_bytes(early)  # died before the next save
    assert call(f"{FIT} --trainer.max_steps=16 --ckpt_path=last") == 0
    steps = [int(r["step"]) for r in read_rows("runs/tiny/metrics.csv") if "train/loss" in r]
    assert steps == list(range(8))


# Command line over config, config over checkpoint


def test_changed_settings_are_those_inside_the_first_step_and_nothing_else_changes(adam, caplog):
    call(f"{FIT} --trainer.max_steps=3")
    saved = checkpoint("runs/tiny")["optimizer_states"][0]["state"]
    adam.clear()
    optimizer = "--model.init_args.optimizer.init_args"
    changes = f"{optimizer}.lr=0.001 {optimizer}.betas=[0.5,0.6] --data.init_args.batch_size=8"
    assert call(f"{FIT} --ckpt_path=last {changes}") == 0
    assert (adam[0]["lr"], adam[0]["betas"]) == (0.001, (0.5, 0.6))
    for i, moments in enumerate(adam[0]["moments"]):
        assert torch.equal(moments, saved[i]["exp_avg"])
    assert {
        "The checkpoint had model.optimizer.lr 0.1, using 0.001.",
        "The checkpoint had model.optimizer.betas [0.8, 0.9], using [0.5, 0.6].",
        "The checkpoint had data.batch_size 4, using 8.",
    } <= set(caplog.messages)


def test_a_summary_says_why_a_run_stopped_early(capsys):
    added = "--trainer.callbacks+=EarlyStopping --trainer.callbacks.EarlyStopping.monitor=val/loss"
    options = "--trainer.callbacks.EarlyStopping.min_delta=1e9 --trainer.callbacks.patience=1"
    write_config(tiny_config(check_val_every_n_epoch=1, max_steps=80))
    assert call(f"{FIT} {added} {options}") == 0
    assert "stopped     Monitored metric val/loss did not improve" in capsys.readouterr().err


def test_the_changed_decay_is_the_one_inside_the_first_step(caplog):
    def ema(decay):
        init_args = {"decays": [decay], "warmup": False}
        write_config(tiny_config(callbacks=[EMA | {"init_args": init_args}]))

    ema(0.5)
    call(f"{FIT} --trainer.max_steps=3")
    before = checkpoint("runs/tiny")
    ema(0.75)
    assert call(f"{FIT} --ckpt_path=last --trainer.max_steps=4") == 0
    after = checkpoint("runs/tiny")
    key = next(key for key in before["callbacks"] if key.startswith("EMA"))
    for name, raw in after["state_dict"].items():
        old, new = (c["callbacks"][key]["shadows"][0][name] for c in (before, after))
        torch.testing.assert_close(new, 0.75 * old + 0.25 * raw)
    assert any("had 0.5, using 0.75" in message for message in caplog.messages)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("schedule", "option"),
    [
        ({"total_steps": 8, "warmup_steps": 2}, ""),
        ({"total_steps": 8, "warmup_steps": 2}, "--model.init_args.optimizer.init_args.lr=0.02"),
        ({"total_steps": 8}, "--model.init_args.lr_scheduler.init_args.total_steps=12"),
        ({"total_steps": 8}, "--model.lr_scheduler=lit_diffusion.lr_schedules.WarmupConstant"),
    ],
)
def test_a_changed_lr_or_schedule_is_as_if_it_had_been_there_from_the_start(adam, schedule, option):
    write_config(with_schedule("WarmupLinear", **schedule))
    call(f"{FIT} --trainer.default_root_dir=runs/whole {option}")
    whole = [step["lr"] for step in adam]
    call(f"{FIT} --trainer.max_steps=5")
    adam.clear()
    assert call(f"{FIT} --ckpt_path=last {option}") == 0
    assert [step["lr"] for step in adam] == whole[5:]
    assert len(set(whole[5:])) > 1 or "Constant" in option


def test_a_schedule_added_at_a_resume_is_as_if_it_had_been_there_from_the_start(adam):
    call(f"{FIT} --trainer.max_steps=5")
    write_config(with_schedule("WarmupLinear", total_steps=8, warmup_steps=2))
    call(f"{FIT} --trainer.default_root_dir=runs/whole")
    whole = [step["lr"] for step in adam[5:]]
    adam.clear()
    assert call(f"{FIT} --ckpt_path=last") == 0
    assert [step["lr"] for step in adam] == whole[5:]
    schedules = [checkpoint(f"runs/{name}")["lr_schedulers"] for name in ("whole", "tiny")]
    assert schedules[0] == schedules[1]


def optimizer(name):
    config = tiny_config()
    config["model"]["init_args"]["optimizer"] = {
        "class_path": f"torch.optim.{name}",
        "init_args": {"lr": 0.01},
    }
    write_config(config)


def test_another_optimizer_cannot_resume_and_says_so(capsys):
    call(f"{FIT} --trainer.max_steps=3")
    optimizer("SGD")
    assert call(f"{FIT} --ckpt_path=last") == 2
    rule = "model.optimizer was torch.optim.Adam and is now torch.optim.SGD"
    assert rule in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [("Adam", "amsgrad=true", "amsgrad=false"), ("SGD", "momentum=0", "momentum=0.9")],
)
def test_a_setting_that_needs_no_other_state_is_changed(name, before, after):
    optimizer(name)
    option = "--model.init_args.optimizer.init_args"
    assert call(f"{FIT} --trainer.max_steps=3 {option}.{before}") == 0
    assert call(f"{FIT} --ckpt_path=last {option}.{after}") == 0
    key, value = after.split("=")
    group = checkpoint("runs/tiny")["optimizer_states"][0]["param_groups"][0]
    assert group[key] == yaml.safe_load(value)


# validate, test and predict


@pytest.mark.parametrize("command", ["validate", "test"])
def test_a_checkpoint_alone_is_scored_with_the_averages_of_its_run(command, capsys, caplog):
    write_config(tiny_config(callbacks=[EMA]))
    call(FIT)
    before, value = files(), read_rows("runs/tiny/metrics.csv")[-1]["val/loss"]
    capsys.readouterr()
    score = f"{command} --ckpt_path={LAST} {TRUST}"
    assert call(score) == 0
    assert f"{float(value):.6f}"[:8] in capsys.readouterr().out
    assert not any("The checkpoint had" in message for message in caplog.messages)
    assert call(f"{score} --model.init_args.shift=7") == 0
    assert "The checkpoint had model.shift 0.0, using 7.0." in caplog.messages
    assert files() == before


def test_scores_of_raw_weights_do_not_pass_for_those_of_averages(capsys):
    write_config(tiny_config(callbacks=[EMA]))
    call(FIT)
    write_config(tiny_config(), Path("plain.yaml"))
    assert call(f"validate --config plain.yaml --ckpt_path={LAST} {TRUST}") == 2
    assert "holds averaged weights, but no EMA callback" in capsys.readouterr().err


def test_predicting_without_a_way_to_keep_it_is_refused(capsys):
    call(FIT)
    predict = f"predict --ckpt_path={LAST} {TRUST}"
    assert call(predict) == 2
    assert "write images with `lit-diffusion sample`, or add a" in capsys.readouterr().err
    assert call(f"{predict} --trainer.callbacks+={HERE}.Writes") == 0


# Mistakes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("--trainer.max_stepz=3", "no option 'trainer.max_stepz'. Did you mean"),
        ("--trainer.max_step=3", "no option 'trainer.max_step'. Did you mean"),  # abbreviated
        ("--trainer.default_root=x", "Did you mean 'trainer.default_root_dir'?"),
        ("--ckpt=x", "no option 'ckpt'. Did you mean 'ckpt_path'?"),
        ("--trainer.max_steps=many", "trainer.max_steps: Expected an int, got many."),
        ("--config endless.yaml", "trainer.max_steps must be a number, -1 for no end"),
        ("--trainer.accumulate_grad_batches=0", "must be at least 1, got 0"),
        ("--trainer.val_check_interval=0", "at least 1 where it counts batches, got 0"),
        ("--model.init_args.network.init_args.widht=3", "Did you mean 'width'?"),
        ("--model.init_args.shfit=3", "no argument 'shfit'. Did you mean 'shift'?"),
        ("--model.init_args.network=stranger.Net", "add --trust stranger."),
        ("--trainer.callbacks+=stranger.Callback", "add --trust stranger."),
        ("--trainer.precision=8", "trainer.precision: Expected one of 64, 32, 16,"),
        ("--trainer.precision=bf17", "Expected an int or one of 'transformer-engine',"),
        pytest.param(
            "--trainer.accelerator=cuda",
            "trainer.accelerator=cuda: there is none here; auto takes what is.",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="has one"),
        ),
        ("--trainer.accelerator=abacus", "invalid accelerator name"),
        ("--config nowhere.yaml", "nowhere.yaml"),
        ("--config broken.yaml", "broken.yaml"),
        ("--config binary.yaml", "binary.yaml is not YAML"),
        ("--config empty.yaml", "empty.yaml must hold settings"),
        ("--config misspelt.yaml", "'trainer.max_stepz'. Did you mean 'trainer.max_steps'?"),
        ("--ckpt_path nowhere.ckpt", "there is no file nowhere.ckpt"),
        ("--ckpt_path", "--ckpt_path: expected one argument"),
        ("--ckpt_path=best", "ckpt_path=best is known to no run here; name the file, such as"),
        ("--trainer.default_root_dir=/proc/runs", "The run folder /proc/runs cannot be written"),
    ],
)
def test_a_mistake_ends_in_one_line_and_exit_code_2(change, message, capsys):
    Path("broken.yaml").write_text("trainer: [\n  max_steps: 3\n")
    Path("endless.yaml").write_text("trainer: {max_steps: null}\n")
    Path("misspelt.yaml").write_text("trainer: {max_stepz: 3}\n")
    Path("binary.yaml").write_bytes(b"\x80\xff\x00")
    Path("empty.yaml").touch()
    assert call(f"{FIT} {change}") == 2
    lines = capsys.readouterr().err.strip().split("\n")
    assert message in lines[-1]
    assert len([line for line in lines if not line.startswith("Seed set")]) == 1
    assert not Path("runs").exists()


def test_usual_trainer_settings_are_not_refused():
    usual = {"accumulate_grad_batches": 4, "check_val_every_n_epoch": None, "max_steps": -1}
    for interval in (0.25, 1, "00:01:00:00"):
        assert not list(wrong_trainer_settings(usual | {"val_check_interval": interval}, "last"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("", "needs --config FILE"),
        ("--conf tiny.yaml", "no option 'conf'. Did you mean 'config'?"),
        (
            f"--config tiny.yaml {TRUST} --trainer.callbacks+=EarlyStopping "
            "--trainer.callbacks.monitor=val/los",
            "`val/loss`",
        ),
        (
            f"--config tiny.yaml {TRUST} --trainer.callbacks+=EMA --trainer.callbacks+=EMA",
            "more than one stateful callback of type `EMA`",
        ),
    ],
)
def test_what_lightning_or_its_parser_refuses_is_a_mistake(options, message, capsys):
    assert call(f"fit {options}") == 2
    assert message in capsys.readouterr().err


def test_arguments_that_do_not_fit_each_other_are_named(capsys):
    config = small_digits(1)
    config["model"]["init_args"] |= {"num_classes": None, "label_dropout": 0.0}
    write_config(config)
    assert call(FIT) == 2
    err = capsys.readouterr().err
    assert "num_classes is None in the module, but 10 in" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("init_args", ["", "init_args."])
def test_null_can_be_given_to_parts_of_parts(capsys, init_args):
    write_config(small_digits(1))
    network = f"--model.{init_args}network.{init_args}num_classes=null"
    options = f"--model.{init_args}num_classes=null --model.{init_args}label_dropout=0"
    assert call(f"{FIT} {network} {options} --print_config") == 0
    model = yaml.safe_load(capsys.readouterr().out)["model"]["init_args"]
    network = model["network"]["init_args"]
    assert (model["num_classes"], network["num_classes"]) == (None, None)
    assert network["model_channels"] == 8


@pytest.mark.parametrize("condition", ["", "{0}=Classes {0}.num_classes=10"])
def test_a_network_without_a_condition_gets_the_classes_of_its_module(condition):
    write_config(small_digits(1))
    network = f"--model.network.num_classes=null {condition.format('--model.network.condition')}"
    assert call(f"{FIT} {network} --trainer.limit_val_batches=0") == 0
    saved = yaml.safe_load(Path("runs/tiny/config.yaml").read_text())["model"]["init_args"]
    assert saved["network"]["init_args"]["num_classes"] == (None if condition else 10)


@pytest.mark.parametrize("what", ["another architecture", "truncated"])
def test_a_checkpoint_that_does_not_fit_is_named(what, capsys):
    call(f"{FIT} --trainer.max_steps=3")
    options = "--model.init_args.network.init_args.width=9"
    if what == "truncated":
        options, content = "", Path(LAST).read_bytes()
        Path(LAST).write_bytes(content[:-100])
    assert call(f"{FIT} --ckpt_path=last {options}") == 2
    err = capsys.readouterr().err
    assert f"last.ckpt is {'of ' if options else ''}{what}" in err
    assert "Traceback" not in err
    assert not options or "network.layers.0.weight" in err


@pytest.mark.parametrize(
    ("option", "argument"),
    [
        ("--model.help=lit_diffusion.modules.diffusion.DiffusionModule", "--model.label_dropout"),
        ("--model.help lit_diffusion.modules.diffusion.DiffusionModule", "--model.label_dropout"),
        ("--data.help=lit_diffusion.data.digits.Digits", "--data.batch_size"),
        ("--trainer.callbacks.help=lit_diffusion.callbacks.EMA", "--trainer.callbacks.decays"),
        ("--trainer.plugins.help=lit_diffusion.checkpoints.AtomicCheckpointIO", "Help for"),
        ("--model.help", "Help for"),
    ],
)
def test_help_of_a_class_names_its_arguments(option, argument, capsys):
    for config in ("", f"--config tiny.yaml {TRUST}"):
        assert call(f"fit {config} {option}") == 0
        assert argument in capsys.readouterr().out
    assert not Path("runs").exists()


def test_help_of_fit_begins_with_what_to_type(capsys):
    assert call("fit --help") == 0
    out = capsys.readouterr().out
    assert "lit-diffusion fit --config configs/digits.yaml --ckpt_path=last" in out[:1500]


# Nothing that a file says runs code


def test_nothing_of_a_stranger_is_imported(tmp_path, monkeypatch):
    (tmp_path / "stranger.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')")
    monkeypatch.syspath_prepend(tmp_path)
    for key in (
        *("model", "data", "model.init_args.network", "model.init_args.optimizer"),
        *("trainer.callbacks", "trainer.logger", "trainer.plugins"),
        *("trainer.strategy", "trainer.profiler"),
    ):
        plus = "+" if key == "trainer.callbacks" else ""
        assert call(f"{FIT} --{key}{plus}=stranger.Class") == 2, key
        config = tiny_config()
        *path, last = key.split(".")
        place = config
        for part in path:
            place = place[part]
        stranger = {"class_path": "stranger.Class"}
        place[last] = [stranger] if plus else stranger
        write_config(config, Path("hidden.yaml"))
        assert call(f"fit --config hidden.yaml {TRUST}") == 2, key
    assert not (tmp_path / "imported").exists()
    assert "stranger" not in sys.modules


class Bomb:
    """Leaves a file behind when it is unpickled without care."""

    def __reduce__(self):
        return (open, ("bombed", "w"))


@pytest.mark.parametrize("scheme", ["", "file://", "local://"])
@pytest.mark.parametrize("plugins", [None, "lightning.pytorch.plugins.io.TorchCheckpointIO"])
@pytest.mark.parametrize("trust", ["", "--trust lightning"])
def test_no_config_has_code_in_a_checkpoint_run(tmp_path, scheme, plugins, trust):
    torch.save({"state_dict": {}, "bomb": Bomb()}, "bomb.ckpt")
    config = tiny_config(plugins=plugins)
    config |= {"ckpt_path": f"{scheme}{tmp_path}/bomb.ckpt", "weights_only": False}
    write_config(config)
    assert call(f"{FIT} {trust}") != 0
    assert not Path("bombed").exists()


def test_a_reader_of_checkpoints_that_may_run_code_is_refused_unless_trusted(capsys):
    write_config(tiny_config(plugins="lightning.pytorch.plugins.io.TorchCheckpointIO"))
    assert call(FIT) == 2
    assert "TorchCheckpointIO may run code that a checkpoint holds" in capsys.readouterr().err
    assert call(f"{FIT} --trust lightning") == 0
