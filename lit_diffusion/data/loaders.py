"""A DataLoader that goes on where a checkpoint was written, also in the middle of an epoch."""

from collections.abc import Callable, Iterator
from typing import Any

from lightning.pytorch import Trainer
from torch.utils.data import DataLoader, Dataset

from lit_diffusion.data.samplers import ShuffledSampler


class ResumableLoader(DataLoader[Any]):
    """Training batches in the order of a ShuffledSampler, without those an epoch has had before.

    A resumed Trainer knows how many batches of its epoch were trained on, but an ordinary loader
    starts that epoch over. This one asks when the first batch of an epoch is wanted, no earlier:
    Lightning makes iterators before it has restored the loops.

    Nothing is kept in checkpoints, so any number of workers may resume what any other number saved.

    Args:
        dataset: as DataLoader's.
        batches_done: called at the first batch of each epoch: how many of it come before, 0 for a
            new epoch. For a Trainer that is `batches_of_epoch(trainer)`.
        options: as DataLoader's, with a ShuffledSampler as sampler. Where Lightning puts another in
            its place, as `overfit_batches` does, an interrupted epoch starts over.

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
        if isinstance(self.sampler, ShuffledSampler):
            assert self.batch_size is not None
            self.sampler.start = self._batches_done() * self.batch_size
        yield from super().__iter__()

    def state_dict(self) -> dict[str, Any]:
        """Empty: the place is a function of the Trainer's progress. Tells it that we can resume."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing."""


def batches_of_epoch(trainer: Trainer) -> int:
    """Batches of the running epoch that were handed out to training, before a resume too."""
    return trainer.fit_loop.epoch_loop.batch_progress.current.ready
