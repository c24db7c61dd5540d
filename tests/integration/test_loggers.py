"""Loggers of others, all offline: what they get of a run, and that metrics.csv stays."""

import json
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
from PIL import Image
from support.commands import call

from lit_diffusion.runs.loggers import read_rows

DIGITS = Path(__file__).parents[2] / "configs" / "digits.yaml"
OPTIONS = [
    "--trainer.max_steps=2 --trainer.log_every_n_steps=1 --trainer.val_check_interval=2",
    "--trainer.limit_val_batches=1 --trainer.callbacks.FIDEvaluation=null",
    "--trainer.callbacks.SampleGrid.num=4",
]
NAMES = ["samples/step-raw", "samples/nearest-raw"]

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("folder")]


def needs(package):
    return pytest.mark.skipif(find_spec(package) is None, reason=f"needs {package}")


def fit(logger):
    assert call(f"fit --config {DIGITS} {' '.join(OPTIONS)} {logger}") == 0
    rows = read_rows("runs/digits/metrics.csv")
    assert [row["step"] for row in rows if "train/loss" in row] == ["0", "1"]
    assert len(list(Path("runs/digits/samples").glob("*.png"))) == 2


def is_picture(file):
    return Image.open(file).size[0] > 100


@needs("wandb")
def test_weights_and_biases(monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    fit("--trainer.logger=WandbLogger --trainer.logger.offline=true --trainer.logger.save_dir=.")
    (files,) = Path("wandb").glob("offline-run-*/files")
    for name in NAMES:
        (picture,) = files.glob(f"media/images/{name}*.png")
        assert is_picture(picture)


@needs("mlflow")
def test_mlflow():
    uri = f"file:{Path('mlruns').absolute()}"
    fit(f"--trainer.logger=MLFlowLogger --trainer.logger.tracking_uri={uri}")
    (lr,) = Path("mlruns").glob("*/*/metrics/train/lr")
    assert len(lr.read_text().splitlines()) == 2
    (betas,) = Path("mlruns").glob("*/*/params/model/init_args/process/class_path")
    assert betas.read_text() == "lit_diffusion.processes.DiscreteVP"
    pictures = list(Path("mlruns").glob("*/*/artifacts/images/*.png"))
    assert len(pictures) == 2
    assert all(map(is_picture, pictures))


@needs("comet_ml")
def test_comet():
    fit("--trainer.logger=CometLogger --trainer.logger.online=false")
    (archive,) = Path().rglob("*.zip")
    with zipfile.ZipFile(archive) as found:
        said = found.read("messages.json").decode()
        pictures = [name for name in found.namelist() if "image" in name or name.endswith(".png")]
    assert "train/lr" in said
    assert all(name in said for name in NAMES)
    assert pictures
    assert json.loads(said.splitlines()[0])
