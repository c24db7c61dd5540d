"""The loss at fixed noise levels: where along the process a model is good, and where it is not."""

from collections.abc import Sequence
from operator import itemgetter
from typing import Any, cast

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from lit_diffusion.callbacks.parts.fixed_items import indexed_loader, items_of, read, spread
from lit_diffusion.callbacks.parts.inference import averaged_weights, inference
from lit_diffusion.callbacks.parts.triggers import RunsEveryNSteps, log_in_row_of_step
from lit_diffusion.metrics.batches import Where, images_in
from lit_diffusion.protocols import Condition, HasNoiseLevels, by_part
from lit_diffusion.seeding import PerSampleNoise


class NoiseLevelLoss(RunsEveryNSteps):
    """Logs the mean loss of fixed images with fixed noise at levels u = (i + 1/2) / num_levels.

    Names are `val/loss_u0.05`, ..., `val/loss_u0.95` (or `train/...`, for training images); u = 1
    is the noisiest. Images, noise and levels are the same every time, so that curves move only
    when the weights do. Every rank computes all of it: the value does not depend on batch size or
    number of ranks.

    Args:
        num_levels: of noise.
        num_images: taken evenly over the first data set, all of it if it is smaller.
        every_n_steps: None takes held-out images, at the end of every validation, with the weights
            that are validated; a number takes training images, with averaged weights where a
            callback provides them, and goes to the loggers alone.
        images: where the images of a batch are, as of `FIDEvaluation`; they go to the module's
            codec as they are. Labels are the second part of a batch that is a tuple.

    Raises:
        ValueError: bad numbers, no validation, or data that can't be read at an index.
        TypeError: for a module that is not `protocols.HasNoiseLevels`.

    Example:
        >>> NoiseLevelLoss(num_levels=4).levels
        [0.125, 0.375, 0.625, 0.875]
    """

    def __init__(
        self,
        num_levels: int = 10,
        num_images: int = 64,
        every_n_steps: int | None = None,
        images: Where = None,
    ) -> None:
        super().__init__(every_n_steps)
        if min(num_levels, num_images) < 1:
            raise ValueError(
                f"num_levels and num_images must be at least 1, got {num_levels} and {num_images}."
            )
        self.levels = [(i + 0.5) / num_levels for i in range(num_levels)]
        self.num_images = num_images
        self.images = images
        self._fixed: tuple[Tensor, Condition, list[int]] | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse modules that can't be asked."""
        super().setup(trainer, pl_module, stage)
        self._fixed = None  # a data set may have changed between runs
        needed = ("per_sample_loss", "process", "codec", "num_classes")
        lacking = [name for name in needed if not hasattr(pl_module, name)]
        if lacking:
            raise TypeError(
                f"NoiseLevelLoss needs a module with {', '.join(needed)} (protocols.HasNoiseLevels)"
                f"; {type(pl_module).__name__} lacks {', '.join(lacking)}."
            )

    def metric_names(self) -> list[str]:
        """One a level, of training images where it runs every so many steps."""
        split = "val" if self.every_n_steps is None else "train"
        return [f"{split}/loss_u{u:.3g}" for u in self.levels]

    def at_step(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure training images, for the loggers."""
        with averaged_weights(trainer):
            losses = self._measure(trainer, pl_module, trainer.train_dataloader)
        log_in_row_of_step(trainer, {name: loss.item() for name, loss in losses.items()})

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure after each validation, with the weights that it used."""
        if self.every_n_steps is None:
            losses = self._measure(trainer, pl_module, trainer.val_dataloaders)
            if not trainer.sanity_checking:
                pl_module.log_dict(losses)

    def _measure(
        self, trainer: Trainer, pl_module: LightningModule, loaders: Any
    ) -> dict[str, Tensor]:
        module = cast(HasNoiseLevels, pl_module)
        if self._fixed is None:
            with isolate_rng():
                self._fixed = read_fixed(loaders, self.num_images, self.images)
        images, labels, indices = self._fixed
        x0 = module.codec.encode(images.to(pl_module.device))
        noise = PerSampleNoise(indices, stream="noise level").randn_like(x0)
        if module.num_classes is None and getattr(module, "conditioning", None) is None:
            labels = None
        labels = move_data_to_device(labels, x0.device)
        with inference(trainer, pl_module):
            losses = noise_level_losses(module, x0, labels, noise, self.levels)
        return dict(zip(self.metric_names(), losses, strict=True))


def read_fixed(loaders: Any, num: int, where: Where = None) -> tuple[Tensor, Condition, list[int]]:
    """At most `num` images, evenly over the first data set, their labels if any, and indices."""
    loader = indexed_loader(loaders)
    if loader is None:
        raise ValueError(
            "NoiseLevelLoss and GradientDiagnostics need a DataLoader over a data set with "
            "indices, to read the same images every time; remove them for streamed data."
        )
    indices = spread(len(items_of(loader)), num)  # type: ignore[arg-type]
    batches = list(read(loader, indices))
    images = torch.cat([images_in(batch, where) for batch in batches])
    labels = None
    if isinstance(batches[0], list | tuple) and len(batches[0]) > 1:
        labels = by_part(lambda *rows: torch.cat(rows), *(batch[1] for batch in batches))
    return images, labels, indices


@torch.no_grad()
def noise_level_losses(
    module: HasNoiseLevels,
    x0: Tensor,
    labels: Condition,
    noise: Tensor,
    levels: Sequence[float],
) -> Tensor:
    """(L,) float64 mean loss at L levels u, of x0 (B, C, H, W) with the same noise at each."""
    means = []
    for u in levels:
        t = module.process.from_unit(torch.full((len(x0),), u, dtype=torch.float64)).to(x0.device)
        losses = [
            module.per_sample_loss(x0[i], by_part(itemgetter(i), labels), t[i], noise[i])
            for i in torch.split(torch.arange(len(x0), device=x0.device), 16)
        ]
        means.append(torch.cat(losses).double().mean())
    return torch.stack(means)
