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


def test_a_picture_of_another_size_is_named(capsys):
    Image.new("L", (9, 8)).save("wide.png")
    assert call("sample --checkpoint run --num 1 --out out --init wide.png") == 2
    told = "wide.png is (1, 8, 9), but the model's images are (1, 8, 8); resize it."
    assert told in capsys.readouterr().err
