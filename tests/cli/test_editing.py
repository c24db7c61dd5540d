import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from support.commands import call
from support.small_digits import write_digits, write_small_digits

from lit_diffusion.checkpoints.loading import load
from lit_diffusion.data.digits import Digits

LAST = "run/checkpoints/last.ckpt"
pytestmark = pytest.mark.usefixtures("folder")


@pytest.fixture(autouse=True)
def module(folder):
    write_small_digits(Path(LAST))
    write_digits("begin", "val", 3)
    return load(LAST)


def sampled(options):
    assert call(f"sample --checkpoint run --num 5 --out out {options}") == 0
    files = sorted(Path("out").glob("0*.png"))
    images = torch.stack([torch.from_numpy(np.array(Image.open(file))) for file in files])
    return images[:, None], json.loads(Path("out/samples.json").read_text())


def test_samples_begin_at_the_pictures_of_a_folder_in_turn(module):
    images, record = sampled("--init begin --strength 0.5 --batch-size 2")
    begin = Digits().images("val")[torch.tensor([0, 1, 2, 0, 1])]
    assert torch.equal(images, module.edit(begin, range(5), strength=0.5))
    assert (record["init"], record["strength"]) == ("begin", 0.5)


def test_what_is_white_in_the_mask_is_kept_of_one_picture():
    mask = np.zeros((8, 8), dtype=np.uint8)
    mask[:, 4:] = 255
    Image.fromarray(mask).save("mask.png")
    images, record = sampled("--init begin/0001.png --mask mask.png")
    kept = Digits().images("val")[1]
    assert (images[..., 4:] == kept[..., 4:]).all()
    assert (images[..., :4] != kept[..., :4]).any()
    assert record["mask"] == "mask.png"


def test_the_record_says_how_images_were_edited():
    _, record = sampled("--init begin")
    assert (record["strength"], record["sampling"]["steps"]) == (0.6, 2)
    assert "Tail(base=Sections" in record["sampling"]["solver"]
    Image.new("L", (8, 8), 255).save("mask.png")
    assert call("sample --checkpoint run --num 1 --out kept --init begin --mask mask.png") == 0
    sampling = json.loads(Path("kept/samples.json").read_text())["sampling"]
    assert sampling["solver"].startswith("RePaint(steps=4, resamples=10, ")


@pytest.fixture
def pictures():
    Image.new("L", (9, 8)).save("wide.png")
    Image.new("RGB", (8, 8)).save("colour.png")
    Image.new("LA", (8, 8)).save("alpha.png")
    Image.new("I;16", (8, 8)).save("deep.png")
    Path("text.png").write_text("no picture")
    Image.new("L", (8, 8)).save("mask.png")


@pytest.mark.usefixtures("pictures")
@pytest.mark.parametrize("options", ["--init {}", "--init begin --mask {}"])
@pytest.mark.parametrize(
    ("file", "told"),
    [
        ("wide.png", "wide.png is (1, 8, 9), and must be (1, 8, 8), as the model's images are"),
        ("colour.png", "colour.png is (3, 8, 8), and must be (1, 8, 8), as the model's images"),
        ("alpha.png", "alpha.png is (2, 8, 8), and must be (1, 8, 8), as the model's images"),
        ("deep.png", "deep.png has mode I;16; images must be of mode L, LA, RGB or RGBA"),
        ("text.png", "text.png is not a readable image"),
        ("nowhere.png", "nowhere.png is no picture, and no folder of PNG files."),
    ],
)
def test_a_picture_that_does_not_fit_is_named_and_the_right_one_taken_then(
    capsys, options, file, told
):
    command = "sample --checkpoint run --num 1 --out out "
    assert call(command + options.format(file)) == 2
    assert told in capsys.readouterr().err
    fitting = "--init begin --mask mask.png" if "mask" in options else "--init begin"
    assert call(command + fitting) == 0  # nothing of the mistake is in the way


def test_a_folder_of_masks_and_a_mask_for_another_solver_are_refused(capsys):
    assert call("sample --checkpoint run --out out --init begin --mask begin") == 2
    assert "--mask begin is a folder; name one picture" in capsys.readouterr().err
    for solver in ("--solver Heun", "--solver.eta 1"):
        assert call(f"sample --checkpoint run --out out --init begin --mask m.png {solver}") == 2
        assert "--mask fills in by RePaint, on the steps" in capsys.readouterr().err
