"""The way of the first samples from noise to image, as a strip and as a GIF."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image
from torch import Tensor

from lit_diffusion.cli.image_grids import table, tile, written
from lit_diffusion.files import atomic_write
from lit_diffusion.metrics.reference import evenly_spaced
from lit_diffusion.signals import defer_signals

SEEDS = 4
COLUMNS = 10
"""Steps in the strip."""
MOST = 64
"""Steps in the GIF, below that."""
SECONDS = 4
"""Length of the GIF, but for its end."""


class Moment(NamedTuple):
    """Number of the step, sigma / alpha, and x_t and x0 as images uint8 (N, C, H, W)."""

    step: int | str
    noise: float
    x_t: Tensor
    x0: Tensor


class Trajectory:
    """A `protocols.Watch` that keeps every step, or less than `MOST`, evenly over all.

    x_t is shown at the scale of an image: divided by sqrt(alpha^2 + sigma^2).

    Args:
        module: whose `watch` this will be.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._every = 1
        self.moments: list[Moment] = []

    def __call__(self, step: int, t: Tensor, x_t: Tensor, x0: Tensor) -> None:
        """See a step."""
        if step % self._every:
            return
        alpha, sigma = self._module.process.alpha_sigma(t)
        seen = x_t / (alpha**2 + sigma**2).sqrt().to(x_t), x0
        decoded = (self._module.codec.decode(x).cpu() for x in seen)
        self.moments.append(Moment(step, float(sigma / alpha), *decoded))
        if len(self.moments) == MOST:
            del self.moments[1::2]
            self._every *= 2


def write_trajectory(
    module: Any, make: Callable[[], Tensor], names: Sequence[str], out: Path
) -> None:
    """trajectory.png and trajectory.gif of the images (N, C, H, W) that `make` has a module make.

    Args:
        module: tells its `watch` of the steps.
        make: generates them.
        names: of the N.
        out: folder.

    Raises:
        ValueError: for a module without a `watch`.
    """
    if not hasattr(module, "watch"):
        raise ValueError(
            f"--trajectory needs a module that tells its `watch` of each step, as DiffusionModule "
            f"does; {type(module).__name__} has none."
        )
    module.watch = seen = Trajectory(module)
    try:
        images = make()
    finally:
        module.watch = None
    moments = [*seen.moments, Moment("end", 0.0, images, images)]
    with defer_signals(), atomic_write(out / "trajectory.png") as file:
        _strip(moments, names).save(file, "PNG")
    frames = [_frame(moment, names) for moment in moments]
    lasting = [1000 * SECONDS // len(frames)] * len(seen.moments) + [1500]
    with defer_signals(), atomic_write(out / "trajectory.gif") as file:
        frames[0].save(
            file, "GIF", save_all=True, append_images=frames[1:], duration=lasting, loop=0
        )


def _strip(moments: Sequence[Moment], names: Sequence[str]) -> Image.Image:
    """Steps from left to right, two rows a sample."""
    shown = [moments[i] for i in evenly_spaced(len(moments) - 1, COLUMNS)] + [moments[-1]]
    rows = [[written("step\nnoise"), *(written(f"{m.step}\n{m.noise:.3g}") for m in shown)]]
    for i, name in enumerate(names):
        rows.append([written(f"{name}, x_t"), *(tile(m.x_t[i : i + 1], 64) for m in shown)])
        rows.append([written("x0"), *(tile(m.x0[i : i + 1], 64) for m in shown)])
    return table(rows)


def _frame(moment: Moment, names: Sequence[str]) -> Image.Image:
    """A column a sample, of one size at every step."""
    rows = [[written(""), *map(written, names)]]
    for name, images in (("x_t", moment.x_t), ("x0", moment.x0)):
        rows.append([written(name), *(tile(image[None], 160) for image in images)])
    step = moment.step if moment.step == "end" else f"step {moment.step}"
    head = f"{step}, noise {moment.noise:.3g}"
    return table([[written(head)], [table(rows)]])
