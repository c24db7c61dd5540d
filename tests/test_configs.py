"""Every shipped config starts, and what its comments promise can be overridden can be."""

from pathlib import Path

import pytest
import yaml
from support.pictures import save

from lit_diffusion.cli import main

CONFIGS = Path(__file__).parent.parent / "configs"
SMALL = [
    "--trainer.fast_dev_run=2",
    "--trainer.accelerator=cpu",
    "--trainer.precision=32-true",
    "--data.init_args.batch_size=2",
]
NARROW = "--model.init_args.network.init_args.model_channels=32"
EMPTY = "--trainer.callbacks=[]"


def fit(name, *options):
    return main(["fit", "--config", str(CONFIGS / name), *SMALL, *options])


def test_every_config_is_started_by_a_test():
    assert {f.name for f in CONFIGS.glob("*.yaml")} == {
        "digits.yaml",
        "patches.yaml",
        "folder.yaml",
    }


def test_digits_start(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert fit("digits.yaml") == 0


def test_patches_start(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert fit("patches.yaml", NARROW, "--data.init_args.num_val=4") == 0


def test_a_folder_of_pictures_starts(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for i in range(8):
        save(tmp_path / "pictures" / f"{i}.jpg", seed=i, size=(80, 70))
    options = [EMPTY, NARROW, "--data.init_args.train=pictures", "--data.init_args.val=3"]
    assert fit("folder.yaml", *options) == 0


@pytest.mark.parametrize("name", ["digits.yaml", "patches.yaml", "folder.yaml"])
def test_configs_say_how_they_are_used(name):
    text = (CONFIGS / name).read_text()
    assert f"lit-diffusion fit --config configs/{name}" in text
    assert yaml.safe_load(text)["seed_everything"] == 0
