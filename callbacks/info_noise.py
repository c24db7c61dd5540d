"""InfoNoise: train where a little less noise tells most about the clean image.

The conditional entropy of x0 given x_t is the uncertainty about the clean image that remains at the
time t. By the I-MMSE relation, the derivative of this entropy with respect to the SNR
`(alpha / sigma)**2` is minus half the error of the best possible estimate of x0. Training losses
estimate this error.

Source: Guo et al. 2005 (I-MMSE, arXiv cs/0412108); Raya et al. 2026 (InfoNoise, arXiv 2602.18647).
"""

from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lit_diffusion.callbacks.curriculum import Timesteps
from lit_diffusion.callbacks.loss_resampler import LossBasedDensity, LossHistory
from lit_diffusion.losses import DenoisingLoss

SIGMA_RANGE = (0.002, 80.0)  # EDM's range of sigma / alpha
GATE_POWER = 3
PARTS = 16  # of a bin, over which gate and weight are integrated


class NoiseLevels(NamedTuple):
    """Noise levels of equal bins of u, each divided into `PARTS` equal parts.

    Attributes:
        width: (num_bins, PARTS) float64 lengths of the parts of each bin, in log SNR. Noise
            levels outside `SIGMA_RANGE` add no length.
        alpha: (num_bins, PARTS) float64 signal scales in the middle of each part.
        sigma: (num_bins, PARTS) float64 noise scales in the middle of each part.
    """

    width: Tensor
    alpha: Tensor
    sigma: Tensor


def noise_levels(module: Any, num_bins: int) -> NoiseLevels:
    """Compute the noise levels in equal bins of u, from the process and the times of a module.

    Example:
        >>> from types import SimpleNamespace
        >>> from lit_diffusion.processes import EDMProcess
        >>> from lit_diffusion.timesteps import Uniform
        >>> levels = noise_levels(SimpleNamespace(process=EDMProcess(), times=Uniform()), 2)
        >>> levels.width.sum(1).exp().sqrt().round().tolist()  # from 0.002 to 0.4 to 80
        [200.0, 200.0]
    """
    u = torch.linspace(0, 1, PARTS * num_bins + 1, dtype=torch.float64)
    u = (u + 1e-9).clamp(max=1 - 2**-53)  # rounding must not move an edge to the step before it
    alpha, sigma = module.process.alpha_sigma(module.times.quantile(u, module.process))
    log_snr = -2 * (sigma / alpha).clamp(*SIGMA_RANGE).log()
    middle = module.process.at_log_snr((log_snr[1:] + log_snr[:-1]) / 2)
    parts = (-log_snr.diff(), *module.process.alpha_sigma(middle))
    return NoiseLevels(*(part.reshape(num_bins, PARTS) for part in parts))


def information_weight(levels: NoiseLevels) -> Tensor:
    """Compute the factors that convert squared errors of the velocity to information about x0.

    Each bin is divided into `PARTS` parts, and each part has one factor. For the best possible
    network, the factor times the squared error of the velocity is the change of the mutual
    information of x_t and x0 from one end of the part to the other. For any other network, this
    product is what the part contributes to the variational bound on the likelihood.

    Returns:
        (num_bins, PARTS) float64, in nats per dimension of x0: half of the change of the SNR over a
        part, divided by `1 + SNR`.

    Source: Guo et al. 2005 (I-MMSE, arXiv cs/0412108), Eq. 22 (theorem 2); Kingma et al. 2021 (VDM,
    arXiv 2107.00630) for the variational bound.
    """
    snr = (levels.alpha / levels.sigma) ** 2
    return levels.width / 2 * snr / (1 + snr)


def x0_weight(module: Any, alpha: Tensor, sigma: Tensor, step: int | None) -> Tensor:
    """Return the weights of the squared error of x0 in a module's loss, with the shape of alpha.

    The module is a `DiffusionModule` with a `DenoisingLoss`, after `step` optimizer steps.
    """
    scale = module.parameterization.output_scale(alpha, sigma)
    return module.loss.weighting.weight(alpha, sigma, scale, step) / scale**2


def velocity_error(module: Any, u: Tensor, losses: Tensor, step: int | None) -> Tensor:
    """Compute the squared errors of the velocity from losses.

    The squared error of the velocity is `1 + SNR` times the squared error of x0. This product
    equals the sum of the squared errors of x0 and of the noise. Callbacks average the error of the
    velocity over bins, because this error changes slowly with the noise level.

    Args:
        module: `DiffusionModule` with a `DenoisingLoss`.
        u: (B,) float64 noise levels in [0, 1).
        losses: (B,) losses at these noise levels.
        step: number of optimizer steps completed before the losses were computed.

    Returns:
        (B,) float64 errors. They are not finite where the loss has the weight 0.
    """
    alpha, sigma = module.process.alpha_sigma(module.times.quantile(u, module.process))
    return (1 + (alpha / sigma) ** 2) * losses / x0_weight(module, alpha, sigma, step)


def weight_at(module: Any, u: Tensor, step: int | None) -> Tensor:
    """Return `x0_weight` at noise levels u (N,) float64 in [0, 1)."""
    alpha, sigma = module.process.alpha_sigma(module.times.quantile(u, module.process))
    return x0_weight(module, alpha, sigma, step)


class InfoNoise(LossBasedDensity):
    """Samples noise levels so that each level's share of the objective follows the entropy rate.

    The profile is the entropy rate times a gate. In the following formulas, `error_of_x0` is the
    lowest possible error of x0, which is estimated from losses:

        profile = 1/2 * abs(d SNR / du) * error_of_x0 * gate
        gate    = r**3 / (r**3 + gate_sigma**3)        with r = sigma / alpha
        density = profile / (weight of the loss on the squared error of x0)

    The share of a noise level in the training objective is `density * weight`, so it follows the
    profile. The losses are not corrected for the density, so the training objective changes.
    Without the gate, the profile would be too large at low noise levels. There, the derivative of
    the SNR is large, and the errors of an unfinished network are far above the lowest possible
    errors.

    Noise levels are sampled uniformly until each bin has `history` losses. A bin whose times all
    have the weight 0, such as the last time of `ZeroTerminalSNR` with `MinSNR`, needs no losses and
    is sampled only by the uniform part of the density. The callback logs
    `info_noise/full`, the fraction of bins with `history` losses, and `info_noise/tv`, the total
    variation distance between the density and the uniform density.

    If the weight approaches 0 at high noise levels, the density prefers these levels, because the
    profile is divided by the weight. This happens for `Epsilon` with `Simple`, and for `MinSNR`. It
    does not happen for `Velocity` with `Simple`, `FlowVelocity` with `Simple`, or
    `EDMPreconditioning`. Noise levels `sigma / alpha` outside [0.002, 80], the range of EDM, are
    sampled only by the uniform part of the density.

    The module must be a `DiffusionModule` with a `DenoisingLoss`, or have the same attributes. It
    cannot be `MeanFlow`, whose losses are normalized and depend on two times.

    Args:
        num_bins: number of equal bins over u in [0, 1]. With fewer bins, all histories are full
            sooner.
        history: number of recent losses stored for each bin.
        uniform_prob: fraction of noise levels that are sampled uniformly, in (0, 1].
        gate_sigma: noise level `sigma / alpha` at which the gate is 1/2, >= 0, in units of x0. With
            0, there is no gate. The paper reports about 0.15 for CIFAR-10. Latents, or pixels that
            are scaled differently, need a different value.

    Raises:
        ValueError: if an argument is invalid. At fit start, the error is also raised if the module
            is `MeanFlow`, if its loss is not a `DenoisingLoss`, or if the weight of the loss is 0
            in a bin. `LossBasedDensity` lists more errors.

    Source: Raya et al. 2026 (InfoNoise, arXiv 2602.18647), section 3.1. The profile, the gate and
    the division by the weight are from this paper. The bins, the mean over a history, the update in
    every batch, and the uniform part of the density are our choices, because we do not know what
    the authors use. The authors compute `gate_sigma` from the profile. The result of their rule
    depends on the lowest noise level of the bins, so here `gate_sigma` is an argument.

    Example:
        >>> InfoNoise(num_bins=32).writes
        ('timestep_density',)
    """

    writes = ("timestep_density",)
    logged = "info_noise"

    def __init__(
        self,
        num_bins: int = 64,
        history: int = 64,
        uniform_prob: float = 0.1,
        gate_sigma: float = 0.15,
    ) -> None:
        super().__init__(num_bins, history, uniform_prob)
        if not 0 <= gate_sigma < float("inf"):
            raise ValueError(
                f"gate_sigma is a noise level, at least 0 and finite, got {gate_sigma}."
            )
        self.gate_sigma = gate_sigma
        self._diffusion: Any = None  # the module that is trained
        self._levels: NoiseLevels | None = None
        # (num_bins,) False for bins without losses, because each of their times has the weight 0
        self._is_measured = torch.ones(num_bins, dtype=torch.bool)
        self._step = 0  # optimizer steps before this batch

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Raise ValueError if the errors of x0 cannot be computed from the losses."""
        super().on_fit_start(trainer, pl_module)
        require_denoising_loss(pl_module, type(self).__name__)
        self._diffusion = pl_module
        self._levels = levels = noise_levels(pl_module, self.num_bins)
        require_weight(pl_module, type(self).__name__, levels, trainer.global_step)
        u = (torch.arange(levels.width.numel(), dtype=torch.float64) + 0.5) / levels.width.numel()
        weight = weight_at(pl_module, u, trainer.global_step).view_as(levels.width)
        self._is_measured = (weight > 0).any(1)

    def timesteps_at(self, step: int, device: torch.device) -> Timesteps:
        """Return the density of the losses so far."""
        self._step = step
        if self._levels is not None:
            self._levels = NoiseLevels(*(values.to(device) for values in self._levels))
            self._is_measured = self._is_measured.to(device)
        return super().timesteps_at(step, device)

    def recorded_losses(self, pl_module: LightningModule, outputs: dict[str, Tensor]) -> Tensor:
        """Return the squared errors of the velocity."""
        return velocity_error(pl_module, outputs["u"], outputs["per_sample_loss"], self._step)

    def density(self, history: LossHistory) -> Tensor:
        """Return the density of a history of squared errors of the velocity."""
        if self._levels is None:
            raise ValueError("InfoNoise has a density only after the start of a fit.")
        _, alpha, sigma = self._levels
        gate = 1 / (1 + (self.gate_sigma * alpha / sigma) ** GATE_POWER)
        weight = x0_weight(self._diffusion, alpha, sigma, self._step)
        share = (information_weight(self._levels) * gate / weight).sum(1)  # (num_bins,)
        counts = history.counts.where(self._is_measured, self.history)
        return self.mix_with_uniform(
            LossHistory(history.losses, counts), history.losses.mean(1) * share
        )


def require_denoising_loss(module: Any, callback: str) -> None:
    """Raise ValueError unless the squared error of x0 can be computed from the module's losses."""
    needed = ("process", "times", "parameterization", "loss")
    if missing := [name for name in needed if not hasattr(module, name)]:
        raise ValueError(
            f"{callback} needs a DiffusionModule, and {type(module).__name__} lacks "
            f"{' and '.join(missing)}."
        )
    if hasattr(module, "equal_times"):
        raise ValueError(
            f"{callback} needs losses that are errors at one time, but the losses of "
            f"{type(module).__name__} are normalized and depend on two times; use DiffusionModule, "
            f"or leave out {callback}."
        )
    if not isinstance(module.loss, DenoisingLoss):
        raise ValueError(
            f"{callback} computes errors of x0 from losses, and {type(module.loss).__name__} adds "
            "other terms; use DenoisingLoss."
        )


def require_weight(module: Any, callback: str, levels: NoiseLevels, step: int | None) -> None:
    """Raise ValueError unless the loss has a weight above 0 at all noise levels."""
    if not (x0_weight(module, levels.alpha, levels.sigma, step) > 0).all():
        raise ValueError(
            f"{callback} divides by the weight of the loss, and {module.loss} has the weight 0 at "
            "some noise levels; use a weighting that is positive everywhere."
        )
