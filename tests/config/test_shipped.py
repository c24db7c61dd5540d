import shutil

import pytest

from lit_diffusion.cli.main import main
from lit_diffusion.config.shipped import find_shipped_config, shipped_configs


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_config_of_the_package_is_found_from_any_folder():
    digits = str(shipped_configs() / "digits.yaml")
    assert find_shipped_config("configs/digits.yaml") == digits
    assert find_shipped_config("--config=configs/digits.yaml") == f"--config={digits}"
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
        "--config",
        "configs/arms",
    ],
)
def test_other_arguments_stay(argument):
    assert find_shipped_config(argument) is None


def test_a_config_in_the_current_folder_wins(tmp_path):
    (tmp_path / "configs").mkdir()
    shutil.copy(shipped_configs() / "mnist.yaml", tmp_path / "configs" / "digits.yaml")
    assert find_shipped_config("configs/digits.yaml") is None


def test_fit_reads_it_and_says_so(capsys):
    assert main(["fit", "--config", "configs/digits.yaml", "--print_config"]) == 0
    output = capsys.readouterr()
    assert "lit_diffusion.data.digits.Digits" in output.out
    assert output.err.count(f"reads {shipped_configs() / 'digits.yaml'}") == 1
