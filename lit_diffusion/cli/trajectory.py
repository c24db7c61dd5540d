"""Draw trajectories of samples from noise to image, as trajectory.png and trajectory.gif."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image
from torch import Tensor

from lit_diffusion.cli.generator import ImageGenerator
from lit_diffusion.cli.image_grids import table, text_image, tile
from lit_diffusion.files import atomic_write
from lit_diffusion.metrics.images import evenly_spaced
from lit_diffusion.signals import defer_signals

NUM_TRAJECTORIES = 4
STRIP_STEPS = 10
MAX_GIF_STEPS = 64
"""The GIF has fewer steps than this."""
GIF_SECONDS = 4
"""Length of the GIF, without the last frame."""


class Frame(NamedTuple):
    """A solver step. Its images are (N, C, H, W) uint8."""

    step: int | str
    noise: float  # sigma / alpha
    x_t: Tensor
    x0: Tensor  # as the network predicts it at this step


class Trajectory:
    """A `protocols.Watch` that records fewer than `MAX_GIF_STEPS` solver steps, evenly spaced.

    Each x_t is divided by `sqrt(alpha**2 + sigma**2)`, so that it has the scale of an image.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._every = 1
        self.frames: list[Frame] = []

    def __call__(self, step: int, t: Tensor, x_t: Tensor, x0: Tensor) -> None:
        """Record a step, and drop every other step if there are too many."""
        if step % self._every:
            return
        alpha, sigma = self._module.process.alpha_sigma(t)
        scaled = x_t / (alpha**2 + sigma**2).sqrt().to(x_t.dtype)
        images = (self._module.codec.decode(x) for x in (scaled, x0))
        self.frames.append(Frame(step, float(sigma / alpha), *images))
        if len(self.frames) == MAX_GIF_STEPS:
            del self.frames[1::2]
            self._every *= 2


def write_trajectory(generator: ImageGenerator, num: int, folder: Path) -> None:
    """Write trajectory.png and trajectory.gif of the first of `num` images."""
    module: Any = generator.loaded.module
    if not hasattr(module, "watch"):
        raise ValueError(
            f"--trajectory needs a module that calls its `watch` at each step, such as "
            f"DiffusionModule, got {type(module).__name__}; leave out --trajectory."
        )
    module.watch = trajectory = Trajectory(module)
    try:
        images = generator.generate(range(min(num, NUM_TRAJECTORIES)))
    finally:
        module.watch = None
    # Frames are moved to the CPU only now, so that no solver step waits for the device.
    frames = [each._replace(x_t=each.x_t.cpu(), x0=each.x0.cpu()) for each in trajectory.frames]
    frames.append(Frame("end", 0.0, images, images))
    names = [f"seed {generator.options.seed + i}" for i in range(len(images))]
    pictures = [_draw_frame(frame, names) for frame in frames]
    durations = [1000 * GIF_SECONDS // len(frames)] * (len(frames) - 1) + [1500]
    with defer_signals(), atomic_write(folder / "trajectory.png") as file:
        _draw_strip(frames, names).save(file, "PNG")
    with defer_signals(), atomic_write(folder / "trajectory.gif") as file:
        pictures[0].save(
            file, "GIF", save_all=True, append_images=pictures[1:], duration=durations, loop=0
        )


def _draw_strip(frames: Sequence[Frame], names: Sequence[str]) -> Image.Image:
    """Draw steps from left to right; each sample has a row of x_t and a row of x0."""
    columns = [frames[i] for i in evenly_spaced(len(frames) - 1, STRIP_STEPS)] + [frames[-1]]
    header = [text_image(f"{frame.step}\n{frame.noise:.3g}") for frame in columns]
    rows = [[text_image("step\nnoise"), *header]]
    for i, name in enumerate(names):
        sample = slice(i, i + 1)
        rows.append([text_image(f"{name}, x_t"), *(tile(each.x_t[sample], 64) for each in columns)])
        rows.append([text_image("x0"), *(tile(each.x0[sample], 64) for each in columns)])
    return table(rows)


def _draw_frame(frame: Frame, names: Sequence[str]) -> Image.Image:
    """Draw x_t above x0, with a column for each sample; the size is equal for all steps."""
    rows = [[text_image(""), *map(text_image, names)]]
    for name, images in (("x_t", frame.x_t), ("x0", frame.x0)):
        rows.append([text_image(name), *(tile(image[None], 160) for image in images)])
    step = frame.step if frame.step == "end" else f"step {frame.step}"
    header = text_image(f"{step}, noise {frame.noise:.3g}")
    return table([[header], [table(rows)]])
