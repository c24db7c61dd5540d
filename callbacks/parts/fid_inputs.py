"""What FIDEvaluation compares: samples of a module, and real images of a Trainer's data."""

from collections.abc import Sequence
from inspect import signature
from itertools import compress

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from lit_diffusion.callbacks.parts.fixed_items import indexed_loader, items_of
from lit_diffusion.callbacks.parts.inference import inference
from lit_diffusion.metrics.batches import Where
from lit_diffusion.metrics.reference import HasSplits, RealImages, images_of_split
from lit_diffusion.protocols import CanGenerate, NonFiniteSamples
from lit_diffusion.seeding import classes_of


def shares(total: int, rank: int, world_size: int, batch_size: int) -> list[range]:
    """Batches of the seeds rank, rank + world_size, ... below `total`; as many on every rank."""
    mine, longest = range(rank, total, world_size), len(range(0, total, world_size))
    return [mine[start : start + batch_size] for start in range(0, longest, batch_size)]


def generated(module: LightningModule, seeds: Sequence[int]) -> tuple[Tensor | None, list[int]]:
    """Samples of these seeds, with labels seed mod `num_classes` where the module has classes.

    Returns:
        Images uint8 (N, C, H, W) and no seeds; or no images and the seeds that are not finite.
    """
    assert isinstance(module, CanGenerate)
    num_classes = getattr(module, "num_classes", None)
    labels = None
    if num_classes:
        labels = torch.tensor(classes_of(seeds, num_classes), device=module.device)
    try:
        images = module.generate(seeds, labels)
    except NonFiniteSamples as error:
        return None, error.seeds
    if images.is_floating_point() and not images.isfinite().all():
        bad = ~images.isfinite().flatten(1).all(1)
        return None, list(compress(seeds, bad.tolist()))
    refuse_odd_images(images, len(seeds))
    return images, []


def try_one(trainer: Trainer, module: LightningModule) -> dict[str, float]:
    """Look at one sample before it is needed; nothing to log."""
    with inference(trainer, module):
        generated(module, [0])
    return {}


def refuse_unable(module: LightningModule, name: str) -> None:
    """Raise TypeError for a module that callback `name` can't ask for samples."""
    try:
        signature(getattr(module, "generate", None)).bind([0], None)  # type: ignore[arg-type]
    except TypeError as error:
        raise TypeError(
            f"{name} needs a module with generate(seeds, labels=None) -> uint8 images (protocols."
            f"CanGenerate), and {type(module).__name__} has none such: {error}."
        ) from error


def refuse_odd_images(images: Tensor, num: int) -> None:
    """Raise TypeError for what `protocols.CanGenerate` does not allow."""
    if images.dtype != torch.uint8 or images.ndim != 4 or len(images) != num:
        raise TypeError(
            f"generate must return {num} images, uint8 (N, C, H, W) in [0, 255], got "
            f"{images.dtype} {tuple(images.shape)}; clamp, round and cast them."
        )


def split_images(trainer: Trainer, name: str, where: Where = None) -> RealImages | None:
    """Images of "train", "val" or "test", from the data module or a loader; None without either.

    `where` says where the images of a foreign loader's batches are.
    """
    data = trainer.datamodule  # type: ignore[attr-defined]
    if isinstance(data, HasSplits):
        return images_of_split(data, name)
    if name == "val" and trainer.state.fn == TrainerFn.FITTING:
        _make_validation_loaders(trainer)
    loaders = {
        "train": trainer.train_dataloader,
        "val": trainer.val_dataloaders,
        "test": trainer.test_dataloaders,
    }[name]
    loader = indexed_loader(loaders)
    if loader is None:
        return None
    return RealImages(name, items_of(loader), loader.collate_fn, loader.num_workers, where=where)


def tested_split(trainer: Trainer) -> str:
    """Split of the images of a test; that of a data module with splits is "val" unless it tells."""
    data = trainer.datamodule  # type: ignore[attr-defined]
    return str(getattr(data, "tests_on", "val" if isinstance(data, HasSplits) else "test"))


def _make_validation_loaders(trainer: Trainer) -> None:
    # As Lightning does in the first epoch with a validation, and not again if they are there.
    if trainer.enable_validation and trainer.val_dataloaders is None:
        trainer.validating = True
        trainer.fit_loop.epoch_loop.val_loop.setup_data()
        trainer.training = True
