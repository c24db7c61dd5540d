import re
import sys

import lightning.pytorch as pl
import pytest
import torch
from support.tiny_run import TinyData, TinyModule, TinyNet

from lit_diffusion.callbacks.progress import PlainProgress, StepBar, format_speed


def trainer_with(callback, **options):
    options |= {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    return pl.Trainer(callbacks=[callback], enable_model_summary=False, **options)


def fit(callback, ckpt_path=None, **options):
    trainer = trainer_with(callback, **options)  # 4 batches an epoch
    trainer.fit(TinyModule(TinyNet(3), torch.optim.Adam), TinyData(), ckpt_path=ckpt_path)
    return trainer


def lines(capsys) -> list[str]:
    return [line for line in capsys.readouterr().err.split("\n") if line.startswith("step ")]


@pytest.mark.parametrize(
    ("done", "left", "seconds", "parts"),
    [
        (20, 80, 10.0, ["2.0 steps/s", "0:00:40 left"]),
        (10, float("inf"), 40.0, ["4.0 s/step"]),
        (0, 20, 1.0, []),
        (1, sys.maxsize, 1.0, ["1.0 steps/s"]),  # longer than a timedelta can be
    ],
)
def test_speed_and_time_left_follow_from_the_steps_done(done, left, seconds, parts):
    assert format_speed("step", done, left, seconds) == parts


@pytest.mark.parametrize(
    ("max_steps", "count"), [(6, "step 6/6  epoch 1"), (-1, "step 1  epoch 0")]
)
def test_a_line_holds_step_epoch_metrics_and_speed(capsys, max_steps, count):
    trainer = trainer_with(PlainProgress(), max_steps=max_steps, max_epochs=-1)
    module = TinyModule(TinyNet(3), torch.optim.Adam)
    if max_steps < 0:  # a run without an end
        module.on_train_batch_end = lambda *_: setattr(trainer, "should_stop", True)
    trainer.fit(module, TinyData())
    pattern = rf"{count}  train/loss [\d.e-]+.*  [\d.]+ (steps/s|s/step)(  0:00:00 left)?"
    assert any(re.fullmatch(pattern, line) for line in lines(capsys))


def test_first_and_last_step_and_validations_have_a_line_and_no_line_is_rewritten(capsys):
    fit(PlainProgress(every_n_seconds=1000), max_steps=10)
    printed = lines(capsys)
    assert [line.split()[1] for line in printed] == ["1/10", "4/10", "8/10", "10/10"]
    assert not any("\r" in line for line in printed)
    assert all("train/loss " in line for line in printed)


def test_a_fit_does_not_show_the_loss_of_the_fit_before_it(capsys):
    fit(progress := PlainProgress(), max_steps=1)
    module = TinyModule(TinyNet(3), torch.optim.Adam)
    module.log = lambda *args, **options: None
    trainer_with(progress, max_steps=1).fit(module, TinyData())
    assert ["train/loss" in line for line in lines(capsys)] == [True, False]


def test_a_time_that_is_not_positive_is_refused():
    with pytest.raises(ValueError, match="every_n_seconds must be > 0"):
        PlainProgress(every_n_seconds=0)


def test_a_bar_counts_the_steps_of_the_run(capsys):
    fit(StepBar(), max_steps=10)
    drawn = capsys.readouterr().out
    assert "10/10" in drawn
    assert "4/4" not in drawn.replace("4/4 [", "")  # of the epoch's batches; validations have 4
    assert "step/s" in drawn
    assert "epoch 2" in drawn


def test_a_bar_goes_on_where_the_run_does(capsys, tmp_path):
    fit(StepBar(), max_steps=6).save_checkpoint(tmp_path / "last.ckpt")
    fit(bar := StepBar(), max_steps=10, ckpt_path=tmp_path / "last.ckpt")
    assert bar.train_progress_bar.initial == 6
    assert "10/10" in capsys.readouterr().out
