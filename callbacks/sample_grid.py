"""Write image grids of samples from fixed seeds, and of their nearest training images."""

import math
from collections.abc import Iterable, Sequence

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
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.seed import isolate_rng
from PIL import Image, ImageDraw
from torch import Tensor
from torchvision.transforms.functional import pil_to_tensor, to_pil_image
from torchvision.utils import make_grid

from lit_diffusion.callbacks.evaluation import (
    PeriodicEvaluation,
    averaged_weights,
    check_images,
    generate_images,
    inference_mode,
    refuse_other_run,
    require_generate,
    split_images,
)
from lit_diffusion.callbacks.trainer_state import isinstance_lightning, stepped_batches
from lit_diffusion.files import IMAGE_MODES
from lit_diffusion.metrics.image_distances import nearest_neighbors
from lit_diffusion.metrics.images import BatchKey, ImageSet, evenly_spaced
from lit_diffusion.protocols import CanGenerate, NonFiniteSamples
from lit_diffusion.seeding import classes_of

MAX_TRAINING_BYTES = 2**28
"""Maximum total size in bytes of the training images with which samples are compared."""


class SampleGrid(PeriodicEvaluation):
    """Writes grids of the samples of seeds 0, ..., num - 1 as PNG files.

    The grids are written to `samples/` in the run folder. They are also logged to TensorBoard, W&B,
    MLflow and Comet if the Trainer has such a logger. `lit-diffusion fit` sets the run folder. In
    other projects, it is the first logger's version directory, or `default_root_dir` if there is no
    logger. File names contain the optimizer step and the name of the weights. The name is "ema" if
    a callback provides averages, else "raw".

    - `step-00001000-ema.png` shows the samples. If the data module has `class_names`, the name of
      the class is printed below each sample. Small images are enlarged by an integer factor.
    - `nearest-00001000-ema.png` shows each sample next to its nearest training image in pixel
      space. If the training images exceed 256 MB, the search uses 256 MB of images that are evenly
      spaced over the data set. If no training images have the shape of the samples, this grid is
      omitted and a message is printed once.
    - `val/memorized` is a metric that is logged with the grid of nearest images. It is the fraction
      of samples that are close to a training image. A sample is close if its distance to the
      nearest training image is at most the median distance from held-out images to their nearest
      training images. The metric is about 0.5 if samples are as new as held-out images, and 1 if
      they are copies of training images.

    Every rank generates all samples. The states of the random generators are restored afterwards.
    `fast_dev_run` generates the samples and writes no files.

    Args:
        num: number of samples, 1 to 10,000.
        labels: labels of the samples. If there are more samples than labels, the labels repeat.
            With None, the labels are `seed % num_classes` if the data module has `class_names`. If
            it has no `class_names`, `generate` is called without labels.
        every_n_steps: optimizer steps between grids; None writes after every validation of a fit.
        batch_size: number of samples per call of `generate`.
        images: how to find the images in a training batch: an index, a key, or a function of the
            batch. None uses the whole batch if it is a tensor, the first item if it is a tuple or
            list, and the only 4-dimensional tensor if it is a dictionary.

    Raises:
        ValueError: if an argument is invalid. At fit start, the error is also raised if a label is
            not a class of the module, if `every_n_steps` is None and the fit has no validation, or
            if the folder of a new run contains grids of another run.
        TypeError: at fit start, if the module has no method `generate(seeds, labels=None)`.

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
        images: BatchKey = None,
    ) -> None:
        super().__init__(every_n_steps)
        if min(num, batch_size) < 1:
            raise ValueError(f"num and batch_size must be at least 1, got {num} and {batch_size}.")
        if num > 10_000:
            raise ValueError(f"num must be at most 10000, to fit into one image, got {num}.")
        if labels is not None and not len(labels):
            raise ValueError("labels must have at least one label; pass None for no labels.")
        self.num = num
        self.labels = None if labels is None else list(labels)
        self.batch_size = batch_size
        self.images = images
        self._has_read_images = False
        self._training_images: Tensor | None = None
        self._median_distance: Tensor | None = None  # of held-out images to the training images

    def metric_names(self) -> list[str]:
        """Name of the metric, which is logged only if there are training and held-out images."""
        return ["val/memorized"]

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Raise an error if the module cannot generate samples with these labels."""
        require_generate(pl_module, "SampleGrid")
        num_classes, labels = getattr(pl_module, "num_classes", None), self.labels
        if labels and num_classes and not -1 <= min(labels) <= max(labels) < num_classes:
            raise ValueError(f"labels must be in -1..{num_classes - 1}, got {labels}.")
        super().on_fit_start(trainer, pl_module)
        grids = self.folder / "samples"
        if not trainer.fast_dev_run:  # type: ignore[attr-defined]
            refuse_other_run(trainer, grids, any(grids.glob("*.png")))
        self._has_read_images, self._training_images, self._median_distance = False, None, None

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write grids after each validation of a fit. In the sanity check, only test `generate`."""
        if trainer.sanity_checking:
            with inference_mode(trainer, pl_module):
                generate_images(pl_module, [0])
        super().on_validation_epoch_end(trainer, pl_module)

    def measure(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, float]:
        """Write the grids, and return `val/memorized` on rank 0 if it can be measured."""
        with averaged_weights(trainer) as weights, inference_mode(trainer, pl_module):
            names = getattr(trainer.datamodule, "class_names", ())  # type: ignore[attr-defined]
            num_classes = getattr(pl_module, "num_classes", None)
            labels, captions = self.labels, None
            if isinstance(names, Sequence) and names and num_classes:
                labels = labels or list(classes_of(range(self.num), num_classes))
                captions = class_captions(labels, list(map(str, names)), self.num)
            try:
                samples = self._generate(pl_module, labels)
            except NonFiniteSamples as error:  # raised on every rank; training can continue
                rank_zero_warn(f"SampleGrid draws nothing at step {trainer.global_step}: {error}")
                return {}
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return {}
        if not self._has_read_images:  # outside autocast, which the data set may not support
            with isolate_rng():
                train, val = (split_images(trainer, n, self.images) for n in ("train", "val"))
                if trainer.is_global_zero:
                    self._read_images(train, val, tuple(samples.shape[1:]))
            self._has_read_images = True
        if not trainer.is_global_zero:
            return {}
        self._publish(trainer, "step", weights, image_grid(samples, captions))
        if self._training_images is None:
            return {}
        distances, index = nearest_neighbors(samples, self._training_images)
        pairs = torch.cat([samples, self._training_images[index]], dim=-1)
        self._publish(trainer, "nearest", weights, image_grid(pairs))
        if self._median_distance is None:
            return {}
        is_near = distances <= self._median_distance
        return {"val/memorized": is_near.double().mean().item()}

    def _generate(self, module: LightningModule, labels: Sequence[int] | None) -> Tensor:
        """Generate the samples, (num, C, H, W) uint8 on the CPU."""
        assert isinstance(module, CanGenerate)
        batches = []
        for start in range(0, self.num, self.batch_size):
            seeds = range(start, min(start + self.batch_size, self.num))
            batch_labels = None
            if labels is not None:
                repeated = [labels[seed % len(labels)] for seed in seeds]
                batch_labels = torch.tensor(repeated, device=module.device)
            images = module.generate(seeds, batch_labels)
            check_images(images, len(seeds))
            batches.append(images.cpu())
        return torch.cat(batches)

    def _read_images(
        self, train: ImageSet | None, val: ImageSet | None, shape: tuple[int, ...]
    ) -> None:
        """Read the training and held-out images with which samples are compared."""

        def read(images: ImageSet | None, most: int, consequence: str) -> Tensor | None:
            try:
                if images is None:
                    raise TypeError("the Trainer has no DataLoader of these images with indices.")
                indices = evenly_spaced(len(images), most)
                pixels = torch.cat([batch for batch, _ in images.batches(256, indices)])
                if pixels.shape[1:] != shape:
                    raise TypeError(
                        f"images have the shape {tuple(pixels.shape[1:])}, samples {shape}."
                    )
            except (TypeError, NotImplementedError) as error:
                rank_zero_info(f"SampleGrid {consequence}: {error}")
                return None
            return pixels

        most = max(1, MAX_TRAINING_BYTES // math.prod(shape))
        training_images = read(train, most, "shows no nearest training images")
        self._training_images = training_images
        if train is None or training_images is None:
            return
        if len(training_images) < len(train):
            rank_zero_info(
                f"SampleGrid compares with {len(training_images)} of {len(train)} training images."
            )
        held_out = read(val, self.num, "logs no val/memorized")
        if held_out is not None:
            self._median_distance = nearest_neighbors(held_out, training_images)[0].median()

    def _publish(self, trainer: Trainer, kind: str, weights: str, grid: Tensor) -> None:
        folder = self.folder / "samples"
        folder.mkdir(parents=True, exist_ok=True)
        picture, step = to_pil_image(grid), trainer.global_step
        picture.save(folder / f"{kind}-{step:08d}-{weights}.png")
        log_picture(trainer.loggers, f"samples/{kind}-{weights}", picture, stepped_batches(trainer))


def log_picture(loggers: Iterable[Logger], name: str, picture: Image.Image, step: int) -> None:
    """Log an image to TensorBoard, W&B, MLflow and Comet. Other loggers are skipped."""
    for logger in loggers:
        if isinstance_lightning(logger, TensorBoardLogger):
            logger.experiment.add_image(name, np.asarray(picture), step, dataformats="HWC")
        elif isinstance_lightning(logger, WandbLogger):
            logger.log_image(name, [picture], step)
        elif isinstance_lightning(logger, MLFlowLogger):
            logger.experiment.log_image(logger.run_id, picture, key=name, step=step)
        elif isinstance_lightning(logger, CometLogger):
            logger.experiment.log_image(picture, name, step=step)


def image_grid(images: Tensor, captions: Sequence[str] | None = None, width: int = 512) -> Tensor:
    """Arrange images in an almost square grid. Small images are enlarged by an integer factor.

    Args:
        images: (N, C, H, W) uint8, C = 1, ..., 4.
        captions: one text for each image, which is written below the image.
        width: approximate width of the grid in pixels. It determines the enlargement factor.

    Returns:
        (C, height, width) uint8. If the images are gray (C = 1), the grid has 3 channels.

    Example:
        >>> image_grid(torch.zeros(4, 3, 16, 16, dtype=torch.uint8), width=64).shape
        torch.Size([3, 70, 70])
    """
    square = math.ceil(math.sqrt(len(images) * images.shape[2] / images.shape[3]))
    columns = min(square, len(images))
    scale = max(1, round(width / (columns * images.shape[3])))
    large = images.repeat_interleave(scale, dim=2).repeat_interleave(scale, dim=3)
    if captions is not None:
        strips = []
        for text in captions:  # white on black, 13 pixels high
            strip = Image.new(IMAGE_MODES[images.shape[1]], (large.shape[3], 13), "black")
            ImageDraw.Draw(strip).text((1, 0), text, fill="white")
            strips.append(pil_to_tensor(strip))
        large = torch.cat([large, torch.stack(strips)], dim=2)
    return make_grid(large, nrow=columns, pad_value=127)


def class_captions(labels: Sequence[int], names: Sequence[str], num: int) -> list[str]:
    """List the class names of `num` images. If there are fewer labels than images, labels repeat.

    The name of a label that is no class, such as -1, is "".

    Example:
        >>> class_captions([1, 0, -1], ["cat", "dog"], 4)
        ['dog', 'cat', '', 'dog']
    """
    name_of = dict(enumerate(names))
    return [name_of.get(labels[i % len(labels)], "") for i in range(num)]
