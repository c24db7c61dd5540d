"""Grids of samples from fixed seeds, and the nearest training images beside them."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import (
    CometLogger,
    Logger,
    MLFlowLogger,
    TensorBoardLogger,
    WandbLogger,
)
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from PIL import Image, ImageDraw
from torch import Tensor
from torchvision.transforms.functional import pil_to_tensor, to_pil_image
from torchvision.utils import make_grid

from lit_diffusion.callbacks.parts.fid_inputs import (
    refuse_odd_images,
    refuse_unable,
    split_images,
    try_one,
)
from lit_diffusion.callbacks.parts.fixed_items import spread
from lit_diffusion.callbacks.parts.inference import averaged_weights, inference
from lit_diffusion.callbacks.parts.triggers import RunsEveryNSteps, log_in_row_of_step
from lit_diffusion.metrics.batches import Where
from lit_diffusion.metrics.copies import nearest, share_below
from lit_diffusion.metrics.images import MODES
from lit_diffusion.metrics.reference import RealImages
from lit_diffusion.protocols import CanGenerate, NonFiniteSamples
from lit_diffusion.ranks import from_first
from lit_diffusion.seeding import classes_of
from lit_diffusion.trainer_state import is_a, stepped_batches

BANK_BYTES = 2**28


class SampleGrid(RunsEveryNSteps):
    """Writes the samples of seeds 0, ..., num - 1 as PNG, so that one sees the same ones improve.

    Files go to `<trainer.default_root_dir>/samples/`, with the weights they were made with (ema
    where a callback provides such weights, else raw) in their names, and to loggers (TensorBoard,
    W&B, MLflow, Comet):

    - `step-00001000-ema.png`: the samples, in rows, with the names of their classes where the data
      module has `class_names`; small images are enlarged pixel by pixel.
    - `nearest-00001000-ema.png`: each sample with, on its right, the training image that is nearest
      in pixel space, of at most 256 MB of them, evenly over the data set. Needs training images
      of the samples' shape; where there are none, that is said once.

    Beside the latter `val/memorized` is logged: the share of the samples that are nearer to a
    training image than the median of as many held-out images is. New images give about 0.5, and
    copies 1.

    Every rank generates all the samples. Random numbers of training are as without this callback.

    Args:
        num: of samples.
        labels: of the samples, repeated in turn; None takes seed mod `num_classes` where the data
            name their classes, and else leaves them to the module.
        every_n_steps: optimizer steps from one grid to the next; None draws at the end of every
            validation within fit.
        batch_size: samples generated at a time.
        images: where the images of a training batch are, as of `FIDEvaluation`.

    Raises:
        ValueError: bad numbers; at fit start, labels that are no classes of the module, and where
            None would never trigger.
        TypeError: at fit start, for a module without `generate(seeds, labels=None)`.

    Example:
        >>> SampleGrid(num=20, labels=range(10), every_n_steps=500).labels
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """

    def __init__(
        self,
        num: int,
        labels: Sequence[int] | None = None,
        every_n_steps: int | None = None,
        batch_size: int = 64,
        images: Where = None,
    ) -> None:
        super().__init__(every_n_steps)
        if min(num, batch_size) < 1:
            raise ValueError(f"num and batch_size must be at least 1, got {num} and {batch_size}.")
        if num > 10_000:
            raise ValueError(f"num must be at most 10000, which fill one picture, got {num}.")
        if labels is not None and not len(labels):
            raise ValueError("labels must hold at least one label; pass None for no labels.")
        self.num = num
        self.labels = None if labels is None else list(labels)
        self.batch_size = batch_size
        self.images = images
        self._bank: Tensor | None = None
        self._usual: Tensor | None = None  # median distance of held-out images to those of the bank
        self._bank_was_read = False

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find conflicts before the first step."""
        refuse_unable(pl_module, "SampleGrid")
        num_classes = getattr(pl_module, "num_classes", None)
        if (
            self.labels
            and num_classes
            and not -1 <= min(self.labels) <= max(self.labels) < num_classes
        ):
            raise ValueError(f"labels must be in -1..{num_classes - 1}, got {self.labels}.")
        super().on_fit_start(trainer, pl_module)
        self._bank, self._usual, self._bank_was_read = None, None, False

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw after each validation; where that only checks that it works, so does this."""
        if trainer.sanity_checking:
            try_one(trainer, pl_module)
        elif trainer.state.fn == TrainerFn.FITTING and self.every_n_steps is None:
            numbers = self._draw(trainer, pl_module)
            pl_module.log_dict(from_first(lambda: numbers), sync_dist=True)

    def metric_names(self) -> list[str]:
        """Logged where there are held-out images."""
        return ["val/memorized"]

    def at_step(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw."""
        log_in_row_of_step(trainer, self._draw(trainer, pl_module))

    def _draw(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, float]:
        """Write the grids; what is to be logged, on rank 0."""
        with averaged_weights(trainer) as weights, inference(trainer, pl_module):
            labels, captions = self._labels(trainer, pl_module)
            try:
                samples = self._generate(pl_module, labels)
            except NonFiniteSamples as error:  # on every rank alike; training can go on
                rank_zero_warn(f"SampleGrid draws nothing at step {trainer.global_step}: {error}")
                return {}
            if not self._bank_was_read:
                train, val = (split_images(trainer, n, self.images) for n in ("train", "val"))
                if trainer.is_global_zero:
                    self._read_bank(train, val, tuple(samples.shape[1:]))
                self._bank_was_read = True
            if not trainer.is_global_zero:
                return {}
            self._publish(trainer, "step", weights, image_grid(samples, captions))
            return self._publish_nearest(trainer, weights, samples)

    def _labels(self, trainer: Trainer, module: LightningModule) -> tuple[Any, Any]:
        """Labels, repeated in turn, and captions; None leaves labels to the module."""
        names = getattr(trainer.datamodule, "class_names", ())  # type: ignore[attr-defined]
        num_classes = getattr(module, "num_classes", None)
        if not isinstance(names, Sequence) or not names or not num_classes:
            return self.labels, None
        labels = self.labels or classes_of(range(self.num), num_classes)
        return labels, class_captions(labels, list(map(str, names)), self.num)

    def _publish_nearest(self, trainer: Trainer, weights: str, samples: Tensor) -> dict[str, float]:
        if self._bank is None:
            return {}
        distances, index = nearest(samples, self._bank)
        pairs = torch.cat([samples, self._bank[index]], dim=-1)
        self._publish(trainer, "nearest", weights, image_grid(pairs))
        if self._usual is None:
            return {}
        return {self.metric_names()[0]: share_below(distances, self._usual)}

    def _read_bank(
        self, train: RealImages | None, val: RealImages | None, shape: tuple[int, ...]
    ) -> None:
        """What samples are compared with: not augmented, where the data say how that is."""
        most = max(1, BANK_BYTES // math.prod(shape))
        self._bank = self._read("shows no nearest training images", train, most, shape)
        if self._bank is None:
            return
        if train is not None and len(self._bank) < len(train):
            compared = f"{len(self._bank)} of {len(train)} training images"
            rank_zero_info(f"SampleGrid compares with {compared}.")
        held_out = self._read("logs no val/memorized", val, self.num, shape)
        if held_out is not None:
            self._usual = nearest(held_out, self._bank)[0].median()

    def _read(
        self, otherwise: str, images: RealImages | None, most: int, shape: tuple[int, ...]
    ) -> Tensor | None:
        """At most so many images, evenly over them; None, and that is said, without such."""
        try:
            if images is None:
                raise TypeError("the Trainer has no loader of them with indices.")
            chosen = spread(len(images), most)
            found = torch.cat([each for each, _ in images.batches(256, chosen)])
            if found.shape[1:] != shape:
                raise TypeError(f"they are {tuple(found.shape[1:])}, and samples {shape}.")
        except (TypeError, NotImplementedError) as error:
            rank_zero_info(f"SampleGrid {otherwise}: {error}")
            return None
        return found

    def _generate(self, module: LightningModule, given: Sequence[int] | None) -> Tensor:
        assert isinstance(module, CanGenerate)
        batches = []
        for start in range(0, self.num, self.batch_size):
            seeds = range(start, min(start + self.batch_size, self.num))
            labels = None
            if given is not None:
                chosen = [given[seed % len(given)] for seed in seeds]
                labels = torch.tensor(chosen, device=module.device)
            images = module.generate(seeds, labels)
            refuse_odd_images(images, len(seeds))
            batches.append(images.cpu())
        return torch.cat(batches)

    def _publish(self, trainer: Trainer, kind: str, weights: str, grid: Tensor) -> None:
        folder = Path(trainer.default_root_dir) / "samples"
        folder.mkdir(parents=True, exist_ok=True)
        picture, step = to_pil_image(grid), trainer.global_step
        picture.save(folder / f"{kind}-{step:08d}-{weights}.png")
        batches = stepped_batches(trainer)
        log_picture(trainer.loggers, f"samples/{kind}-{weights}", picture, batches)


def log_picture(loggers: Iterable[Logger], name: str, picture: Image.Image, step: int) -> None:
    """Give a picture to TensorBoard, W&B, MLflow and Comet; other loggers get none."""
    for logger in loggers:
        if is_a(logger, TensorBoardLogger):
            logger.experiment.add_image(name, np.asarray(picture), step, dataformats="HWC")
        elif is_a(logger, WandbLogger):
            logger.log_image(name, [picture], step)
        elif is_a(logger, MLFlowLogger):
            logger.experiment.log_image(logger.run_id, picture, key=name, step=step)
        elif is_a(logger, CometLogger):
            logger.experiment.log_image(picture, name, step=step)


def image_grid(images: Tensor, captions: Sequence[str] | None = None, width: int = 512) -> Tensor:
    """Images in a near-square grid of about `width` pixels; small ones are enlarged pixel by pixel.

    From (N, C, H, W) uint8, C = 1, ..., 4, to (C, or 3 for 1, height, width) uint8. Captions, one
    an image, stand below.
    """
    square = math.ceil(math.sqrt(len(images) * images.shape[2] / images.shape[3]))
    columns = min(square, len(images))
    scale = max(1, round(width / (columns * images.shape[3])))
    large = images.repeat_interleave(scale, dim=2).repeat_interleave(scale, dim=3)
    if captions is not None:
        strips = [_written(text, *large.shape[1::2]) for text in captions]
        large = torch.cat([large, torch.stack(strips)], dim=2)
    grid: Tensor = make_grid(large, nrow=columns, pad_value=127)
    return grid


def _written(text: str, channels: int, width: int) -> Tensor:
    """(channels, 13, width) uint8, white on black."""
    picture = Image.new(MODES[channels - 1], (width, 13), "black")
    ImageDraw.Draw(picture).text((1, 0), text, fill="white")
    strip: Tensor = pil_to_tensor(picture)
    return strip


def class_captions(labels: Sequence[int], names: Sequence[str], num: int) -> list[str]:
    """Names of the classes of `num` images, labels repeated in turn; "" for label -1.

    Example:
        >>> class_captions([1, 0, -1], ["cat", "dog"], 4)
        ['dog', 'cat', '', 'dog']
    """
    known = dict(enumerate(names))
    return [known.get(labels[i % len(labels)], "") for i in range(num)]
