"""Where a fit stands when a training batch ends, which decides what may be saved there."""

from typing import Any

from lightning.pytorch import Trainer


class WholeSteps:
    """Tells batches whose gradients wait for the next, which are in no checkpoint, from others.

    A module with manual optimization may accumulate by itself and tells nobody: there, a batch that
    made no optimizer step is taken for one that accumulates.
    """

    def __init__(self) -> None:
        self._before: int | None = None

    def batch_starts(self, trainer: Trainer) -> None:
        """To be called in `on_train_batch_start`."""
        self._before = trainer.global_step

    def accumulates(self, trainer: Trainer) -> bool:
        """Whether the last batch was such a one."""
        if trainer.lightning_module.automatic_optimization:
            return accumulates(trainer)
        return trainer.global_step == self._before


def accumulates(trainer: Trainer) -> bool:
    """Whether the Trainer itself accumulates after the batch."""
    return trainer.fit_loop.epoch_loop._should_accumulate()


def validation_follows(trainer: Trainer) -> bool:
    """Whether a validation belongs to the batch.

    Lightning's own answer, which depends on half a dozen of its settings.
    """
    loop = trainer.fit_loop
    assert loop._data_fetcher is not None
    return loop.epoch_loop._should_check_val_fx(loop._data_fetcher)


def is_ending(trainer: Trainer) -> bool:
    """Whether the batch was the last of the run."""
    by_steps = 0 <= trainer.max_steps <= trainer.global_step
    epochs = trainer.max_epochs
    in_last_epoch = epochs is not None and 0 <= epochs <= trainer.current_epoch + 1
    stops = trainer.should_stop and trainer.fit_loop._can_stop_early
    return stops or by_steps or (in_last_epoch and trainer.is_last_batch)


def ends_epoch(trainer: Trainer) -> bool:
    """Whether work for the end of an epoch follows, which is not done again after a resume.

    Epochs of a single batch, which end with every batch, are left out.
    """
    return trainer.is_last_batch and trainer.num_training_batches > 1


def batch_is_ending(trainer: Trainer) -> bool:
    """Whether this is `on_train_batch_end`; the name of the hook is another while saving."""
    batches: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    return bool(batches.completed < batches.processed)


def epoch_is_ending(trainer: Trainer) -> bool:
    """Whether this is `on_train_epoch_end`."""
    epochs: Any = trainer.fit_loop.epoch_progress.current
    return bool(epochs.completed < epochs.processed)


def is_between_epochs(trainer: Trainer) -> bool:
    """Whether no epoch is running, as in `on_train_end`."""
    epochs: Any = trainer.fit_loop.epoch_progress.current
    return bool(epochs.completed == epochs.ready)


def row_is_to_come(trainer: Trainer) -> bool:
    """Whether the batch made an optimizer step whose metrics are yet to be logged."""
    return batch_is_ending(trainer) and not accumulates(trainer)
