"""When a callback that takes time runs: at the end of validation, or every n optimizer steps."""

from abc import ABC, abstractmethod
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import WeightAveraging

from lit_diffusion.sharding import first_split
from lit_diffusion.trainer_state import is_a, stepped_batches


class RunsEveryNSteps(Callback, ABC):
    """Calls `at_step` after the batch that comes to a multiple of n optimizer steps, once for each.

    A resumed run has the same ones. Without n, whoever inherits from it runs at validation.
    """

    def __init__(self, n: int | None) -> None:
        if n is not None and n < 1:
            raise ValueError(f"every_n_steps must be at least 1 or None, got {n}.")
        self.every_n_steps = n
        self._step = 0  # of which the trigger is past

    @abstractmethod
    def at_step(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """What takes time."""

    @abstractmethod
    def metric_names(self) -> list[str]:
        """What it logs in a fit."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse averages of Lightning's, which tell nobody when they are in place."""
        for other in trainer.callbacks:  # type: ignore[attr-defined]
            if is_a(other, WeightAveraging):
                raise ValueError(
                    f"{type(self).__name__} cannot know which weights it would see beside "
                    f"{type(other).__name__}, as that depends on the order of callbacks; use "
                    "lit_diffusion.callbacks.EMA instead."
                )

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse a Trainer under which it would never run, and weights that are split."""
        name = type(self).__name__
        if self.every_n_steps is None and not trainer.enable_validation:
            raise ValueError(
                f"{name}(every_n_steps=None) runs at the end of validation, and this fit has no "
                f"validation; pass every_n_steps=1000 or remove {name}."
            )
        for other in trainer.callbacks if self.every_n_steps else ():  # type: ignore[attr-defined]
            if (monitor := getattr(other, "monitor", None)) in self.metric_names():
                raise ValueError(
                    f"{type(other).__name__}(monitor={monitor!r}) looks for it at every validation,"
                    f" and {name}(every_n_steps={self.every_n_steps}) does not measure then; leave "
                    f"every_n_steps out of {name} and set the Trainer's val_check_interval."
                )
        if split := first_split(dict(pl_module.named_parameters())):
            raise ValueError(
                f"{name} has every rank compute samples of its own, which needs whole weights, and "
                f"{split!r} is split over ranks; leave {name} out, and look at checkpoints in "
                "another process (`lit-diffusion sample`, `lit-diffusion evaluate`)."
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count from here, in a resumed run too."""
        self._step = trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Run every so many steps."""
        n, before, self._step = self.every_n_steps, self._step, trainer.global_step
        if n is not None and self._step // n > before // n:
            self.at_step(trainer, pl_module)


def log_in_row_of_step(trainer: Trainer, numbers: dict[str, float]) -> None:
    """Log what was measured after an optimizer step in the row that Lightning has of that step.

    `pl_module.log` would wait for Lightning's next row, lose all but the last measurement, repeat
    it in the rows after it, and lose it in a run that is saved and ends before that row.
    """
    for logger in trainer.loggers if numbers else ():
        logger.log_metrics(numbers, step=stepped_batches(trainer) - 1)
