"""Loggers of others, all offline: what they get of a run, and that metrics.csv stays."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from PIL import Image
from support.commands import call

from lit_diffusion.cli.loggers import read_rows

DIGITS = Path(__file__).parents[2] / "configs" / "digits.yaml"
OPTIONS = [
    "--trainer.max_steps=2 --trainer.log_every_n_steps=1 --trainer.val_check_interval=2",
    "--trainer.limit_val_batches=1 --trainer.callbacks.FIDEvaluation=null",
    "--trainer.callbacks.SampleGrid.num=4 --trainer.callbacks.SampleGrid.every_n_steps=2",
]

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("folder")]


def needs(package):
    return pytest.mark.skipif(find_spec(package) is None, reason=f"needs {package}")


def fit(logger):
    assert call(f"fit --config {DIGITS} {' '.join(OPTIONS)} {logger}") == 0
    rows = read_rows("runs/digits/metrics.csv")
    assert [row["step"] for row in rows if "train/loss" in row] == ["0", "1"]
    assert len(list(Path("runs/digits/samples").glob("*.png"))) == 2


@needs("wandb")
def test_weights_and_biases(monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    fit("--trainer.logger=WandbLogger --trainer.logger.offline=true --trainer.logger.save_dir=.")
    (files,) = Path("wandb").glob("offline-run-*/files")
    for name in ("samples/step-ema", "samples/nearest-ema"):
        (picture,) = files.glob(f"media/images/{name}*.png")
        assert Image.open(picture).size[0] > 100


@needs("mlflow")
def test_mlflow(monkeypatch):
    """As docs/loggers.md says, in the folder of Lightning's default."""
    page = (DIGITS.parents[1] / "docs" / "loggers.md").read_text()
    monkeypatch.setenv(*re.search(r"`(MLFLOW\w+)=(\w+)`", page).groups())
    fit("--trainer.logger=MLFlowLogger")
    (run,) = Path("mlruns").glob("*/*/metrics")
    again = f"--trainer.logger.run_id={run.parent.name} --ckpt_path=last"
    options = f"--trainer.logger=MLFlowLogger {again}"
    assert call(f"fit --config {DIGITS} {OPTIONS[0]} {options} --trainer.max_steps=3") == 0
    (lr,) = Path("mlruns").glob("*/*/metrics/train/lr")
    assert len(lr.read_text().splitlines()) == 3
    (betas,) = Path("mlruns").glob("*/*/params/model/init_args/process/class_path")
    assert betas.read_text() == "lit_diffusion.processes.DiscreteVP"
    pictures = list(Path("mlruns").glob("*/*/artifacts/images/*.png"))
    assert len(pictures) == 2
    assert all(Image.open(picture).size[0] > 100 for picture in pictures)
