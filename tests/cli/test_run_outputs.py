import os

import pytest
import torch
from lightning.pytorch import Trainer
from support.saving import fit
from support.tiny_run import TinyData, TinyModule, TinyNet

from lit_diffusion.cli.last_checkpoint import LastCheckpoint
from lit_diffusion.cli.loggers import AppendingCSVLogger, read_rows
from lit_diffusion.cli.run_outputs import CurvesInStep, ImagesSeen, RunConfig


def test_a_config_is_written_as_a_whole_or_not_at_all(tmp_path, monkeypatch):
    """What is half a config would be taken for another run's, or for none."""

    class Parser:
        def dump(self, config, **options):
            return "trainer:"

    def full(descriptor):
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        fit(RunConfig(Parser(), None), tmp_path)
    assert not list(tmp_path.glob("*.yaml"))


@pytest.mark.parametrize("images", [[1], "abc", [1, 2, "many"], [1, 2, True]])
def test_counts_of_images_that_are_none_are_refused(images):
    with pytest.raises(ValueError, match="images_seen must be three counts"):
        ImagesSeen().on_load_checkpoint(None, None, {"images_seen": images})


@pytest.mark.parametrize("interval", [2, 3, 5])
def test_another_interval_of_validation_at_a_resume_shifts_no_row(tmp_path, interval):
    def run(max_steps, val_check_interval, ckpt_path=None):
        callbacks = [CurvesInStep(), LastCheckpoint(tmp_path)]
        logger = AppendingCSVLogger(tmp_path)
        options = {"check_val_every_n_epoch": None, "val_check_interval": val_check_interval}
        options |= {"log_every_n_steps": 1, "enable_progress_bar": False, "accelerator": "cpu"}
        trainer = Trainer(
            max_steps=max_steps,
            callbacks=callbacks,
            logger=logger,
            default_root_dir=tmp_path,
            num_sanity_val_steps=0,
            enable_model_summary=False,
            **options,
        )
        trainer.fit(TinyModule(TinyNet(3), torch.optim.Adam), TinyData(), ckpt_path=ckpt_path)

    run(6, 2)
    run(10, interval, tmp_path / "last.ckpt")
    steps = [row["step"] for row in read_rows(tmp_path / "metrics.csv") if "train/loss" in row]
    assert steps == [str(step) for step in range(10)]
