"""How many steps each of several optimizers has completed."""

from lightning.pytorch import Trainer
from torch.optim import Optimizer


class StepCounts:
    """Steps completed by each optimizer; their sum is `global_step`.

    Args:
        trainer: counts the sum.
        counts: so far, by position in `trainer.optimizers`.
    """

    def __init__(self, trainer: Trainer, counts: list[int]) -> None:
        self._trainer = trainer
        self._counts = list(counts)
        self._start = list(counts)
        self._turn = 0  # whose step the next one that completes is

    def turn_to(self, optimizer: Optimizer) -> None:
        """The next step to complete is this optimizer's."""
        self.completed()
        self._turn = self._trainer.optimizers.index(optimizer)

    def completed(self) -> list[int]:
        """Steps completed so far."""
        self._counts[self._turn] += self._trainer.global_step - sum(self._counts)
        return list(self._counts)

    def since_start(self) -> list[int]:
        """Steps completed in this fit."""
        return [n - start for n, start in zip(self.completed(), self._start, strict=True)]
