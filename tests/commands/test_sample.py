import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from support.commands import call
from support.small_digits import write_small_digits

LAST = "run/checkpoints/last.ckpt"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def averaged(folder):
    return write_small_digits(Path(LAST))


def pngs(out: str = "out") -> torch.Tensor:
    """The numbered images, uint8 (N, 1, H, W)."""
    paths = sorted(Path(out).glob("0*.png"))
    return torch.stack([torch.from_numpy(np.array(Image.open(p))) for p in paths])[:, None]


def record(out: str = "out") -> dict:
    return json.loads(Path(out, "samples.json").read_text())


def test_the_files_are_the_images_that_the_averaged_module_generates(averaged):
    assert call(f"sample --checkpoint {LAST} --num 5 --out out --batch-size 2 --seed 7") == 0
    assert sorted(p.name for p in Path("out").iterdir()) == [
        *(f"00000{i}.png" for i in range(5)),
        "grid.png",
        "samples.json",
    ]
    assert torch.equal(pngs(), averaged.generate(range(7, 12)))


def test_labels_are_cycled_over_the_samples(averaged):
    call("sample --checkpoint run --num 5 --out out --labels 3,1")
    expected = averaged.generate(range(5), torch.tensor([3, 1, 3, 1, 3]))
    assert torch.equal(pngs(), expected)


def test_label_minus_one_is_no_class(averaged):
    assert call("sample --checkpoint run --num 2 --out out --labels -1,2") == 0
    assert torch.equal(pngs(), averaged.generate(range(2), torch.tensor([-1, 2])))


def test_the_record_says_how_the_images_were_made(averaged):
    call("sample --checkpoint run --num 3 --out out --labels 3 --steps 2 --guidance 2")
    kept = record()
    assert kept["checkpoint"] == LAST
    assert (kept["step"], kept["weights"], kept["seeds"]) == (9, "ema_0.9", [0, 3])
    assert kept["labels"] == [3]
    assert kept["sampling"]["steps"] == 2
    assert "ClassifierFree(scale=2.0)" in kept["sampling"]["guidance"]


def test_raw_weights_give_other_images(averaged):
    call("sample --checkpoint run --num 2 --out a --weights raw")
    call("sample --checkpoint run --num 2 --out b --weights ema_0.9")
    assert not torch.equal(pngs("a"), pngs("b"))
    assert (record("a")["weights"], record("b")["weights"]) == ("raw", "ema_0.9")


@pytest.mark.parametrize(
    ("options", "solver"),
    [
        ("", "DDIM(steps=4, eta=0.0, times=None, clip=True)"),
        ("--steps 3", "DDIM(steps=3, eta=0.0, times=None, clip=True)"),
        ("--solver ddpm", "DDPM(variance=FixedSmall(), steps=4, times=None, clip=True)"),
        ("--solver dpmpp --steps 2", "DPMSolverPP(steps=2, times=None, clip=True)"),
        ("--solver ddim --steps 2", "DDIM(steps=2, eta=0.0, times=None, clip=True)"),
    ],
)
def test_another_solver_keeps_steps_and_clipping(averaged, options, solver):
    assert call(f"sample --checkpoint run --num 1 --out out {options}") == 0
    assert record()["sampling"]["solver"] == solver


def test_the_grid_shows_the_images_enlarged_in_rows(averaged):
    call("sample --checkpoint run --num 5 --out out")
    grid = np.array(Image.open("out/grid.png"))
    scale = 512 // (2 * 8)
    assert grid.shape == (3 * (8 * scale + 1) - 1, 2 * (8 * scale + 1) - 1)
    second = grid[: 8 * scale : scale, 8 * scale + 1 :: scale]
    assert (second == pngs()[1, 0].numpy()).all()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("--labels 3,x", "--labels: must be integers such as 0,1,2, got '3,x'"),
        ("--labels 3,10", "--labels must be in 0..9, or -1, got 10."),
        ("--num 0", "--num must be at least 1, got 0."),
        ("--batch-size 0", "--batch-size must be at least 1, got 0."),
        ("--steps 0", "steps must be at least 1, got 0."),
        ("--weights ema_0.5", "no weights 'ema_0.5'; it has raw, ema_0.9."),
        ("--stepz 3", "no option 'stepz'. Did you mean 'steps'?"),
        ("--device banana", "--device banana cannot be used here"),
        ("--device meta:x", "--device meta:x cannot be used here"),
        ("--guidance nan", "scale must be finite, got nan."),
        ("--out run/checkpoints/last.ckpt", "--out run/checkpoints/last.ckpt is a file"),
        ("--solver heunn", "invalid choice: 'heunn'"),
    ],
)
def test_a_mistake_is_told_in_one_line(averaged, capsys, options, told):
    assert call(f"sample --checkpoint run --out out {options}") == 2
    said = [s for s in capsys.readouterr().err.strip().split("\n") if not s.startswith("Loaded")]
    assert told in said[-1]
    assert len(said) == 1


def test_images_of_two_calls_are_never_mixed(averaged, capsys):
    call("sample --checkpoint run --num 2 --out out")
    assert call("sample --checkpoint run --num 1 --out out") == 2
    assert "--out out already holds images" in capsys.readouterr().err
    assert len(pngs()) == 2


def test_a_run_folder_without_a_checkpoint_is_told(capsys):
    Path("empty").mkdir()
    assert call("sample --checkpoint empty --out out") == 2
    assert "There is no checkpoint at empty/checkpoints/last.ckpt." in capsys.readouterr().err


def test_a_model_without_classes_takes_neither_labels_nor_guidance(capsys):
    write_small_digits(Path(LAST), classes=False)
    for option in ("--labels 1", "--guidance 2"):
        assert call(f"sample --checkpoint run --out out {option}") == 2
        assert f"{option.split()[0]} needs a model with classes" in capsys.readouterr().err
