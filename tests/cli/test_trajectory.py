from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from support.commands import call
from support.small_digits import write_small_digits

from lit_diffusion.cli.trajectory import Trajectory
from lit_diffusion.codecs import PixelCodec
from lit_diffusion.metrics.images import FolderImages
from lit_diffusion.processes import EDMProcess
from lit_diffusion.seeding import PerSampleNoise

LAST = "run/checkpoints/last.ckpt"
SAMPLE = "sample --checkpoint run --seed 7 --labels 3,1 --guidance 2"
pytestmark = pytest.mark.usefixtures("folder")


@pytest.fixture
def module(folder):
    return deepcopy(write_small_digits(Path(LAST)))


def test_x_t_has_the_scale_of_images_at_any_noise():
    trajectory = Trajectory(SimpleNamespace(process=EDMProcess(), codec=PixelCodec()))
    x = 80 * torch.randn(2, 1, 8, 8)
    trajectory(0, torch.tensor(80.0, dtype=torch.float64), x, x)
    noise = trajectory.frames[0].x_t.float() / 127.5 - 1
    assert 0.5 < noise.std() < 0.9  # of a standard normal, clamped to [-1, 1]


def test_a_trajectory_leads_from_the_noise_of_the_seeds_to_their_images(module):
    module.watch = trajectory = Trajectory(module)
    images = module.generate([7, 8], torch.tensor([3, 1]))
    assert [frame.step for frame in trajectory.frames] == [0, 1, 2, 3]
    noise = PixelCodec().decode(PerSampleNoise([7, 8]).draw((1, 8, 8)))
    assert (trajectory.frames[0].x_t.int() - noise.int()).abs().max() <= 1
    assert torch.equal(trajectory.frames[-1].x0, images)
    levels = [frame.noise for frame in trajectory.frames]
    assert levels == sorted(levels, reverse=True)


def test_strip_and_gif_end_in_the_images_which_are_as_without_them(module):
    assert call(f"{SAMPLE} --num 2 --out plain") == 0
    assert call(f"{SAMPLE} --num 2 --out out --trajectory") == 0
    assert len(FolderImages("out")) == 2
    for file in Path("plain").iterdir():
        assert (Path("out") / file.name).read_bytes() == file.read_bytes()
    last = np.array(Image.open("out/000001.png"))
    strip = np.array(Image.open("out/trajectory.png"))
    assert (strip[-68:-4:8, -68:-4:8] == last[..., None]).all()  # within a gap
    noise = PixelCodec().decode(PerSampleNoise([8]).draw((1, 8, 8)))[0, 0].numpy().astype(int)
    first = strip[-140:-76:8, -356:-292:8, 0]  # a row above, four columns before
    assert np.abs(first - noise).max() <= 1
    with Image.open("out/trajectory.gif") as gif:
        assert gif.n_frames == 5
        begin = np.array(gif.convert("L"))
        gif.seek(4)
        assert gif.info["duration"] == 1500
        frame = np.array(gif.convert("L"))
    x0 = frame[-168:-8:20, -168:-8:20]  # within two gaps
    assert np.abs(x0.astype(int) - last).max() <= 8  # of a palette
    assert np.abs(begin[-336:-176:20, -168:-8:20] - noise).max() <= 8
