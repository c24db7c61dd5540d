"""fit, validate and test through `main`, on a tiny module: exit codes and files are what counts."""

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

TRUST = "--trust support"
FIT = f"fit --config tiny.yaml {TRUST}"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_config(tiny_config())


class Spy:
    """Hyperparameters inside each optimizer step."""

    def __init__(self, monkeypatch):
        self.groups = []
        step = Adam.step

        def spying(optimizer, closure=None):
            group = optimizer.param_groups[0]
            self.groups.append({key: group[key] for key in ("lr", "betas")})
            return step(optimizer, closure)

        monkeypatch.setattr(Adam, "step", spying)


def with_schedule(name: str, **init_args) -> dict:
    config = tiny_config()
    config["model"]["init_args"]["lr_scheduler"] = {
        "class_path": f"lit_diffusion.lr_schedules.{name}",
        "init_args": init_args,
    }
    return config


# The run folder


def test_a_fit_leaves_a_run_folder_named_after_its_config():
    assert call(FIT) == 0
    files = {str(p.relative_to("runs/tiny")) for p in Path("runs/tiny").rglob("*") if p.is_file()}
    assert {"config.yaml", "metrics.csv", "checkpoints/last.ckpt"} <= files
    assert not any("version_" in name or "lightning_logs" in name for name in files)
    assert next(Path("runs/tiny/tensorboard").glob("events.*"))


def test_the_summary_says_where_things_are_and_how_to_sample(capsys):
    call(FIT)
    told = capsys.readouterr().err
    assert "runs/tiny" in told
    assert "8 steps, 32 images seen" in told
    assert "lit-diffusion sample --checkpoint runs/tiny" in told


def test_the_summary_counts_the_images_of_each_batch_size_that_a_run_had(capsys):
    call(FIT)
    call(f"{FIT} --ckpt_path=last --trainer.max_steps=12 --data.init_args.batch_size=2")
    assert "12 steps, 40 images seen" in capsys.readouterr().err
    call(f"{FIT} --ckpt_path=last --trainer.max_steps=13 --data.init_args.batch_size=8")
    assert "13 steps, 48 images seen" in capsys.readouterr().err


@pytest.mark.parametrize("callbacks", [[], [EMA]])
def test_the_sample_command_that_a_fit_ends_with_works(callbacks, capsys):
    """Without averages, with a module from elsewhere, in a folder with a space."""
    config = small_digits(2, callbacks=callbacks)
    write_config(config)
    assert call(f"{FIT} --trainer.default_root_dir='my runs/tiny'") == 0
    told = capsys.readouterr().err.strip().split("\n")[-1]
    assert told.startswith("sample ")
    assert "--trust=support" in told
    assert call(told.partition("lit-diffusion ")[2].replace("--num 64", "--num 1")) == 0
    assert Path("my runs/tiny/out/000000.png").is_file()


@pytest.mark.parametrize("option", ["max_steps=0", "enable_checkpointing=false"])
def test_a_run_without_a_checkpoint_is_not_told_how_to_sample(option, capsys):
    assert call(f"{FIT} --trainer.{option}") == 0
    told = capsys.readouterr().err
    assert "run folder  runs/tiny" in told
    assert "lit-diffusion sample" not in told


def test_output_that_is_no_terminal_gets_plain_lines(capsys):
    call(FIT)
    told = capsys.readouterr().err
    assert "step 8/8  epoch 1  train/loss " in told
    assert "\r" not in told


def test_a_run_that_another_process_trains_is_not_resumed_and_not_changed(capsys):
    call(FIT)
    before = {p: p.read_bytes() for p in Path("runs").rglob("*") if p.is_file()}
    capsys.readouterr()
    with occupied(Path("runs/tiny")):
        assert call(f"{FIT} --ckpt_path=last --trainer.max_steps=12") == 2
    assert "runs/tiny is in use: another process trains into it." in capsys.readouterr().err
    assert {p: p.read_bytes() for p in Path("runs").rglob("*") if p.is_file()} == before
    assert call(f"{FIT} --ckpt_path=last --trainer.max_steps=12") == 0


def test_a_second_fit_into_the_same_folder_is_refused_and_changes_nothing(capsys):
    call(FIT)
    before = {p: p.read_bytes() for p in Path("runs").rglob("*") if p.is_file()}
    capsys.readouterr()
    assert call(FIT) == 2
    assert "runs/tiny already holds a run" in capsys.readouterr().err
    assert {p: p.read_bytes() for p in Path("runs").rglob("*") if p.is_file()} == before


def test_fast_dev_run_touches_no_run_folder():
    call(FIT)
    before = sorted(Path("runs").rglob("*"))
    assert call(f"{FIT} --trainer.fast_dev_run=true") == 0
    assert sorted(Path("runs").rglob("*")) == before


def test_what_the_user_configures_takes_the_place_of_the_defaults():
    config = tiny_config(
        logger={
            "class_path": "lightning.pytorch.loggers.CSVLogger",
            "init_args": {"save_dir": "l"},
        },
        callbacks=[
            {
                "class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
                "init_args": {"dirpath": "kept", "save_last": True},
            }
        ],
    )
    write_config(config)
    assert call(FIT) == 0
    assert Path("kept/last.ckpt").exists()
    assert Path("l").exists()
    assert Path("runs/tiny/checkpoints/last.ckpt").exists()  # from which it would go on
    assert not Path("runs/tiny/tensorboard").exists()
    assert read_rows("runs/tiny/metrics.csv")  # which a resume and compare want


def test_a_logger_that_is_given_is_the_first(monkeypatch):
    seen = []
    monkeypatch.setattr(TinyModule, "on_train_start", lambda self: seen.append(self.logger))
    assert call(f"{FIT} --trainer.logger=CSVLogger --trainer.logger.save_dir=l") == 0
    assert [type(logger).__name__ for logger in seen] == ["CSVLogger"]


@pytest.mark.parametrize("given", ["false", "[]"])
def test_no_logger_is_no_logger(given):
    assert call(f"{FIT} --trainer.logger={given}") == 0
    assert not Path("runs/tiny/metrics.csv").exists()


def test_a_run_without_checkpoints_has_none():
    assert call(f"{FIT} --trainer.enable_checkpointing=false") == 0
    assert not Path("runs/tiny/checkpoints").exists()


# Composition


def test_a_fragment_is_appended_and_the_command_line_wins_over_both():
    write_config({"trainer": {"callbacks+": [EMA]}}, Path("ema.yaml"))
    write_config(
        {"trainer": {"callbacks+": [EMA | {"init_args": {"prefix": "x"}}]}}, Path("e2.yaml")
    )
    write_config(tiny_config(callbacks=[{"class_path": f"{HERE}.Nothing"}]))
    assert call(f"{FIT} --config ema.yaml --trainer.max_steps=3") == 0
    saved = yaml.safe_load(Path("runs/tiny/config.yaml").read_text())
    assert [c["class_path"].rpartition(".")[2] for c in saved["trainer"]["callbacks"]] == [
        "Nothing",
        "EMA",
    ]
    assert saved["trainer"]["max_steps"] == 3


def test_the_saved_config_gives_the_same_run_again():
    call(FIT)
    again = "--trainer.default_root_dir=runs/again"
    assert call(f"fit --config runs/tiny/config.yaml {TRUST} {again}") == 0
    assert equal(weights("runs/tiny"), weights("runs/again"))


def test_what_the_numbers_were_tuned_on_stays_with_the_run():
    call(f"{FIT} --tuned_on=digits-cnn")
    assert yaml.safe_load(Path("runs/tiny/config.yaml").read_text())["tuned_on"] == "digits-cnn"


# Resuming


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """The folder of an undisturbed run."""
    folder = tmp_path_factory.mktemp("whole")
    config = write_config(tiny_config(callbacks=[EMA], max_steps=10), folder / "tiny.yaml")
    root = folder / "run"
    assert call(f"fit --config {config} {TRUST} --trainer.default_root_dir={root}") == 0
    return root


@pytest.mark.parametrize("died_at", [3, 4, 5, 8])
def test_a_resumed_run_ends_as_an_undisturbed_one(whole, died_at):
    """Mid-epoch and at the end of one: weights, averages, counters and curves."""
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


def test_weights_in_double_precision_are_restored_to_the_last_bit():
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


def test_a_run_is_resumed_from_its_checkpoint_alone():
    call(f"{FIT} --trainer.max_steps=3")
    last = "runs/tiny/checkpoints/last.ckpt"
    assert call(f"fit --ckpt_path={last} --trainer.max_steps=5 {TRUST}") == 0
    assert checkpoint("runs/tiny")["global_step"] == 5
    assert [row["step"] for row in read_rows("runs/tiny/metrics.csv")] == list("012334")


def test_last_without_a_checkpoint_is_a_mistake_unless_the_run_may_start(capsys):
    assert call(f"{FIT} --ckpt_path=last") == 2
    assert "no file runs/tiny/checkpoints/last.ckpt" in capsys.readouterr().err
    assert not Path("runs").exists()
    assert call(f"{FIT} --ckpt_path=last-or-none") == 0
    assert checkpoint("runs/tiny")["global_step"] == 8


def test_a_run_that_is_moved_goes_on_in_its_new_place_from_anywhere(whole, monkeypatch, capsys):
    """To the last bit, by its checkpoint alone, and by the config that it wrote."""
    given = {"dirpath": "runs/tiny/kept", "every_n_train_steps": 1}
    keeper = {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": given}
    write_config(tiny_config(callbacks=[EMA, keeper], max_steps=10))
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
    wrong = "--trainer.callbacks+=support.tiny_run.Fails"
    assert call(f"{FIT} {wrong}") == 1
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
def test_a_checkpoint_that_has_all_that_is_asked_for_is_not_trained_again(limit, more, capsys):
    base = f"{FIT} --trainer.max_steps=-1 --trainer"
    assert call(f"{base}.{limit}") == 0
    before = {p: p.read_bytes() for p in Path("runs").rglob("*") if p.is_file()}
    capsys.readouterr()
    assert call(f"{base}.{limit} --ckpt_path=last") == 2
    name, _, value = limit.split()[0].partition("=")
    unit = name.removeprefix("max_")
    told = f"last.ckpt has {value} {unit}, and trainer.{name} is {value}; raise that to train on"
    assert told in capsys.readouterr().err
    assert call(f"{base}.{limit} --ckpt_path=last-or-none") == 0
    assert "the run is finished" in capsys.readouterr().err
    assert {p: p.read_bytes() for p in Path("runs").rglob("*") if p.is_file()} == before
    assert call(f"{base}.{more} --ckpt_path=last") == 0


def test_a_resume_tells_the_rows_that_it_takes_out(caplog):
    assert call(f"{FIT} --trainer.max_steps=3") == 0
    early = Path("runs/tiny/checkpoints/last.ckpt").read_bytes()
    assert call(f"{FIT} --trainer.max_steps=7 --ckpt_path=last") == 0
    assert not any("rows of steps" in message for message in caplog.messages)
    Path("runs/tiny/checkpoints/last.ckpt").write_bytes(early)  # died before the next save
    assert call(f"{FIT} --trainer.max_steps=7 --ckpt_path=last") == 0
    rows = "Took 5 rows of steps after 3 out of runs/tiny/metrics.csv."
    assert rows in caplog.messages


def test_last_where_a_run_lost_its_last_checkpoint_touches_nothing(capsys):
    call(f"{FIT} --trainer.max_steps=3")
    checkpoints = Path("runs/tiny/checkpoints")
    (checkpoints / "last.ckpt").rename(checkpoints / "best-fid.ckpt")
    before = {p: p.read_bytes() for p in Path("runs").rglob("*") if p.is_file()}
    capsys.readouterr()
    assert call(f"{FIT} --ckpt_path=last") == 2
    assert "there is no file runs/tiny/checkpoints/last.ckpt" in capsys.readouterr().err
    assert call(f"{FIT} --ckpt_path=last-or-none") == 2
    assert "checkpoints/best-fid.ckpt" in capsys.readouterr().err
    assert {p: p.read_bytes() for p in Path("runs").rglob("*") if p.is_file()} == before


def test_curves_are_rewound_by_the_steps_they_are_logged_at_not_by_those_of_all_optimizers():
    config = tiny_config()
    config["model"]["class_path"] = f"{HERE}.TwoOptimizers"
    write_config(config)
    assert call(f"{FIT} --trainer.max_steps=12") == 0
    early = Path("runs/tiny/checkpoints/last.ckpt").read_bytes()
    assert call(f"{FIT} --trainer.max_steps=16 --ckpt_path=last") == 0
    Path("runs/tiny/checkpoints/last.ckpt").write_bytes(early)  # died before the next save
    assert call(f"{FIT} --trainer.max_steps=16 --ckpt_path=last") == 0
    steps = [int(r["step"]) for r in read_rows("runs/tiny/metrics.csv") if "train/loss" in r]
    assert steps == list(range(8))


# What wins


def test_lr_and_betas_of_the_command_line_are_those_inside_the_first_step(monkeypatch, caplog):
    call(f"{FIT} --trainer.max_steps=3")
    spy = Spy(monkeypatch)
    optimizer = "--model.init_args.optimizer.init_args"
    flags = f"{optimizer}.lr=0.001 {optimizer}.betas=[0.5,0.6]"
    assert call(f"{FIT} --ckpt_path=last {flags}") == 0
    assert spy.groups[0] == {"lr": 0.001, "betas": (0.5, 0.6)}
    assert "The checkpoint had model.optimizer.lr 0.1, using 0.001." in caplog.messages
    assert "The checkpoint had model.optimizer.betas [0.8, 0.9], using [0.5, 0.6]." in (
        caplog.messages
    )


def test_changed_data_are_told(caplog):
    call(f"{FIT} --trainer.max_steps=4")
    assert call(f"{FIT} --ckpt_path=last --data.init_args.batch_size=8") == 0
    assert "The checkpoint had data.batch_size 4, using 8." in caplog.messages


def test_why_a_run_stopped_early_is_told(capsys):
    added = "--trainer.callbacks+=EarlyStopping --trainer.callbacks.EarlyStopping.monitor=val/loss"
    options = "--trainer.callbacks.EarlyStopping.min_delta=1e9 --trainer.callbacks.patience=1"
    config = tiny_config(check_val_every_n_epoch=1, max_steps=80)
    write_config(config)
    assert call(f"{FIT} {added} {options}") == 0
    assert "stopped     Monitored metric val/loss did not improve" in capsys.readouterr().err


def test_the_decay_of_the_command_line_is_the_one_inside_the_first_step(caplog):
    write_config(tiny_config(callbacks=[EMA | {"init_args": {"decays": [0.5], "warmup": False}}]))
    call(f"{FIT} --trainer.max_steps=3")
    before = checkpoint("runs/tiny")
    write_config(tiny_config(callbacks=[EMA | {"init_args": {"decays": [0.75], "warmup": False}}]))
    assert call(f"{FIT} --ckpt_path=last --trainer.max_steps=4") == 0
    after = checkpoint("runs/tiny")
    key = next(key for key in before["callbacks"] if key.startswith("EMA"))
    for name, raw in after["state_dict"].items():
        old, new = (c["callbacks"][key]["shadows"][0][name] for c in (before, after))
        torch.testing.assert_close(new, 0.75 * old + 0.25 * raw)
    assert any("had 0.5, using 0.75" in message for message in caplog.messages)


def test_without_flags_a_schedule_goes_on_where_it_was(monkeypatch):
    write_config(with_schedule("WarmupLinear", total_steps=8, warmup_steps=2))
    spy = Spy(monkeypatch)
    call(f"{FIT} --trainer.default_root_dir=runs/whole")
    whole = [group["lr"] for group in spy.groups]
    spy.groups.clear()
    call(f"{FIT} --trainer.max_steps=5")
    call(f"{FIT} --ckpt_path=last")
    assert [group["lr"] for group in spy.groups] == whole
    assert len(set(whole)) > 5


@pytest.mark.parametrize(
    ("schedule", "flag"),
    [
        ({"total_steps": 8, "warmup_steps": 2}, "optimizer.init_args.lr=0.02"),
        ({"total_steps": 8}, "lr_scheduler.init_args.total_steps=12"),
        ({"total_steps": 8}, "lr_scheduler=lit_diffusion.lr_schedules.WarmupConstant"),
    ],
)
def test_a_changed_lr_or_schedule_is_as_if_it_had_been_there_from_the_start(
    monkeypatch, schedule, flag
):
    write_config(with_schedule("WarmupLinear", **schedule))
    spy = Spy(monkeypatch)
    flag = f"--model.init_args.{flag}"
    call(f"{FIT} --trainer.default_root_dir=runs/whole {flag}")
    whole = [group["lr"] for group in spy.groups]
    call(f"{FIT} --trainer.max_steps=5")
    spy.groups.clear()
    assert call(f"{FIT} --ckpt_path=last {flag}") == 0
    assert [group["lr"] for group in spy.groups] == whole[5:]


def test_a_schedule_added_at_a_resume_is_as_if_it_had_been_there_from_the_start(monkeypatch):
    write_config(with_schedule("WarmupLinear", total_steps=8, warmup_steps=2))
    spy = Spy(monkeypatch)
    call(f"{FIT} --trainer.default_root_dir=runs/whole")
    whole = [group["lr"] for group in spy.groups]
    write_config(tiny_config())
    call(f"{FIT} --trainer.max_steps=5")
    write_config(with_schedule("WarmupLinear", total_steps=8, warmup_steps=2))
    spy.groups.clear()
    assert call(f"{FIT} --ckpt_path=last") == 0
    assert [group["lr"] for group in spy.groups] == whole[5:]
    schedules = [checkpoint(f"runs/{name}")["lr_schedulers"] for name in ("whole", "tiny")]
    assert schedules[0] == schedules[1]


def test_changing_one_setting_leaves_momenta_and_other_settings_alone(monkeypatch):
    call(f"{FIT} --trainer.max_steps=3")
    saved = checkpoint("runs/tiny")["optimizer_states"][0]["state"]
    seen = []
    step = Adam.step

    def spying(optimizer, closure=None):
        seen.append({k: v["exp_avg"].clone() for k, v in enumerate(optimizer.state.values())})
        return step(optimizer, closure)

    monkeypatch.setattr(Adam, "step", spying)
    flag = "--model.init_args.optimizer.init_args.lr=0.5"
    assert call(f"{FIT} --ckpt_path=last --trainer.max_steps=4 {flag}") == 0
    assert all(torch.equal(saved[k]["exp_avg"], seen[0][k]) for k in saved)


def test_another_optimizer_cannot_resume_and_says_so(capsys):
    call(f"{FIT} --trainer.max_steps=3")
    config = tiny_config()
    config["model"]["init_args"]["optimizer"] = {
        "class_path": "torch.optim.SGD",
        "init_args": {"lr": 0.1},
    }
    write_config(config)
    assert call(f"{FIT} --ckpt_path=last") == 2
    told = capsys.readouterr().err
    assert "model.optimizer was torch.optim.Adam and is now torch.optim.SGD" in told


@pytest.mark.parametrize(
    ("optimizer", "before", "after"),
    [("Adam", "amsgrad=true", "amsgrad=false"), ("SGD", "momentum=0", "momentum=0.9")],
)
def test_a_setting_whose_state_is_held_or_not_needed_is_changed(optimizer, before, after):
    config = tiny_config()
    config["model"]["init_args"]["optimizer"] = {
        "class_path": f"torch.optim.{optimizer}",
        "init_args": {"lr": 0.01},
    }
    write_config(config)
    option = "--model.init_args.optimizer.init_args"
    assert call(f"{FIT} --trainer.max_steps=3 {option}.{before}") == 0
    assert call(f"{FIT} --ckpt_path=last {option}.{after}") == 0
    key, value = after.split("=")
    group = checkpoint("runs/tiny")["optimizer_states"][0]["param_groups"][0]
    assert group[key] == yaml.safe_load(value)


@pytest.mark.parametrize("command", ["validate", "test"])
def test_the_command_line_wins_over_the_checkpoint_in_validation(command, caplog):
    call(FIT)
    last = "runs/tiny/checkpoints/last.ckpt"
    assert call(f"{command} --ckpt_path={last} {TRUST}") == 0
    assert not any("The checkpoint had" in message for message in caplog.messages)
    assert call(f"{command} --ckpt_path={last} {TRUST} --model.init_args.shift=7") == 0
    assert "The checkpoint had model.shift 0.0, using 7.0." in caplog.messages


# Validation from a checkpoint


def test_a_checkpoint_alone_is_scored_with_the_averages_of_its_run(capsys):
    write_config(tiny_config(callbacks=[EMA]))
    call(FIT)
    last = read_rows("runs/tiny/metrics.csv")[-1]
    capsys.readouterr()
    assert call(f"validate --ckpt_path=runs/tiny/checkpoints/last.ckpt {TRUST}") == 0
    told = capsys.readouterr().out
    assert f"{float(last['val/loss']):.6f}"[:8] in told


def test_scores_of_raw_weights_do_not_pass_for_those_of_averages(capsys):
    write_config(tiny_config(callbacks=[EMA]))
    call(FIT)
    write_config(tiny_config(), Path("plain.yaml"))
    last = "runs/tiny/checkpoints/last.ckpt"
    assert call(f"validate --config plain.yaml --ckpt_path={last} {TRUST}") == 2
    assert "holds averaged weights, but no EMA callback" in capsys.readouterr().err


def test_validation_writes_nothing_into_the_run_folder():
    call(FIT)
    before = {p: p.read_bytes() for p in Path("runs").rglob("*") if p.is_file()}
    assert call(f"validate --ckpt_path=runs/tiny/checkpoints/last.ckpt {TRUST}") == 0
    assert {p: p.read_bytes() for p in Path("runs").rglob("*") if p.is_file()} == before


def test_predicting_without_a_way_to_keep_it_is_refused(capsys):
    call(FIT)
    predict = f"predict --ckpt_path=runs/tiny/checkpoints/last.ckpt {TRUST}"
    assert call(predict) == 2
    assert "write images with `lit-diffusion sample`, or add a" in capsys.readouterr().err
    assert call(f"{predict} --trainer.callbacks+={HERE}.Writes") == 0


# Mistakes


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            "--trainer.max_stepz=3",
            "no option 'trainer.max_stepz'. Did you mean 'trainer.max_steps'",
        ),
        ("--trainer.max_steps=many", "trainer.max_steps: Expected an int, got many."),
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
        ("--ckpt_path nowhere.ckpt", "there is no file nowhere.ckpt"),
        ("--ckpt_path", "--ckpt_path: expected one argument"),
        ("--trainer.default_root_dir=/proc/runs", "The run folder /proc/runs cannot be written"),
    ],
)
def test_a_mistake_is_told_in_one_line_with_exit_code_2(change, told, capsys):
    Path("broken.yaml").write_text("trainer: [\n  max_steps: 3\n")
    Path("binary.yaml").write_bytes(b"\x80\xff\x00")
    Path("empty.yaml").touch()
    assert call(f"{FIT} {change}") == 2
    said = capsys.readouterr().err.strip().split("\n")
    assert told in said[-1]
    assert len([line for line in said if not line.startswith("Seed set")]) == 1
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            "--config tiny.yaml --trainer.default_root_dir=B --ckpt=A/checkpoints/last.ckpt "
            "--model.optimizer.lr=1e-4",
            "no option 'ckpt'. Did you mean 'ckpt_path'?",
        ),
        (
            "--config tiny.yaml --trainer.default_root=elsewhere",
            "no option 'trainer.default_root'. Did you mean 'trainer.default_root_dir'?",
        ),
        ("--conf tiny.yaml", "no option 'conf'. Did you mean 'config'?"),
        (
            "--config tiny.yaml --trainer.max_step=100",
            "no option 'trainer.max_step'. Did you mean 'trainer.max_steps'?",
        ),
    ],
)
def test_an_abbreviated_option_is_no_option(options, told, capsys):
    """The run folder is found before the Trainer's parser, and must not differ from what it has."""
    call(f"{FIT} --trainer.default_root_dir=A")
    before = sorted(Path().rglob("*"))
    capsys.readouterr()
    assert call(f"fit {options} {TRUST}") == 2
    assert capsys.readouterr().err == f"lit-diffusion fit: there is {told}\n"
    assert sorted(Path().rglob("*")) == before


def test_a_fit_without_a_config_is_told_what_it_needs(capsys):
    assert call("fit") == 2
    assert "needs --config FILE" in capsys.readouterr().err


def test_a_config_file_with_a_wrong_name_is_told_as_the_command_line_is(capsys):
    config = tiny_config(max_stepz=3)
    write_config(config)
    assert call(FIT) == 2
    assert "'trainer.max_stepz'. Did you mean 'trainer.max_steps'?" in capsys.readouterr().err


def test_arguments_that_do_not_go_together_are_told_by_those_who_know(capsys):
    config = small_digits(1)
    config["model"]["init_args"]["num_classes"] = None
    config["model"]["init_args"]["label_dropout"] = 0.0
    write_config(config)
    assert call(FIT) == 2
    said = capsys.readouterr().err.strip().split("\n")
    assert said[-1].startswith("lit-diffusion fit: num_classes is None in the module, but 10 in")
    assert "Traceback" not in said


@pytest.mark.parametrize("init_args", ["", "init_args."])
def test_null_can_be_given_to_parts_of_parts(capsys, init_args):
    write_config(small_digits(1))
    network = f"--model.{init_args}network.{init_args}num_classes=null"
    options = f"--model.{init_args}num_classes=null --model.{init_args}label_dropout=0"
    assert call(f"{FIT} {network} {options} --print_config") == 0
    model = yaml.safe_load(capsys.readouterr().out)["model"]["init_args"]
    told = model["network"]["init_args"]
    assert (model["num_classes"], told["num_classes"], told["model_channels"]) == (None, None, 8)


@pytest.mark.parametrize("condition", ["", "{0}=Classes {0}.num_classes=10"])
def test_a_network_without_a_condition_gets_the_classes_of_its_module(condition):
    write_config(small_digits(1))
    network = f"--model.network.num_classes=null {condition.format('--model.network.condition')}"
    assert call(f"{FIT} {network}") == 0
    saved = yaml.safe_load(Path("runs/tiny/config.yaml").read_text())["model"]["init_args"]
    assert saved["network"]["init_args"]["num_classes"] == (None if condition else 10)


def test_a_checkpoint_of_another_architecture_is_told_by_name(capsys):
    call(f"{FIT} --trainer.max_steps=3")
    wider = "--model.init_args.network.init_args.width=9"
    assert call(f"{FIT} --ckpt_path=last {wider}") == 2
    told = capsys.readouterr().err
    assert "last.ckpt is of another architecture" in told
    assert "network.layers.0.weight" in told
    assert "Traceback" not in told


def test_a_truncated_checkpoint_is_told_by_name(capsys):
    call(f"{FIT} --trainer.max_steps=3")
    last = Path("runs/tiny/checkpoints/last.ckpt")
    last.write_bytes(last.read_bytes()[:-100])
    assert call(f"{FIT} --ckpt_path=last") == 2
    assert "last.ckpt is truncated" in capsys.readouterr().err


def test_nothing_of_a_stranger_is_imported(tmp_path, monkeypatch):
    (tmp_path / "stranger.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')")
    monkeypatch.syspath_prepend(tmp_path)
    for change in (
        "--model=stranger.Model",
        "--data=stranger.Data",
        "--model.init_args.network=stranger.Net",
        "--model.init_args.optimizer=stranger.optimizer",
        "--trainer.callbacks+=stranger.Callback",
        "--trainer.logger=stranger.Logger",
        "--trainer.plugins=stranger.Plugin",
        "--trainer.strategy=stranger.Strategy",
        "--trainer.profiler=stranger.Profiler",
    ):
        assert call(f"{FIT} {change}") == 2, change
        config = tiny_config()
        key, _, value = change[2:].rstrip("+").partition("=")
        *path, last = key.rstrip("+").split(".")
        place = config
        for part in path:
            place = place[part]
        place[last] = [{"class_path": value}] if last == "callbacks" else {"class_path": value}
        write_config(config, Path("hidden.yaml"))
        assert call(f"fit --config hidden.yaml {TRUST}") == 2, change
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


def test_a_file_url_is_the_file(capsys):
    call(f"{FIT} --trainer.max_steps=3")
    last = Path("runs/tiny/checkpoints/last.ckpt").absolute()
    assert call(f"fit --ckpt_path=file://{last} {TRUST} --trainer.max_steps=5") == 0
    assert checkpoint("runs/tiny")["global_step"] == 5
