import json
import os
import signal
from copy import deepcopy
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from support.commands import call
from support.small_digits import write_small_digits

from lit_diffusion.callbacks.sample_grid import image_grid
from lit_diffusion.cli import sampling
from lit_diffusion.grids import Sections
from lit_diffusion.guidance import ClassifierFree
from lit_diffusion.modules.diffusion import DiffusionModule
from lit_diffusion.solvers import DDIM

LAST = "run/checkpoints/last.ckpt"


pytestmark = pytest.mark.usefixtures("folder")


@pytest.fixture
def averaged(folder):
    return deepcopy(write_small_digits(Path(LAST)))


def pngs(out: str = "out") -> torch.Tensor:
    """The numbered images, uint8 (N, 1, H, W)."""
    paths = sorted(Path(out).glob("0*.png"))
    return torch.stack([torch.from_numpy(np.array(Image.open(p))) for p in paths])[:, None]


def record(out: str = "out") -> dict:
    return json.loads(Path(out, "samples.json").read_text())


def test_the_files_are_the_images_that_the_averaged_module_generates(averaged, monkeypatch, capsys):
    clock = count(step=20)
    monkeypatch.setattr(sampling.time, "monotonic", lambda: next(clock))
    assert call(f"sample --checkpoint {LAST} --num 5 --out out --batch-size 2 --seed 7") == 0
    assert sorted(p.name for p in Path("out").iterdir()) == [
        *(f"00000{i}.png" for i in range(5)),
        *("grid.png", "samples.json"),
    ]
    assert torch.equal(pngs(), averaged.generate(range(7, 12)))
    assert "2 of 5 images  20.0 s/image  0:01:00 left\n" in capsys.readouterr().err


def test_labels_are_repeated_in_turn_and_the_record_says_how_images_were_generated(
    averaged, capsys
):
    guided = "--guidance 2 --guidance_interval 0.2,5 --guidance_rescale 0.7"
    options = f"--labels 3,-1 --steps 2 {guided}"
    assert call(f"sample --checkpoint run --num 5 --out out {options}") == 0
    assert f"by {DDIM(2, times=Sections())}." in capsys.readouterr().out
    averaged.solver, averaged.guidance = DDIM(2), ClassifierFree(2.0, (0.2, 5.0), 0.7)
    assert torch.equal(pngs(), averaged.generate(range(5), torch.tensor([3, -1, 3, -1, 3])))
    content = record()
    assert content["checkpoint"] == LAST
    assert (content["step"], content["weights"], content["seeds"]) == (9, "ema_0.9", [0, 5])
    assert content["labels"] == [3, -1]
    assert content["sampling"]["steps"] == 2
    assert content["sampling"]["guidance"] == repr(averaged.guidance)
    assert "guided_by" not in content


@pytest.mark.quick
@pytest.mark.usefixtures("terminal_signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_call_that_is_stopped_keeps_its_images_and_goes_on(averaged, monkeypatch, number, capsys):
    command = "sample --checkpoint run --num 7 --batch-size 2 --labels 3,1,4 --steps 1"
    assert call(f"{command} --out whole") == 0
    generate, calls = DiffusionModule.generate, []

    def stopped(*args):
        calls.append(args)
        if len(calls) == 3:
            os.kill(os.getpid(), number)
        return generate(*args)

    with monkeypatch.context() as patch:
        patch.setattr(DiffusionModule, "generate", stopped)
        assert call(f"{command} --out out") == 128 + number
    stderr = capsys.readouterr().err
    assert "Stopped with 4 of 7 images in out. Repeat the command to continue." in stderr
    assert torch.equal(pngs("out"), pngs("whole")[:4])
    content = record("out")
    assert (content["num"], content["of"], content["seeds"]) == (4, 7, [0, 4])

    for other in ("--seed 1", "--weights raw"):
        assert call(f"{command} --out out {other}") == 2
        assert "has 4 of 7 images of another command" in capsys.readouterr().err
    assert record("out") == content
    assert call(f"{command} --out out") == 0
    for file in Path("whole").iterdir():
        assert (Path("out") / file.name).read_bytes() == file.read_bytes()
    assert call(f"{command} --out out") == 2
    assert "--out out already has images" in capsys.readouterr().err


@pytest.mark.usefixtures("terminal_signals")
def test_a_call_that_is_stopped_at_its_end_is_not_to_be_repeated(averaged, monkeypatch, capsys):
    save = Image.Image.save

    def stopped(image, file, *args):
        save(image, file, *args)
        if args:  # the grid
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Image.Image, "save", stopped)
    assert call("sample --checkpoint run --num 3 --steps 1 --out out") == 143
    assert len(pngs()) == 3
    assert "Stopped, but everything is in out.\n" in capsys.readouterr().err


@pytest.mark.quick
@pytest.mark.parametrize("when", ["first batch", "grid"])
def test_a_call_that_is_killed_while_it_writes_goes_on(averaged, monkeypatch, when):
    command = "sample --checkpoint run --num 4 --batch-size 2 --steps 1 --out"
    assert call(f"{command} whole") == 0
    save, files = Image.Image.save, []

    def dies(image, file, *args):
        files.append(file)
        if len(files) == {"first batch": 2, "grid": 5}[when]:
            raise MemoryError
        save(image, file, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Image.Image, "save", dies)
        assert call(f"{command} out") != 0
    assert call(f"{command} out") == 0
    for file in Path("whole").iterdir():
        assert (Path("out") / file.name).read_bytes() == file.read_bytes()


def test_a_record_that_is_nested_too_deep_is_no_record(averaged, capsys):
    Path("out").mkdir()
    Path("out/samples.json").write_text("[" * 100_000)
    Image.new("L", (8, 8)).save("out/000000.png")
    assert call("sample --checkpoint run --num 3 --steps 1 --out out") == 2
    assert "--out out already has images" in capsys.readouterr().err


def test_classes_are_named_as_the_folders_of_their_training_images_are(averaged, capsys):
    file = torch.load(LAST, weights_only=True)
    names = ["cat", "dog", *"cdefghij"]
    torch.save(file | {"Digits": {"class_names": names}}, LAST)
    assert call("sample --checkpoint run --num 3 --out out --labels dog,2,-1") == 0
    assert (record()["labels"], record()["class_names"]) == ([1, 2, -1], names)
    grid = torch.from_numpy(np.array(Image.open("out/grid.png"))).permute(2, 0, 1)
    assert torch.equal(grid, image_grid(pngs(), ["dog", "c", ""]))
    assert call("sample --checkpoint run --num 3 --out other --labels bird") == 2
    rule = "--labels must be in 0..9 or one of cat, dog, c, d, e, f, g, h, i, j or -1, got 'bird'."
    assert rule in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--labels 3,x", "--labels must be in 0..9 or -1, got 'x'."),
        ("--weights ema_0.5", "no weights 'ema_0.5'; it has raw, ema_0.9."),
        ("--device banana", "--device banana cannot be used here"),
        ("--device hpu", "--device hpu cannot be used here"),
        ("--device xla", "--device xla cannot be used here: torch was built without it; try"),
        ("--classifier run", "--classifier run must be a NoisyClassifier, got a DiffusionModule."),
        ("--out run/checkpoints/last.ckpt", "--out run/checkpoints/last.ckpt is a file"),
        ("--compare nonsense", "--compare must be solvers, or some of DDIM,DDPM,"),
        ("--compare solvers --solver.steps 1 --init m.png", "leave out --init, --solver.steps."),
        ("--solver stranger.Heun", "add --trust stranger."),
    ],
)
def test_a_mistake_ends_in_one_line_and_exit_code_2(averaged, capsys, options, message):
    assert call(f"sample --checkpoint run --out out {options}") == 2
    lines = [s for s in capsys.readouterr().err.strip().split("\n") if not s.startswith("Loaded")]
    assert message in lines[-1]
    assert len(lines) == 1
