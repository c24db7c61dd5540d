"""What a fit ends with at its start is told before."""

import tarfile
import warnings
from pathlib import Path

import pytest
from lightning.pytorch.strategies import FSDPStrategy
from support.cifar10_files import FOLDER, md5, published_as, write
from support.commands import call
from support.doctor import clean_folder, look_at, planned, rehearse, topics
from support.small_digits import small_digits
from support.tiny_run import HERE, tiny_config

from lit_diffusion.callbacks import EMA
from lit_diffusion.cli.doctor.opening import ask_callbacks, open_data
from lit_diffusion.cli.doctor.rehearsal import started
from lit_diffusion.cli.doctor.report import Level
from lit_diffusion.data.cifar10 import CIFAR10


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    clean_folder(tmp_path, monkeypatch)


def opened(config):
    cli = rehearse(config)
    with started(cli):
        return list(open_data(cli)), cli.trainer.train_dataloader is not None


def test_data_that_are_there_are_opened_and_counted():
    (finding,), is_open = opened(small_digits(8))
    assert finding.level is Level.OK
    assert finding.text == "1,437 training images, 360 held out"
    assert is_open


def test_data_that_cannot_be_opened_leave_the_rest_known():
    config = small_digits(8)
    config["data"] = {
        "class_path": "lit_diffusion.data.image_folder.ImageFolder",
        "init_args": {"train": "nowhere", "val": 3, "image_size": 8, "batch_size": 12},
    }
    (finding,), is_open = opened(config)
    assert finding.level is Level.PROBLEM
    assert "nowhere" in finding.text
    assert not is_open
    plan = planned(config)
    assert (plan.num_images, plan.batch_size, plan.steps) == (None, 12, 8)


def test_an_archive_that_fit_would_unpack_is_no_fault(tmp_path, monkeypatch):
    made = published_as(write(tmp_path / "whole"))
    archive = Path("data") / made.filename
    archive.parent.mkdir()
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(tmp_path / "whole" / FOLDER, FOLDER)
    made.tgz_md5 = md5(archive)
    monkeypatch.setattr(CIFAR10, "source", made)
    config = small_digits(8)
    config["data"] = {"class_path": "lit_diffusion.data.cifar10.CIFAR10"}
    (finding, *_), is_open = opened(config)
    assert finding.level is Level.NOTE
    assert "will be unpacked" in finding.text
    assert not is_open
    assert planned(config).batch_size == 128
    assert [path.name for path in Path("data").iterdir()] == [archive.name]
    archive.write_bytes(archive.read_bytes()[:-9])
    (finding, *_), _ = opened(config)
    assert finding.level is Level.WARNING
    assert "without a network" in finding.text


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--trainer.val_check_interval=23"], "check_val_every_n_epoch=None"),
        (["--trainer.limit_train_batches=0.0001"], "limit_train_batches"),
        (["--trainer.devices=30", "--trainer.strategy=ddp"],
         "batch_size 64 on 30 process(es) is more than the 1437 training images"),
    ],
)  # fmt: skip
def test_what_the_trainer_cannot_do_with_them_is_a_problem(options, told):
    found = look_at(small_digits(200), *options, seconds=0.0)
    assert found["data"].level is Level.PROBLEM
    assert told in found["data"].text


# Callbacks


def digits_with(name, steps=200, **arguments):
    config = small_digits(steps)
    spec = {"class_path": f"lit_diffusion.callbacks.{name}", "init_args": arguments}
    config["trainer"]["callbacks"].append(spec)
    return config


def digits_averaging(prefix):
    config = small_digits(200)
    config["trainer"]["callbacks"][0]["init_args"]["prefix"] = prefix
    return config


@pytest.mark.parametrize(
    ("config", "options", "topic", "told"),
    [
        (digits_with("MomentumDecay", min_beta1=0.95), [], "MomentumDecay", "min_beta1 must be"),
        (digits_with("MomentumDecay", steps=-1), ["--trainer.max_epochs=-1"], "MomentumDecay",
         "pass total_steps"),
        (digits_averaging("nothing"), [], "EMA", "fits no parameter"),
        (digits_with("FIDEvaluation", extractor="digits-cnn", weights="ema_2", num_samples=70), [],
         "FIDEvaluation", "the callbacks provide"),
        (digits_with("FIDEvaluation", extractor="digits-cnn", num_samples=70),
         ["--trainer.limit_val_batches=0"], "FIDEvaluation", "this fit has no validation"),
        (digits_with("SampleGrid", num=4), ["--trainer.limit_val_batches=0"], "SampleGrid",
         "this fit has no validation"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_what_a_callback_refuses_is_a_problem_with_its_name(config, options, topic, told, capsys):
    found = look_at(config, *options)
    assert topics(found, Level.PROBLEM) == {topic}
    assert told in found[topic].text
    assert call(" ".join(["fit --config run.yaml", *options])) == 2
    assert " ".join(found[topic].text.split()) in " ".join(capsys.readouterr().err.split())


def asked(cli):
    with started(cli):
        cli.trainer.strategy.setup_optimizers(cli.trainer)
        return list(ask_callbacks(cli))


def test_a_strategy_that_splits_weights_in_its_own_way_is_refused():
    cli = rehearse(small_digits(8))
    assert asked(cli) == []
    cli.trainer._accelerator_connector.strategy = FSDPStrategy()  # takes a GPU to be asked for
    with started(cli):
        (finding,) = ask_callbacks(cli)
    assert (finding.level, finding.topic) == (Level.PROBLEM, "EMA")
    assert "does not support FSDPStrategy" in finding.text


def test_what_a_callback_warns_of_at_the_start_is_a_warning_with_its_name(monkeypatch):
    def warn(self, trainer, module):
        warnings.warn("the average is odd.", stacklevel=1)

    monkeypatch.setattr(EMA, "on_fit_start", warn)
    (finding,) = asked(rehearse(small_digits(8)))
    assert (finding.level, finding.topic) == (Level.WARNING, "EMA")
    assert finding.text == "the average is odd."


def test_a_module_that_lacks_what_a_callback_needs_is_a_problem():
    config = tiny_config()
    config["trainer"]["callbacks"] = [
        {"class_path": "lit_diffusion.callbacks.TimestepCurriculum", "init_args": {"num_steps": 4}}
    ]
    found = look_at(config, "--trust", HERE.split(".")[0])
    assert "needs a module with timestep_density" in found["TimestepCurriculum"].text


def test_asking_leaves_the_module_without_a_trainer_and_writes_nothing():
    cli = rehearse(digits_with("SampleGrid", num=4))
    assert asked(cli) == []
    assert cli.model._trainer is None
    assert cli.datamodule.trainer is None
    assert not any(p._backward_hooks for p in cli.model.parameters())
    assert [path.name for path in Path().iterdir()] == ["run.yaml"]
