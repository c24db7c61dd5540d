import copy
import tarfile
from pathlib import Path

import pytest
from lightning.pytorch import Trainer
from support.cifar10_files import FOLDER, md5, published_as, write
from support.doctor import rehearse
from support.small_digits import small_digits

from lit_diffusion.data.cifar10 import CIFAR10
from lit_diffusion.doctor.rehearsal import Data, data_of, plan_of
from lit_diffusion.doctor.report import Level
from lit_diffusion.doctor.run import check_loading

FID = {
    "class_path": "lit_diffusion.callbacks.FIDEvaluation",
    "init_args": {"num_samples": 100, "extractor": "digits-cnn", "every_n_steps": 7},
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def planned(config, *options):
    cli = rehearse(config, *options)
    return plan_of(cli, data_of(cli))


def test_a_rehearsal_writes_nothing():
    rehearse(small_digits(8))
    assert [path.name for path in Path().iterdir()] == ["run.yaml"]


def test_a_plan_is_what_the_config_says():
    config = small_digits(50, val_check_interval=10, check_val_every_n_epoch=None)
    config["trainer"]["callbacks"].append(copy.deepcopy(FID))
    plan = planned(config, "--data.init_args.batch_size=100", "--trainer.accumulate_grad_batches=2")
    assert (plan.steps, plan.num_images, plan.val_images) == (50, 1437, 360)
    assert (plan.batch_size, plan.batches_per_epoch, plan.accumulate) == (100, 14, 2)
    assert (plan.val_interval, plan.val_epochs) == (10, None)
    assert plan.averages[0].decays == (0.9,)
    assert (plan.evaluations[0].every_n_steps, plan.evaluations[0].num_real) == (7, 360)
    assert (plan.lr.warmup_steps, plan.lr.length) == (4, 100)


def test_the_batches_of_an_epoch_are_those_that_the_trainer_has(tmp_path):
    cli = rehearse(small_digits(3), "--data.init_args.batch_size=100")
    plan = plan_of(cli, data_of(cli))
    trainer = Trainer(
        max_epochs=1,
        limit_train_batches=1.0,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(cli.model, cli.datamodule)
    assert trainer.num_training_batches == plan.batches_per_epoch
    assert sum(trainer.num_val_batches) == -(-plan.val_images // 100)


def test_ranks_share_the_images_of_an_epoch():
    options = ["--trainer.strategy=ddp", "--trainer.devices=4", "--data.init_args.batch_size=100"]
    plan = planned(small_digits(8), *options)
    assert plan.ranks == 4
    assert plan.batches_per_epoch == 1437 // 4 // 100
    assert plan.global_batch == 400


@pytest.mark.parametrize(
    ("options", "batches", "val_images"),
    [
        (["--trainer.limit_train_batches=3"], 3, 360),
        (["--trainer.limit_train_batches=0.5"], 7, 360),
        (["--trainer.limit_val_batches=0"], 14, 0),
        (["--trainer.limit_val_batches=2"], 14, 200),
        (["--trainer.limit_val_batches=0.25"], 14, 90),
        (["--trainer.overfit_batches=2", "--trainer.limit_train_batches=3"], 2, 200),
        (["--trainer.overfit_batches=0.5"], 7, 180),
    ],
)
def test_limits_of_the_trainer_count(options, batches, val_images):
    plan = planned(small_digits(8), "--data.init_args.batch_size=100", *options)
    assert (plan.batches_per_epoch, plan.val_images) == (batches, val_images)


@pytest.mark.parametrize("setting", ["devices=[0,1,0,1]", "precision=64-false"])
def test_what_the_trainer_refuses_is_kept_and_the_rest_built(setting):
    option = f"--trainer.{setting}"
    if "precision" in setting:
        with pytest.raises(ValueError, match="precision"):
            rehearse(small_digits(8), option)
        return
    cli = rehearse(small_digits(8), "--trainer.accelerator=gpu", option)
    assert cli.refusal
    assert cli.trainer is None
    assert cli.ranks().devices == 4
    assert plan_of(cli, data_of(cli)).steps == 8


def test_a_mistake_in_the_config_is_raised_as_in_a_fit():
    with pytest.raises(ValueError, match="max_stepz"):
        rehearse(small_digits(8), "--trainer.max_stepz=3")


def test_data_that_cannot_be_opened_leave_the_rest_known():
    config = small_digits(8)
    config["data"] = {
        "class_path": "lit_diffusion.data.image_folder.ImageFolder",
        "init_args": {"train": "nowhere", "val": 3, "image_size": 8, "batch_size": 12},
    }
    cli = rehearse(config)
    data = data_of(cli)
    assert "nowhere" in data.fault
    assert (data.num_images, data.batch_size) == (None, 12)
    assert plan_of(cli, data).steps == 8


def test_data_without_a_number_of_images_are_unknown():
    assert Data().num_images is None


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
    data = data_of(rehearse(config))
    assert (data.fault, data.is_open, data.batch_size) == (None, False, 128)
    assert [path.name for path in Path("data").iterdir()] == [archive.name]
    (finding,) = check_loading(rehearse(small_digits(8)), data)
    assert finding.level is Level.NOTE
    assert "will be unpacked" in finding.text
    archive.write_bytes(archive.read_bytes()[:-9])
    assert data_of(rehearse(config)).awaited.needs_network
