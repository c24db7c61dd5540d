from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from support.commands import call
from support.pictures_module import PicturesModule
from support.small_digits import write_small_digits

from lit_diffusion.checkpoints.loading import LoadedModule
from lit_diffusion.cli.generator import ImageGenerator
from lit_diffusion.cli.image_grids import tile
from lit_diffusion.cli.options import SamplingOptions
from lit_diffusion.cli.trajectory import MAX_GIF_STEPS, Trajectory, write_trajectory
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


class Diffusing:
    process, codec = EDMProcess(), PixelCodec()


def frames_of(steps, scale=1.0):
    trajectory, x = Trajectory(Diffusing()), scale * torch.randn(2, 1, 8, 8)
    for step in range(steps):
        trajectory(step, torch.tensor(scale, dtype=torch.float64), x, x)
    return trajectory.frames


def test_few_steps_are_all_drawn_and_many_evenly_from_the_first_to_the_last():
    assert [frame.step for frame in frames_of(MAX_GIF_STEPS - 1)] == list(range(MAX_GIF_STEPS - 1))
    for steps in (MAX_GIF_STEPS, 250):
        drawn = [frame.step for frame in frames_of(steps)]
        assert MAX_GIF_STEPS / 2 <= len(drawn) < MAX_GIF_STEPS
        (stride,) = set(np.diff(drawn))
        assert (drawn[0], drawn[-1] + stride >= steps) == (0, True)


def test_x_t_has_the_scale_of_images_at_any_noise():
    noise = frames_of(1, scale=80.0)[0].x_t.float() / 127.5 - 1
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


def test_a_module_without_a_watch_is_named():
    loaded = LoadedModule(PicturesModule(), Path("a.ckpt"), 1, "raw", {})
    generator = ImageGenerator(loaded, SamplingOptions("a.ckpt"), None, None, [])
    with pytest.raises(ValueError, match="PicturesModule has none"):
        write_trajectory(generator, 1, Path())


# Tables of images and text


def test_small_images_are_enlarged_and_large_ones_shrunk_to_twice_the_width():
    image = torch.randint(0, 256, (1, 1, 8, 8)).to(torch.uint8)
    block = np.kron(image[0, 0].numpy(), np.ones((8, 8), dtype=np.uint8))
    assert (np.array(tile(image, 64)) == block[..., None]).all()
    assert tile(torch.zeros(1, 3, 512, 256, dtype=torch.uint8), 64).size == (64, 128)
