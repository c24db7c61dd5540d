import json
import os
import signal
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from support.commands import call
from support.small_digits import write_small_digits

from lit_diffusion.callbacks.sample_grid import image_grid
from lit_diffusion.checkpoints.loading import LoadedModule
from lit_diffusion.cli import generator, sampling
from lit_diffusion.cli.generator import load_generator, read_labels
from lit_diffusion.cli.options import SamplingOptions, usable_device
from lit_diffusion.codecs import PixelCodec
from lit_diffusion.guidance import ClassifierFree
from lit_diffusion.losses import DenoisingLoss, Simple
from lit_diffusion.modules.diffusion import DiffusionModule
from lit_diffusion.processes import EDMProcess
from lit_diffusion.solvers import Heun

LAST = "run/checkpoints/last.ckpt"


pytestmark = pytest.mark.usefixtures("folder")


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
    assert "ClassifierFree(scale=2.0," in kept["sampling"]["guidance"]


@pytest.mark.usefixtures("terminal_signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_call_that_is_stopped_keeps_what_it_has_and_goes_on(
    averaged, monkeypatch, number, capsys
):
    command = "sample --checkpoint run --num 9 --batch-size 2 --labels 3,1,4"
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
    assert "Stopped with 4 of 9 images in out; the same command goes on." in capsys.readouterr().err
    assert torch.equal(pngs("out"), pngs("whole")[:4])
    kept = record("out")
    assert (kept["num"], kept["of"], kept["seeds"]) == (4, 9, [0, 4])

    for other in ("--seed 1", "--num 8", "--steps 2", "--labels 3", "--weights raw"):
        assert call(f"{command} --out out {other}") == 2
        assert "holds 4 of 9 images of another call" in capsys.readouterr().err
    assert record("out") == kept
    assert call(f"{command} --out out") == 0
    for file in Path("whole").iterdir():
        assert (Path("out") / file.name).read_bytes() == file.read_bytes()
    assert call(f"{command} --out out") == 2


@pytest.mark.parametrize("when", ["first batch", "grid"])
def test_a_call_that_is_killed_while_it_writes_goes_on(averaged, monkeypatch, when):
    command = "sample --checkpoint run --num 4 --batch-size 2 --out"
    assert call(f"{command} whole") == 0
    save, saved = Image.Image.save, []

    def dies(image, file, *args):
        saved.append(file)
        if len(saved) == {"first batch": 2, "grid": 5}[when]:
            raise MemoryError
        save(image, file, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Image.Image, "save", dies)
        assert call(f"{command} out") != 0
    assert call(f"{command} out") == 0
    for file in Path("whole").iterdir():
        assert (Path("out") / file.name).read_bytes() == file.read_bytes()


def test_a_call_that_made_nothing_is_in_no_ones_way(averaged, capsys):
    sample = "sample --checkpoint run --num 2 --out out"
    assert call(f"{sample} --solver.eta 9") == 2
    assert "eta = 9.0 is more noise than" in capsys.readouterr().err
    assert call(sample) == 0


def test_progress_has_a_rate_and_an_end(averaged, monkeypatch, capsys):
    clock = count(step=20)
    monkeypatch.setattr(sampling.time, "monotonic", lambda: next(clock))
    assert call("sample --checkpoint run --num 6 --batch-size 2 --out out") == 0
    told = capsys.readouterr().err.strip().split("\n")[-2:]
    assert told[0] == "2 of 6 images  20.0 s/image  0:01:20 left"


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
        (
            "--solver '{class_path: DDPM}'",
            "DDPM(variance=FixedSmall(), steps=4, times=None, clip=True)",
        ),
        (
            "--solver dpmpp --steps 2",
            "DPMSolverPP(steps=2, times=None, clip=True, order=2, eta=0.0)",
        ),
        ("--solver Euler", "Euler(steps=4, eta=0.0, times=None, clip=True)"),
        ("--solver EulerAncestral", "EulerAncestral(steps=4, eta=1.0, times=None, clip=True)"),
        ("--solver ddim --steps 2", "DDIM(steps=2, eta=0.0, times=None, clip=True)"),
        ("--solver DDIM --solver.eta 0.5", "DDIM(steps=4, eta=0.5, times=None, clip=True)"),
        (
            "--solver '{class_path: lit_diffusion.solvers.DDIM, init_args: {steps: 2, eta: 1}}'",
            "DDIM(steps=2, eta=1.0, times=None, clip=True)",
        ),
        (
            "--solver DPMSolverPP --solver.times=lit_diffusion.grids.LogSNR",
            "DPMSolverPP(steps=4, times=LogSNR(noisiest=-inf), clip=True, order=2, eta=0.0)",
        ),
        (
            "--solver DDPM --solver.variance lit_diffusion.gaussian.FixedLarge --solver.clip=false",
            "DDPM(variance=FixedLarge(), steps=4, times=None, clip=False)",
        ),
    ],
)
def test_another_solver_keeps_steps_and_clipping(averaged, options, solver):
    assert call(f"sample --checkpoint run --num 1 --out out {options}") == 0
    assert record()["sampling"]["solver"] == solver


def test_classes_are_named_as_the_folders_of_their_training_images_are(averaged, capsys):
    file = torch.load(LAST, weights_only=True)
    names = ["cat", "dog", *"cdefghij"]
    torch.save(file | {"Digits": {"class_names": names}}, LAST)
    assert call("sample --checkpoint run --num 3 --out out --labels dog,2,-1") == 0
    assert (record()["labels"], record()["class_names"]) == ([1, 2, -1], names)
    grid = torch.from_numpy(np.array(Image.open("out/grid.png"))).permute(2, 0, 1)
    assert torch.equal(grid, image_grid(pngs(), ["dog", "c", ""]))
    assert call("sample --checkpoint run --num 3 --out other --labels bird") == 2
    told = "--labels must be in 0..9 or one of cat, dog, c, d, e, f, g, h, i, j or -1, got 'bird'."
    assert told in capsys.readouterr().err


def test_names_that_are_other_numbers_leave_no_doubt():
    names = ["1", "10", "2"]
    assert read_labels("10,-1,1", 3, names) == [1, -1, 0]
    with pytest.raises(ValueError, match="must be one of 1, 10, 2 or -1, got '0'"):
        read_labels("0", 3, names)
    assert read_labels("2,0", 3, ["0", "1", "2"]) == [2, 0]


def test_the_grid_shows_the_images_enlarged_in_rows(averaged):
    call("sample --checkpoint run --num 5 --out out")
    grid = np.array(Image.open("out/grid.png"))
    scale = round(512 / (3 * 8))
    tile = 8 * scale + 2  # with a line between, and around
    assert grid.shape == (2 * tile + 2, 3 * tile + 2, 3)
    second = grid[2:tile:scale, tile + 2 : 2 * tile : scale]
    assert (second == pngs()[1, 0].numpy()[..., None]).all()


class Captioned(torch.nn.Module):
    """Conditioned on something that is no class."""

    conditioning, num_classes, label_dropout, guidance = "captions", None, 0.1, None
    process, loss, solver, codec = EDMProcess(), DenoisingLoss(Simple()), Heun(), PixelCodec()
    generate = None


def test_any_conditioning_can_be_guided(monkeypatch):
    loaded = LoadedModule(
        Captioned(), Path("a.ckpt"), 1, "raw", {"hyper_parameters": {"solver": {}}}
    )
    monkeypatch.setattr(generator, "load_module", lambda *args, **options: loaded)
    options = SamplingOptions("a.ckpt", device="cpu", guidance=2.0)
    assert load_generator(options).loaded.module.guidance == ClassifierFree(2.0)


def test_a_model_without_classes_takes_neither_labels_nor_guidance(capsys):
    write_small_digits(Path(LAST), classes=False)
    for option in ("--labels 1", "--guidance 2"):
        assert call(f"sample --checkpoint run --out out {option}") == 2
        assert f"{option.split()[0]} needs a model with classes" in capsys.readouterr().err


def test_each_process_of_a_launcher_takes_its_own_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for place, device in (("97", "cuda:97"), ("", "cuda:0")):
        monkeypatch.setenv("LOCAL_RANK", place)
        asked = []
        monkeypatch.setattr(
            torch, "empty", lambda *_, device, asked=asked: asked.append(device) or torch.zeros(0)
        )
        usable_device(None)
        assert asked == [device]
    monkeypatch.undo()
    assert usable_device("cpu") == torch.device("cpu")
