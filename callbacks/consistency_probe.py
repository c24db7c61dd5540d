"""Measure how much the samples of fixed seeds change during training, without real images."""

from typing import Any, cast

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lit_diffusion.callbacks.evaluation import (
    PeriodicEvaluation,
    averaged_weights,
    inference_mode,
    require_generate,
)
from lit_diffusion.metrics.image_distances import psnr
from lit_diffusion.protocols import CanGenerate, NonFiniteSamples

NAME = "val/consistency"


class ConsistencyProbe(PeriodicEvaluation):
    """Logs the PSNR between the current and the previously measured samples of the same seeds.

    The metric `val/consistency` is the mean PSNR in dB. It rises as a run converges, because the
    samples change less. It does not measure how good the samples are. Samples are generated with
    averaged weights if another callback, such as EMA, provides them. Checkpoints contain the latest
    samples, so a resumed run compares its first samples with the samples in the checkpoint.

    Args:
        num: number of samples. Their seeds are 0, ..., num - 1.
        every_n_steps: optimizer steps between measurements; None measures after every validation
            of a fit.

    Raises:
        ValueError: if an argument is below 1. At fit start, the error is also raised if
            `every_n_steps` is None and the fit has no validation.
        TypeError: at fit start, if the module has no method `generate(seeds, labels=None)`.

    Source: Eq. 1 of "Why diffusion models are stable and how to make them faster" (2023), applied
    to two states of one run instead of two models.

    Example:
        >>> ConsistencyProbe(num=8, every_n_steps=500).metric_names()
        ['val/consistency']
    """

    def __init__(self, num: int = 16, every_n_steps: int | None = None) -> None:
        super().__init__(every_n_steps)
        if num < 1:
            raise ValueError(f"num must be at least 1, got {num}.")
        self.num = num
        self._last_images: Tensor | None = None

    def metric_names(self) -> list[str]:
        """The name of the logged metric."""
        return [NAME]

    def state_dict(self) -> dict[str, Any]:
        """The latest samples, (num, C, H, W) uint8; {} before the first measurement."""
        return {} if self._last_images is None else {"images": self._last_images}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the latest samples."""
        self._last_images = state_dict.get("images")

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Clear the samples of an earlier fit.

        In a resumed fit, Lightning later restores the samples from the checkpoint.
        """
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            self._last_images = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Raise an error if the module cannot generate samples."""
        require_generate(pl_module, "ConsistencyProbe")
        super().on_fit_start(trainer, pl_module)

    def measure(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, float]:
        """Return the mean PSNR to the previous samples, or {} at the first measurement."""
        with averaged_weights(trainer), inference_mode(trainer, pl_module):
            try:
                images = cast(CanGenerate, pl_module).generate(range(self.num)).cpu()
            except NonFiniteSamples as error:  # raised on every rank; training can continue
                step = trainer.global_step
                rank_zero_warn(f"ConsistencyProbe measures nothing at step {step}: {error}")
                return {}
        before, self._last_images = self._last_images, images
        if before is None or before.shape != images.shape:
            return {}
        return {NAME: psnr(images, before).mean().item()}
