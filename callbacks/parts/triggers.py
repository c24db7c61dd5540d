"""When a callback that takes time runs: at the end of validation, or every n optimizer steps."""

from abc import ABC, abstractmethod
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lit_diffusion.callbacks.parts.inference import refuse_unnamed_averages
from lit_diffusion.callbacks.parts.strategies import refuse_split_sampling


class EveryNSteps:
    """Knows the first training batch after each n-th optimizer step.

    A resumed run has the same ones; accumulated batches of one step have one. None has none.
    """

    def __init__(self, n: int | None) -> None:
        if n is not None and n < 1:
            raise ValueError(f"every_n_steps must be at least 1 or None, got {n}.")
        self.n = n
        self._last = 0

    def start(self, step: int) -> None:
        """Begin at `step`, of which the trigger is past."""
        self._last = step

    def due(self, step: int) -> bool:
        """Whether a multiple of n was reached since the last call; each is told once."""
        last, self._last = self._last, step
        return self.n is not None and step // self.n > last // self.n


class RunsEveryNSteps(Callback, ABC):
    """A callback that calls `at_step` every n optimizer steps, and runs at validation without n."""

    def __init__(self, n: int | None) -> None:
        self.every_n_steps = n
        self._trigger = EveryNSteps(n)

    @abstractmethod
    def at_step(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """What takes time."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse callbacks beside which the weights would be in doubt."""
        refuse_unnamed_averages(trainer, type(self).__name__)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse a Trainer under which it would never run, and weights that are split."""
        name = type(self).__name__
        if self.every_n_steps is None and not trainer.enable_validation:
            raise ValueError(
                f"{name}(every_n_steps=None) runs at the end of validation, and this fit has no "
                f"validation; pass every_n_steps=1000 or remove {name}."
            )
        refuse_split_sampling(pl_module, name)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count from here, in a resumed run too."""
        self._trigger.start(trainer.global_step)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Run every so many steps."""
        if self._trigger.due(trainer.global_step):
            self.at_step(trainer, pl_module)
