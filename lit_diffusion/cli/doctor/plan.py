"""A run in numbers, as its Trainer counts them."""

import math
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Trainer

from lit_diffusion.cli.doctor.rehearsal import is_timed


@dataclass(frozen=True)
class Plan:
    """How long a run is, and what happens in it how often. None is what is not known."""

    steps: float | None = None  # optimizer steps of the whole run; infinite where nothing ends it
    start_step: int = 0  # optimizer steps of the checkpoint that the run goes on from
    num_images: int | None = None  # of the training split
    held_out: int | None = None  # images of the validation split
    batch_size: int | None = None  # on each process
    batches_per_epoch: int | None = None  # on each process
    ranks: int = 1
    accumulate: int = 1  # batches to an optimizer step
    val_batches: float | None = None  # from one validation to the next, on average; 0 is never
    val_images: int | None = None  # that a validation looks at

    @property
    def length(self) -> int | None:
        """Optimizer steps of the whole run; None where not known, or without end."""
        return None if self.steps is None or math.isinf(self.steps) else int(self.steps)

    @property
    def steps_to_go(self) -> int | None:
        """Those that are not done yet."""
        return None if self.length is None else max(self.length - self.start_step, 0)

    @property
    def steps_per_epoch(self) -> int | None:
        """Optimizer steps: the batches left over at the end of an epoch make one too."""
        batches = self.batches_per_epoch
        return math.ceil(batches / self.accumulate) if batches else None

    @property
    def epochs(self) -> float | None:
        """Of the whole run."""
        if self.length is None or self.steps_per_epoch is None:
            return None
        return self.length / self.steps_per_epoch

    @property
    def global_batch(self) -> int | None:
        """Images of an optimizer step on all processes."""
        return None if self.batch_size is None else self.batch_size * self.ranks * self.accumulate

    @property
    def images_seen(self) -> int | None:
        """On all processes, all batches taken for full ones."""
        if self.length is None or self.batch_size is None:
            return None
        batches = self.length * self.accumulate
        if self.batches_per_epoch and self.steps_per_epoch:
            epochs, rest = divmod(self.length, self.steps_per_epoch)
            left = min(rest * self.accumulate, self.batches_per_epoch)
            batches = epochs * self.batches_per_epoch + left
        return batches * self.batch_size * self.ranks

    @property
    def steps_between_validations(self) -> float | None:
        """Optimizer steps, on average."""
        if self.val_batches and self.batches_per_epoch and self.steps_per_epoch:
            return self.val_batches * self.steps_per_epoch / self.batches_per_epoch
        return None if self.val_batches is None else self.val_batches / self.accumulate

    def interval(self, every_n_steps: int | None) -> float | None:
        """Optimizer steps from one time to the next; None is after every validation."""
        return self.steps_between_validations if every_n_steps is None else every_n_steps

    def times(self, every_n_steps: int | None) -> int | None:
        """How often that is in what is to go of the run; None where not known."""
        every = self.interval(every_n_steps)
        if every == 0:
            return 0
        if self.length is None or every is None:
            return None
        # A share of an epoch leaves a remainder, so that rounding must not add a validation.
        return math.floor(self.length / every + 1e-9) - math.floor(self.start_step / every + 1e-9)


def plan_of(trainer: Trainer, start_step: int = 0) -> Plan:
    """What a Trainer says of the run whose start it is in, and whose data are open or not."""
    train, batches = trainer.train_dataloader, trainer.num_training_batches
    stated = getattr(getattr(trainer, "datamodule", None), "batch_size", None)
    return Plan(
        steps=_steps(trainer),
        start_step=start_step,
        num_images=num_images_in(train),
        held_out=num_images_in(trainer.val_dataloaders),
        batch_size=getattr(train, "batch_size", None) or stated,
        batches_per_epoch=int(batches) if train is not None and math.isfinite(batches) else None,
        ranks=trainer.world_size,
        accumulate=trainer.accumulate_grad_batches,
        val_batches=_batches_between_validations(trainer),
        val_images=_val_images(trainer),
    )


def _steps(trainer: Trainer) -> float | None:
    if 0 in (trainer.max_steps, trainer.max_epochs, trainer.limit_train_batches):
        return 0
    steps: float = trainer.max_steps
    if trainer.max_epochs == -1 or trainer.train_dataloader is not None:
        steps = trainer.estimated_stepping_batches
    is_known = steps >= 0 and not (math.isinf(steps) and is_timed(trainer))
    return steps if is_known else None


def _batches_between_validations(trainer: Trainer) -> float | None:
    if not trainer.enable_validation:
        return 0
    epochs, interval = trainer.check_val_every_n_epoch, trainer.val_check_interval
    if epochs is None:
        return interval if isinstance(interval, int) else None  # else a time
    each = getattr(trainer, "val_check_batch", None)
    if trainer.train_dataloader is None or not each or math.isinf(each):
        return None
    per_epoch = trainer.num_training_batches
    often = per_epoch // each
    return per_epoch * epochs / often if often else None


def _val_images(trainer: Trainer) -> int | None:
    if not trainer.enable_validation:
        return 0
    loader: Any = trainer.val_dataloaders
    images = num_images_in(loader)
    if images is None:
        return None
    batches = sum(trainer.num_val_batches)
    return min(images, int(batches * loader.batch_size * trainer.world_size))


def num_images_in(loader: Any) -> int | None:
    """Number of them; None of several loaders, and of streams."""
    try:
        return len(loader.dataset)
    except (AttributeError, TypeError):
        return None
