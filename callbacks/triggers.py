"""When a callback that takes time runs: at the end of validation, or every n optimizer steps."""

from lightning.pytorch import Trainer


class EveryNSteps:
    """Tells the first training batch after each n-th optimizer step.

    A trigger is a function of the step, so a resumed run has the same ones; accumulated batches of
    one step have one, and so have modules that step several optimizers a batch.

    Args:
        n: at least 1; None never triggers.

    Raises:
        ValueError: n below 1.

    Example:
        >>> trigger = EveryNSteps(10)
        >>> trigger.start(step=20)
        >>> [step for step in (20, 21, 30, 30, 39, 41) if trigger.due(step)]
        [30, 41]
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

    def refuse_never(self, trainer: Trainer, name: str) -> None:
        """Raise ValueError where neither validation nor a number of steps would trigger `name`."""
        if self.n is None and not trainer.enable_validation:
            raise ValueError(
                f"{name}(every_n_steps=None) runs at the end of validation, and this fit has no "
                f"validation; pass every_n_steps=1000 or remove {name}."
            )
