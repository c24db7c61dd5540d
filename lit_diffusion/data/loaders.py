"""A DataLoader that goes on where a checkpoint was written, also in the middle of an epoch."""

import os
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import DataLoader, Dataset

from lit_diffusion.callbacks.trainer_state import limited_batches, loaded_checkpoint
from lit_diffusion.data.samplers import ShuffledSampler


class ResumableLoader(DataLoader[Any]):
    """Training batches in the order of a ShuffledSampler, without those an epoch has had before.

    A resumed Trainer knows how many batches of its epoch were trained on, but an ordinary loader
    starts that epoch over. This one asks when the first batch of an epoch is wanted, no earlier:
    Lightning makes iterators before it has restored the loops.

    Nothing of it is kept in checkpoints, so any number of workers may resume what any other number
    saved.

    Args:
        dataset: as DataLoader's.
        batches_done: called at the first batch of each epoch: how many of it come before.
        options: as DataLoader's, with a ShuffledSampler as sampler. Where Lightning puts another in
            its place, as `overfit_batches` does, batches that were done are loaded and left out.

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
        """Batches of the rest of the epoch."""
        done = self._batches_done()
        if isinstance(self.sampler, ShuffledSampler):
            assert self.batch_size is not None
            self.sampler.start, done = done * self.batch_size, 0
        yield from islice(super().__iter__(), done, None)

    def state_dict(self) -> dict[str, Any]:
        """Empty: the place is a function of the Trainer's progress. Tells it that we can resume."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing."""


def batches_of_epoch(trainer: Trainer) -> int:
    """Batches of the running epoch that were handed out to training, before a resume too."""
    return trainer.fit_loop.epoch_loop.batch_progress.current.ready


def recount(trainer: Trainer, before: int, now: int, length: int) -> None:
    """Count the done batches of an interrupted epoch as batches of another size, when resuming.

    The epoch goes on after the images that it has had. Where they are no whole optimizer steps of
    the new size, it goes on at the last whole one and warns of images that it has again.

    Args:
        trainer: that is about to restore its loops.
        before: images of a batch on all processes when the checkpoint was saved.
        now: the same in this run.
        length: batches of an epoch in this run, before the Trainer's limit.
    """
    progress = loaded_checkpoint(trainer)["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    done, batches = progress["current"], limited_batches(trainer, length)
    seen, unfinished = done["processed"] * before, done["processed"] - done["completed"]
    if progress["is_last_batch"]:
        count = batches  # whatever is left over belongs to no epoch
    else:
        each = trainer.accumulate_grad_batches
        count = min(seen // (now * each), (batches - 1) // each) * each
        if count * now != seen:
            rank_zero_warn(
                f"The checkpoint is {seen} images into an epoch, which are no whole number of this "
                f"run's optimizer steps of {now * each} images: it goes on after {count * now}."
            )
    done.update(ready=count, started=count, processed=count, completed=count - unfinished)


def usable_cores() -> int:
    """Number of CPU cores that the affinity of this process allows."""
    has_affinity = hasattr(os, "sched_getaffinity")  # not on macOS
    return len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
