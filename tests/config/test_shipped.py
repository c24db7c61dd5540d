import shutil

import pytest

from lit_diffusion.cli.main import main
from lit_diffusion.config.shipped import find_shipped_config, shipped_configs, use_shipped_configs


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_config_of_the_package_is_found_from_any_folder():
    digits = str(shipped_configs() / "digits.yaml")
    assert find_shipped_config("configs/digits.yaml") == digits
    mdlrc = find_shipped_config("configs/arms/mdlrc.yaml")
    assert mdlrc == str(shipped_configs() / "arms" / "mdlrc.yaml")


@pytest.mark.parametrize(
    "argument",
    [
        "configs/none.yaml",
        "configs/../setup.yaml",
        "my/configs/digits.yaml",
        "digits.yaml",
        "/configs/digits.yaml",
        "--config=configs/digits.yaml",
        "./configs/digits.yaml",
        "configs/arms",
    ],
)
def test_other_arguments_stay(argument):
    assert find_shipped_config(argument) is None


def test_a_config_in_the_current_folder_wins(tmp_path):
    (tmp_path / "configs").mkdir()
    shutil.copy(shipped_configs() / "mnist.yaml", tmp_path / "configs" / "digits.yaml")
    assert find_shipped_config("configs/digits.yaml") is None


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("doctor X --trainer.max_steps=1", "doctor Y --trainer.max_steps=1"),
        ("sweep X --arms X a.yaml+X X+X", "sweep Y --arms Y a.yaml+Y Y+Y"),
        ("sweep --seeds 0,1 X --print X", "sweep --seeds 0,1 Y --print Y"),
        ("fit --config=X -c X --config X", "fit --config=Y -c Y --config Y"),
        ("sample --data X --data=X", "sample --data Y --data=Y"),
        ("sweep X --out X", "sweep Y --out X"),
        ("fit --out=X --trainer.default_root_dir X", "fit --out=X --trainer.default_root_dir X"),
    ],
)
def test_values_that_are_configs_are_replaced_and_others_stay(line, expected):
    name, path = "configs/digits.yaml", str(shipped_configs() / "digits.yaml")
    words, found = use_shipped_configs(line.replace("X", name).split())
    assert words == expected.replace("X", name).replace("Y", path).split()
    assert found == ({name: path} if "Y" in expected else {})


def test_fit_reads_it_and_says_so(capsys):
    assert main(["fit", "--config", "configs/digits.yaml", "--print_config"]) == 0
    output = capsys.readouterr()
    assert "lit_diffusion.data.digits.Digits" in output.out
    assert output.err.count(f"reads {shipped_configs() / 'digits.yaml'}") == 1
