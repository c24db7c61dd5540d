"""Whole examinations, in this process. How long something takes is never asserted."""

from pathlib import Path

import pytest
import yaml
from support.commands import call
from support.doctor import clean_folder, look, look_at, topics
from support.small_digits import small_digits
from support.tiny_run import HERE, tiny_config

from lit_diffusion.cli.doctor.examination import examine
from lit_diffusion.cli.doctor.report import Level, has_problem
from lit_diffusion.cli.run_folder import occupied

CONFIGS = Path(__file__).parent.parent.parent / "configs"
NARROW = "--model.init_args.network.init_args.model_channels=32"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    clean_folder(tmp_path, monkeypatch)


# The shipped configs


def test_digits_are_sound():
    found = look("--config", str(CONFIGS / "digits.yaml"), seconds=1.0)
    assert topics(found, Level.PROBLEM) | topics(found, Level.WARNING) == set()
    assert "2,000 optimizer steps = 128,000 images" in found["length"].text
    assert "10% of the labels" in found["guidance"].text
    assert "step" in found["time"].text
    assert "4 FIDs" in found["evaluation time"].text
    assert not Path("runs").exists()


def test_classes_that_the_model_is_not_told_are_noted():
    network = {"init_args": {"num_classes": None}}
    untold = {"num_classes": None, "label_dropout": 0, "network": network}
    Path("untold.yaml").write_text(yaml.safe_dump({"model": {"init_args": untold}}))
    found = look("--config", str(CONFIGS / "digits.yaml"), "--config", "untold.yaml")
    assert found["classes"].text.startswith("The data have 10 classes (0, 1, 2, 3, 4, ...), of wh")
    assert "classes" not in look("--config", str(CONFIGS / "digits.yaml"))


def test_patches_are_sound():
    found = look("--config", str(CONFIGS / "patches.yaml"), NARROW)
    assert topics(found, Level.PROBLEM) == set()
    assert "12,800" in found["data"].text


def test_cifar10_lacks_weights_here_is_yet_to_be_downloaded_and_the_rest_is_looked_at():
    found = look("--config", str(CONFIGS / "cifar10-improved.yaml"), NARROW)
    assert topics(found, Level.PROBLEM) == {"FID weights"}
    assert found["data"].level is Level.WARNING
    assert "cifar-10-python.tar.gz will be downloaded" in found["data"].text
    assert found["FID weights"].text.startswith("inception-v3-compat: no extractor weights at ")
    assert "lit-diffusion fetch-weights" in found["FID weights"].text
    assert "500,000 optimizer steps = 64,000,000 images" in found["length"].text
    assert found["FID"].level is Level.OK
    assert "37% of the average of 0.9999 are random weights" in found["EMA"].text
    assert {"disk", "terminal SNR", "time", "evaluation time", "FID"} <= found.keys()
    assert not Path("data").exists()


def test_imagenet_lacks_data_and_weights_here_and_the_rest_is_looked_at():
    found = look("--config", str(CONFIGS / "imagenet128-guided.yaml"), NARROW)
    assert topics(found, Level.PROBLEM) == {"data", "FID weights"}
    assert "data/imagenet/train" in found["data"].text
    assert "256 images an optimizer step = 32 x 8 ranks" in found["batch"].text
    assert "can't be guided" in found["guidance"].text
    assert {"disk", "terminal SNR", "time", "evaluation time", "EMA"} <= found.keys()


def test_the_size_of_a_checkpoint_is_right():
    config = str(CONFIGS / "digits.yaml")
    found = look("--config", config)
    assert "checkpoints of 12.1 MB" in found["disk"].text
    assert call(f"fit --config {config} --trainer.max_steps=2") == 0
    size = Path("runs/digits/checkpoints/last.ckpt").stat().st_size
    assert size / 1e6 == pytest.approx(12.1, rel=0.05)


# What fit would refuse


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--config", "nowhere.yaml"], "nowhere.yaml"),
        (["--trainer.max_steps=3"], "needs --config FILE"),
        (["--config", str(CONFIGS / "digits.yaml"), "--trainer.max_stepz=3"], "max_steps"),
        (["--config", str(CONFIGS / "digits.yaml"), "--ckpt_path=x.ckpt"], "x.ckpt"),
    ],
)
def test_a_mistake_is_a_problem(options, told):
    found = look(*options)
    assert topics(found, Level.PROBLEM) == found.keys() == {"config"}
    assert told in found["config"].text


def test_a_trainer_that_refuses_is_a_problem_and_the_rest_is_looked_at():
    found = look_at(small_digits(200), "--trainer.accelerator=gpu")
    assert topics(found, Level.PROBLEM) == {"trainer"}
    assert {"length", "disk", "data"} <= found.keys()


def test_slurm_speaks_for_the_trainer_that_it_makes_refuse(monkeypatch):
    for name, value in {"JOB_ID": "7", "JOB_NAME": "x", "NTASKS": "4", "NNODES": "1"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    found = look_at(small_digits(200))
    assert topics(found, Level.PROBLEM) == {"SLURM"}
    assert "--ntasks-per-node" in found["SLURM"].text


def test_too_few_images_for_the_features_are_told_without_the_weights_too():
    config = small_digits(200, val_check_interval=100, check_val_every_n_epoch=None)
    fid = {
        "class_path": "lit_diffusion.callbacks.FIDEvaluation",
        "init_args": {"num_samples": 1000, "extractor": "inception-v3-compat"},
    }
    config["trainer"]["callbacks"].append(fid)
    found = look_at(config)
    assert topics(found, Level.PROBLEM) == {"FID weights"}
    assert "360, must exceed the 2,048 features" in found["FID"].text


def test_data_of_another_shape_are_a_problem():
    config = small_digits(200)
    config["model"]["init_args"]["image_shape"] = [1, 16, 16]
    assert "image_shape is (1, 16, 16)" in look_at(config)["data"].text


def test_data_that_their_own_code_prepares_are_no_problem():
    config = tiny_config(max_steps=50)
    config["data"] = {"class_path": f"{HERE}.PreparedData"}
    found = look_at(config, "--trust", HERE.split(".")[0])
    assert found["data"].level is Level.WARNING
    assert "before prepare_data" in found["data"].text


# The run folder


def test_a_folder_that_holds_a_run_is_a_problem_unless_it_is_resumed():
    config = small_digits(4)
    Path("run.yaml").write_text(yaml.safe_dump(config))
    assert call("fit --config run.yaml") == 0
    before = {p: p.stat().st_mtime_ns for p in Path("runs").rglob("*")}
    found = look("--config", "run.yaml")
    assert "already holds a run" in found["run folder"].text
    ended = look("--config", "run.yaml", "--ckpt_path=last")
    assert ended["run folder"].level is Level.OK
    assert "goes on from step 4" in ended["resume"].text
    assert "nothing is left" in ended["length"].text
    lr = "--model.init_args.optimizer.init_args.lr=0.001"
    longer = look("--config", "run.yaml", "--ckpt_path=last", "--trainer.max_steps=90", lr)
    assert not has_problem(longer.values())
    assert "1 kept and one being written, 780 kB there already" in longer["disk"].text
    assert "had model.optimizer.lr 0.002, the run uses 0.001" in longer["resume"].text
    assert {p: p.stat().st_mtime_ns for p in Path("runs").rglob("*")} == before


def test_a_checkpoint_of_another_architecture_is_a_problem():
    Path("run.yaml").write_text(yaml.safe_dump(small_digits(4)))
    assert call("fit --config run.yaml") == 0
    width = "--model.init_args.network.init_args.model_channels=16"
    found = look("--config", "run.yaml", "--ckpt_path=last", width, "--trainer.max_steps=90")
    assert "of another architecture" in found["resume"].text


def test_a_resume_without_a_checkpoint_is_a_problem_unless_it_may_start():
    assert "there is no file runs" in str(look_at(small_digits(200), "--ckpt_path=last"))
    assert not has_problem(look_at(small_digits(200), "--ckpt_path=last-or-none").values())


def test_a_folder_in_use_is_a_problem():
    Path("runs/run").mkdir(parents=True)
    with occupied(Path("runs/run")):
        found = look_at(small_digits(200))
    assert "in use" in found["run folder"].text
    assert look_at(small_digits(200))["run folder"].level is Level.OK


def test_a_file_where_the_folder_would_be_is_a_problem():
    Path("runs").mkdir()
    Path("runs/run").write_text("")
    assert "is a file" in look_at(small_digits(200))["run folder"].text


def test_a_trial_needs_no_folder():
    found = look_at(small_digits(200), "--trainer.fast_dev_run=2")
    assert found["trial"].level is Level.NOTE
    assert "run folder" not in found


# Methods


def test_guidance_without_dropped_labels_is_a_problem():
    config = small_digits(200)
    config["model"]["init_args"]["guidance"] = {
        "class_path": "lit_diffusion.guidance.ClassifierFree",
        "init_args": {"scale": 2.0},
    }
    config["model"]["init_args"]["label_dropout"] = 0.0
    assert look_at(config)["guidance"].level is Level.PROBLEM
    config["model"]["init_args"]["label_dropout"] = 0.1
    assert look_at(config)["guidance"].level is Level.OK


def test_a_process_with_some_image_left_is_warned_of():
    config = small_digits(200)
    config["model"]["init_args"]["process"] = {
        "class_path": "lit_diffusion.processes.ContinuousVP",
        "init_args": {"beta_d": 9.0},
    }
    config["model"]["init_args"]["solver"] = {
        "class_path": "lit_diffusion.solvers.DPMSolverPP",
        "init_args": {"steps": 4},
    }
    assert look_at(config)["terminal SNR"].level is Level.WARNING


def test_a_module_of_somebody_else_is_looked_at_too():
    found = look_at(tiny_config(max_steps=50), "--trust", HERE.split(".")[0])
    assert not has_problem(found.values())
    assert "50 optimizer steps = 200 images" in found["length"].text
    assert "measured on" in found["time"].text
    assert "optimizer" in found["disk"].text


# Settings that Lightning takes without a word


@pytest.mark.parametrize(
    ("option", "topic", "told"),
    [
        ("trainer.accumulate_grad_batches=0", "trainer", "accumulate_grad_batches must be"),
        ("trainer.check_val_every_n_epoch=0", "trainer", "check_val_every_n_epoch must be"),
        ("trainer.val_check_interval=0", "trainer", "val_check_interval must be"),
        ("ckpt_path=best", "resume", "best-fid.ckpt"),
        ("trainer.max_steps=0", "length", "no step is made"),
        ("trainer.max_epochs=0", "length", "no step is made"),
        ("trainer.limit_train_batches=0.0001", "data", "limit_train_batches"),
        ("trainer.default_root_dir=run.yaml/runs", "run folder", "is a file"),
        ("model.init_args.optimizer.init_args.lr=-1", "optimizer", "Invalid learning rate"),
        ("model.init_args.lr_scheduler.init_args.warmup_steps=-3", "optimizer", "must be >= 0"),
    ],
)
def test_what_a_fit_fails_on_is_the_one_problem(option, topic, told):
    found = look_at(small_digits(200), f"--{option}", seconds=0.0)
    assert topics(found, Level.PROBLEM) == {topic}
    assert told in found[topic].text


# The machine


def test_the_machine_is_examined_without_a_config(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NAME", "bash")
    monkeypatch.delenv("SLURM_NTASKS", raising=False)
    topics = [finding.topic for finding in examine([])]
    assert topics[:1] == ["versions"]
    assert topics[-1] == "SLURM"


def test_of_the_machine_a_run_hears_what_is_wrong_only(monkeypatch):
    monkeypatch.setattr("lit_diffusion.cli.doctor.machine.LITTLE", 1e30)
    found = list(examine(["--config", "nowhere.yaml"]))
    assert [finding.topic for finding in found] == ["disk", "config"]
