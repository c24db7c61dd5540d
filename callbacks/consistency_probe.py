"""How much samples still change from one evaluation to the next: needs no real images."""

from typing import Any, cast

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from lit_diffusion.callbacks.parts.fid_inputs import refuse_unable
from lit_diffusion.callbacks.parts.inference import averaged_weights, inference
from lit_diffusion.callbacks.parts.triggers import RunsEveryNSteps, log_in_row_of_step
from lit_diffusion.metrics.psnr import psnr
from lit_diffusion.protocols import CanGenerate
from lit_diffusion.ranks import from_first

NAME = "val/consistency"


class ConsistencyProbe(RunsEveryNSteps):
    """Logs `val/consistency`: mean PSNR (dB) of fixed seeds' images beside those of the last time.

    It rises while a run converges, and tells by how much samples still change. It says nothing of
    how good they are. With averaged weights where a callback provides them. The images are in the
    checkpoint: a resumed run goes on.

    Args:
        num: seeds 0, ..., num - 1.
        every_n_steps: optimizer steps from one time to the next; None measures at the end of every
            validation within fit.

    Raises:
        ValueError: for less than one seed; at fit start, where None would never trigger.
        TypeError: at fit start, for a module without `generate(seeds, labels=None)`.

    Source: "Why diffusion models are stable and how to make them faster" (2023), Eq. 1, of a run
    beside itself.

    Example:
        >>> ConsistencyProbe(num=8, every_n_steps=500).metric_names()
        ['val/consistency']
    """

    def __init__(self, num: int = 16, every_n_steps: int | None = None) -> None:
        super().__init__(every_n_steps)
        if num < 1:
            raise ValueError(f"num must be at least 1, got {num}.")
        self.num = num
        self._last: Tensor | None = None
        self._loaded = False  # since the run was set up

    def metric_names(self) -> list[str]:
        """One."""
        return [NAME]

    def state_dict(self) -> dict[str, Any]:
        """The last images, uint8."""
        return {} if self._last is None else {"images": self._last}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from the images of the checkpoint."""
        self._last, self._loaded = state_dict.get("images"), True

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """A checkpoint, if there is one, is read after this."""
        super().setup(trainer, pl_module, stage)
        self._loaded = False

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find conflicts before the first step."""
        refuse_unable(pl_module, "ConsistencyProbe")
        super().on_fit_start(trainer, pl_module)
        if not self._loaded:
            self._last = None

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure after each validation within fit."""
        fitting = trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking
        if fitting and self.every_n_steps is None:
            numbers = self._measure(trainer, pl_module)
            pl_module.log_dict(from_first(lambda: numbers), sync_dist=True)

    def at_step(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure."""
        log_in_row_of_step(trainer, self._measure(trainer, pl_module))

    def _measure(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, float]:
        with averaged_weights(trainer), inference(trainer, pl_module):
            images = cast(CanGenerate, pl_module).generate(range(self.num)).cpu()
        before, self._last = self._last, images
        if before is None or before.shape != images.shape:
            return {}
        return {NAME: psnr(images, before).mean().item()}
