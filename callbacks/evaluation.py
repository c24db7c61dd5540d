"""Base class and helper functions for callbacks that evaluate a module during training."""

import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from inspect import signature
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Subset

from lit_diffusion.callbacks.trainer_state import (
    confirm_updates,
    eval_mode,
    isinstance_lightning,
    output_folder,
    stepped_batches,
    undivided_sampler,
)
from lit_diffusion.distributed import call_on_rank_zero
from lit_diffusion.metrics.images import (
    BatchKey,
    HasSplits,
    ImageSet,
    evenly_spaced,
    open_split,
    select_images,
)
from lit_diffusion.protocols import (
    CanGenerate,
    Condition,
    NonFiniteSamples,
    WeightsProvider,
    by_part,
)
from lit_diffusion.seeding import PerSampleNoise, classes_of


def refuse_other_run(
    trainer: Trainer,
    path: Path,
    exists: bool,
    fix: str = "give the Trainer a logger, which makes a folder for each run, or another "
    "default_root_dir; or delete what that run wrote",
) -> None:
    """Raise ValueError if a new fit would change a file or folder that another fit has written.

    All ranks must call this function, and only the value of `exists` on rank 0 is used. In a fit of
    `lit-diffusion fit`, the function does nothing, because that command checks its run folder.
    """
    is_new = trainer.ckpt_path is None and trainer.global_step == 0
    if trainer.strategy.broadcast(exists and is_new and not hasattr(trainer, "run_folder")):
        raise ValueError(f"{path} belongs to another run: {fix}.")


class PeriodicEvaluation(Callback, ABC):
    """Base class of callbacks that log metrics after each validation or every n optimizer steps.

    A subclass defines `measure` and `metric_names`. A resumed run measures at the same steps as an
    uninterrupted run. In `measure`, all ranks must call the network the same number of times,
    because each call may have to gather split weights from all ranks.

    Args:
        every_n_steps: optimizer steps between measurements, >= 1; None measures after every
            validation of a fit.

    Attributes:
        folder: folder for the files that the callback writes. It is set in `setup`.

    Example:
        >>> class WeightNorm(PeriodicEvaluation):
        ...     def metric_names(self):
        ...         return ["weight_norm"]
        ...
        ...     def measure(self, trainer, pl_module):
        ...         norms = [parameter.norm() for parameter in pl_module.parameters()]
        ...         return {"weight_norm": torch.stack(norms).norm().item()}
        >>> trainer = Trainer(callbacks=[WeightNorm(every_n_steps=100)], logger=False)
    """

    folder: Path

    def __init__(self, every_n_steps: int | None) -> None:
        if every_n_steps is not None and every_n_steps < 1:
            raise ValueError(f"every_n_steps must be at least 1 or None, got {every_n_steps}.")
        self.every_n_steps = every_n_steps
        self._step = 0  # optimizer steps at the end of the last batch

    @abstractmethod
    def measure(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, float]:
        """Return metrics by name. All ranks call this method. The values of rank 0 are logged."""

    @abstractmethod
    def metric_names(self) -> list[str]:
        """Names of the metrics that a fit logs."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Set `folder`. Raise ValueError if Lightning's callback WeightAveraging is in use."""
        self.folder = Path(output_folder(trainer))
        for other in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance_lightning(other, WeightAveraging):
                raise ValueError(
                    f"{type(self).__name__} cannot know which weights it measures if "
                    f"{type(other).__name__} swaps them, because that depends on the order of "
                    "callbacks; use lit_diffusion.callbacks.EMA instead."
                )

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Raise ValueError if this callback would never run, or too rarely for a monitor."""
        name = type(self).__name__
        if self.every_n_steps is None and not trainer.enable_validation:
            raise ValueError(
                f"{name}(every_n_steps=None) runs at the end of validation, and this fit has no "
                f"validation; pass every_n_steps=1000 or remove {name}."
            )
        for other in trainer.callbacks if self.every_n_steps else ():  # type: ignore[attr-defined]
            if (monitor := getattr(other, "monitor", None)) in self.metric_names():
                raise ValueError(
                    f"{type(other).__name__}(monitor={monitor!r}) looks for this metric at every "
                    f"validation, and {name}(every_n_steps={self.every_n_steps}) does not measure "
                    f"it then; leave every_n_steps out of {name} and set the Trainer's "
                    "val_check_interval."
                )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Store the number of completed optimizer steps, which is not 0 in a resumed run."""
        self._step = trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Measure after the batch that reaches or passes a multiple of `every_n_steps`."""
        n, before, self._step = self.every_n_steps, self._step, trainer.global_step
        if n is not None and self._step // n > before // n:
            confirm_updates(trainer)
            self.measure_after_step(trainer, pl_module)

    def measure_after_step(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure, and log the metrics at the logger step of the last optimizer step.

        This method passes the metrics directly to the loggers. `pl_module.log` would log them only
        at the next logging step (see `log_every_n_steps`), and could lose measurements.
        """
        metrics = self.measure(trainer, pl_module)
        for logger in trainer.loggers if metrics else ():
            logger.log_metrics(metrics, step=stepped_batches(trainer) - 1)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure after each validation of a fit, but not after the sanity check."""
        fitting = trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking
        if fitting and self.every_n_steps is None:
            metrics = self.measure(trainer, pl_module)
            pl_module.log_dict(call_on_rank_zero(lambda: metrics), sync_dist=True)


# Weights and mode of the module


@contextmanager
def inference_mode(trainer: Trainer, module: LightningModule) -> Iterator[None]:
    """Context for evaluating a module during training, without side effects on training.

    Inside the context, the module is in eval mode, gradients are disabled, and the Trainer's
    precision applies. At the end, the states of the random generators are restored.
    """
    autocast = trainer.precision_plugin.forward_context()
    # With torch.inference_mode, a module could cache inference tensors, which cannot be trained.
    with isolate_rng(), torch.no_grad(), eval_mode(module), autocast:
        yield


def weights_providers(trainer: Trainer, name: str) -> list[WeightsProvider]:
    """Return the callbacks that provide weights called `name`."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    return [c for c in callbacks if isinstance(c, WeightsProvider) and name in c.names()]


@contextmanager
def swap_weights(trainer: Trainer, name: str) -> Iterator[None]:
    """Context in which callbacks swap in the weights called `name`, if a callback provides them."""
    with ExitStack() as stack:
        for provider in weights_providers(trainer, name):
            stack.enter_context(provider.weights(name))
        yield


@contextmanager
def averaged_weights(trainer: Trainer) -> Iterator[str]:
    """Context in which the module has averaged weights, if a callback provides them.

    Yields the name of the weights: "ema" for averages, or "raw" for the weights being trained.
    """
    with swap_weights(trainer, "ema"):
        yield "ema" if weights_providers(trainer, "ema") else "raw"


# Samples of the module


def require_generate(module: LightningModule, callback: str) -> None:
    """Raise TypeError if `callback` cannot call `module.generate(seeds, labels)`."""
    try:
        signature(getattr(module, "generate", None)).bind([0], None)  # type: ignore[arg-type]
    except TypeError as error:
        raise TypeError(
            f"{callback} needs a module with generate(seeds, labels=None) -> uint8 images "
            f"(protocols.CanGenerate), and {type(module).__name__} has no such method: {error}."
        ) from error


def require_noise_levels(module: LightningModule, callback: str) -> None:
    """Raise TypeError if the module lacks an attribute of `protocols.HasNoiseLevels`."""
    needed = ("per_sample_loss", "process", "codec", "num_classes")
    if lacking := [name for name in needed if not hasattr(module, name)]:
        raise TypeError(
            f"{callback} needs a module with {', '.join(needed)} (protocols.HasNoiseLevels); "
            f"{type(module).__name__} lacks {', '.join(lacking)}."
        )


def generate_images(
    module: LightningModule, seeds: Sequence[int]
) -> tuple[Tensor | None, list[int]]:
    """Generate one image per seed. If the module has classes, the label is `seed % num_classes`.

    Returns:
        A pair. If all samples are finite, the pair contains the images (N, C, H, W) in uint8, and
        an empty list. Otherwise, it contains None, and the seeds of the samples with NaN or
        infinite values.
    """
    assert isinstance(module, CanGenerate)
    labels, num_classes = None, getattr(module, "num_classes", None)
    if num_classes:
        labels = torch.tensor(classes_of(seeds, num_classes), device=module.device)
    try:
        images = module.generate(seeds, labels)
    except NonFiniteSamples as error:
        return None, error.seeds
    if images.is_floating_point() and not images.isfinite().all():
        non_finite = ~images.isfinite().flatten(1).all(1)
        return None, list(compress(seeds, non_finite.tolist()))
    check_images(images, len(seeds))
    return images, []


def check_images(images: Tensor, num: int) -> None:
    """Raise TypeError unless `images` are `num` images (N, C, H, W) uint8."""
    if images.dtype != torch.uint8 or images.ndim != 4 or len(images) != num:
        raise TypeError(
            f"generate must return {num} images, uint8 (N, C, H, W) in [0, 255], got "
            f"{images.dtype} {tuple(images.shape)}; clamp, round and cast them."
        )


# Images of the data


def indexed_loader(loaders: Any) -> "tuple[DataLoader[Any], Any] | None":
    """Return the first DataLoader whose samples can be indexed, and its samples.

    If there is no such DataLoader, the result is None.

    The function skips loaders of an IterableDataset, because it cannot be indexed. It also skips
    loaders with `batch_size=None`, because each item of their data sets is a whole batch. From a
    data set with a `SubsetRandomSampler`, it returns the subset.
    """
    for loader in CombinedLoader(loaders).flattened:
        has_items = isinstance(loader, DataLoader) and loader.batch_sampler is not None
        if has_items and not isinstance(loader.dataset, IterableDataset):
            indices = getattr(undivided_sampler(loader), "indices", None)
            items = loader.dataset if indices is None else Subset(loader.dataset, list(indices))
            return loader, items
    return None


def split_images(trainer: Trainer, split: str, where: BatchKey = None) -> ImageSet | None:
    """Return the images of "train", "val" or "test" from the data module or the Trainer's loader.

    The images come from the data module if it implements `metrics.images.HasSplits`. Otherwise,
    they come from the Trainer's DataLoader of this split. In this case, the argument `where` says
    how to find the images in a batch. The result is None if the Trainer has no DataLoader of this
    split whose samples can be indexed.
    """
    data = trainer.datamodule  # type: ignore[attr-defined]
    if isinstance(data, HasSplits):
        return open_split(data, split)
    fitting = split == "val" and trainer.state.fn == TrainerFn.FITTING
    if fitting and trainer.enable_validation and trainer.val_dataloaders is None:
        # Lightning would create these loaders later, before the first validation.
        trainer.validating = True
        try:
            trainer.fit_loop.epoch_loop.val_loop.setup_data()
        finally:
            trainer.training = True
    loaders = {
        "train": trainer.train_dataloader,
        "val": trainer.val_dataloaders,
        "test": trainer.test_dataloaders,
    }
    if (indexed := indexed_loader(loaders[split])) is None:
        return None
    loader, items = indexed
    return ImageSet(split, items, loader.collate_fn, loader.num_workers, key=where)


class FixedImages(NamedTuple):
    """Images of a data set that a callback uses in every evaluation.

    Attributes:
        images: (N, C, H, W) of any dtype.
        labels: labels or conditions of the N images, or None.
        indices: index of each image in the data set.
    """

    images: Tensor
    labels: Condition
    indices: list[int]

    def encode(self, module: Any) -> tuple[Tensor, Condition, Tensor]:
        """Return x0, labels and noise on the device of a module that has noise levels.

        Both x0 and the noise have the shape (N, C, H, W). The labels are None if the module's loss
        takes no labels. The noise of an image depends only on its index in the data set.
        """
        x0 = module.codec.encode(self.images.to(module.device))
        noise = PerSampleNoise(self.indices, stream="noise level").randn_like(x0)
        labels = self.labels
        if module.num_classes is None and getattr(module, "conditioning", None) is None:
            labels = None
        return x0, move_data_to_device(labels, x0.device), noise


def read_fixed_images(loaders: Any, num: int, where: BatchKey = None) -> FixedImages:
    """Read at most `num` images, evenly spaced over a data set. Every call reads the same images.

    The images come from the first data set of the Trainer's `loaders` that can be indexed. If there
    is none, the function raises a ValueError. It creates a new loader for this data set, because
    iterating over the Trainer's loader in the middle of an epoch would restart the loader's
    persistent workers. A random augmentation of the data set is the same in every call, too.
    """
    if (indexed := indexed_loader(loaders)) is None:
        raise ValueError(
            "NoiseLevelLoss and GradientDiagnostics need a DataLoader over a data set with "
            "indices, to read the same images every time; remove these callbacks for streamed data."
        )
    loader, items = indexed
    indices = evenly_spaced(len(items), num)
    options: Any = {"batch_size": 256, "sampler": indices, "collate_fn": loader.collate_fn}
    with isolate_rng():
        for seed in (torch.default_generator.manual_seed, np.random.seed, random.seed):
            seed(0)
        batches = list(DataLoader(items, **options))
    images = torch.cat([select_images(batch, where) for batch in batches])
    labels = None
    if isinstance(batches[0], list | tuple) and len(batches[0]) > 1:
        labels = by_part(lambda *rows: torch.cat(rows), *(batch[1] for batch in batches))
    return FixedImages(images, labels, indices)
