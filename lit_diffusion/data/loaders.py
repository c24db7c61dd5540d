"""Shuffle training images, divide them over processes, and resume in the middle of an epoch."""

import os
from collections.abc import Callable, Iterator
from itertools import count, islice
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lit_diffusion.callbacks.trainer_state import limited_batches, loaded_checkpoint
from lit_diffusion.seeding import fold


class ShuffledSampler(DistributedSampler[Any]):
    """Sampler that shuffles by (seed, epoch), and yields keys `epoch * N + index`.

    Let N be the length of the dataset, and R the number of ranks (`num_replicas`). All ranks
    shuffle the dataset in the same order. Rank r gets the images at positions r, r + R, and so on.
    Therefore, step k of an epoch has the same images on one process with batch size `B * R` as on R
    processes with batch size B. Each rank gets `floor(N / R)` images. The remaining images, at most
    R - 1, are dropped. Different epochs drop different images.

    The class is a subclass of DistributedSampler, because the Trainer leaves a DistributedSampler
    unchanged. The Trainer would replace any other sampler with one that repeats images, or that
    divides the images over the ranks a second time.

    Example:
        >>> sampler = ShuffledSampler(range(4), seed=0)
        >>> sampler.set_epoch(2)
        >>> sorted(sampler)
        [8, 9, 10, 11]
    """

    start = 0
    """Number of keys of this rank to skip at the start of an epoch."""

    def __init__(
        self, dataset: Dataset[Any], seed: int, num_replicas: int = 1, rank: int = 0
    ) -> None:
        super().__init__(dataset, num_replicas, rank, shuffle=True, seed=seed, drop_last=True)

    def __iter__(self) -> Iterator[int]:
        size = len(self.dataset)  # type: ignore[arg-type]
        generator = torch.Generator().manual_seed(fold("order", self.seed, self.epoch))
        order = torch.randperm(size, generator=generator)
        share = order[self.rank : self.total_size : self.num_replicas]
        return iter((self.epoch * size + share[self.start :]).tolist())


def even_batch_size(num_images: int, num_replicas: int, batch_size: int) -> int:
    """Return the smallest size >= `batch_size` that gives all processes the same number of batches.

    No image is repeated, so some processes may get one image more than others. With `batch_size`
    images per batch, the extra image may need an extra batch. If the model is sharded (FSDP), the
    processes with an extra batch would hang in it, because a forward pass needs all processes.

    Raises:
        ValueError: if there are fewer images than processes.

    Example:
        >>> even_batch_size(360, 2, 64)
        64
        >>> even_batch_size(129, 2, 64)  # 65 + 64 images would be 2 batches and 1
        65
    """
    if num_images < num_replicas:
        raise ValueError(
            f"Every process needs an image, got {num_images} images for {num_replicas} processes:"
            " use fewer devices or more images."
        )
    low, high = num_images // num_replicas, -(-num_images // num_replicas)
    return next(size for size in count(batch_size) if -(-low // size) == -(-high // size))


class ResumableLoader(DataLoader[Any]):
    """DataLoader that, after a resume, skips the batches of the epoch that are already done.

    A resumed Trainer knows the number of batches to skip, but an ordinary loader would start the
    epoch again.

    Args:
        dataset: dataset of a DataLoader.
        batches_done: function that returns the number of batches to skip in an epoch. It is called
            when the first batch of the epoch is requested, because Lightning restores its loops
            only after it has created the iterators.
        **options: options of DataLoader, with a ShuffledSampler as `sampler`. If Lightning replaces
            the sampler, as with `overfit_batches`, the skipped batches are loaded and dropped.

    Example:
        >>> data, done = list("abcdefgh"), [0]
        >>> order = ShuffledSampler(data, seed=0)
        >>> loader = ResumableLoader(data, lambda: done[0], sampler=order, batch_size=2)
        >>> epoch = list(loader)
        >>> done[0] = 3
        >>> list(loader) == epoch[3:], len(loader)
        (True, 4)
    """

    def __init__(
        self, dataset: Dataset[Any], batches_done: Callable[[], int], **options: Any
    ) -> None:
        super().__init__(dataset, **options)
        self._batches_done = batches_done

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Yield the remaining batches of the epoch."""
        num_skipped = self._batches_done()
        if isinstance(self.sampler, ShuffledSampler):
            assert self.batch_size is not None
            self.sampler.start, num_skipped = num_skipped * self.batch_size, 0
        yield from islice(super().__iter__(), num_skipped, None)

    def state_dict(self) -> dict[str, Any]:
        """Return {}. Because this method exists, the Trainer treats the loader as resumable."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing, because the position is a function of the Trainer's progress."""


def batches_done_in_epoch(trainer: Trainer) -> int:
    """Number of training batches of the current epoch so far, including batches before a resume.

    The number is 0 if the Trainer is not training. A loader then yields the whole epoch.
    """
    return trainer.fit_loop.epoch_loop.batch_progress.current.ready if trainer.training else 0


def rescale_progress(trainer: Trainer, old_size: int, new_size: int, num_batches: int) -> None:
    """Convert the batch count of an interrupted epoch to a different batch size, on resume.

    The epoch continues after the images that were already used. The number of used images is
    rounded down to a multiple of this run's images per optimizer step. If the rounding changes the
    number, some images are used twice, and a warning says so.

    Args:
        trainer: Trainer that is about to restore its loops.
        old_size: images per batch over all processes in the run that wrote the checkpoint.
        new_size: images per batch over all processes in this run.
        num_batches: batches per epoch of this run, before `trainer.limit_train_batches` is applied.
    """
    progress = loaded_checkpoint(trainer)["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    current, num_batches = progress["current"], limited_batches(trainer, num_batches)
    images_done = current["processed"] * old_size
    unfinished = current["processed"] - current["completed"]
    if progress["is_last_batch"]:
        batches = num_batches  # the remaining images belong to no epoch
    else:
        per_step = trainer.accumulate_grad_batches
        steps = min(images_done // (new_size * per_step), (num_batches - 1) // per_step)
        batches = steps * per_step
        if batches * new_size != images_done:
            rank_zero_warn(
                f"The checkpoint is {images_done} images into an epoch, which is not a whole "
                f"number of this run's optimizer steps of {new_size * per_step} images: the epoch "
                f"continues after {batches * new_size} images."
            )
    current.update(
        ready=batches, started=batches, processed=batches, completed=batches - unfinished
    )


def usable_cores() -> int:
    """Number of CPU cores in the affinity mask of this process."""
    has_affinity = hasattr(os, "sched_getaffinity")  # not on macOS
    return len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
