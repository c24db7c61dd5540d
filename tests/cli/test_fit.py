from pathlib import Path

import pytest
from support.commands import call
from support.tiny_run import tiny_config, write_config

TRUST = "--trust support"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_config(tiny_config())


@pytest.mark.parametrize(
    ("option", "argument"),
    [
        ("--model.help=lit_diffusion.modules.diffusion.DiffusionModule", "--model.label_dropout"),
        ("--model.help lit_diffusion.modules.diffusion.DiffusionModule", "--model.label_dropout"),
        ("--data.help=lit_diffusion.data.digits.Digits", "--data.batch_size"),
        ("--trainer.callbacks.help=lit_diffusion.callbacks.EMA", "--trainer.callbacks.decays"),
        (
            "--trainer.logger.help=lightning.pytorch.loggers.CSVLogger",
            "--trainer.logger.save_dir",
        ),
        (
            "--trainer.profiler.help=lightning.pytorch.profilers.SimpleProfiler",
            "--trainer.profiler.filename",
        ),
        (
            "--trainer.strategy.help=lightning.pytorch.strategies.DDPStrategy",
            "--trainer.strategy.timeout",
        ),
        ("--trainer.plugins.help=lit_diffusion.checkpoints.AtomicCheckpointIO", "Help for"),
        ("--trainer.accelerator.help=lightning.pytorch.accelerators.CPUAccelerator", "Help for"),
        ("--model.help", "Help for"),
    ],
)
def test_help_of_a_class_names_its_arguments(option, argument, capsys):
    assert call(f"fit {option}") == 0
    assert argument in capsys.readouterr().out
    assert call(f"fit --config tiny.yaml {TRUST} {option}") == 0
    assert argument in capsys.readouterr().out
    assert not Path("runs").exists()


def test_help_of_fit_begins_with_what_to_type(capsys):
    assert call("fit --help") == 0
    told = capsys.readouterr().out
    assert "lit-diffusion fit --config configs/digits.yaml --ckpt_path=last" in told[:1500]


@pytest.mark.parametrize(
    ("added", "told"),
    [
        ("+=EarlyStopping --trainer.callbacks.monitor=val/los", "`val/loss`"),
        ("+=EMA --trainer.callbacks+=EMA", "more than one stateful callback of type `EMA`"),
    ],
)
def test_mistakes_that_lightning_tells_are_mistakes(capsys, added, told):
    assert call(f"fit --config tiny.yaml {TRUST} --trainer.callbacks{added}") == 2
    assert told in capsys.readouterr().err
