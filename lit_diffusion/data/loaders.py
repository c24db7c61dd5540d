"""Which images each process loads in which order, and resuming in the middle of an epoch."""

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
    """A new order in every epoch, a function of (seed, epoch); yields keys `epoch * N + index`.

    Ranks take turns in one common order, so step k of an epoch has the same images on one process
    with batch B * R as on R processes with batch B. Each rank gets floor(N / R) images; the up to
    R - 1 left over differ from epoch to epoch. N is the length of the dataset, R `num_replicas`.

    The Trainer uses a DistributedSampler as it is. Any other sampler it would replace by one that
    pads with repeated images or, if the sampler shards, shards a second time.
    """

    start = 0
    """Number of this rank's keys to skip at the beginning of an epoch."""

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
    """The least size, from `batch_size` up, with which all processes have equally many batches.

    Shares of an unrepeated split differ by up to one image, which can make one batch more. With a
    sharded model (FSDP), whose every forward pass communicates, that process would hang.

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
    least, most = num_images // num_replicas, -(-num_images // num_replicas)
    return next(size for size in count(batch_size) if -(-least // size) == -(-most // size))


class ResumableLoader(DataLoader[Any]):
    """Training batches in the order of a ShuffledSampler, from where a checkpoint was written.

    A resumed Trainer knows how many batches of its epoch were trained on, but an ordinary loader
    starts that epoch over. This one asks when the first batch of an epoch is requested, as
    Lightning creates iterators before it has restored its loops.

    Args:
        dataset: as of DataLoader.
        batches_done: called at the first batch of each epoch; returns the number of batches of that
            epoch to skip.
        **options: as of DataLoader, with a ShuffledSampler as `sampler`. If Lightning replaces it,
            as with `overfit_batches`, the batches to skip are loaded and dropped.

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
        """Yield the batches of the rest of the epoch."""
        done = self._batches_done()
        if isinstance(self.sampler, ShuffledSampler):
            assert self.batch_size is not None
            self.sampler.start, done = done * self.batch_size, 0
        yield from islice(super().__iter__(), done, None)

    def state_dict(self) -> dict[str, Any]:
        """Empty. Its presence tells the Trainer that the loader can resume within an epoch."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Does nothing: the position is a function of the Trainer's progress."""


def batches_done_in_epoch(trainer: Trainer) -> int:
    """Batches of the running epoch that training has received, those before a resume included."""
    return trainer.fit_loop.epoch_loop.batch_progress.current.ready


def rescale_progress(trainer: Trainer, old_size: int, new_size: int, num_batches: int) -> None:
    """On resume, convert the done batches of an interrupted epoch to another batch size.

    The epoch continues after the images that it has had. If these are no whole number of optimizer
    steps of the new size, it continues after the last whole one and warns of the repeated images.

    Args:
        trainer: that is about to restore its loops.
        old_size: images in a batch, on all processes, of the run that wrote the checkpoint.
        new_size: the same in this run.
        num_batches: in an epoch of this run, before the Trainer's limit.
    """
    progress = loaded_checkpoint(trainer)["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    current, num_batches = progress["current"], limited_batches(trainer, num_batches)
    images_done = current["processed"] * old_size
    unfinished = current["processed"] - current["completed"]
    if progress["is_last_batch"]:
        batches = num_batches  # images left over belong to no epoch
    else:
        per_step = trainer.accumulate_grad_batches
        steps = min(images_done // (new_size * per_step), (num_batches - 1) // per_step)
        batches = steps * per_step
        if batches * new_size != images_done:
            rank_zero_warn(
                f"The checkpoint is {images_done} images into an epoch, which are no whole number "
                f"of this run's optimizer steps of {new_size * per_step} images: it goes on after "
                f"{batches * new_size}."
            )
    current.update(
        ready=batches, started=batches, processed=batches, completed=batches - unfinished
    )


def usable_cores() -> int:
    """Number of CPU cores that the affinity of this process allows."""
    has_affinity = hasattr(os, "sched_getaffinity")  # not on macOS
    return len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
