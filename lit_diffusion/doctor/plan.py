"""What a config asks for, as plain numbers: how long a run is and what happens in it."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Average:
    """An EMA callback.

    Attributes:
        decays: per optimizer step.
        warmup: whether the decay of step n is at most (1 + n) / (10 + n).
    """

    decays: tuple[float, ...]
    warmup: bool


@dataclass(frozen=True)
class Evaluation:
    """A FIDEvaluation callback.

    Attributes:
        num_samples: to generate.
        every_n_steps: optimizer steps; None is after every validation.
        repeats_at_end: further evaluations of the last step.
        num_features: of the extractor; None where not known.
        num_real: images compared with; None where not known.
    """

    num_samples: int
    every_n_steps: int | None = None
    repeats_at_end: int = 0
    num_features: int | None = None
    num_real: int | None = None


@dataclass(frozen=True)
class Grid:
    """A SampleGrid callback.

    Attributes:
        num: of samples.
        every_n_steps: optimizer steps; None is after every validation.
    """

    num: int
    every_n_steps: int | None = None


@dataclass(frozen=True)
class LRSchedule:
    """A schedule of the lr.

    Attributes:
        name: of its class.
        warmup_steps: optimizer steps until the full lr; None where not known.
        length: optimizer steps that it is made for; None is as long as the run, or endless.
        follows_run: whether it takes its length from the run.
        final_factor: share of the lr that is left at `length`.
        fault: what it raises before the run is over; None where nothing.
    """

    name: str
    warmup_steps: int | None = 0
    length: int | None = None
    follows_run: bool = False
    final_factor: float = 0.0
    fault: str | None = None


@dataclass(frozen=True)
class Course:
    """A callback that changes training over time, such as CLTS or MDLRC.

    Attributes:
        name: of its class.
        length: optimizer steps until it is over; None is those of the run.
    """

    name: str
    length: int | None


@dataclass(frozen=True)
class Plan:
    """A run on paper.

    Attributes:
        max_steps: as the Trainer's: -1 is no limit.
        max_epochs: as the Trainer's: -1 is no limit, None the Trainer's own.
        has_timer: whether the Trainer also stops after a time.
        start_step: optimizer steps behind the checkpoint that the run goes on from.
        num_images: of the training split; None where not known.
        batch_size: on each process; None where not known.
        batches_per_epoch: on each process; None where not known, or endless.
        ranks: processes of the run; None where not known.
        accumulate: batches to an optimizer step.
        val_interval: `val_check_interval`: batches, or a share of an epoch; None where it is
            a time.
        val_epochs: `check_val_every_n_epoch`: None counts batches over epochs.
        val_images: of the validation split; None where not known, 0 without.
        averages: EMA callbacks.
        evaluations: FIDEvaluation callbacks.
        grids: SampleGrid callbacks.
        lr: schedule of the lr; None where it is constant or not known.
        courses: callbacks that change training over time.
    """

    max_steps: int = -1
    max_epochs: int | None = None
    has_timer: bool = False
    start_step: int = 0
    num_images: int | None = None
    batch_size: int | None = None
    batches_per_epoch: int | None = None
    ranks: int | None = 1
    accumulate: int = 1
    val_interval: int | float | None = 1.0
    val_epochs: int | None = 1
    val_images: int | None = None
    averages: tuple[Average, ...] = ()
    evaluations: tuple[Evaluation, ...] = ()
    grids: tuple[Grid, ...] = ()
    lr: LRSchedule | None = None
    courses: tuple[Course, ...] = ()

    @property
    def epochs_limit(self) -> int | None:
        """Epochs after which the Trainer stops; None is never. Its own limit is 1,000."""
        if self.max_epochs is None:
            return 1000 if self.max_steps == -1 and not self.has_timer else None
        return None if self.max_epochs < 0 else self.max_epochs

    @property
    def is_endless(self) -> bool:
        """Whether nothing ends the run."""
        return self.max_steps < 0 and self.epochs_limit is None and not self.has_timer

    @property
    def steps_per_epoch(self) -> int | None:
        """Optimizer steps: the batches left over at the end of an epoch make one too."""
        known = self.batches_per_epoch
        return None if known is None else math.ceil(known / self.accumulate)

    @property
    def steps(self) -> int | None:
        """Optimizer steps of the whole run; None where not known."""
        limits = [self.max_steps] if self.max_steps >= 0 else []
        if self.epochs_limit is not None and self.steps_per_epoch is not None:
            limits.append(self.epochs_limit * self.steps_per_epoch)
        return min(limits) if limits else None

    @property
    def steps_to_go(self) -> int | None:
        """Those that are not done yet."""
        return None if self.steps is None else max(self.steps - self.start_step, 0)

    @property
    def epochs(self) -> float | None:
        """Of the whole run."""
        if self.steps is None or not self.steps_per_epoch:
            return None
        return self.steps / self.steps_per_epoch

    @property
    def global_batch(self) -> int | None:
        """Images of an optimizer step on all processes."""
        if self.batch_size is None or self.ranks is None:
            return None
        return self.batch_size * self.ranks * self.accumulate

    @property
    def images_seen(self) -> int | None:
        """On all processes, all batches taken for full ones."""
        if self.steps is None or self.batch_size is None or self.ranks is None:
            return None
        return self.batches(self.steps) * self.batch_size * self.ranks

    def batches(self, steps: int) -> int:
        """Of one process, for so many optimizer steps from the start."""
        per_epoch, per_step = self.batches_per_epoch, self.steps_per_epoch
        if not per_epoch or not per_step:
            return steps * self.accumulate
        epochs, rest = divmod(steps, per_step)
        return epochs * per_epoch + min(rest * self.accumulate, per_epoch)

    @property
    def batches_between_validations(self) -> float | None:
        """On each process, on average; None where there is no validation, or not known when."""
        if self.val_images == 0 or self.val_interval is None:
            return None
        if self.val_epochs is None:
            return self.val_interval
        if not self.batches_per_epoch:
            return None
        per_epoch, interval = self.batches_per_epoch, self.val_interval
        if isinstance(interval, float):
            interval = max(1, int(per_epoch * interval))
        if not 0 < interval <= per_epoch:
            return None  # the Trainer refuses it
        return per_epoch * self.val_epochs / (per_epoch // interval)

    @property
    def steps_between_validations(self) -> float | None:
        """Optimizer steps, on average."""
        between = self.batches_between_validations
        if between is None:
            return None
        if self.batches_per_epoch and self.steps_per_epoch:
            return between * self.steps_per_epoch / self.batches_per_epoch
        return between / self.accumulate

    def times(self, every_n_steps: int | None) -> int | None:
        """How often something is done in what is to go of the run; None where not known.

        Args:
            every_n_steps: optimizer steps; None is after every validation.
        """
        every = self.steps_between_validations if every_n_steps is None else every_n_steps
        if self.val_images == 0 and every_n_steps is None:
            return 0
        if self.steps is None or not every:
            return None
        # A share of an epoch leaves a remainder, so that rounding must not add a validation.
        return math.floor(self.steps / every + 1e-9) - math.floor(self.start_step / every + 1e-9)
