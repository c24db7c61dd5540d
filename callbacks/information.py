"""Noise levels drawn by how much of the image is decided at each of them, measured in training."""

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lit_diffusion.callbacks.loss_resampler import DensityOfLosses, LossHistory
from lit_diffusion.losses import DenoisingLoss


def entropy_rate(history: LossHistory, per_loss: Tensor, log_snr: Tensor) -> Tensor:
    """(num_bins,) how much x_t tells of x0 more at one end of a bin than at the other, in nats.

    Per pixel, by I-MMSE: half the mean squared error of the noise, at most 1 as of a network that
    says 0, times the change of the log SNR.

    Args:
        history: of losses.
        per_loss: (num_bins,) squared error of the noise for a loss of 1.
        log_snr: (num_bins + 1,) at the edges of the bins, falling.

    Source: Guo, Shamai & Verdu 2005 (I-MMSE), Eq. 2; Raya et al. 2026 (InfoNoise, arXiv
    2602.18647), whose profile this is.

    Example:
        >>> history = LossHistory(torch.tensor([[0.5], [4.0]]).double(), torch.tensor([1, 1]))
        >>> entropy_rate(history, torch.ones(2), torch.tensor([3.0, 1.0, -1.0])).tolist()
        [0.5, 1.0]
    """
    error = (history.losses.mean(1) * per_loss.to(history.losses)).clamp(max=1)
    return 0.5 * error * -log_snr.to(error).diff()


class InformationDensity(DensityOfLosses):
    """Draws noise levels by how fast they tell of the image: the entropy rate, measured on the way.

    Nothing is tuned to the data: where noise hides the whole image, or hides nothing of it, there
    is nothing to learn, and the losses say where that is. The objective changes, as no weight
    undoes the density. Until each bin has had `history` losses, times are uniform. Logs
    `information/full` and `information/tv`. What it needs of a module and raises is as of
    `DensityOfLosses`, and beside it a `DiffusionModule`'s process, parameterization and
    `DenoisingLoss`, by which the loss says the error of the noise.

    Args:
        num_bins: as of `DensityOfLosses`.
        history: as of `DensityOfLosses`.
        uniform_prob: as of `DensityOfLosses`.

    Raises:
        ValueError: as `DensityOfLosses`, and at fit start for another kind of module or loss.

    Source: as of `entropy_rate`. The clamp, the bins and the share of uniform draws are ours.

    Example:
        >>> InformationDensity(num_bins=50).writes
        ('timestep_density',)
    """

    writes = ("timestep_density",)
    logged = "information"

    def __init__(self, num_bins: int = 50, history: int = 32, uniform_prob: float = 0.1) -> None:
        super().__init__(num_bins, history, uniform_prob)
        self._per_loss = self._log_snr = torch.empty(0)

    def density(self, history: LossHistory) -> Tensor:
        """In proportion to `entropy_rate`, mixed with uniform."""
        rate = entropy_rate(history, self._per_loss, self._log_snr)
        mixed = (1 - self.uniform_prob) * rate / rate.sum() + self.uniform_prob / self.num_bins
        full = (history.seen >= self.history).all()
        return torch.where(full, mixed, torch.ones_like(mixed))

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find what a loss says of the noise."""
        super().on_fit_start(trainer, pl_module)
        self._per_loss, self._log_snr = noise_errors(pl_module, self.num_bins)


def noise_errors(module: Any, num_bins: int) -> tuple[Tensor, Tensor]:
    """(num_bins,) squared error of the noise for a loss of 1; (num_bins + 1,) log SNR at edges.

    Raises:
        ValueError: for a module of another kind, or a weight of 0.
    """
    loss = getattr(module, "loss", None)
    if not isinstance(loss, DenoisingLoss):
        raise ValueError(
            "InformationDensity needs a DiffusionModule with DenoisingLoss, by which the loss says "
            f"the error of the noise, got {type(module).__name__} with {loss}."
        )
    centers = (torch.arange(num_bins, dtype=torch.float64) + 0.5) / num_bins
    alpha, sigma = module.process.alpha_sigma(module.process.from_unit(centers))
    gain = module.parameterization.gain(alpha, sigma)
    weight = loss.weighting.weight(alpha, sigma, gain, None)
    if not (weight > 0).all():
        raise ValueError(f"InformationDensity needs weights above 0, and {loss} has others.")
    edges = torch.linspace(0, 1, num_bins + 1, dtype=torch.float64)
    alpha_at, sigma_at = module.process.alpha_sigma(module.process.from_unit(edges))
    log_snr = 2 * (alpha_at / sigma_at).log().clamp(-10, 10)  # infinite where nothing is left
    return (alpha / sigma * gain) ** 2 / weight, log_snr
