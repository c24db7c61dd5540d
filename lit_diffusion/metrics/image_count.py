"""Training images seen by all processes, also of a run whose resumes change the batch size."""

from typing import Any, NamedTuple

from lightning.pytorch import Trainer


class ImageCount(NamedTuple):
    """Training images seen by all processes, all batches taken for full ones.

    So many `images` were seen when `batches` of one process were done, and `each` batch since then
    has so many on all processes; None where that is not known.
    """

    images: int | None
    batches: int
    each: int | None

    def at(self, batches: int) -> int | None:
        """Images seen when so many batches are done, those before a resume included."""
        if self.images is None or self.each is None:
            return None
        return self.images + (batches - self.batches) * self.each

    def resumed(self, batches: int, each: int | None) -> "ImageCount":
        """What counts from `batches` on, of which every one now has `each` images."""
        return self if each == self.each else ImageCount(self.at(batches), batches, each)

    def now(self, trainer: Trainer) -> int | None:
        """Images seen by now."""
        return self.at(_batches_done(trainer))


def counted(trainer: Trainer, before: ImageCount | None = None) -> ImageCount:
    """What counts the images of a fit that starts.

    It goes on from the count `before` of a checkpoint. Without, all batches before a resume are
    taken to have been of the present size.
    """
    batch_size = getattr(trainer.train_dataloader, "batch_size", None)
    each = int(batch_size * trainer.world_size) if batch_size else None
    return (before or ImageCount(0, 0, each)).resumed(_batches_done(trainer), each)


def read_count(state: Any) -> ImageCount | None:
    """The count in a checkpoint, where it is the list of one, or None."""
    if state is None:
        return None
    is_list = isinstance(state, list) and len(state) == 3
    if not is_list or not all(number is None or _is_count(number) for number in state):
        raise ValueError(f"images_seen must be three counts, got {state!r:.100}.")
    return ImageCount(*state)


def images_seen(trainer: Trainer) -> int | None:
    """Training images of a fit so far on all processes, by the `image_count` of a callback.

    None where the batch size is not known.
    """
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    counts = [getattr(callback, "image_count", None) for callback in callbacks]
    known = [count for count in counts if isinstance(count, ImageCount)]
    return (known[0] if known else counted(trainer)).now(trainer)


def _batches_done(trainer: Trainer) -> int:
    """Training batches of this process, those before a resume included."""
    total: Any = trainer.fit_loop.epoch_loop.batch_progress.total
    return int(total.processed)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63
