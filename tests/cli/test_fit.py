"""fit, validate, test and predict as called by a user, on a tiny module: exit codes and files."""

import contextlib
import functools
import inspect
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch import Trainer
from support.commands import call, checkpoint, equal
from support.tiny_run import HERE, TinyModule, spec, tiny_config, write_config

from lit_diffusion.checkpoints.saving import write_checkpoint
from lit_diffusion.cli.fit import OPTIONS, trainer_arguments
from lit_diffusion.cli.loggers import read_rows
from lit_diffusion.cli.run_folder import occupied

TRUST = "--trust support"
FIT = f"fit --config tiny.yaml {TRUST}"
LAST = "runs/tiny/checkpoints/last.ckpt"
EMA = spec("lit_diffusion.callbacks.ema.EMA", decays=[0.5], warmup=False)


@pytest.fixture(scope="module")
def originals(tmp_path_factory) -> Path:
    """A run of 8 steps, which are two epochs, what it printed, and a run that stopped after 3."""
    folder = tmp_path_factory.mktemp("originals")
    with contextlib.chdir(folder):
        write_config(tiny_config(callbacks=[EMA]))
        with Path("printed").open("w") as file, contextlib.redirect_stderr(file):
            assert call(f"{FIT} --ckpt_path=last-or-none") == 0
        Path("runs/tiny").rename("whole")
        assert call(f"{FIT} --trainer.max_steps=3") == 0
        Path("runs/tiny").rename("stopped")
    return folder


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_config(tiny_config(callbacks=[EMA]))


@pytest.fixture
def whole(originals) -> Path:
    """The run of 8 steps, as runs/tiny."""
    return Path(shutil.copytree(originals / "whole", "runs/tiny"))


@pytest.fixture
def stopped(originals) -> Path:
    """The run of 3 steps, as runs/tiny."""
    return Path(shutil.copytree(originals / "stopped", "runs/tiny"))


def files() -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in Path("runs").rglob("*") if path.is_file()}


# The run folder


@pytest.mark.usefixtures("whole")
def test_a_fit_leaves_a_run_folder_named_after_its_config(originals):
    names = {str(path.relative_to("runs/tiny")) for path in files()}
    assert {"config.yaml", "metrics.csv", "checkpoints/last.ckpt"} <= names
    assert not any("version_" in name or "lightning_logs" in name for name in names)
    assert next(Path("runs/tiny/tensorboard").glob("events.*"))
    err = (originals / "printed").read_text()
    assert "8 steps, 32 images seen" in err
    assert "lit-diffusion sample" not in err  # the module does not generate


@pytest.mark.parametrize(
    ("name", "expected"), [("tf32", ("high", True)), ("ieee", ("highest", False))]
)
def test_the_precision_of_float32_is_a_setting_of_fit_and_of_sample(name, expected, monkeypatch):
    def current():
        return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32

    before = current()
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", before[1])  # restores it
    try:
        write_config(tiny_config() | {"float32_precision": name})
        assert call(f"{FIT} --trainer.max_steps=1") == 0
        assert current() == expected
        config = Path("runs/tiny/config.yaml").read_text()
        assert f"float32 matmul precision {expected[0]}" in config.splitlines()[0]
        assert yaml.safe_load(config)["float32_precision"] == name
    finally:
        torch.set_float32_matmul_precision(before[0])


@pytest.mark.usefixtures("stopped")
def test_a_folder_that_holds_a_run_is_not_changed_by_another(capsys):
    before = files()
    assert call(FIT) == 2
    assert "runs/tiny already holds a run" in capsys.readouterr().err
    with occupied(Path("runs/tiny")):
        assert call(f"{FIT} --ckpt_path=last") == 2
    assert "runs/tiny is in use: another process trains into it." in capsys.readouterr().err
    assert call(f"{FIT} --trainer.fast_dev_run=true") == 0
    assert files() == before


def test_the_loggers_and_callbacks_of_a_config_stand_beside_those_of_every_run(monkeypatch, capsys):
    saver = spec("ModelCheckpoint", dirpath="elsewhere", save_last=True)
    stop = spec("EarlyStopping", monitor="val/loss", min_delta=1e9, patience=1)
    logger = spec("CSVLogger", save_dir="l")
    write_config(tiny_config(logger=logger, callbacks=[saver, stop], max_steps=80))
    first = []
    monkeypatch.setattr(TinyModule, "generate", None, raising=False)
    monkeypatch.setattr(TinyModule, "on_train_start", lambda self: first.append(self.logger))
    assert call(f"{FIT} --trainer.default_root_dir='my runs/tiny'") == 0
    assert [type(logger).__name__ for logger in first] == ["CSVLogger"]
    assert Path("elsewhere/last.ckpt").exists()
    assert Path("l").exists()
    assert Path("my runs/tiny/checkpoints/last.ckpt").exists()  # from which it would resume
    assert not Path("my runs/tiny/tensorboard").exists()
    assert read_rows("my runs/tiny/metrics.csv")  # which a resume and compare want
    err = capsys.readouterr().err
    assert "stopped     Monitored metric val/loss did not improve" in err
    assert "sample --checkpoint 'my runs/tiny' --weights raw --trust=support" in err


def test_a_run_that_was_stopped_early_trains_on_without_early_stopping_only(caplog):
    """It may have been killed after its last save, or be started again."""
    stop = spec("EarlyStopping", monitor="val/loss", min_delta=1e9, patience=1)
    write_config(tiny_config(callbacks=[stop], max_steps=80))
    assert call(FIT) == 0
    before = Path(LAST).read_bytes()
    assert call(f"{FIT} --ckpt_path=last-or-none") == 0
    assert Path(LAST).read_bytes() == before
    assert "was stopped early: Monitored metric val/loss did not improve" in caplog.text
    options = "--ckpt_path=last --trainer.max_steps=20 --trainer.callbacks.EarlyStopping=null"
    assert call(f"{FIT} {options}") == 0
    assert checkpoint("runs/tiny")["global_step"] == 20


# Composition


def test_a_fragment_is_appended_and_the_command_line_wins_over_both(capsys):
    """Also where it passes null to parts of parts."""
    write_config({"trainer": {"callbacks+": [EMA]}}, Path("ema.yaml"))
    config = tiny_config(callbacks=[{"class_path": f"{HERE}.Nothing"}])
    config["model"]["init_args"]["optimizer"]["init_args"]["foreach"] = True
    write_config(config)
    options = "--config ema.yaml --trainer.max_steps=3 --tuned_on=digits-cnn --print_config"
    assert call(f"{FIT} {options} --model.init_args.optimizer.init_args.foreach=null") == 0
    config = yaml.safe_load(capsys.readouterr().out)
    names = [each["class_path"].rpartition(".")[2] for each in config["trainer"]["callbacks"]]
    assert names == ["Nothing", "EMA"]
    assert (config["trainer"]["max_steps"], config["tuned_on"]) == (3, "digits-cnn")
    optimizer = config["model"]["init_args"]["optimizer"]["init_args"]
    assert (optimizer["lr"], optimizer["foreach"]) == (0.1, None)


# Resuming


@pytest.mark.usefixtures("stopped")
def test_weights_in_double_precision_are_restored_bit_exactly(monkeypatch):
    """Lightning restores them before it has cast the module, which rounds them to float32."""
    content, restored = checkpoint("runs/tiny"), []
    content["state_dict"] = {k: v.double() + 1e-12 for k, v in content["state_dict"].items()}
    write_checkpoint(content, LAST)
    monkeypatch.setattr(
        TinyModule,
        "on_train_start",
        lambda self: restored.append({k: v.clone() for k, v in self.state_dict().items()}),
    )
    assert call(f"{FIT} --ckpt_path=last --trainer.max_steps=4 --trainer.precision=64-true") == 0
    assert equal(restored[0], content["state_dict"])


@pytest.mark.usefixtures("stopped")
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="lists the mapped files on Linux")
def test_a_resumed_run_does_not_hold_its_old_checkpoint(monkeypatch):
    """The disk space of a mapped file that was replaced is free only when the process ends."""
    mapped = []
    monkeypatch.setattr(
        TinyModule,
        "on_train_start",
        lambda self: mapped.append("last.ckpt" in Path("/proc/self/maps").read_text()),
    )
    assert call(f"{FIT} --ckpt_path=last --trainer.max_steps=4") == 0
    assert mapped == [False]


@pytest.mark.usefixtures("stopped")
def test_a_resumed_run_ends_as_an_uninterrupted_one(originals, monkeypatch, caplog):
    """Also where it was moved: by its checkpoint alone, and by the config that it wrote."""
    moved = Path("elsewhere/renamed").absolute()
    moved.parent.mkdir()
    Path("runs/tiny").rename(moved)
    config = (moved / "config.yaml").read_text()
    Path("far/away").mkdir(parents=True)
    monkeypatch.chdir("far/away")
    last = f"--ckpt_path={moved}/checkpoints/last.ckpt"
    assert call(f"fit {last} --trainer.max_steps=5 {TRUST}") == 0
    options = f"--config {moved}/config.yaml --ckpt_path=last --trainer.max_steps=8"
    assert call(f"fit {options} {TRUST}") == 0
    assert list(Path().iterdir()) == []
    assert not any("rows of steps" in message for message in caplog.messages)
    whole, resumed = checkpoint(originals / "whole"), checkpoint(moved)
    assert equal(whole["state_dict"], resumed["state_dict"])
    assert (originals / "whole/metrics.csv").read_text() == (moved / "metrics.csv").read_text()
    key = next(key for key in whole["callbacks"] if key.startswith("EMA"))
    assert equal(*(each["callbacks"][key]["shadows"][0] for each in (whole, resumed)))
    assert (whole["epoch"], whole["images_seen"]) == (resumed["epoch"], resumed["images_seen"])
    assert (moved / "config.yaml").read_text() == config
    config = yaml.safe_load((moved / "config.resume-2.yaml").read_text())
    assert config["trainer"]["max_steps"] == 8


@pytest.mark.usefixtures("whole")
def test_a_finished_run_is_not_trained_again(capsys):
    before, command = files(), f"{FIT} --trainer.max_steps=-1 --trainer.max_epochs=-1"
    for unit, limit in (("steps", 8), ("epochs", 2)):
        assert call(f"{command} --ckpt_path=last --trainer.max_{unit}={limit}") == 2
        rule = f"last.ckpt has {limit} {unit}, and trainer.max_{unit} is {limit}; raise "
        assert rule in capsys.readouterr().err
    assert call(f"{FIT} --ckpt_path=last-or-none") == 0
    assert "the run is finished" in capsys.readouterr().err
    assert files() == before


def test_a_resume_deletes_rows_after_its_checkpoint_and_counts_images_of_each_batch_size(
    stopped, caplog, capsys
):
    with (stopped / "metrics.csv").open("a") as file:  # of a run that died before the next save
        file.writelines(f"{step},0,1.0\n" for step in range(4, 8))
    options = "--trainer.max_steps=7 --data.init_args.batch_size=2"
    assert call(f"{FIT} --ckpt_path=last {options}") == 0
    assert "Deleted 4 rows of steps after 3 from runs/tiny/metrics.csv." in caplog.messages
    assert "7 steps, 20 images seen" in capsys.readouterr().err


# Command line over config, config over checkpoint


@pytest.mark.usefixtures("stopped")
def test_changed_settings_are_those_inside_the_first_step_and_nothing_else_changes(
    monkeypatch, caplog
):
    saved, steps, step = checkpoint("runs/tiny"), [], torch.optim.Adam.step

    @functools.wraps(step)  # a step without this mark would run its hooks twice
    def record(optimizer, closure=None):
        moments = [state["exp_avg"].clone() for state in optimizer.state.values()]
        group = optimizer.param_groups[0]
        steps.append((group["lr"], group["betas"], moments))
        return step(optimizer, closure)

    monkeypatch.setattr(torch.optim.Adam, "step", record)
    options = "--model.init_args.optimizer.init_args"
    changes = f"{options}.lr=0.001 {options}.betas=[0.5,0.6] --data.init_args.batch_size=8"
    changes += " --trainer.callbacks.EMA.decays=[0.75] --trainer.max_steps=4"
    assert call(f"{FIT} --ckpt_path=last {changes}") == 0
    [(lr, betas, moments)] = steps
    assert (lr, betas) == (0.001, (0.5, 0.6))
    for i, moment in enumerate(moments):
        assert torch.equal(moment, saved["optimizer_states"][0]["state"][i]["exp_avg"])
    assert {
        "The checkpoint had model.optimizer.lr 0.1, using 0.001.",
        "The checkpoint had model.optimizer.betas [0.8, 0.9], using [0.5, 0.6].",
        "The checkpoint had data.batch_size 4, using 8.",
    } <= set(caplog.messages)
    assert any("had 0.5, using 0.75" in message for message in caplog.messages)
    after = checkpoint("runs/tiny")
    key = next(key for key in saved["callbacks"] if key.startswith("EMA"))
    for name, raw in after["state_dict"].items():
        old, new = (c["callbacks"][key]["shadows"][0][name] for c in (saved, after))
        torch.testing.assert_close(new, 0.75 * old + 0.25 * raw)


# validate, test and predict


@pytest.mark.usefixtures("whole")
def test_a_checkpoint_alone_is_scored_with_the_averages_of_its_run(capsys, caplog):
    before, value = files(), read_rows("runs/tiny/metrics.csv")[-1]["val/loss"]
    assert call(f"validate --ckpt_path={LAST} {TRUST}") == 0
    assert f"{float(value):.6f}"[:8] in capsys.readouterr().out
    assert not any("The checkpoint had" in message for message in caplog.messages)
    assert call(f"test --ckpt_path={LAST} {TRUST} --model.init_args.shift=7") == 0
    assert "The checkpoint had model.shift 0.0, using 7.0." in caplog.messages
    assert files() == before


@pytest.mark.usefixtures("stopped")
def test_predicting_without_a_way_to_keep_it_is_refused(capsys):
    predict = f"predict --ckpt_path={LAST} {TRUST}"
    assert call(predict) == 2
    assert "write images with `lit-diffusion sample`, or add a" in capsys.readouterr().err
    assert call(f"{predict} --trainer.callbacks+={HERE}.Writes") == 0


# Mistakes

NO_MPS = pytest.mark.skipif(torch.backends.mps.is_available(), reason="MPS is available")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("--trainer.max_step=3", "no option 'trainer.max_step'. Did you mean"),  # abbreviated
        ("--config endless.yaml", "trainer.max_steps must be a number, -1 for no end"),
        ("--trainer.accumulate_grad_batches=0", "accumulate_grad_batches must be at least 1"),
        ("'--trainer.callbacks+={class_path: EMA, init_args: {decays: [2]}}'", "got (2.0,)."),
        ("--config number.yaml", "trainer must be settings such as 'max_steps: 1000', got 0.5."),
        ("--config misspelt.yaml", "'trainer.max_stepz'. Did you mean 'trainer.max_steps'?"),
        ("--ckpt_path=best", "there is no file best; name another"),
        ("-- =x", "the argument '--' belongs to no option; remove it, or the space before =."),
        pytest.param(
            "--trainer.accelerator=mps",
            "trainer.accelerator=mps is not available on this machine; use auto or cpu.",
            marks=NO_MPS,
        ),
        ("--trainer.default_root_dir=/proc/runs", "The run folder /proc/runs cannot be written"),
    ],
)
def test_a_mistake_ends_in_one_line_and_exit_code_2(change, message, capsys):
    Path("endless.yaml").write_text("trainer: {max_steps: null}\n")
    Path("number.yaml").write_text("trainer: 0.5\n")
    Path("misspelt.yaml").write_text("trainer: {max_stepz: 3}\n")
    assert call(f"{FIT} {change}") == 2
    lines = capsys.readouterr().err.strip().split("\n")
    assert message in lines[-1]
    assert len([line for line in lines if not line.startswith("Seed set")]) == 1
    assert not Path("runs").exists()


def test_what_an_optimizer_refuses_is_a_mistake(capsys):
    assert call(f"{FIT} --model.optimizer.lr=-1") == 2
    assert "model.optimizer or model.lr_scheduler: Invalid" in capsys.readouterr().err


@pytest.mark.usefixtures("stopped")
@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            f"{FIT} --ckpt_path=last --model.init_args.network.init_args.width=9",
            r"last\.ckpt has a different architecture .*network\.layers\.0\.weight",
        ),
        (
            f"{FIT} --ckpt_path=last --model.optimizer=torch.optim.SGD --model.optimizer.lr=0.1",
            r"model\.optimizer was torch\.optim\.Adam and is now torch\.optim\.SGD",
        ),
        (  # else scores of raw weights would pass for those of averages
            f"validate --config plain.yaml --ckpt_path={LAST} {TRUST}",
            "holds averaged weights, but no EMA callback",
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(command, message, capsys):
    write_config(tiny_config(), Path("plain.yaml"))
    assert call(command) == 2
    err = capsys.readouterr().err
    assert re.search(message, err)
    assert "Traceback" not in err


def test_all_options_can_be_listed_and_those_of_the_trainer_are_read_from_its_source(capsys):
    listed = set()
    for command in ("fit", "validate", "predict"):
        assert call(f"{command} --help all") == 0
        out = capsys.readouterr().out
        assert f"    lit-diffusion {command} --c" in out[:500]
        listed |= set(re.findall(r"^ +(?:-\w[^-]*)?--(\w+)", out, re.MULTILINE))
    assert {*OPTIONS} == listed | {"trust"}
    assert trainer_arguments() == list(inspect.signature(Trainer.__init__).parameters)[1:]


# Nothing that a file says runs code


def test_nothing_of_a_stranger_is_imported(tmp_path, monkeypatch):
    (tmp_path / "stranger.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')")
    monkeypatch.syspath_prepend(tmp_path)
    assert call(f"{FIT} --model.init_args.network=stranger.Class") == 2
    for key in (
        *("model", "data", "model.init_args.network", "model.init_args.optimizer"),
        *("trainer.callbacks", "trainer.logger", "trainer.plugins"),
        *("trainer.strategy", "trainer.profiler"),
    ):
        config = tiny_config()
        *path, last = key.split(".")
        place = config
        for part in path:
            place = place[part]
        stranger = {"class_path": "stranger.Class"}
        place[last] = [stranger] if last == "callbacks" else stranger
        write_config(config, Path("hidden.yaml"))
        assert call(f"fit --config hidden.yaml {TRUST}") == 2, key
    assert not (tmp_path / "imported").exists()
    assert "stranger" not in sys.modules


class Bomb:
    """Leaves a file behind when it is unpickled without care."""

    def __reduce__(self):
        return (open, ("bombed", "w"))


READER = "lightning.pytorch.plugins.io.TorchCheckpointIO"


@pytest.mark.parametrize(
    ("scheme", "plugins", "trust"),
    [("", None, ""), ("local://", None, ""), ("local://", READER, "--trust lightning")],
)
def test_no_config_has_code_in_a_checkpoint_run(tmp_path, scheme, plugins, trust):
    torch.save({"state_dict": {}, "bomb": Bomb()}, "bomb.ckpt")
    config = tiny_config(plugins=plugins)
    config |= {"ckpt_path": f"{scheme}{tmp_path}/bomb.ckpt", "weights_only": False}
    write_config(config)
    assert call(f"{FIT} {trust}") != 0
    assert not Path("bombed").exists()


def test_a_reader_of_checkpoints_that_may_run_code_is_refused_unless_trusted(capsys):
    write_config(tiny_config(plugins=READER))
    assert call(FIT) == 2
    assert "TorchCheckpointIO may run code that a checkpoint holds" in capsys.readouterr().err
    assert call(f"{FIT} --trust lightning --trainer.max_steps=0") == 0
