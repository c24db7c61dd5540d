"""Measure the loss at fixed noise levels, to compare how well a model denoises at each of them."""

from collections.abc import Sequence
from operator import itemgetter
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lit_diffusion.callbacks.evaluation import (
    FixedImages,
    PeriodicEvaluation,
    averaged_weights,
    inference_mode,
    read_fixed_images,
    require_noise_levels,
)
from lit_diffusion.metrics.images import BatchKey
from lit_diffusion.protocols import Condition, HasNoiseLevels, by_part


class NoiseLevelLoss(PeriodicEvaluation):
    """Logs the mean loss of the same images at several noise levels, always with the same noise.

    The noise levels are `u = (i + 1/2) / num_levels` for i = 0, ..., num_levels - 1, on a scale
    from 0 (cleanest) to 1 (noisiest). With 10 levels, the metrics of held-out images are
    `val/loss_u0.05`, ..., `val/loss_u0.95`. For training images, the names begin with `train/`.

    Images, noise and noise levels are the same in every measurement, so a metric changes only if
    the weights change. Every rank computes all metrics, so the metrics do not depend on the batch
    size or the number of ranks.

    Args:
        num_levels: number of noise levels, >= 1.
        num_images: number of images, evenly spaced over the first data set. A smaller data set is
            used in full.
        every_n_steps: when to measure, and on which images. None measures held-out images after
            every validation, with the weights that were validated. A number n measures training
            images after every n optimizer steps, with averaged weights if a callback provides them.
            Losses of training images go to the loggers only, and not to `trainer.callback_metrics`.
        images: how to find the images in a batch: an index, a key, or a function of the batch. None
            uses the whole batch if it is a tensor, the first item if it is a tuple, and the only
            4-dimensional tensor if it is a dictionary. Images are passed to the module's codec
            unchanged. If the batch is a tuple, its second item is used as labels.

    Raises:
        ValueError: if an argument is below 1, if `every_n_steps` is None and the fit has no
            validation, or if no data set can be indexed.
        TypeError: if the module does not implement `protocols.HasNoiseLevels`.

    Example:
        >>> NoiseLevelLoss(num_levels=4).levels
        [0.125, 0.375, 0.625, 0.875]
    """

    def __init__(
        self,
        num_levels: int = 10,
        num_images: int = 64,
        every_n_steps: int | None = None,
        images: BatchKey = None,
    ) -> None:
        super().__init__(every_n_steps)
        if min(num_levels, num_images) < 1:
            raise ValueError(
                f"num_levels and num_images must be at least 1, got {num_levels} and {num_images}."
            )
        self.levels = [(i + 0.5) / num_levels for i in range(num_levels)]
        self.num_images = num_images
        self.images = images
        self._fixed: FixedImages | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Raise TypeError if the module does not implement `protocols.HasNoiseLevels`."""
        super().setup(trainer, pl_module, stage)
        self._fixed = None  # the data may have changed since the last run
        require_noise_levels(pl_module, "NoiseLevelLoss")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Read the training images, so that unsuitable data raise an error at once."""
        super().on_train_start(trainer, pl_module)
        if self.every_n_steps is not None:
            self._fixed = read_fixed_images(trainer.train_dataloader, self.num_images, self.images)

    def metric_names(self) -> list[str]:
        """Names of the metrics, one for each noise level."""
        split = "val" if self.every_n_steps is None else "train"
        return [f"{split}/loss_u{u:.3g}" for u in self.levels]

    def measure(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, float]:
        """Return the losses of training images by name, with averaged weights if available."""
        with averaged_weights(trainer):
            losses = self._losses(trainer, pl_module, trainer.train_dataloader)
        return dict(zip(self.metric_names(), losses.tolist(), strict=True))

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure held-out images after each validation, with the validated weights."""
        if self.every_n_steps is None:
            losses = self._losses(trainer, pl_module, trainer.val_dataloaders)
            if not trainer.sanity_checking:
                pl_module.log_dict(dict(zip(self.metric_names(), losses, strict=True)))

    def _losses(self, trainer: Trainer, pl_module: LightningModule, loaders: Any) -> Tensor:
        if self._fixed is None:
            self._fixed = read_fixed_images(loaders, self.num_images, self.images)
        x0, labels, noise = self._fixed.encode(pl_module)
        with inference_mode(trainer, pl_module):
            module = cast(HasNoiseLevels, pl_module)
            return noise_level_losses(module, x0, labels, noise, self.levels)


@torch.no_grad()
def noise_level_losses(
    module: HasNoiseLevels, x0: Tensor, labels: Condition, noise: Tensor, levels: Sequence[float]
) -> Tensor:
    """Return the mean losses of a batch at L noise levels u in [0, 1], as a float64 tensor (L,).

    All levels use the same noise, which has the shape (B, C, H, W) of the encoded images `x0`.
    """
    means = []
    for u in levels:
        t = module.process.from_unit(torch.full((len(x0),), u, dtype=torch.float64)).to(x0.device)
        losses = [
            module.per_sample_loss(x0[i], by_part(itemgetter(i), labels), t[i], noise[i])
            for i in torch.split(torch.arange(len(x0), device=x0.device), 16)
        ]
        means.append(torch.cat(losses).double().mean())
    return torch.stack(means)
