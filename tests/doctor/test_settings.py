"""Settings that Lightning takes without a word."""

import pytest
from support.doctor import clean_folder, look_at, topics
from support.small_digits import small_digits

from lit_diffusion.doctor.report import Level
from lit_diffusion.doctor.settings import check_precision


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    clean_folder(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("option", "topic", "told"),
    [
        ("trainer.accumulate_grad_batches=0", "trainer", "accumulate_grad_batches must be"),
        ("trainer.check_val_every_n_epoch=0", "trainer", "check_val_every_n_epoch must be"),
        ("trainer.val_check_interval=0", "trainer", "val_check_interval must be"),
        ("ckpt_path=best", "resume", "best-fid.ckpt"),
        ("trainer.max_steps=0", "length", "no step is made"),
        ("trainer.max_epochs=0", "length", "no step is made"),
        ("trainer.limit_train_batches=0.0001", "batch", "limit_train_batches"),
        ("trainer.default_root_dir=run.yaml/runs", "run folder", "is a file"),
        ("model.init_args.optimizer.init_args.lr=-1", "optimizer", "Invalid learning rate"),
        ("model.init_args.lr_scheduler.init_args.warmup_steps=-3", "lr", "must be >= 0"),
    ],
)
def test_what_a_fit_fails_on_is_the_one_problem(option, topic, told):
    found = look_at(small_digits(200), f"--{option}", seconds=0.0)
    assert topics(found, Level.PROBLEM) == {topic}
    assert told in found[topic].text


def test_a_precision_that_is_another_here_is_told():
    assert [f.level for f in check_precision("16-mixed", "bf16-mixed")] == [Level.NOTE]
    assert list(check_precision("bf16-mixed", "bf16-mixed")) == []
    assert list(check_precision(32, "32-true")) == []
    found = look_at(small_digits(200), "--trainer.precision=16-mixed", seconds=0.0)
    assert "takes bf16-mixed" in found["precision"].text
