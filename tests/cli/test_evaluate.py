from pathlib import Path

import pytest
from support.commands import call
from support.small_digits import write_digits, write_small_digits

from lit_diffusion.cli import evaluate

RUN = "evaluate --checkpoint run --extractor digits-cnn"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def run(folder):
    write_small_digits(Path("run/checkpoints/last.ckpt"))


MAKING = {
    "--num": 5,
    "--out": "other",
    "--weights": "ema",
    "--labels": 1,
    "--prompt": "seven",
    "--steps": 2,
    "--solver": "ddim",
    "--guidance": 1,
    "--guidance_interval": "0.1,2",
    "--guidance_rescale": 0.7,
    "--weaker": "run",
    "--classifier": "run",
    "--init": "full",
    "--strength": 0.5,
    "--mask": "mask.png",
    "--seed": 0,
    "--ema": 0.05,
}


def test_options_for_making_images_are_refused_beside_images_by_name(run, capsys):
    for name, value in MAKING.items():
        for given in (f"{name} {value}", f"{name}={value}"):
            assert call(f"evaluate --images x --checkpoint run {given}") == 2
            assert f"leave out {name}, which would" in capsys.readouterr().err
    assert call("evaluate --images x --seed 3 --reference real --steps 2") == 2
    told = "--images scores images as they are; leave out --seed, --steps, which would say how"
    assert told in capsys.readouterr().err


def test_every_option_is_for_images_or_for_making_them():
    known = {name for action in evaluate.parser()._actions for name in action.option_strings}
    assert known - {"-h", "--help"} == {*evaluate.WITH_IMAGES, *MAKING}


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("evaluate", "give --checkpoint C, --images DIR, or both."),
        ("evaluate --images x", "--images needs either --reference, a folder"),
        ("evaluate --images x --reference val", "--images needs either --reference, a folder"),
        ("evaluate --images x --checkpoint run --reference full", "--images needs either --refer"),
        ("evaluate --images x --data run/config.yaml --reference full", "--images needs either --"),
        ("evaluate --data nowhere.yaml --images full --extractor digits-cnn", "There is no config"),
        ("evaluate --images full --checkpoint nowhere --extractor digits-cnn", "no checkpoint at"),
        ("evaluate --images full --checkpoint run --batch-size 0", "--batch-size must be at"),
        (f"{RUN} --reference nowhere", "nowhere is neither a folder of images nor an .npz"),
        (f"{RUN}x", "there is no FID protocol 'digits-cnnx'"),
        (f"{RUN} --out full", "--out full already holds images"),
    ],
)
def test_a_mistake_is_told_in_one_line(run, capsys, command, told):
    write_digits("full", "val", 1)
    assert call(command) == 2
    said = capsys.readouterr().err.strip().split("\n")
    assert told in said[-1]
    assert not any("Traceback" in line for line in said)
